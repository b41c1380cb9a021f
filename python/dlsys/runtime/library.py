"""The native library through ctypes: its kernel table, and its statuses as exceptions.

Kernels are declared nowhere in Python: the table says what each one takes, and a wrapper is
generated from that at first use. Constants and structures are those of `interface`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from dlsys.dtypes import FLOAT32, as_dtype, storage_dtype
from dlsys.errors import (
    DeviceError,
    DeviceLostError,
    DlsysError,
    KernelError,
    NotApplicableError,
    OutOfMemoryError,
    OutOfRangeError,
)
from dlsys.runtime import toolchain
from dlsys.runtime.interface import DLContext, difference, interface
from dlsys.settings import settings
from dlsys.system import at_fork

DL_CPU, DL_GPU = interface.enums["DL_CPU"], interface.enums["DL_GPU"]
MAX_NDIM = interface.limits["max_ndim"]
_TYPES = {kind.column: kind.code for kind in interface.devices.values()}

DTYPE_CODES: dict[Any, int] = {as_dtype(name): code for name, code in interface.dtypes.items()}
CODE_DTYPES: dict[int, Any] = {code: dtype for dtype, code in DTYPE_CODES.items()}


class DLArray(ctypes.Structure):
    _fields_ = interface.fields("DLArray", shape=ctypes.POINTER(ctypes.c_int64))


class DLArrayList(ctypes.Structure):
    _fields_ = interface.fields("DLArrayList", arrays=ctypes.POINTER(ctypes.c_void_p))


class DLBytes(ctypes.Structure):
    _fields_ = interface.fields("DLBytes")
    struct: Any  # that it shows


class DLValue(ctypes.Union):
    _fields_ = interface.fields("DLValue")


class DLStep(ctypes.Structure):
    _fields_ = interface.fields("DLStep")


class DLMemoryStats(ctypes.Structure):
    _fields_ = interface.fields("DLMemoryStats")


class DLCounters(ctypes.Structure):
    _fields_ = interface.fields("DLCounters")


class DLGraphInfo(ctypes.Structure):
    _fields_ = interface.fields("DLGraphInfo")


class DLGraphStreams(ctypes.Structure):
    _fields_ = interface.fields("DLGraphStreams")


class _KernelEntry(ctypes.Structure):
    _fields_ = interface.fields(
        "DLKernelEntry", **dict.fromkeys(("name", "device", "sig", "file"), ctypes.c_char_p)
    )


_ANSWERS = 4096  # of kernels about calls that are remembered
_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_LETTERS: dict[str, Any] = {
    "i": ctypes.c_void_p,
    "o": ctypes.c_void_p,
    "I": ctypes.POINTER(DLArrayList),
    "O": ctypes.POINTER(DLArrayList),
    "b": ctypes.POINTER(DLBytes),
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "s": ctypes.c_void_p,
}
_ERRORS: dict[int, type[DlsysError]] = {
    interface.enums["DL_OUT_OF_MEMORY"]: OutOfMemoryError,
    interface.enums["DL_DEVICE_LOST"]: DeviceLostError,
    interface.enums["DL_UNAVAILABLE"]: DeviceError,
    interface.enums["DL_NOT_APPLICABLE"]: NotApplicableError,
    interface.enums["DL_OUT_OF_RANGE"]: OutOfRangeError,
}


class Library:
    """The loaded library.

    Attributes:
        cdll: the `ctypes.CDLL`; its functions return a status for `check`.
        path, version: where it came from and what it was built from.
        index: (device name, kernel name, storage type of its floats) -> position in the kernel
            table; instead of the storage type, the integer type of kernels that compute in one.
        signature: (device name, kernel name) -> one letter a parameter (see DLKernelEntry).
    """

    def __init__(self, path: str):
        self.path = path
        self.cdll = _open(path)
        self.version = self.cdll.DLVersion().decode()
        trouble = self.cdll.DLLoadError().decode()
        if trouble:
            raise DeviceError(f"the native library {path} is unusable: {trouble}; run `make lib`")
        count = ctypes.c_int64()
        table = self.cdll.DLKernelTable(ctypes.byref(count))
        self._entries = (_KernelEntry * count.value).from_address(table)
        keys = [
            (entry.device.decode(), entry.name.decode(), CODE_DTYPES[entry.dtype])
            for entry in self._entries
        ]
        self.index = {key: position for position, key in enumerate(keys)}
        # Of a kernel's first storage type: its algorithms are those of all.
        self._positions = {key[:2]: k for k, key in reversed(list(enumerate(keys)))}
        self.signature = {
            key[:2]: entry.sig.decode() for key, entry in zip(keys, self._entries, strict=True)
        }
        self._kernels: dict[tuple[str, str, Any], Callable[..., None]] = {}
        self._algorithms: dict[tuple[str, str], tuple[str, ...]] = {}
        # The answer to a question (DLKernelFits, DLKernelWorkspace) about a call: by the function,
        # the kernel's key, the device's id and the arguments as `_frozen` has them.
        self.ask = functools.lru_cache(_ANSWERS)(self._asked)

    def check(self, status: int, **context: object) -> None:
        """Raises what a failed call left on this thread, with `context` as `[key: value]`."""
        if status:
            self._fail(status, self.cdll.DLGetLastError(), context)

    def kernel(self, device_name: str, name: str, dtype: Any = FLOAT32) -> Callable[..., None]:
        """The kernel for a storage type as a function of arrays (anything with `.handle_address`),
        lists of arrays, structs of the interface, numbers and, for "cuda", the stream. Raises
        KernelError when the library has no such kernel.
        """
        key = (device_name, name, dtype)
        call = self._kernels.get(key)
        if call is None:
            self._entry(key)
            call = self._kernels[key] = self._wrap(key)
        return call

    def key(self, device_name: str, name: str, arguments: Iterable[Any]) -> tuple[str, str, Any]:
        """The key in `index` of the kernel for a call with these arguments: for the one integer
        dtype that all arrays have, where there is such a kernel, else for `storage_dtype`.
        """
        dtypes = list(dtypes_of(arguments))
        uniform = (device_name, name, dtypes[0] if len(set(dtypes)) == 1 else None)
        return uniform if uniform in self.index else (device_name, name, storage_dtype(dtypes))

    def algorithms(self, device_name: str, name: str) -> tuple[str, ...]:
        """The names of a kernel's algorithms, which its caller selects by numbers from 1 on; none
        for most kernels.
        """
        key = (device_name, name)
        if key not in self._algorithms:
            position = self._positions[key]
            name_of = functools.partial(self.cdll.DLAlgorithmName, position)
            names = iter(map(name_of, itertools.count(1)).__next__, None)
            self._algorithms[key] = tuple(text.decode() for text in names)
        return self._algorithms[key]

    def algorithm_source(self, device_name: str, name: str, number: int) -> str:
        """The library, with its version, that an algorithm comes from; "" for this one.
        DeviceError, with the reason, where that library cannot be used.
        """
        text = ctypes.c_char_p()
        position = self._positions[device_name, name]
        self.check(self.cdll.DLAlgorithmSource(position, number, ctypes.byref(text)))
        return (text.value or b"").decode()

    def fits(self, device_name: str, name: str, *arguments: Any, device_id: int = 0) -> bool:
        """True when a kernel does a call with these arguments, no slower than several kernels do.

        The arguments are those of the call, without the stream, in the order of the kernel's
        signature: numbers, structs, and for each array anything with `.shape` and `.dtype`, as a
        Spec or an array. Raises KernelError when the library has no such kernel.
        """
        key = self.key(device_name, name, arguments)
        if not self._entry(key).fits:
            return True
        return bool(self.ask("DLKernelFits", key, device_id, _frozen(arguments)))

    def workspace(self, device_name: str, name: str, *arguments: Any, device_id: int = 0) -> int:
        """The bytes of scratch memory that a kernel takes for a call, its arguments as for `fits`.

        An array's `.address`, where it has one, says how it is aligned and what it overlaps. Raises
        KernelError when the library has no such kernel, or when it refuses the arguments.
        """
        key = self.key(device_name, name, arguments)
        self._entry(key)
        return self.ask("DLKernelWorkspace", key, device_id, _frozen(arguments))

    def _entry(self, key: tuple[str, str, Any]) -> _KernelEntry:
        if key not in self.index:
            known = key[:2] in self.signature
            what = f"no kernel of {key[2]}" if known else "no such kernel"
            raise KernelError(f"{key[1]}: device {key[0]} has {what} in {self.path}")
        return self._entries[self.index[key]]

    def _asked(
        self, function: str, key: tuple[str, str, Any], device_id: int, frozen: tuple
    ) -> int:
        """The library's answer to a question about a call that nobody makes yet."""
        ctx = DLContext(device_id, _TYPES[key[0]])
        letters = self.signature[key[:2]].rstrip("s")
        if len(letters) != len(frozen):
            raise KernelError(
                f"{key[1]}: its kernel on {key[0]} takes {len(letters)} arguments ({letters}), "
                f"got {len(frozen)}"
            )
        held: list[object] = []  # what the values point to
        values = (DLValue * len(letters))()
        for value, letter, argument in zip(values, letters, frozen):
            if letter in "io":
                value.p = _shown(argument, ctx, held)
            elif letter in "IOb":
                made = (
                    bytes_of(ctypes.create_string_buffer(argument, len(argument)))
                    if letter == "b"
                    else array_list([_shown(array, ctx, held) for array in argument])
                )
                held.append(made)
                value.p = ctypes.addressof(made)
            elif letter == "f":
                value.f = argument
            else:
                value.i = argument
        answer = ctypes.c_int64()
        self.check(getattr(self.cdll, function)(self.index[key], values, ctypes.byref(answer)))
        return answer.value

    def place_number(self, text: str) -> int:
        """The library's number for a place in the user's program, such as "train.py:12", which
        errors that a GPU tells late name.
        """
        number = ctypes.c_int32()
        given = text.encode(errors="backslashreplace")
        self.check(self.cdll.DLPlaceNumber(given, ctypes.byref(number)))
        return number.value

    def set_threads(self, threads: int) -> None:
        """Sets the number of the CPU's worker threads, 0 as for DLSYS_THREADS. Results do not
        depend on it. Plans that are made from now on have scratch for as many.
        """
        self.check(self.cdll.DLCpuSetThreads(threads))
        self.ask.cache_clear()

    def _wrap(self, key: tuple[str, str, Any]) -> Callable[..., None]:
        # Generated code costs 0.3 us a call where a generic wrapper costs twice that; it takes
        # objects, never addresses, so that an argument cannot be freed while the kernel runs.
        letters = self.signature[key[:2]]
        entry = self._entries[self.index[key]]
        names = [f"{letter}{position}" for position, letter in enumerate(letters)]
        array, listed = "{}.handle_address", "list_of({})"
        forms = {"i": array, "o": array, "I": listed, "O": listed, "b": "bytes_of({})"}
        passed = [
            forms.get(letter, "{}").format(name)
            for letter, name in zip(letters, names, strict=True)
        ]
        source = (
            f"def kernel({', '.join(names)}):\n"
            f"    status = call({', '.join(passed)})\n"
            f"    if status:\n"
            f"        fail(status, text(), ({''.join(name + ', ' for name in names)}))\n"
        )

        def fail(status: int, text: bytes, arguments: tuple[object, ...]) -> NoReturn:
            described = ", ".join(_describe(argument) for argument in arguments)
            where = f"{entry.file.decode()}:{entry.line}"
            self._fail(status, text, {"call": f"{'/'.join(key[:2])}({described})", "source": where})

        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *(_LETTERS[letter] for letter in letters))
        scope: dict[str, Any] = {
            "call": prototype(entry.call),
            "text": self.cdll.DLGetLastError,
            "fail": fail,
            "bytes_of": bytes_of,
            "list_of": lambda arrays: array_list([x.handle_address for x in arrays]),
        }
        exec(source, scope)  # noqa: S102
        wrapper = scope["kernel"]
        wrapper.__name__ = wrapper.__qualname__ = key[1]
        return wrapper

    def _fail(self, status: int, text: bytes, context: dict[str, object]) -> NoReturn:
        suffix = ", ".join(f"{key}: {value}" for key, value in context.items())
        message = text.decode(errors="replace") + (f" [{suffix}]" if suffix else "")
        raise _ERRORS.get(status, KernelError)(message)


