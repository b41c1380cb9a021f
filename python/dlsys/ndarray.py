"""Arrays on a native device: contiguous, over a caching allocator, shared through DLPack."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dlsys.dtypes import BFloat16, as_dtype, bfloat16, host, rounded, stored
from dlsys.errors import ShapeError
from dlsys.runtime import dlpack
from dlsys.runtime.device import Block, Context, stream, synchronize
from dlsys.runtime.device import best_context as _best_context
from dlsys.runtime.device import cpu as cpu
from dlsys.runtime.device import gpu as gpu
from dlsys.runtime.library import (
    CODE_DTYPES,
    DL_CPU,
    DL_GPU,
    DTYPE_CODES,
    MAX_NDIM,
    DLArray,
    load,
)
from dlsys.values import HostNumbers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

_HOST = cpu(0)

# A DLArray and its shape as one block of 64-bit words: data, ctx, ndim and dtype, address of the
# shape, shape. Filling it in one call takes a third of the time of a structure and a shape array.
_HANDLE_WORDS = 4
_HANDLES = tuple(ctypes.c_int64 * (_HANDLE_WORDS + ndim) for ndim in range(MAX_NDIM + 1))


class NDArray(HostNumbers):
    """An array of up to 8 dimensions on a device. Make one with `array`, `empty` or `from_dlpack`.

    Attributes:
        block: the memory, which views share; `block.use(stream)` comes before work on it.
        data_address: of the first element. handle_address: of the DLArray that kernels take.
    """

    __slots__ = (
        "block",
        "data_address",
        "handle_address",
        "_ctx",
        "_dtype",
        "_shape",
        "_words",
        "__weakref__",
        "_capsule",
    )
    block: Block
    data_address: int
    handle_address: int
    _ctx: Context
    _dtype: Any
    _shape: tuple[int, ...]
    _words: ctypes.Array[ctypes.c_int64]
    _capsule: Any  # the last one that `__dlpack__` gave

    @classmethod
    def from_block(cls, block: Block, offset: int, shape: tuple[int, ...], dtype: Any) -> NDArray:
        """A view of `block` from byte `offset`; the caller answers for size and alignment."""
        self = cls.__new__(cls)
        ndim = len(shape)
        self.block = block
        self._ctx = ctx = block.ctx
        self._shape = shape
        self._dtype = dtype
        self.data_address = data = block.address + offset
        self._words = words = _HANDLES[ndim](
            data, ctx.packed, ndim | DTYPE_CODES[dtype] << 32, 0, *shape
        )
        self.handle_address = address = ctypes.addressof(words)
        words[3] = address + 8 * _HANDLE_WORDS
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def ctx(self) -> Context:
        """The device."""
        return self._ctx

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the elements take."""
        return math.prod(self._shape) * self._dtype.itemsize

    @property
    def handle(self) -> DLArray:
        """The structure that kernels take; valid as long as this array."""
        return DLArray.from_buffer(self._words)

    def asnumpy(self) -> np.ndarray:
        """A fresh numpy array of the same shape and dtype, float32 for bfloat16; waits for the work
        that computes it.

        Raises:
            OutOfRangeError: a kernel on its GPU, of this work or of other, has found an index or a
                label out of range since the last wait. The next call returns the values.
        """
        narrow = self._dtype is bfloat16
        out = np.empty(self._shape, np.uint16 if narrow else self._dtype)
        self._download(out)
        return bfloat16.decode(out) if narrow else out

    def copyto(self, target: NDArray | np.ndarray) -> None:
        """Copies into `target`, an NDArray of any device or a numpy array, of the same shape.

        Raises:
            ShapeError: the shapes differ; nothing was written.
        """
        if isinstance(target, NDArray):
            target[:] = self
        elif isinstance(target, np.ndarray):
            _check_same_shape("copyto", self._shape, target.shape)
            if target.dtype == self._dtype and target.flags.c_contiguous and target.flags.writeable:
                self._download(target)
            else:
                np.copyto(target, self.asnumpy(), casting="same_kind")
        else:
            raise TypeError(
                f"copyto: expected an NDArray or a numpy array, got {type(target).__name__}"
            )

    def __setitem__(self, key: Any, value: Any) -> None:
        """`arr[:] = x` with a number or an array of the same shape; else a ShapeError."""
        if key is not Ellipsis and not (isinstance(key, slice) and key == slice(None)):
            raise ShapeError(
                f"an NDArray is assigned as a whole, arr[:] = x; got the index {key!r}"
            )
        if isinstance(value, NDArray):
            _check_same_shape("arr[:] = x", self._shape, value._shape)
            self._assign(value)
            return
        given = np.asarray(value)
        if not np.can_cast(given.dtype, host(self._dtype), "same_kind") and not _is_number(value):
            raise ShapeError(f"arr[:] = x: cannot store {given.dtype} in an array of {self._dtype}")
        if given.ndim == 0 and self._shape != ():
            self._fill(given)
        else:
            _check_same_shape("arr[:] = x", self._shape, given.shape)
            self._upload(given)

    def _upload(self, values: np.ndarray) -> None:
        held = stored(values, self._dtype)
        if held.size:
            _copy(self.data_address, self._ctx, held.ctypes.data, _HOST, held.nbytes, self.block)

    def _download(self, out: np.ndarray) -> None:
        if out.size:
            # The address through `out.ctypes` takes four times as long.
            address = ctypes.addressof(ctypes.c_char.from_buffer(out.data))
            if not self._ctx.streams:  # the work is done, and its errors were raised
                ctypes.memmove(address, self.data_address, out.nbytes)
                return
            _copy(address, _HOST, self.data_address, self._ctx, out.nbytes, self.block)

    def _fill(self, value: np.ndarray) -> None:
        held = rounded(value, self._dtype)
        number = float(np.float32(held))
        if held.item() == number:
            launch("fill", self._ctx, number, self)
        else:  # the kernel takes a float32, which a large integer or a NaN does not pass through
            self._upload(np.full(self._shape, held))

    def _assign(self, source: NDArray) -> None:
        if source._dtype != self._dtype:
            converted = empty(self._shape, source._ctx, self._dtype)
            launch("cast", source._ctx, source, converted)
            source = converted
        if source.data_address == self.data_address or not self.size:
            return
        blocks = (source.block, self.block)
        _copy(self.data_address, self._ctx, source.data_address, source._ctx, self.nbytes, *blocks)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"ctx": self._ctx}

    def __reduce__(self) -> tuple[Any, ...]:
        return array, (self.asnumpy(), self._ctx, self._dtype)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule that shares this memory. `stream` is the consumer's (see dlpack.export).

        A consumer that refuses the dtype raises its own error: numpy has no bfloat16, which
        `asnumpy` gives as float32.

        Raises:
            BufferError: another device was asked for.
        """
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"this array is on {self._ctx}; use array(x, ctx) to move it")
        shared = array(self, self._ctx) if copy else self
        versioned = max_version is not None and max_version[0] >= 1
        # The array holds it: a consumer that refuses would destroy it while its exception is on
        # the way, which the destructor, a Python function, would lose.
        self._capsule = dlpack.export(shared, stream, versioned)
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._ctx.device_type, self._ctx.device_id


def launch(kernel: str, ctx: Context, *arguments: Any) -> None:
    """Runs one kernel of the table on the calling thread's stream of `ctx`.

    arguments: arrays and numbers, as the kernel takes them.

    Raises:
        KernelError: what the kernel found wrong; its outputs are as they were.
    """
    library = load()
    call = library.kernel(*library.key(ctx.kernel_device, kernel, arguments))
    if not ctx.streams:
        call(*arguments)
        return
    own = stream(ctx)
    for argument in arguments:
        for x in argument if isinstance(argument, list) else (argument,):
            if isinstance(x, NDArray):
                x.block.use(own)
    call(*arguments, own)


def _copy(
    dst: int, dst_ctx: Context, src: int, src_ctx: Context, nbytes: int, *blocks: Block
) -> None:
    # On the stream of the GPU that takes part, after the last work on the blocks.
    ctx = src_ctx if dst_ctx.device_type == DL_CPU else dst_ctx
    across_gpus = src_ctx is not dst_ctx and src_ctx.device_type == dst_ctx.device_type == DL_GPU
    for block in blocks:
        block.use(stream(block.ctx))
        if across_gpus:  # streams of two devices do not order each other
            synchronize(block.ctx)
    library = load()
    copy = library.cdll.DLMemoryCopy
    library.check(copy(dst, dst_ctx.struct, src, src_ctx.struct, nbytes, stream(ctx)))
    if across_gpus:
        synchronize(ctx)


def best() -> Context | None:
    """The best device that can be used: `gpu(0)`, else `cpu(0)`, else None, which is numpy."""
    return _best_context()[0]


def is_gpu_ctx(ctx: Context | None) -> bool:
    """True for a GPU."""
    return ctx is not None and ctx.device_type == DL_GPU


def array(
    arr: ArrayLike | NDArray, ctx: Context = _HOST, dtype: DTypeLike | BFloat16 | None = None
) -> NDArray:
    """A copy of `arr` on `ctx`. Host float64 becomes float32 unless `dtype` is given; others stay.

    Raises:
        ShapeError: a dtype that devices do not hold, or more than 8 dimensions.
        DeviceError, OutOfMemoryError: the device is not available, or full.
    """
    if isinstance(arr, NDArray):
        out = empty(arr.shape, ctx, arr.dtype if dtype is None else dtype)
        out._assign(arr)
        return out
    given = np.asarray(arr)
    if dtype is None:
        native = given.dtype.newbyteorder("=")
        dtype = np.float32 if native == np.float64 else native
    out = empty(given.shape, ctx, dtype)
    out._upload(given)
    return out


def empty(
    shape: Sequence[int] | int, ctx: Context = _HOST, dtype: DTypeLike | BFloat16 = np.float32
) -> NDArray:
    """A new array with undefined contents. Raises as `array` does.

    shape: the extents. ctx: the device.
    """
    extents = _checked_shape(shape)
    wanted = _checked_dtype(dtype)
    block = Block(_checked_ctx(ctx), math.prod(extents) * wanted.itemsize)
    return NDArray.from_block(block, 0, extents, wanted)


def from_dlpack(x: Any) -> NDArray:
    """An NDArray that shares the memory of `x`, an array of numpy, PyTorch, JAX or CuPy.

    What is read-only is copied, and what does not lie at a multiple of its elements' size.

    Raises:
        ShapeError: not contiguous, or a dtype or device that is not supported.
    """
    block, shape, dtype, read_only = dlpack.consume(x)
    shared = NDArray.from_block(block, 0, _checked_shape(shape), dtype)
    copied = read_only or shared.data_address % dtype.itemsize
    return array(shared, shared.ctx, dtype) if copied else shared


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _check_same_shape(what: str, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    if ours != theirs:
        raise ShapeError(f"{what}: shapes differ: {ours} and {theirs}")


def _checked_ctx(ctx: Any) -> Context:
    if not isinstance(ctx, Context):
        raise TypeError(f"expected a context such as ndarray.cpu(0) or ndarray.gpu(0), got {ctx!r}")
    return ctx


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (int, np.integer)):
        shape = (shape,)
    extents = tuple(operator.index(extent) for extent in shape)
    if len(extents) > MAX_NDIM:
        raise ShapeError(f"shape {extents} has {len(extents)} dimensions; at most {MAX_NDIM} work")
    if extents and not (min(extents) >= 0 and max(extents) < 2**62):
        raise ShapeError(f"shape {extents} has an extent that is negative or beyond 2**62")
    return extents


def _checked_dtype(dtype: Any) -> Any:
    wanted = as_dtype(dtype)
    code = DTYPE_CODES.get(wanted)
    if code is None:
        known = ", ".join(str(name) for name in DTYPE_CODES)
        raise ShapeError(f"dtype {wanted} is not supported on devices; expected one of {known}")
    return CODE_DTYPES[code]
