"""Arithmetic and functions of one element, broadcast by numpy's rule where there are two operands.

Floats keep their dtype; float32 with float64 is refused by ShapeError, and a number adapts to its
partner.
"""

from __future__ import annotations

from typing import Any

from ..ops import elementwise
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
from ..ops.math import power, rounding, transcendental
from ..ops.movement import copy_op, stop_gradient_op
from .record import Array, pair, recorded

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "astype", "atan", "atan2", "atanh", "ceil",
    "clip", "copy", "cos", "cosh", "div", "erf", "exp", "exp2", "expm1", "floor", "floor_divide",
    "fmod", "log", "log10", "log1p", "log2", "maximum", "minimum", "mul", "neg", "pow",
    "reciprocal", "remainder", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "stop_gradient",
    "sub", "tan", "trunc",
]  # fmt: skip


@recorded
def add(a: Array, b: Array) -> Array:
    """a + b, broadcast against each other.

    Integers and truth values give integers. ShapeError where shapes or dtypes do not fit.

    >>> F.add(dl.tensor([[1.0], [2.0]]), [10.0, 20.0])
    Tensor([[11., 21.],
            [12., 22.]],
           device=numpy)
    """
    return elementwise.add(*pair(a, b))


@recorded
def sub(a: Array, b: Array) -> Array:
    """a - b, broadcast against each other.

    Integers and truth values give integers. ShapeError where shapes or dtypes do not fit.

    >>> F.sub(dl.tensor([1.0, 2.0]), [4.0, 0.5])
    Tensor([-3. ,  1.5], device=numpy)
    """
    return elementwise.sub(*pair(a, b))


@recorded
def mul(a: Array, b: Array) -> Array:
    """a · b element by element, broadcast against each other.

    Integers and truth values give integers. ShapeError where shapes or dtypes do not fit.

    >>> F.mul(dl.tensor([1.0, 2.0]), [4.0, 0.5])
    Tensor([4., 1.], device=numpy)
    """
    return elementwise.mul(*pair(a, b))


@recorded
def div(a: Array, b: Array) -> Array:
    """a / b element by element in floats, broadcast against each other.

    A division by 0 gives an infinity or NaN. ShapeError where shapes or dtypes do not fit.

    >>> F.div(dl.tensor([1.0, 2.0]), [4.0, 0.5])
    Tensor([0.25, 4.  ], device=numpy)
    """
    return elementwise.div(*pair(a, b))


@recorded
def pow(a: Array, b: Array) -> Array:
    """a to the power b element by element in floats, broadcast against each other.

    Integers to one integral power that is not negative, as in x**2, stay integers. A negative a has
    only integers as powers, others give NaN. ShapeError where shapes or dtypes do not fit.

    >>> F.pow(dl.tensor([1.0, 2.0, 3.0]), 2)
    Tensor([1., 4., 9.], device=numpy)
    """
    return power.power(*pair(a, b))


@recorded
def maximum(a: Array, b: Array) -> Array:
    """The larger of a and b element by element, broadcast against each other; NaN where either is.

    Of a tie the gradient goes to a. ShapeError where shapes or dtypes do not fit.

    >>> F.maximum(dl.tensor([1.0, -2.0]), 0)
    Tensor([1., 0.], device=numpy)
    """
    return maximum_op(*pair(a, b))


@recorded
def minimum(a: Array, b: Array) -> Array:
    """The smaller of a and b element by element, broadcast against each other; NaN where either is.

    Of a tie the gradient goes to a. ShapeError where shapes or dtypes do not fit.

    >>> F.minimum(dl.tensor([1.0, 2.0]), [0.5, 3.0])
    Tensor([0.5, 2. ], device=numpy)
    """
    return minimum_op(*pair(a, b))


@recorded
def clip(x: Array, min: float | None = None, max: float | None = None) -> Array:
    """x within [min, max]; a bound that is None is none.

    x: any shape and dtype; integers within integers stay such. Between two bounds the gradient is 0
    at both and beyond; at a single bound it is 1. ShapeError for a min above max.

    >>> F.clip(dl.tensor([-3.0, 0.5, 2.0]), -1, 1)
    Tensor([-1. ,  0.5,  1. ], device=numpy)
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

    >>> F.neg(dl.tensor([-1.5, 0.5, 2.7]))
    Tensor([ 1.5, -0.5, -2.7], device=numpy)
    """
    return neg_op(as_node(x))


