"""Checks that the functions of gpu_op make of their arrays, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from ..ndarray import NDArray

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
