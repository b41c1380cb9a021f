"""Tensors from nothing and from other arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtypes import as_dtype, host
from ..errors import ShapeError
from ..graph.lines import where
from ..ndarray import from_dlpack as ndarray_from_dlpack
from .device import Device, engine_of
from .tensor import Tensor


def tensor(
    data: Any, device: Device = None, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """A Tensor with a copy of a number, a nested sequence, an array or a Tensor. Python's floats
    become float32, its integers int64; arrays keep their dtype, but float64 is float32 on native
    devices.

    device: "numpy", "cpu", "gpu", "gpu:1"; the best there is where it is None. data: what is
    copied, on whichever device it is. dtype: another one for it. requires_grad: `backward` leaves
    its gradient in `grad`. ShapeError for what is no array of numbers, DeviceError for a device
    that cannot be used.

    >>> x = dl.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> x
    Tensor([[1., 2.],
            [3., 4.]],
           device=numpy)
    >>> x.shape, x.dtype, x.device
    ((2, 2), dtype('float32'), 'numpy')
    >>> dl.tensor([1, 2], dtype="float32", requires_grad=True)
    Tensor([1., 2.], device=numpy, requires_grad=True)
    """
    return Tensor(data, device, dtype, requires_grad)


def from_numpy(array: np.ndarray, device: Device = None) -> Tensor:
    """A Tensor with a copy of a numpy array, in its dtype.

    device: as of `tensor`.

    >>> dl.from_numpy(np.array([1.5, 2.5]))
    Tensor([1.5, 2.5], dtype=float64, device=numpy)
    """
    return Tensor(np.asarray(array), device)


def from_dlpack(array: Any) -> Tensor:
    """A Tensor that shares the memory of an array of PyTorch, JAX, CuPy or numpy, on its device.

    Nobody may write to it as long as the Tensor is used. ShapeError for what is not contiguous or
    of a dtype or device that is not known.

    >>> values = ndarray.array([1.0, 2.0], ndarray.cpu(0))  # or torch.tensor([1.0, 2.0])
    >>> dl.from_dlpack(values).tolist()
    [1.0, 2.0]
    """
    shared = ndarray_from_dlpack(array)
    return Tensor.holding(engine_of(shared.ctx), shared)


def full(
    shape: Any, value: float, device: Device = None, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """One number everywhere; float32, or int64 or bool where the number is one.

    shape: an integer or a tuple. value: the number. device, dtype and requires_grad: as of
    `tensor`.

    >>> dl.full((2, 2), 7)
    Tensor([[7, 7],
            [7, 7]],
           device=numpy)
    """
    if dtype is None:
        dtype = np.result_type(value) if isinstance(value, (bool, int)) else np.float32
    values = np.full(extents("full", (shape,)), value, host(as_dtype(dtype)))
    return Tensor(values, device, dtype, requires_grad)


def zeros(*shape: Any, device: Device = None, dtype: Any = np.float32,
          requires_grad: bool = False) -> Tensor:  # fmt: skip
    """Zeros: `zeros(2, 3)` or `zeros((2, 3))`.

    shape: integers, or one tuple of them. device, dtype and requires_grad: as of `tensor`.

    >>> dl.zeros(2, 3)
    Tensor([[0., 0., 0.],
            [0., 0., 0.]],
           device=numpy)
    """
    return full(extents("zeros", shape), 0, device, dtype, requires_grad)


def ones(*shape: Any, device: Device = None, dtype: Any = np.float32,
         requires_grad: bool = False) -> Tensor:  # fmt: skip
    """Ones: `ones(2, 3)` or `ones((2, 3))`.

    shape: integers, or one tuple of them. device, dtype and requires_grad: as of `tensor`.

    >>> dl.ones((2, 2), dtype="int64")
    Tensor([[1, 1],
            [1, 1]],
           device=numpy)
    """
    return full(extents("ones", shape), 1, device, dtype, requires_grad)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros in the shape and dtype and on the device of a Tensor. x: the Tensor.

    >>> dl.zeros_like(dl.tensor([1, 2]))
    Tensor([0, 0], device=numpy)
    """
    return full(x.shape, 0, x.device, x.dtype)


def ones_like(x: Tensor) -> Tensor:
    """Ones in the shape and dtype and on the device of a Tensor. x: the Tensor.

    >>> dl.ones_like(dl.tensor([1, 2]))
    Tensor([1, 1], device=numpy)
    """
    return full(x.shape, 1, x.device, x.dtype)


def arange(
    start: float, stop: float | None = None, step: float = 1, device: Device = None,
    dtype: Any = None,
) -> Tensor:  # fmt: skip
    """start, start + step, … below `stop`; `arange(n)` is 0, …, n - 1. int64 where all three are
    integers, else float32.

    device and dtype: as of `tensor`.

    >>> dl.arange(4)
    Tensor([0, 1, 2, 3], device=numpy)
    >>> dl.arange(1.0, 2.0, 0.25)
    Tensor([1.  , 1.25, 1.5 , 1.75], device=numpy)
    """
    low, high = (0, start) if stop is None else (start, stop)
    values = np.arange(low, high, step)
    if dtype is None and values.dtype.kind == "f":
        dtype = np.float32
    return Tensor(values, device, dtype)


def linspace(
    start: float, stop: float, count: int, device: Device = None, dtype: Any = np.float32
) -> Tensor:
    """`count` numbers from `start` to `stop`, both included, at equal distances.

    device and dtype: as of `tensor`.

    >>> dl.linspace(0, 1, 5)
    Tensor([0.  , 0.25, 0.5 , 0.75, 1.  ], device=numpy)
    """
    return Tensor(np.linspace(start, stop, count), device, dtype)


def eye(rows: int, columns: int | None = None, device: Device = None,
        dtype: Any = np.float32) -> Tensor:  # fmt: skip
    """The identity matrix, or one of another number of columns with ones on its diagonal.

    rows, columns: the extents. device and dtype: as of `tensor`.

    >>> dl.eye(2)
    Tensor([[1., 0.],
            [0., 1.]],
           device=numpy)
    >>> dl.eye(2, 3).shape
    (2, 3)
    """
    return Tensor(np.eye(rows, columns), device, dtype)


def extents(what: str, shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape given as integers or as one sequence of them. ShapeError for anything else."""
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    try:
        found = tuple([int(n) for n in given if n == int(n)])
    except (TypeError, ValueError):
        found = ()
    if len(found) != len(given) or min(found, default=0) < 0:
        raise ShapeError(f"{what}: expected extents such as (2, 3), got {shape!r} [{where()}]")
    return found
