"""Quantized and integer operators: on the host with scales of any granularity, int4 to uint16.

On Nodes, what is quantized to 8 bits by known numbers, one for a tensor or one for each position of
an axis, becomes floats between a quantization and a dequantization, QLinearConv and QLinearMatMul
too; `fusion/quantized.py` computes that in integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import functional as F
from ....graph.node import Node
from ..call import Call
from ..registry import Unfit, host, values
from .elementwise import cast, dtype_of, wide
from .images import convolve, convolve_nodes
from .products import product_of_integers

_RUNTIME = "com.microsoft"  # the domain of ONNX Runtime's own operators


def _spread(call: Call, v: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Scales or zero points of one value, an axis, or blocks of it, to broadcast against x."""
    axis, block = call.get("axis", 1) % max(x.ndim, 1), call.get("block_size", 0)
    v = wide(v) if v.dtype.kind not in "iu" else v.astype(np.int64)
    if v.size == 1 and v.ndim < 2:
        return v.reshape(())
    if v.ndim == 1 and not block:
        return v.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return np.take(np.repeat(v, block or 1, axis), range(x.shape[axis]), axis)


def _range(dtype: np.dtype) -> tuple[int, int]:
    """The least and largest integer of a dtype, those of 2 and 4 bits too."""
    bits = int("".join(c for c in dtype.name if c.isdigit()))
    unsigned = dtype.name.startswith("u")
    return (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def quantized(y: np.ndarray, zero: Any, dtype: np.dtype) -> np.ndarray:
    """Floats in units of the scale, as integers about a zero point, to even, saturated."""
    low, high = _range(dtype)
    moved = np.rint(y) + (0 if zero is None else zero)
    return np.clip(moved, low, high).astype(np.int64).astype(dtype)


# ---- on Nodes ----


def _array(x: Any) -> np.ndarray:
    """A value that is known before anything runs."""
    if not isinstance(x, np.ndarray):
        raise Unfit
    return x


def _known(call: Call, scale: Any, zero: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """A scale in float32 and a zero point that are known, both of shape () or (n,)."""
    given = _array(scale)
    offset = np.zeros_like(given, dtype) if zero is None else _array(zero)
    blocks = call.get("block_size", 0) or given.ndim > 1 or given.size != offset.size
    if not call.walker.symbolic or blocks or given.dtype != np.float32 or offset.dtype != dtype:
        raise Unfit
    shape = () if given.size == 1 else given.shape
    return given.reshape(shape), offset.reshape(shape)


def _is_float(x: Any) -> bool:
    return isinstance(x, Node) and x.dtype in (None, np.float32)


@values("QuantizeLinear")
def _quantize_nodes(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    code = call.get("output_dtype", 0)
    given = dtype_of(code) if code else np.dtype(np.uint8)
    dtype = given if zero is None else _array(zero).dtype
    if not _is_float(x) or dtype not in (np.uint8, np.int8):
        raise Unfit
    return F.quantize(x, *_known(call, scale, zero, dtype), axis=call.get("axis", 1))


@values("DequantizeLinear")
def _dequantize_nodes(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    """Weights are dequantized by a Node too, so that products find them as integers."""
    if not isinstance(x, (Node, np.ndarray)) or x.dtype not in (np.uint8, np.int8, np.int32):
        raise Unfit
    if (isinstance(x, np.ndarray) and not x.ndim) or call.get("output_dtype", 0):
        raise Unfit
    return F.dequantize(x, *_known(call, scale, zero, x.dtype), axis=call.get("axis", 1))


def _operand(call: Call, x: Any, scale: Any, zero: Any, axis: int) -> Any:
    if x.dtype not in (np.uint8, np.int8):
        raise Unfit
    return F.dequantize(x, *_known(call, scale, zero, x.dtype), axis=axis)


def _result(call: Call, y: Any, scale: Any, zero: Any) -> Any:
    if _array(zero).size != 1:
        raise Unfit
    return F.quantize(y, *_known(call, scale, zero, zero.dtype))


@values("QLinearMatMul")
def _qlinear_matmul_nodes(call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any,
                          b_zero: Any, y_scale: Any, y_zero: Any) -> Any:  # fmt: skip
    if not isinstance(a, Node) or np.ndim(b) != 2:
        raise Unfit
    left = _operand(call, a, a_scale, a_zero, -2)
    right = _operand(call, b, b_scale, b_zero, 1)
    return _result(call, F.matmul(left, right), y_scale, y_zero)


@values("QLinearConv")
def _qlinear_conv_nodes(call: Call, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any,
                        w_zero: Any, y_scale: Any, y_zero: Any,
                        bias: Any = None) -> Any:  # fmt: skip
    if not isinstance(x, Node) or _array(w).ndim != 4:
        raise Unfit
    image = _operand(call, x, x_scale, x_zero, 1)
    filters = _operand(call, w, w_scale, w_zero, 0)
    terms = None
    if bias is not None:
        scales = (_array(x_scale) * _array(w_scale)).reshape(-1)
        scales = np.broadcast_to(scales, bias.shape).astype(np.float32)
        terms = F.dequantize(bias, scales, np.zeros(bias.shape, np.int32))
    return _result(call, convolve_nodes(call, image, filters, terms), y_scale, y_zero)


@values("QLinearAdd", domain=_RUNTIME)
def _qlinear_add_nodes(call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any,
                       b_zero: Any, y_scale: Any, y_zero: Any) -> Any:  # fmt: skip
    if not isinstance(a, Node) or not isinstance(b, Node):
        raise Unfit
    left = _operand(call, a, a_scale, a_zero, 0)
    return _result(call, F.add(left, _operand(call, b, b_scale, b_zero, 0)), y_scale, y_zero)


@values("QGemm", domain=_RUNTIME)
def _qgemm_nodes(call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any,
                 bias: Any = None, y_scale: Any = None, y_zero: Any = None) -> Any:  # fmt: skip
    flags = bool(call.get("transA", 0)), bool(call.get("transB", 0))
    if not isinstance(a, Node) or flags[0] or call.get("alpha", 1.0) != 1.0:
        raise Unfit
    right = _operand(call, _array(b), b_scale, b_zero, 0 if flags[1] else 1)
    made = F.matmul(_operand(call, a, a_scale, a_zero, 0), right, *flags)
    if bias is not None:
        scales = (_array(a_scale) * _array(b_scale)).reshape(-1)
        scales = np.broadcast_to(scales, bias.shape).astype(np.float32)
        made = F.add(made, F.dequantize(bias, scales, np.zeros(bias.shape, np.int32)))
    return made if y_scale is None else _result(call, made, y_scale, y_zero)


# ---- on the host ----


@host("QLinearAdd", domain=_RUNTIME)
def _qlinear_add(call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any,
                 y_scale: Any, y_zero: Any) -> np.ndarray:  # fmt: skip
    total = _centered(a, a_zero, None) * a_scale + _centered(b, b_zero, None) * b_scale
    return quantized(total / y_scale, np.asarray(y_zero).astype(np.int64), y_zero.dtype)


@host("QGemm", domain=_RUNTIME)
def _qgemm(call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any,
           bias: Any = None, y_scale: Any = None, y_zero: Any = None) -> np.ndarray:  # fmt: skip
    rows = bool(call.get("transB", 0))
    left, right = _centered(a, a_zero, None), _centered(b, b_zero, 0 if rows else 1)
    left, right = left.T if call.get("transA", 0) else left, right.T if rows else right
    total = left @ right * call.get("alpha", 1.0) + (0 if bias is None else bias)
    scaled = total * wide(a_scale) * wide(b_scale)
    if y_scale is None:
        return scaled.astype(np.float32)
    return quantized(scaled / y_scale, np.asarray(y_zero).astype(np.int64), y_zero.dtype)


@host("QuantizeLinear")
def _quantize(call: Call, x: np.ndarray, scale: np.ndarray, zero: Any = None) -> np.ndarray:
    code = call.get("output_dtype", 0)
    dtype = zero.dtype if zero is not None else dtype_of(code) if code else np.dtype(np.uint8)
    ratio = wide(x) / _spread(call, scale, x)
    if dtype.name.startswith("float"):
        return cast(ratio.astype(np.float32), dtype, bool(call.get("saturate", 1)))
    return quantized(ratio, None if zero is None else _spread(call, zero, x), dtype)


@host("DequantizeLinear")
def _dequantize(call: Call, x: np.ndarray, scale: np.ndarray, zero: Any = None) -> np.ndarray:
    code = call.get("output_dtype", 0)
    values = x.astype(np.float32) if x.dtype.name.startswith("float") else x.astype(np.int64)
    if zero is not None:
        z = _spread(call, zero, x)
        values = values - z.astype(values.dtype)
    made = values * _spread(call, scale, x)
    return made.astype(dtype_of(code) if code else scale.dtype)


@host("DynamicQuantizeLinear")
def _dynamic(call: Call, x: np.ndarray) -> tuple[np.ndarray, ...]:
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = np.float32((np.float32(high) - np.float32(low)) / 255)
    scale = scale if scale else np.float32(1)
    zero = np.clip(np.rint(np.float32(-low) / scale), 0, 255).astype(np.uint8)
    return quantized(x / scale, int(zero), np.dtype(np.uint8)), np.asarray(scale), np.asarray(zero)


def _factor(scale: Any, rows: bool) -> Any:
    """A scale of the left operand: one value, or one for each row."""
    return scale[:, None] if rows and np.ndim(scale) == 1 and np.size(scale) > 1 else scale


@host("QLinearMatMul")
def _qlinear_matmul(call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any,
                    b_zero: Any, y_scale: Any, y_zero: Any) -> np.ndarray:  # fmt: skip
    total = product_of_integers(a, b, a_zero, b_zero).astype(np.float64)
    scale = wide(_factor(a_scale, True)) * wide(b_scale) / wide(_factor(y_scale, True))
    return quantized(total * scale, np.asarray(y_zero).astype(np.int64), y_zero.dtype)


def _centered(x: np.ndarray, zero: Any, axis: int | None) -> np.ndarray:
    """x less its zero points, one for all or one for each position of an axis, in float64."""
    if zero is None:
        return x.astype(np.float64)
    z = np.asarray(zero).astype(np.float64)
    if z.size > 1 and axis is not None:
        z = z.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return x.astype(np.float64) - z


@host("ConvInteger")
def _conv_integer(call: Call, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> np.ndarray:
    made = convolve(call, _centered(x, x_zero, None), _centered(w, w_zero, 0), None)
    return np.rint(made).astype(np.int32)


@host("QLinearConv")
def _qlinear_conv(call: Call, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any,
                  y_scale: Any, y_zero: Any, bias: Any = None) -> np.ndarray:  # fmt: skip
    b = None if bias is None else bias.astype(np.float64)
    total = convolve(call, _centered(x, x_zero, None), _centered(w, w_zero, 0), b)
    scale: Any = np.asarray(x_scale * w_scale / y_scale).reshape(-1)
    scale = scale.reshape((-1, *[1] * (x.ndim - 2))) if scale.size > 1 else scale
    return quantized(total * scale, np.asarray(y_zero).astype(np.int64), y_zero.dtype)
