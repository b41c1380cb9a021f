"""Arithmetic and functions of one element, broadcast by numpy's rule where there are two operands.

Floats keep their dtype; float32 with float64 is refused by ShapeError, and a number adapts to its
partner.
"""

from __future__ import annotations

from typing import Any

from ..ops import elementwise, power
from ..ops.comparison import maximum_op, minimum_op
from ..ops.elementwise import (
    abs_op,
    as_node,
    cast_op,
    clip_op,
    cos_op,
    exp_op,
    log1p_op,
    log_op,
    neg_op,
    rsqrt_op,
    sign_op,
    sin_op,
    sqrt_op,
)
from ..ops.movement import copy_op, stop_gradient_op
from .record import Array, pair, recorded

__all__ = [
    "abs", "add", "astype", "clip", "copy", "cos", "div", "exp", "log", "log1p", "maximum",
    "minimum", "mul", "neg", "pow", "rsqrt", "sign", "sin", "sqrt", "stop_gradient", "sub",
]  # fmt: skip


@recorded
def add(a: Array, b: Array) -> Array:
    """a + b, broadcast against each other.

    Integers and truth values give integers. ShapeError where shapes or dtypes do not fit.

    Example: F.add(x, 1)
    """
    return elementwise.add(*pair(a, b))


@recorded
def sub(a: Array, b: Array) -> Array:
    """a - b, broadcast against each other.

    Integers and truth values give integers. ShapeError where shapes or dtypes do not fit.

    Example: F.sub(x, y)
    """
    return elementwise.sub(*pair(a, b))


@recorded
def mul(a: Array, b: Array) -> Array:
    """a · b element by element, broadcast against each other.

    Integers and truth values give integers. ShapeError where shapes or dtypes do not fit.

    Example: F.mul(x, y)
    """
    return elementwise.mul(*pair(a, b))


@recorded
def div(a: Array, b: Array) -> Array:
    """a / b element by element in floats, broadcast against each other.

    A division by 0 gives an infinity or NaN. ShapeError where shapes or dtypes do not fit.

    Example: F.div(1, x)
    """
    return elementwise.div(*pair(a, b))


@recorded
def pow(a: Array, b: Array) -> Array:
    """a to the power b element by element in floats, broadcast against each other.

    A negative a has only integers as powers, others give NaN. ShapeError where shapes or dtypes do
    not fit.

    Example: F.pow(x, 2)
    """
    return power.power(*pair(a, b))


@recorded
def maximum(a: Array, b: Array) -> Array:
    """The larger of a and b element by element, broadcast against each other; NaN where either is.

    Of a tie the gradient goes to a. ShapeError where shapes or dtypes do not fit.

    Example: F.maximum(x, 0)
    """
    return maximum_op(*pair(a, b))


@recorded
def minimum(a: Array, b: Array) -> Array:
    """The smaller of a and b element by element, broadcast against each other; NaN where either is.

    Of a tie the gradient goes to a. ShapeError where shapes or dtypes do not fit.

    Example: F.minimum(x, y)
    """
    return minimum_op(*pair(a, b))


@recorded
def clip(x: Array, min: float | None = None, max: float | None = None) -> Array:
    """x within [min, max]; a bound that is None is none.

    x: any shape and dtype; integers within integers stay such. Between two bounds the gradient is 0
    at both and beyond; at a single bound it is 1. ShapeError for a min above max.

    Example: F.clip(x, -1, 1)
    """
    x = as_node(x)
    if min is not None and max is not None:
        return clip_op(x, min, max)
    if min is not None:
        return maximum_op(x, min)
    return x if max is None else minimum_op(x, max)


@recorded
def neg(x: Array) -> Array:
    """-x of each element.

    x: any shape and dtype; truth values give integers.

    Example: F.neg(x)
    """
    return neg_op(as_node(x))


@recorded
def abs(x: Array) -> Array:
    """|x| of each element, its gradient 0 at 0.

    x: any shape and dtype; truth values give integers.

    Example: F.abs(x)
    """
    return abs_op(as_node(x))


@recorded
def sign(x: Array) -> Array:
    """1 where x is positive, -1 where it is negative, else 0, or NaN as x is.

    x: any shape and dtype. It has no gradient.

    Example: F.sign(x)
    """
    return sign_op(as_node(x))


@recorded
def exp(x: Array) -> Array:
    """e to the power x of each element.

    x: any shape; integers give floats.

    Example: F.exp(x)
    """
    return exp_op(as_node(x))


@recorded
def log(x: Array) -> Array:
    """The natural logarithm of each element, -inf at 0 and NaN below.

    x: any shape; integers give floats.

    Example: F.log(F.exp(x))
    """
    return log_op(as_node(x))


@recorded
def log1p(x: Array) -> Array:
    """The natural logarithm of 1 + x of each element, exact for small x too.

    x: any shape; integers give floats.

    Example: F.log1p(F.abs(x))
    """
    return log1p_op(as_node(x))


@recorded
def sqrt(x: Array) -> Array:
    """The square root of each element, NaN below 0.

    x: any shape; integers give floats.

    Example: F.sqrt(F.abs(x))
    """
    return sqrt_op(as_node(x))


@recorded
def rsqrt(x: Array) -> Array:
    """1 / sqrt(x) of each element, infinite at 0 and NaN below.

    x: any shape; integers give floats.

    Example: F.rsqrt(F.exp(x))
    """
    return rsqrt_op(as_node(x))


@recorded
def sin(x: Array) -> Array:
    """The sine of each element, in radians.

    x: any shape; integers give floats.

    Example: F.sin(x)
    """
    return sin_op(as_node(x))


@recorded
def cos(x: Array) -> Array:
    """The cosine of each element, in radians.

    x: any shape; integers give floats.

    Example: F.cos(x)
    """
    return cos_op(as_node(x))


@recorded
def astype(x: Array, dtype: Any) -> Array:
    """x in another dtype, such as "float16" or np.int64; floats lose their fraction on the way to
    integers.

    x: any shape. The gradient passes between floats. SignatureError for what is no dtype of
    numbers.

    Example: F.astype(x, "float64")
    """
    return cast_op(as_node(x), dtype)


@recorded
def copy(x: Array) -> Array:
    """The values of x in memory of their own.

    x: any shape and dtype.

    Example: F.copy(x)
    """
    return copy_op(as_node(x))


@recorded
def stop_gradient(x: Array) -> Array:
    """x as a constant to gradients: what is computed from it does not lead them to x.

    x: any shape and dtype. It costs nothing. `x.detach()` is the same.

    Example: F.stop_gradient(x)
    """
    return stop_gradient_op(as_node(x))
