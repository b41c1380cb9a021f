"""DLPack: arrays shared with other libraries without a copy, in both directions.

Structures and rules: https://dmlc.github.io/dlpack/latest/c_api.html. A capsule holds a
DLManagedTensor, or a DLManagedTensorVersioned when the consumer asks for version 1; whoever
consumes it renames it and calls its deleter when done.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np

from dlsys.dtypes import bfloat16
from dlsys.errors import ShapeError
from dlsys.runtime.device import Block, Context, stream
from dlsys.runtime.library import DL_CPU, DL_GPU, DTYPE_CODES, load

_READ_ONLY = 1
_LEGACY_STREAM = 1  # DLPack's and CUDA's number of the default stream
_TYPE_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4


def _type_code(dtype: Any) -> int:
    return _BFLOAT if dtype is bfloat16 else _TYPE_CODES[dtype.kind]


_DTYPES = {(_type_code(dtype), dtype.itemsize * 8): dtype for dtype in DTYPE_CODES}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", _Deleter)]
    name: ClassVar[bytes] = b"dltensor"
    used: ClassVar[bytes] = b"used_dltensor"


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]
    name: ClassVar[bytes] = b"dltensor_versioned"
    used: ClassVar[bytes] = b"used_dltensor_versioned"


# Capsules go by address: inside a capsule's destructor a new reference to it would revive it.
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_SetName", _api)
)

# What consumers hold: address of the managed tensor -> everything that must outlive it.
_exports: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _delete_export(address: int, exports: dict[int, tuple[Any, ...]] = _exports) -> None:
    exports.pop(address, None)


@_Deleter
def _destroy_capsule(
    capsule: int,
    names: tuple[bytes, ...] = (_Managed.name, _ManagedVersioned.name),
    is_valid: Any = _is_valid,
    get_pointer: Any = _get_pointer,
    exports: dict[int, tuple[Any, ...]] = _exports,
) -> None:
    for name in names:
        if is_valid(capsule, name):
            exports.pop(get_pointer(capsule, name), None)


# A consumer may call them while the interpreter shuts down, after this module's names are gone.
for _callback in (_delete_export, _destroy_capsule):
    _api.Py_IncRef(ctypes.py_object(_callback))


def export(array: Any, consumer: int | None, versioned: bool) -> Any:
    """A capsule that shares the memory of `array` (an NDArray) and keeps it alive.

    `consumer` is the stream that the consumer works on: None for CUDA's default stream, -1 for "do
    not order". Later work of ours on the array waits for that stream only when it is the default
    one; a stream of its own may be gone by then.
    """
    block: Block = array.block
    if block.ctx.device_type == DL_GPU and consumer != -1:
        stream_number = _LEGACY_STREAM if consumer is None else consumer
        if stream_number == _LEGACY_STREAM:
            block.use(stream_number)
        elif stream_number != block.stream:
            library = load()
            wait = library.cdll.DLStreamWait
            library.check(wait(block.ctx.struct, stream_number, block.stream))
    managed: Any = _ManagedVersioned(major=1, minor=0) if versioned else _Managed()
    managed.deleter = _delete_export
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*_row_major_strides(array.shape))
    tensor = managed.tensor
    tensor.data = array.data_address
    tensor.device_type, tensor.device_id = array.ctx.device_type, array.ctx.device_id
    tensor.ndim, tensor.shape, tensor.strides = array.ndim, shape, strides
    tensor.code, tensor.bits = _type_code(array.dtype), array.dtype.itemsize * 8
    tensor.lanes = 1
    address = ctypes.addressof(managed)
    _exports[address] = (block, managed, shape, strides)
    return _new(address, managed.name, ctypes.cast(_destroy_capsule, ctypes.c_void_p))


def _row_major_strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


class ForeignBlock(Block):
    """Memory of another library, given back through its deleter."""

    __slots__ = ("_managed",)

    def __init__(self, ctx: Context, address: int, nbytes: int, managed: Any):
        self.address = address
        self.ctx = ctx
        self.nbytes = nbytes
        self.home = self.stream = stream(ctx)
        self._library = load()
        self._process = self.process
        self._managed = managed

    def __del__(self) -> None:
        managed = getattr(self, "_managed", None)
        if managed is None or not self._is_ours():
            return
        # The owner may hand the memory out at once, so our last work on it has to be over.
        if self.stream:
            self._library.cdll.DLStreamDrain(self.ctx.struct, self.stream)
        if managed.deleter:
            managed.deleter(ctypes.addressof(managed))


def consume(source: Any) -> tuple[ForeignBlock, tuple[int, ...], Any, bool]:
    """The memory of `source` (anything with `__dlpack__`) as (block, shape, dtype, read only).

    Raises:
        TypeError: `source` does not speak DLPack.
        ShapeError: its device, dtype or layout is not one of ours; it is left as it was.
    """
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise TypeError(f"from_dlpack: {type(source).__name__} has no __dlpack__ method")
    device_type, device_id = (int(part) for part in source.__dlpack_device__())
    if device_type not in (DL_CPU, DL_GPU):
        raise ShapeError(
            f"from_dlpack: device type {device_type} is not supported; expected CPU (1) or CUDA (2)"
        )
    ctx = Context(device_type, device_id)
    managed = _take(_capsule_of(source, stream(ctx) or None))
    try:
        tensor = managed.tensor
        shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        dtype = _checked_dtype(tensor)
        _check_layout(tensor, shape)
    except ShapeError:
        if managed.deleter:
            managed.deleter(ctypes.addressof(managed))
        raise
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    address = (tensor.data or 0) + tensor.byte_offset
    read_only = bool(getattr(managed, "flags", 0) & _READ_ONLY)
    return ForeignBlock(ctx, address, nbytes, managed), shape, dtype, read_only


def _capsule_of(source: Any, our_stream: int | None) -> Any:
    try:
        return source.__dlpack__(stream=our_stream, max_version=(1, 0))
    except TypeError:  # a producer from before version 1
        return source.__dlpack__(stream=our_stream)


def _take(capsule: Any) -> Any:
    for structure in (_ManagedVersioned, _Managed):
        if _is_valid(id(capsule), structure.name):
            managed = structure.from_address(_get_pointer(id(capsule), structure.name))
            _set_name(id(capsule), structure.used)
            return managed
    raise TypeError("from_dlpack: __dlpack__ returned no fresh DLPack capsule")


def _checked_dtype(tensor: Any) -> Any:
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise ShapeError(
            f"from_dlpack: type code {tensor.code} with {tensor.bits} bits, {tensor.lanes} lanes "
            f"is not supported; expected one of {', '.join(str(known) for known in DTYPE_CODES)}"
        )
    return dtype


def _check_layout(tensor: Any, shape: tuple[int, ...]) -> None:
    if not tensor.strides or 0 in shape:
        return
    strides = [tensor.strides[axis] for axis in range(len(shape))]
    wanted = _row_major_strides(shape)
    if any(s != w for n, s, w in zip(shape, strides, wanted, strict=True) if n != 1):
        raise ShapeError(
            f"from_dlpack: shape {shape} has strides {tuple(strides)}; expected a contiguous "
            f"row-major array, so copy it first"
        )
