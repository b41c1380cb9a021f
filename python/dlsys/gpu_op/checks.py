"""What the functions of gpu_op share: the checks of their arrays, before anything is written, and
the launch of elementwise kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from ..ndarray import NDArray, launch

FLOAT32 = np.dtype(np.float32)


def check_arrays(op: str, *arrays: Any) -> None:
    """Float32 NDArrays of one device, or TypeError or ShapeError."""
    for arr in arrays:
        if not isinstance(arr, NDArray):
            raise TypeError(f"{op}: expected an NDArray, got {type(arr).__name__}")
        if arr.dtype != FLOAT32:
            raise ShapeError(f"{op}: expected float32, got {arr.dtype}")
        if arr.ctx is not arrays[0].ctx:
            raise ShapeError(f"{op}: arrays on two devices: {arrays[0].ctx} and {arr.ctx}")


def check_shape(op: str, what: str, arr: NDArray, expected: tuple[int, ...]) -> None:
    """The array has this shape, or ShapeError."""
    if arr.shape != expected:
        raise ShapeError(f"{op}: {what} has shape {arr.shape}, expected {expected}")


def check_separate(op: str, out: NDArray, *inputs: NDArray) -> None:
    """The output is none of the inputs, or ShapeError: only elementwise kernels work in place, the
    others would read what they have already written.
    """
    if any(out.size and out.data_address == arr.data_address for arr in inputs):
        raise ShapeError(f"{op}: the output is also an input; give it an array of its own")


def elementwise(
    op: str, kernel: str, inputs: tuple[NDArray, ...], out: NDArray, *scalars: Any
) -> None:
    """Runs a kernel on arrays of one shape; the output may be an input."""
    check_arrays(op, *inputs, out)
    for arr in inputs[1:]:
        check_shape(op, "the second input", arr, inputs[0].shape)
    check_shape(op, "the output", out, inputs[0].shape)
    launch(kernel, out.ctx, *inputs, *scalars, out)
