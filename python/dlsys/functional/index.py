"""Choosing elements by position or by a condition, and putting them back."""

from __future__ import annotations

from typing import Any

from ..dtypes import FLOAT32
from ..ops import indexing
from ..ops.comparison import where_op
from ..ops.elementwise import as_node, is_number
from .record import Array, recorded

__all__ = ["embedding", "getitem", "one_hot", "scatter_add", "slice", "take", "where"]


@recorded
def getitem(x: Array, key: Any) -> Array:
    """x[key]: the elements that integers, slices, None and ... choose, by numpy's rules.

    x: any dtype. ShapeError for an index out of range and for more indices than axes.

    Example: F.getitem(x, (0, ...))
    """
    return indexing.getitem_op(as_node(x), key)


@recorded
def slice(x: Array, begin: tuple[int, ...], size: tuple[int, ...]) -> Array:
    """size[k] positions from begin[k] on along each axis k of x; a size of -1 is all that follow.

    x: any dtype. All positions must exist, other than with x[…]: ShapeError names the axis where
    they do not.

    Example: F.slice(x, (0, 1), (1, -1))
    """
    return indexing.slice_op(as_node(x), begin, size)


@recorded
def take(x: Array, indices: Array, axis: int = 0) -> Array:
    """x at the positions `indices` of one axis, whose place the axes of the indices take.

    x: any dtype. indices: int32 or int64, any shape. OutOfRangeError for one out of range.

    Example: F.take(x, [1, 0, 1], axis=1)
    """
    return indexing.gather_op(as_node(x), as_node(indices), axis)


@recorded
def embedding(indices: Array, weight: Array) -> Array:
    """The rows of weight (n, …) at indices of any shape: (*indices, …).

    indices: int32 or int64; OutOfRangeError for one out of range. The gradient of weight is dense.

    Example: F.embedding(labels, x)
    """
    return indexing.embedding_op(as_node(weight), as_node(indices))


@recorded
def scatter_add(x: Array, indices: Array, updates: Array, axis: int = 0) -> Array:
    """x with `updates` added at the positions `indices` of one axis, repeated ones each time, in an
    order that is the same in every run.

    indices: int32 or int64. updates: x's shape with the indices' axes in the place of `axis`.
    ShapeError where shapes do not fit, OutOfRangeError for an index out of range.

    Example: F.scatter_add(x, [0, 0], y)
    """
    return indexing.scatter_add_op(as_node(x), as_node(indices), as_node(updates), axis)


@recorded
def one_hot(indices: Array, num_classes: int, dtype: Any = FLOAT32) -> Array:
    """A row of `num_classes` elements for each index: 1 at the index, 0 elsewhere.

    indices: int32 or int64, any shape; the result is (*indices, num_classes). OutOfRangeError for
    an index out of range. It has no gradient.

    Example: F.one_hot(labels, 3)
    """
    return indexing.one_hot_op(as_node(indices), num_classes, dtype)


@recorded
def where(condition: Array, a: Array, b: Array) -> Array:
    """a where the condition is True (not 0), else b, all three broadcast against each other.

    a and b: nodes, numbers or arrays whose dtypes promote to one. The gradient goes to the one that
    was chosen. ShapeError where shapes or dtypes do not fit.

    Example: F.where(F.greater(x, 0), x, 0)
    """
    a, b = (value if is_number(value) else as_node(value) for value in (a, b))
    return where_op(as_node(condition), a, b)