@recorded
def abs(x: Array) -> Array:
    """|x| of each element, its gradient 0 at 0.

    x: any shape and dtype; truth values give integers.

    >>> F.abs(dl.tensor([-1.5, 0.5, 2.7]))
    Tensor([1.5, 0.5, 2.7], device=numpy)
    """
    return abs_op(as_node(x))


@recorded
def sign(x: Array) -> Array:
    """1 where x is positive, -1 where it is negative, else 0, or NaN as x is.

    x: any shape and dtype. It has no gradient.

    >>> F.sign(dl.tensor([-1.5, 0.5, 2.7]))
    Tensor([-1.,  1.,  1.], device=numpy)
    """
    return sign_op(as_node(x))


@recorded
def exp(x: Array) -> Array:
    """e to the power x of each element.

    x: any shape; integers give floats.

    >>> F.exp(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([1.       , 2.718282 , 7.3890557], device=numpy)
    """
    return exp_op(as_node(x))


@recorded
def log(x: Array) -> Array:
    """The natural logarithm of each element, -inf at 0 and NaN below.

    x: any shape; integers give floats.

    >>> F.log(dl.tensor([0.25, 1.0, 4.0]))
    Tensor([-1.3862944,  0.       ,  1.3862944], device=numpy)
    """
    return log_op(as_node(x))


@recorded
def log1p(x: Array) -> Array:
    """The natural logarithm of 1 + x of each element, exact for small x too.

    x: any shape; integers give floats.

    >>> F.log1p(dl.tensor([0.0, 1e-6, 1.0]))
    Tensor([0.000000e+00, 9.999995e-07, 6.931472e-01], device=numpy)
    """
    return log1p_op(as_node(x))


@recorded
def sqrt(x: Array) -> Array:
    """The square root of each element, NaN below 0.

    x: any shape; integers give floats.

    >>> F.sqrt(dl.tensor([0.25, 1.0, 4.0]))
    Tensor([0.5, 1. , 2. ], device=numpy)
    """
    return sqrt_op(as_node(x))


@recorded
def rsqrt(x: Array) -> Array:
    """1 / sqrt(x) of each element, infinite at 0 and NaN below.

    x: any shape; integers give floats.

    >>> F.rsqrt(dl.tensor([0.25, 1.0, 4.0]))
    Tensor([2. , 1. , 0.5], device=numpy)
    """
    return rsqrt_op(as_node(x))


@recorded
def sin(x: Array) -> Array:
    """The sine of each element, in radians.

    x: any shape; integers give floats.

    >>> F.sin(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([0.       , 0.841471 , 0.9092974], device=numpy)
    """
    return sin_op(as_node(x))


@recorded
def cos(x: Array) -> Array:
    """The cosine of each element, in radians.

    x: any shape; integers give floats.

    >>> F.cos(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([ 1.       ,  0.5403023, -0.4161468], device=numpy)
    """
    return cos_op(as_node(x))


@recorded
def floor_divide(a: Array, b: Array) -> Array:
    """a / b rounded down, as Python's `//`, broadcast against each other.

    Integers give integers, 0 of a division by 0. It has no gradient. ShapeError where shapes or
    dtypes do not fit.

    >>> F.floor_divide(dl.tensor([-7, 7]), 2)
    Tensor([-4,  3], device=numpy)
    """
    return rounding.floor_divide_op(*pair(a, b))


@recorded
def remainder(a: Array, b: Array) -> Array:
    """a - b · (a // b), as Python's `%` with the sign of b, broadcast against each other.

    Integers give integers, 0 of a division by 0. ShapeError where shapes or dtypes do not fit.

    >>> F.remainder(dl.tensor([-7, 7]), 3)
    Tensor([2, 1], device=numpy)
    """
    return rounding.remainder_op(*pair(a, b))