def array_list(addresses: Sequence[int]) -> DLArrayList:
    """A DLArrayList of the DLArrays at these addresses, whose owner keeps them alive."""
    return DLArrayList(len(addresses), (ctypes.c_void_p * len(addresses))(*addresses))


def dtypes_of(arguments: Iterable[Any]) -> Iterator[Any]:
    """The dtypes of the arrays, or the specs, among a call's arguments and in their lists."""
    for argument in arguments:
        if isinstance(argument, list):
            yield from dtypes_of(argument)
        elif hasattr(argument, "dtype"):
            yield argument.dtype


def bytes_of(struct: Any) -> DLBytes:
    """A struct of ctypes, which it keeps alive, as an argument."""
    made = DLBytes(ctypes.sizeof(struct), ctypes.addressof(struct))
    made.struct = struct
    return made


def _frozen(arguments: Sequence[Any]) -> tuple:
    """Arguments as a key: an array by its shape, its dtype's code and its address, 0 without one,
    and a struct by its bytes.

    Raises KernelError for a dtype that no native device holds.
    """
    frozen: list[object] = []
    for argument in arguments:
        if isinstance(argument, (list, tuple)) and not hasattr(argument, "shape"):
            frozen.append(_frozen(argument))
        elif hasattr(argument, "shape"):
            code = DTYPE_CODES.get(argument.dtype)
            if code is None:
                raise KernelError(f"no native device holds {argument.dtype}")
            frozen.append((tuple(argument.shape), code, getattr(argument, "address", 0)))
        elif isinstance(argument, ctypes.Structure):
            frozen.append(bytes(argument))
        else:
            frozen.append(argument)
    return tuple(frozen)


