"""Comparisons and logic: truth values (bool), broadcast by numpy's rule. None has a gradient."""

from __future__ import annotations

from ..ops import comparison
from ..ops.elementwise import as_node
from .record import Array, pair, recorded

__all__ = [
    "equal", "greater", "greater_equal", "isfinite", "isinf", "isnan", "less", "less_equal",
    "logical_and", "logical_not", "logical_or", "logical_xor", "not_equal",
]  # fmt: skip


@recorded
def equal(a: Array, b: Array) -> Array:
    """True where a is equal to b, broadcast against each other; NaN is equal to nothing.

    Any dtypes but float32 with float64. ShapeError where shapes or dtypes do not fit.

    >>> F.equal(dl.tensor([1, 2, 3]), 2)
    Tensor([False,  True, False], device=numpy)
    """
    return comparison.equal_op(*pair(a, b))


@recorded
def not_equal(a: Array, b: Array) -> Array:
    """True where a is not equal to b, broadcast against each other; NaN is equal to nothing.

    Any dtypes but float32 with float64. ShapeError where shapes or dtypes do not fit.

    >>> F.not_equal(dl.tensor([1, 2, 3]), 2)
    Tensor([ True, False,  True], device=numpy)
    """
    return comparison.not_equal_op(*pair(a, b))


@recorded
def less(a: Array, b: Array) -> Array:
    """True where a is less than b, broadcast against each other; False beside NaN.

    Any dtypes but float32 with float64. ShapeError where shapes or dtypes do not fit.

    >>> F.less(dl.tensor([1, 2, 3]), 2)
    Tensor([ True, False, False], device=numpy)
    """
    return comparison.less_op(*pair(a, b))


@recorded
def less_equal(a: Array, b: Array) -> Array:
    """True where a is less than or equal to b, broadcast against each other; False beside NaN.

    Any dtypes but float32 with float64. ShapeError where shapes or dtypes do not fit.

    >>> F.less_equal(dl.tensor([1, 2, 3]), 2)
    Tensor([ True,  True, False], device=numpy)
    """
    return comparison.less_equal_op(*pair(a, b))


@recorded
def greater(a: Array, b: Array) -> Array:
    """True where a is greater than b, broadcast against each other; False beside NaN.

    Any dtypes but float32 with float64. ShapeError where shapes or dtypes do not fit.

    >>> F.greater(dl.tensor([1, 2, 3]), 2)
    Tensor([False, False,  True], device=numpy)
    """
    return comparison.greater_op(*pair(a, b))


@recorded
def greater_equal(a: Array, b: Array) -> Array:
    """True where a is greater than or equal to b, broadcast against each other; False beside NaN.

    Any dtypes but float32 with float64. ShapeError where shapes or dtypes do not fit.

    >>> F.greater_equal(dl.tensor([1, 2, 3]), 2)
    Tensor([False,  True,  True], device=numpy)
    """
    return comparison.greater_equal_op(*pair(a, b))


@recorded
def logical_and(a: Array, b: Array) -> Array:
    """True where both a and b are, broadcast against each other; numbers count as True unless they
    are 0.

    ShapeError where the shapes do not fit.

    >>> F.logical_and(dl.tensor([True, True, False]), [True, False, False])
    Tensor([ True, False, False], device=numpy)
    """
    return comparison.logical_and_op(as_node(a), as_node(b))


@recorded
def logical_or(a: Array, b: Array) -> Array:
    """True where a or b is, or both are, broadcast against each other; numbers count as True unless
    they are 0.

    ShapeError where the shapes do not fit.

    >>> F.logical_or(dl.tensor([True, True, False]), [True, False, False])
    Tensor([ True,  True, False], device=numpy)
    """
    return comparison.logical_or_op(as_node(a), as_node(b))


@recorded
def logical_xor(a: Array, b: Array) -> Array:
    """True where one of a and b is and the other is not, broadcast against each other; numbers
    count as True unless they are 0.

    ShapeError where the shapes do not fit.

    >>> F.logical_xor(dl.tensor([True, True, False]), [True, False, False])
    Tensor([False,  True, False], device=numpy)
    """
    return comparison.logical_xor_op(as_node(a), as_node(b))


@recorded
def logical_not(x: Array) -> Array:
    """True where x is False, or 0.

    x: any shape and dtype.

    >>> F.logical_not(dl.tensor([True, False]))
    Tensor([False,  True], device=numpy)
    """
    return comparison.logical_not_op(as_node(x))


@recorded
def isnan(x: Array) -> Array:
    """True where x is NaN.

    x: any shape and dtype.

    >>> F.isnan(dl.tensor([1.0, np.nan, np.inf]))
    Tensor([False,  True, False], device=numpy)
    """
    return comparison.isnan_op(as_node(x))


@recorded
def isinf(x: Array) -> Array:
    """True where x is infinite.

    x: any shape and dtype.

    >>> F.isinf(dl.tensor([1.0, np.nan, np.inf]))
    Tensor([False, False,  True], device=numpy)
    """
    return comparison.isinf_op(as_node(x))


@recorded
def isfinite(x: Array) -> Array:
    """True where x is neither infinite nor NaN.

    x: any shape and dtype.

    >>> F.isfinite(dl.tensor([1.0, np.nan, np.inf]))
    Tensor([ True, False, False], device=numpy)
    """
    return comparison.isfinite_op(as_node(x))