@recorded
def fmod(a: Array, b: Array) -> Array:
    """a - b · trunc(a / b), as C's fmod with the sign of a, broadcast against each other.

    Integers give integers, 0 of a division by 0. ShapeError where shapes or dtypes do not fit.

    >>> F.fmod(dl.tensor([-7, 7]), 3)
    Tensor([-1,  1], device=numpy)
    """
    return rounding.fmod_op(*pair(a, b))


@recorded
def floor(x: Array) -> Array:
    """The largest integer up to each element, in x's dtype.

    x: any shape and dtype; integers stay as they are. It has no gradient.

    >>> F.floor(dl.tensor([-1.5, 0.5, 2.7]))
    Tensor([-2.,  0.,  2.], device=numpy)
    """
    return rounding.floor_op(as_node(x))


@recorded
def ceil(x: Array) -> Array:
    """The smallest integer from each element on, in x's dtype.

    x: any shape and dtype; integers stay as they are. It has no gradient.

    >>> F.ceil(dl.tensor([-1.5, 0.5, 2.7]))
    Tensor([-1.,  1.,  3.], device=numpy)
    """
    return rounding.ceil_op(as_node(x))


@recorded
def trunc(x: Array) -> Array:
    """Each element without its fraction, in x's dtype.

    x: any shape and dtype; integers stay as they are. It has no gradient.

    >>> F.trunc(dl.tensor([-1.5, 0.5, 2.7]))
    Tensor([-1.,  0.,  2.], device=numpy)
    """
    return rounding.trunc_op(as_node(x))


@recorded
def round(x: Array) -> Array:
    """The integer nearest to each element, of two the even one, in x's dtype.

    x: any shape and dtype; integers stay as they are. It has no gradient.

    >>> F.round(dl.tensor([0.5, 1.5, -2.7]))
    Tensor([ 0.,  2., -3.], device=numpy)
    """
    return rounding.round_op(as_node(x))


@recorded
def reciprocal(x: Array) -> Array:
    """1 / x of each element.

    x: any shape; integers give floats.

    >>> F.reciprocal(dl.tensor([0.25, 1.0, 4.0]))
    Tensor([4.  , 1.  , 0.25], device=numpy)
    """
    return transcendental.reciprocal_op(as_node(x))


@recorded
def exp2(x: Array) -> Array:
    """2 to the power x of each element.

    x: any shape; integers give floats.

    >>> F.exp2(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([1., 2., 4.], device=numpy)
    """
    return transcendental.exp2_op(as_node(x))


@recorded
def expm1(x: Array) -> Array:
    """e to the power x, minus 1, exact for small x too.

    x: any shape; integers give floats.

    >>> F.expm1(dl.tensor([0.0, 1e-6, 1.0]))
    Tensor([0.0000000e+00, 1.0000005e-06, 1.7182819e+00], device=numpy)
    """
    return transcendental.expm1_op(as_node(x))


@recorded
def log2(x: Array) -> Array:
    """The logarithm of each element to base 2, -inf at 0 and NaN below.

    x: any shape; integers give floats.

    >>> F.log2(dl.tensor([0.25, 1.0, 8.0]))
    Tensor([-2.,  0.,  3.], device=numpy)
    """
    return transcendental.log2_op(as_node(x))


@recorded
def log10(x: Array) -> Array:
    """The logarithm of each element to base 10, -inf at 0 and NaN below.

    x: any shape; integers give floats.

    >>> F.log10(dl.tensor([0.01, 1.0, 1000.0]))
    Tensor([-2.0000002,  0.       ,  3.0000002], device=numpy)
    """
    return transcendental.log10_op(as_node(x))


@recorded
def erf(x: Array) -> Array:
    """The error function, 2 / √π times the integral of exp(-t²) from 0 to x.

    x: any shape; integers give floats.

    >>> F.erf(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([0.       , 0.8427008, 0.9953223], device=numpy)
    """
    return transcendental.erf_op(as_node(x))


@recorded
def tan(x: Array) -> Array:
    """The tangent of each element, in radians.

    x: any shape; integers give floats.

    >>> F.tan(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([ 0.       ,  1.5574077, -2.18504  ], device=numpy)
    """
    return transcendental.tan_op(as_node(x))


