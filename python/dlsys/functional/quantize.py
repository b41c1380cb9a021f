"""Functions that make integers of 8 bits of floats, and floats of these."""

from __future__ import annotations

from ..ops import quantize as ops
from ..ops.elementwise import as_node
from .record import Array, recorded

__all__ = ["dequantize", "quantize"]


@recorded
def quantize(x: Array, scale: Array, zero: Array, axis: int = 0) -> Array:
    """clip(round(x / scale) + zero), to even, in the dtype of `zero`, uint8 or int8, of whose range
    it takes the ends: ONNX's QuantizeLinear. No gradient passes.

    x: floats of any shape. scale, zero: arrays of shape () for all of x, or (n,) with one number
    for each position of `axis`. ShapeError where they do not fit.

    >>> F.quantize(dl.tensor([-9.0, 0.0, 0.7]), np.float32(0.5), np.uint8(3))
    Tensor([0, 3, 4], dtype=uint8, device=numpy)
    """
    return ops.quantize_op(as_node(x), as_node(scale), as_node(zero), axis=axis)


@recorded
def dequantize(x: Array, scale: Array, zero: Array, axis: int = 0) -> Array:
    """(x - zero) · scale in float32: ONNX's DequantizeLinear. No gradient passes.

    x, zero: uint8, int8 or int32. scale, zero: as of `quantize`. ShapeError where they do not fit.

    >>> F.dequantize(dl.tensor([0, 3, 4], dtype="uint8"), np.float32(0.5), np.uint8(3))
    Tensor([-1.5,  0. ,  0.5], device=numpy)
    """
    return ops.dequantize_op(as_node(x), as_node(scale), as_node(zero), axis=axis)
