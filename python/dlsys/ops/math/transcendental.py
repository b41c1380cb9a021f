"""Further functions of mathematics, elementwise: circular and hyperbolic ones with their inverses,
exponentials and logarithms of other bases, the error function. All results are floats, and NaN
outside of a function's domain.
"""

from __future__ import annotations

import math

import numpy as np

from ...arguments.signature import declared
from ...graph.node import Node
from ..comparison import OfOperands, where_op
from ..elementwise import FloatElementwise, const_div_op, exp_op, rsqrt_op

__all__ = [
    "acos_op", "acosh_op", "asin_op", "asinh_op", "atan2_op", "atan_op", "atanh_op", "cosh_op",
    "erf_op", "exp2_op", "expm1_op", "log10_op", "log2_op", "reciprocal_op", "sinh_op", "tan_op",
]  # fmt: skip

_LN_2, _LN_10 = math.log(2), math.log(10)


class FloatOfOperands(OfOperands, FloatElementwise):
    """Of two inputs, each of which may be a number, with a floating result."""


def _erf(x: np.ndarray, y: np.ndarray) -> None:
    """The C library's, since numpy has none."""
    np.copyto(y, np.fromiter(map(math.erf, x.flat), np.float64, x.size).reshape(x.shape))


def _atan2_gradients(a: Node, b: Node, dy: Node) -> tuple[Node, Node]:
    square = a * a + b * b
    scaled = dy / where_op(square == 0, 1.0, square)  # 0 at (0, 0), as in PyTorch
    return b * scaled, -a * scaled


expm1_op = FloatElementwise("expm1", np.expm1, lambda x, y, dy: dy * exp_op(x))
exp2_op = FloatElementwise("exp2", np.exp2, lambda x, y, dy: dy * y * _LN_2)
log2_op = FloatElementwise("log2", np.log2, lambda x, y, dy: dy / (x * _LN_2))
log10_op = FloatElementwise("log10", np.log10, lambda x, y, dy: dy / (x * _LN_10))
erf_op = FloatElementwise(
    "erf", _erf, lambda x, y, dy: dy * exp_op(-x * x) * (2 / math.sqrt(math.pi))
)
tan_op = FloatElementwise("tan", np.tan, lambda x, y, dy: dy * (1 + y * y))
asin_op = FloatElementwise("asin", np.arcsin, lambda x, y, dy: dy * rsqrt_op(1 - x * x))
acos_op = FloatElementwise("acos", np.arccos, lambda x, y, dy: -dy * rsqrt_op(1 - x * x))
atan_op = FloatElementwise("atan", np.arctan, lambda x, y, dy: dy / (1 + x * x))
atan2_op = FloatOfOperands("atan2", np.arctan2, lambda a, b, y, dy: _atan2_gradients(a, b, dy))
sinh_op: FloatElementwise = FloatElementwise("sinh", np.sinh, lambda x, y, dy: dy * cosh_op(x))
cosh_op: FloatElementwise = FloatElementwise("cosh", np.cosh, lambda x, y, dy: dy * sinh_op(x))
asinh_op = FloatElementwise("asinh", np.arcsinh, lambda x, y, dy: dy * rsqrt_op(1 + x * x))
acosh_op = FloatElementwise("acosh", np.arccosh, lambda x, y, dy: dy * rsqrt_op(x * x - 1))
atanh_op = FloatElementwise("atanh", np.arctanh, lambda x, y, dy: dy / (1 - x * x))
for _op in (
    expm1_op, exp2_op, log2_op, log10_op, tan_op, asin_op, acos_op, sinh_op, cosh_op, acosh_op,
    atanh_op,
):  # fmt: skip
    _op.autocast = "float32"  # a relative error of x grows

# The docstrings of the operators.
for _op, _text in (
    (expm1_op, "e to the power x, minus 1, exact for small x too."),
    (exp2_op, "2 to the power x."),
    (log2_op, "The logarithm of x to base 2: -inf at 0, NaN below."),
    (log10_op, "The logarithm of x to base 10: -inf at 0, NaN below."),
    (erf_op, "The error function of x, 2 / √π times the integral of exp(-t²) from 0 to x."),
    (tan_op, "The tangent of x, in radians."),
    (asin_op, "The angle from -π/2 to π/2 whose sine is x."),
    (acos_op, "The angle from 0 to π whose cosine is x."),
    (atan_op, "The angle from -π/2 to π/2 whose tangent is x."),
    (atan2_op, "The angle from -π to π of the point (b, a), whose tangent is a / b, broadcast."),
    (sinh_op, "The hyperbolic sine of x."),
    (cosh_op, "The hyperbolic cosine of x."),
    (asinh_op, "The number whose hyperbolic sine is x."),
    (acosh_op, "The number from 0 on whose hyperbolic cosine is x, NaN for x below 1."),
    (atanh_op, "The number whose hyperbolic tangent is x, infinite at ±1 and NaN beyond."),
):
    _op.doc = _text


@declared()
def reciprocal_op(x: Node, name: str | None = None) -> Node:
    """1 / x, in floats."""
    return const_div_op(x, 1, name=name)
