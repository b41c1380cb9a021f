"""Devices: contexts, a stream for each thread, memory that frees itself, and what is usable."""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
import types
from typing import Any, ClassVar, NamedTuple, NoReturn

from dlsys.errors import DeviceError, DlsysError, OutOfMemoryError
from dlsys.runtime.interface import interface
from dlsys.runtime.library import (
    DL_CPU,
    DL_GPU,
    DLArray,
    DLContext,
    DLCounters,
    DLMemoryStats,
    load,
)
from dlsys.system import at_fork

_MAX_NBYTES = 2**62  # ctypes would cut a larger size to 64 bits without a word
_TYPES = {kind.code: (name, kind) for name, kind in interface.devices.items()}


class Context:
    """A device: `cpu(0)`, `gpu(1)`. Equal contexts are the same object.

    Attributes:
        device_type: 1 for the CPU, 2 for a GPU. device_id: its number, from 0.
        name: "cpu" or "gpu". kernel_device: its column of the kernel table, "cpu" or "cuda".
        streams: its kernels take a stream, on which the host runs ahead of them.
        struct: the DLContext for calls into the library. packed: the same as one integer.
    """

    __slots__ = ("device_type", "device_id", "name", "kernel_device", "streams", "struct", "packed")
    device_type: int
    device_id: int
    name: str
    kernel_device: str
    streams: bool
    struct: DLContext
    packed: int
    _known: ClassVar[dict[tuple[int, int], Context]] = {}

    def __new__(cls, device_type: int, device_id: int = 0) -> Context:
        key = (device_type, operator.index(device_id))
        if device_type not in _TYPES or not 0 <= key[1] < 2**31:
            raise ValueError(f"no such device: type {device_type}, number {device_id}")
        known = cls._known.get(key)
        return known or cls._known.setdefault(key, cls._make(*key))

    @classmethod
    def _make(cls, device_type: int, device_id: int) -> Context:
        self = object.__new__(cls)
        name, kind = _TYPES[device_type]
        values = {
            "device_type": device_type,
            "device_id": device_id,
            "name": name,
            "kernel_device": kind.column,
            "streams": kind.streams,
            "struct": DLContext(device_id, device_type),
            "packed": device_id | device_type << 32,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Context is constant; make another one instead of setting {name}")

    def __repr__(self) -> str:
        return f"{self.name}({self.device_id})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Context, (self.device_type, self.device_id)


def cpu(id: int = 0) -> Context:
    """The CPU as a native device.

    id: 0.
    """
    return Context(DL_CPU, id)


def gpu(id: int = 0) -> Context:
    """NVIDIA GPU number `id`."""
    return Context(DL_GPU, id)


def context_of(device: Any) -> Context | None:
    """The context of a device by name: "cpu", "gpu", "gpu:1"; None for numpy. A context is itself.
    DeviceError for what names none.
    """
    if isinstance(device, Context):
        return device
    if isinstance(device, str):
        name, _, number = device.lower().partition(":")
        known = {"cpu": cpu, "gpu": gpu, "cuda": gpu}
        if name == "numpy" and not number:
            return None
        if name in known and (number.isdigit() or not number):
            return known[name](int(number or 0))
    raise DeviceError(
        f'device is {device!r}, expected "numpy", "cpu", "gpu", "gpu:1" or a context such as '
        "ndarray.gpu(0)"
    )


def context_or_numpy(device: Context | str | None) -> Context | None:
    """`context_of` where None is numpy, as for what runs graphs."""
    return None if device is None else context_of(device)


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the library. DeviceError where that is not available, else what it
    reports.
    """
    library = load()
    library.check(getattr(library.cdll, name)(*arguments))


# ---- streams ----
class _Lease:
    # A thread's stream; when the thread ends, the next thread takes it. Streams are never
    # destroyed: blocks remember them, and so do the pools of the allocator.
    idle: ClassVar[dict[Context, list[int]]] = {}
    __slots__ = ("ctx", "stream")

    def __init__(self, ctx: Context):
        self.stream = 0
        self.ctx = ctx
        try:
            self.stream = self.idle.setdefault(ctx, []).pop()
        except IndexError:
            out = ctypes.c_void_p()
            _call("DLStreamCreate", ctx.struct, ctypes.byref(out))
            self.stream = out.value or 0

    def __del__(self) -> None:
        if self.stream:
            self.idle.setdefault(self.ctx, []).append(self.stream)


class _ThreadStreams(threading.local):
    def __init__(self) -> None:
        self.leases: dict[Context, _Lease] = {}


_streams = _ThreadStreams()


def stream(ctx: Context) -> int:
    """The calling thread's own stream on `ctx`; 0 where work is done on return, as on the CPU.

    Raises:
        DeviceError: the library or the device is not available.
    """
    if not ctx.streams:
        return 0
    lease = _streams.leases.get(ctx)
    if lease is None:
        lease = _streams.leases[ctx] = _Lease(ctx)
    return lease.stream


class SideStream:
    """A stream of a GPU besides those of threads: what a `with` block queues goes there. One thread
    at a time enters it.
    """

    def __init__(self, ctx: Context) -> None:
        self._lease = _Lease(ctx)

    def __enter__(self) -> None:
        leases, ctx = _streams.leases, self._lease.ctx
        self._before = leases.get(ctx)
        leases[ctx] = self._lease

    def __exit__(self, *error: object) -> None:
        leases, ctx = _streams.leases, self._lease.ctx
        if self._before is None:
            del leases[ctx]
        else:
            leases[ctx] = self._before


def synchronize(ctx: Context) -> None:
    """Waits until the calling thread's work on `ctx` is done.

    Raises:
        OutOfRangeError: a kernel on this GPU found an index or a label out of range, and nobody was
            told yet.
        DeviceLostError: the GPU faulted.
    """
    _call("DLStreamSynchronize", ctx.struct, stream(ctx))


def _forget_gpu_in_child() -> None:
    # CUDA does not survive a fork: the child neither uses nor frees what the parent holds on a GPU.
    Block.process += 1
    _streams.leases.clear()
    _Lease.idle.clear()
    _probe.cache_clear()


at_fork(after_in_child=_forget_gpu_in_child)


# ---- memory ----
class Block:
    """Device memory that frees itself, and knows the stream that used it last.

    Attributes:
        ctx, address, nbytes: where it is.
        home: the stream it was allocated on and returns to. stream: the one it was last used on.
    """

    __slots__ = (
        "ctx", "address", "nbytes", "home", "stream", "_library", "_process", "__weakref__",
    )  # fmt: skip
    process: ClassVar[int] = 0  # how many forks lie behind this process

    def __init__(self, ctx: Context, nbytes: int):
        """Allocates `nbytes` (0 is fine) on the calling thread's stream, aligned to 256 bytes.

        Raises:
            OutOfMemoryError: everything that was allocated before stays usable.
            DeviceError: the library or the device is not available.
        """
        self.address = 0
        if nbytes > _MAX_NBYTES:
            raise OutOfMemoryError(f"out of memory on {ctx}: requested {nbytes} bytes")
        library = load()
        home = stream(ctx)
        out = ctypes.c_void_p()
        library.check(library.cdll.DLMemoryAlloc(ctx.struct, nbytes, home, ctypes.byref(out)))
        self.ctx = ctx
        self.nbytes = nbytes
        self.home = self.stream = home
        self._library = library
        self._process = self.process
        self.address = out.value or 0

    def fill(self, byte: int) -> None:
        """Queues the same byte for all of it, behind its last use."""
        fill = self._library.cdll.DLMemoryFill
        self._library.check(fill(self.ctx.struct, self.address, byte, self.nbytes, self.stream))

    def use(self, stream: int) -> None:
        """Orders the work on `stream` that follows after that of the block's last user."""
        if stream != self.stream:
            wait = self._library.cdll.DLStreamWait
            self._library.check(wait(self.ctx.struct, stream, self.stream))
            self.stream = stream

    def __del__(self) -> None:
        # A failure here has no one to tell: the next call on the device reports it.
        if self.address and self._is_ours():
            cdll = self._library.cdll
            if self.stream != self.home:
                cdll.DLStreamWait(self.ctx.struct, self.home, self.stream)
            cdll.DLMemoryFree(self.ctx.struct, self.address)

    def _is_ours(self) -> bool:
        return self.ctx.device_type == DL_CPU or self._process == self.process

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Block is device memory: it cannot be copied or pickled")


class MemoryStats(NamedTuple):
    """Counters of a device's allocator, since the library was loaded.

    `device_allocations` and `device_frees` count calls to the device's own allocator, `requests`
    those of the program, served from the cache or not. `reserved_nbytes` are in use or cached.
    """

    device_allocations: int
    device_frees: int
    reserved_nbytes: int
    in_use_nbytes: int
    peak_in_use_nbytes: int
    requests: int


def memory_stats(ctx: Context) -> MemoryStats:
    """The counters of `ctx` now."""
    stats = DLMemoryStats()
    _call("DLMemoryGetStats", ctx.struct, ctypes.byref(stats))
    return MemoryStats(*(getattr(stats, name) for name in MemoryStats._fields))


class Counters(NamedTuple):
    """The library's requests to GPUs since it was loaded, over all threads.

    `program_launches` are replays of captured programs, `kernel_launches` own kernels launched one
    by one or captured, `synchronizations` waits of the host for a device.
    """

    program_launches: int
    kernel_launches: int
    synchronizations: int


def counters() -> Counters:
    """The counters now."""
    found = DLCounters()
    _call("DLGetCounters", ctypes.byref(found))
    return Counters(*(getattr(found, name) for name in Counters._fields))


def reset_peak(ctx: Context) -> None:
    """Starts `peak_in_use_nbytes` again from what is in use now."""
    _call("DLMemoryResetPeak", ctx.struct)


def trim(ctx: Context) -> None:
    """Gives cached blocks back to the device."""
    _call("DLMemoryTrim", ctx.struct)


# ---- what is usable ----
def device_count(device_type: int) -> int:
    """The number of devices of a type (1 CPU, 2 GPU). Raises DeviceError when none work."""
    count = ctypes.c_int32()
    _call("DLDeviceCount", device_type, ctypes.byref(count))
    return count.value


def device_name(ctx: Context) -> str:
    """The device's own name, such as "NVIDIA H200"."""
    text = ctypes.create_string_buffer(256)
    _call("DLDeviceName", ctx.struct, text, len(text))
    return text.value.decode(errors="replace")


def device_memory(ctx: Context) -> tuple[int, int]:
    """Free and total bytes of the device's memory, as the device counts them for all processes."""
    free, total = ctypes.c_int64(), ctypes.c_int64()
    _call("DLDeviceMemory", ctx.struct, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


@functools.cache
def _probe(ctx: Context) -> None:
    # A kernel that runs is the only proof: a library built for other chips fails no earlier.
    device_count(ctx.device_type)
    block = Block(ctx, 4)
    array = DLArray(block.address, ctx.struct, 1, 0, (ctypes.c_int64 * 1)(1))
    argument = types.SimpleNamespace(handle_address=ctypes.addressof(array))
    kernel = load().kernel(ctx.kernel_device, "fill")
    kernel(0.0, argument, *([block.stream] if ctx.streams else []))
    synchronize(ctx)


def unavailable(ctx: Context) -> str | None:
    """None when `ctx` works, else one sentence: why not, and what to do. Never raises."""
    try:
        _probe(ctx)
    except (DlsysError, OSError) as error:
        return str(error)
    return None


def emulated() -> bool:
    """True when the GPU of this library is emulated by the CPU (`make emulator`)."""
    return "emulated" in load().version


def best_context() -> tuple[Context | None, list[str]]:
    """The best device that is there (gpu(0), else cpu(0), else None for numpy), and for each better
    one the sentence that says why it is not used."""
    reasons: list[str] = []
    for ctx in (gpu(0), cpu(0)):
        reason = unavailable(ctx)
        if reason is None and ctx.device_type == DL_GPU and emulated():
            reason = "the GPU of this library is emulated, and slow: ask for it with -c gpu"
        if reason is None:
            return ctx, reasons
        if reason not in reasons:
            reasons.append(reason)
    return None, reasons