@recorded
def asin(x: Array) -> Array:
    """The angle from -π/2 to π/2 whose sine is x, NaN beyond ±1.

    x: any shape; integers give floats.

    >>> F.asin(dl.tensor([-1.0, 0.0, 1.0]))
    Tensor([-1.5707964,  0.       ,  1.5707964], device=numpy)
    """
    return transcendental.asin_op(as_node(x))


@recorded
def acos(x: Array) -> Array:
    """The angle from 0 to π whose cosine is x, NaN beyond ±1.

    x: any shape; integers give floats.

    >>> F.acos(dl.tensor([-1.0, 0.0, 1.0]))
    Tensor([3.1415927, 1.5707964, 0.       ], device=numpy)
    """
    return transcendental.acos_op(as_node(x))


@recorded
def atan(x: Array) -> Array:
    """The angle from -π/2 to π/2 whose tangent is x.

    x: any shape; integers give floats.

    >>> F.atan(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([0.       , 0.7853982, 1.1071488], device=numpy)
    """
    return transcendental.atan_op(as_node(x))


@recorded
def sinh(x: Array) -> Array:
    """The hyperbolic sine of each element.

    x: any shape; integers give floats.

    >>> F.sinh(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([0.       , 1.1752012, 3.6268604], device=numpy)
    """
    return transcendental.sinh_op(as_node(x))


@recorded
def cosh(x: Array) -> Array:
    """The hyperbolic cosine of each element.

    x: any shape; integers give floats.

    >>> F.cosh(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([1.       , 1.5430807, 3.7621956], device=numpy)
    """
    return transcendental.cosh_op(as_node(x))


@recorded
def asinh(x: Array) -> Array:
    """The number whose hyperbolic sine is x.

    x: any shape; integers give floats.

    >>> F.asinh(dl.tensor([0.0, 1.0, 2.0]))
    Tensor([0.       , 0.8813736, 1.4436355], device=numpy)
    """
    return transcendental.asinh_op(as_node(x))


@recorded
def acosh(x: Array) -> Array:
    """The number from 0 on whose hyperbolic cosine is x, NaN for x below 1.

    x: any shape; integers give floats.

    >>> F.acosh(dl.tensor([1.0, 2.0, 3.0]))
    Tensor([0.       , 1.316958 , 1.7627472], device=numpy)
    """
    return transcendental.acosh_op(as_node(x))


@recorded
def atanh(x: Array) -> Array:
    """The number whose hyperbolic tangent is x, infinite at ±1 and NaN beyond.

    x: any shape; integers give floats.

    >>> F.atanh(dl.tensor([-0.5, 0.0, 0.5]))
    Tensor([-0.54930615,  0.        ,  0.54930615], device=numpy)
    """
    return transcendental.atanh_op(as_node(x))


@recorded
def atan2(a: Array, b: Array) -> Array:
    """The angle from -π to π of the point (b, a), broadcast against each other.

    Integers give floats. ShapeError where shapes or dtypes do not fit.

    >>> F.atan2(dl.tensor([0.0, 1.0]), [-1.0, 0.0])
    Tensor([3.1415927, 1.5707964], device=numpy)
    """
    return transcendental.atan2_op(*pair(a, b))


@recorded
def astype(x: Array, dtype: Any) -> Array:
    """x in another dtype, such as "float16" or np.int64; floats lose their fraction on the way to
    integers.

    x: any shape. The gradient passes between floats. SignatureError for what is no dtype of
    numbers.

    >>> F.astype(dl.tensor([1.7, -1.7]), "int64")
    Tensor([ 1, -1], device=numpy)
    """
    return cast_op(as_node(x), dtype)


@recorded
def copy(x: Array) -> Array:
    """The values of x in memory of their own.

    x: any shape and dtype.

    >>> F.copy(dl.tensor([1.0, 2.0]))
    Tensor([1., 2.], device=numpy)
    """
    return copy_op(as_node(x))


@recorded
def stop_gradient(x: Array) -> Array:
    """x as a constant to gradients: what is computed from it does not lead them to x.

    x: any shape and dtype. It costs nothing. `x.detach()` is the same.

    >>> x = dl.tensor(3.0, requires_grad=True)
    >>> (x * F.stop_gradient(x)).backward()
    >>> x.grad
    Tensor(3., device=numpy)
    """
    return stop_gradient_op(as_node(x))