def _shown(array: tuple[tuple[int, ...], int, int], ctx: DLContext, held: list[object]) -> int:
    """The address of a DLArray for a frozen array. It lives as long as `held`."""
    shape, code, address = array
    extents = (ctypes.c_int64 * len(shape))(*shape)
    made = DLArray(address, ctx, len(shape), code, extents)
    held += (extents, made)
    return ctypes.addressof(made)


def _describe(argument: object) -> str:
    if isinstance(argument, list):
        return f"[{', '.join(map(_describe, argument))}]"
    shape = getattr(argument, "shape", None)
    return repr(argument) if shape is None else f"{getattr(argument, 'dtype', 'array')} {shape}"


def _open(path: str) -> ctypes.CDLL:
    try:
        cdll = ctypes.CDLL(path)
    except OSError as error:
        raise DeviceError(
            f"the native library cannot be loaded: {error}; "
            f"run `make lib` to build it for this machine"
        ) from None
    try:
        for name in ("DLGetLastError", "DLLoadError", "DLVersion", "DLInterface"):
            getattr(cdll, name).restype = ctypes.c_char_p
        differs = difference(cdll.DLInterface().decode())
    except AttributeError:
        differs = "it does not say what it holds"
    if differs:
        raise DeviceError(
            f"the native library {path} does not fit this package: {differs}; run `make lib` to "
            "build it again"
        )
    for name, argtypes in interface.functions().items():
        getattr(cdll, name).argtypes = argtypes
    cdll.DLKernelTable.argtypes, cdll.DLKernelTable.restype = (_P,), _P
    cdll.DLAlgorithmName.argtypes, cdll.DLAlgorithmName.restype = (_I64, _I64), ctypes.c_char_p
    cdll.DLProgramFailedStep.argtypes, cdll.DLProgramFailedStep.restype = (_P,), _I64
    return cdll


def library_path() -> str:
    """The file that `load` opens: DLSYS_LIBRARY or libdlsys.so in the package, links resolved."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # One file loaded under two names would be two allocators.
    return os.path.realpath(settings.library or os.path.join(package, "libdlsys.so"))


def _why_not_built() -> str:
    if settings.library:
        place = f" [DLSYS_LIBRARY: {settings.library}]"
    else:
        place = ""
        # setup.py leaves this beside the package where it could not build the library.
        note = os.path.join(os.path.dirname(library_path()), "no_library.txt")
        with contextlib.suppress(OSError), open(note, encoding="utf-8") as file:
            return (
                f"the native library is not built: when dlsys was installed {file.read()}; install "
                "it again from the checkout (`pip install .`), or use numpy (ctx=None)"
            )
    return (
        "the native library is not built: run `make lib` (needs a C++ compiler), or use numpy "
        f"(ctx=None){place}"
    )


# A child that is forked while another thread loads the library would find locks that nobody frees
# in the loader and in the library: a fork waits until it is loaded.
_loading = threading.RLock()
at_fork(
    before=_loading.acquire,
    after_in_parent=_loading.release,
    after_in_child=_loading.release,
)


@functools.cache
def load() -> Library:
    """The native library, loaded at the first call.

    Raises:
        DeviceError: it is not built, cannot be loaded, or does not fit the package. Not remembered:
            a later call tries again.
    """
    with _loading:
        return _loaded()


def _loaded() -> Library:
    path = library_path()
    if not os.path.exists(path):
        raise DeviceError(_why_not_built())
    if not os.path.isfile(path):  # opening a FIFO would wait for whoever writes into it
        raise DeviceError(f"the native library {path} is no file; set DLSYS_LIBRARY to one")
    if toolchain.gpu_present():
        os.environ.setdefault(
            "DLSYS_CUDA_LIBRARY_PATH", os.pathsep.join(toolchain.cuda_library_dirs())
        )
    # Only kernels read the cache, and its import is a tenth of the package's. A fork waits for it,
    # too.
    from dlsys.runtime import tuning_cache as tuning_cache

    library = Library(path)
    if settings.threads:
        library.set_threads(settings.threads)
    library.check(library.cdll.DLCpuGetThreads(ctypes.byref(ctypes.c_int32())))  # makes its pool
    return library
