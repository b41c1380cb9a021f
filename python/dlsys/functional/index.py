"""Choosing elements by position or by a condition, and putting them back."""

from __future__ import annotations

from typing import Any

from ..dtypes import FLOAT32
from ..ops import indexing, sorting, triangle
from ..ops.comparison import masked_fill_op, where_op
from ..ops.elementwise import as_node, is_number
from .record import Array, recorded

__all__ = [
    "embedding", "getitem", "masked_fill", "one_hot", "scatter_add", "slice", "take",
    "take_along_axis", "tril", "triu", "where",
]  # fmt: skip


@recorded
def getitem(x: Array, key: Any) -> Array:
    """x[key]: the elements that integers, slices, None and ... choose, by numpy's rules.

    x: any dtype. ShapeError for an index out of range and for more indices than axes.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> F.getitem(x, (0, slice(1, None)))
    Tensor([1, 2], device=numpy)
    """
    return indexing.getitem_op(as_node(x), key)


@recorded
def slice(x: Array, begin: tuple[int, ...], size: tuple[int, ...]) -> Array:
    """size[k] positions from begin[k] on along each axis k of x; a size of -1 is all that follow.

    x: any dtype. All positions must exist, other than with x[…]: ShapeError names the axis where
    they do not.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> F.slice(x, (0, 1), (1, -1))
    Tensor([[1, 2]], device=numpy)
    """
    return indexing.slice_op(as_node(x), begin, size)


@recorded
def take(x: Array, indices: Array, axis: int = 0) -> Array:
    """x at the positions `indices` of one axis, whose place the axes of the indices take.

    x: any dtype. indices: int32 or int64, any shape. OutOfRangeError for one out of range.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> F.take(x, [2, 0], axis=1)
    Tensor([[2, 0],
            [5, 3]],
           device=numpy)
    """
    return indexing.gather_op(as_node(x), as_node(indices), axis)


@recorded
def embedding(indices: Array, weight: Array) -> Array:
    """The rows of weight (n, …) at indices of any shape: (*indices, …).

    indices: int32 or int64; OutOfRangeError for one out of range. The gradient of weight is dense.

    >>> F.embedding(dl.tensor([2, 0]), dl.eye(3))
    Tensor([[0., 0., 1.],
            [1., 0., 0.]],
           device=numpy)
    """
    return indexing.embedding_op(as_node(weight), as_node(indices))


@recorded
def scatter_add(x: Array, indices: Array, updates: Array, axis: int = 0) -> Array:
    """x with `updates` added at the positions `indices` of one axis, repeated ones each time, in an
    order that is the same in every run.

    indices: int32 or int64. updates: x's shape with the indices' axes in the place of `axis`.
    ShapeError where shapes do not fit, OutOfRangeError for an index out of range.

    >>> F.scatter_add(dl.zeros(3), [0, 2, 2], dl.tensor([1.0, 2.0, 3.0]))
    Tensor([1., 0., 5.], device=numpy)
    """
    return indexing.scatter_add_op(as_node(x), as_node(indices), as_node(updates), axis)


@recorded
def one_hot(indices: Array, num_classes: int, dtype: Any = FLOAT32) -> Array:
    """A row of `num_classes` elements for each index: 1 at the index, 0 elsewhere.

    indices: int32 or int64, any shape; the result is (*indices, num_classes). dtype: that of the
    result. OutOfRangeError for an index out of range. It has no gradient.

    >>> F.one_hot(dl.tensor([2, 0]), 3)
    Tensor([[0., 0., 1.],
            [1., 0., 0.]],
           device=numpy)
    """
    return indexing.one_hot_op(as_node(indices), num_classes, dtype)


@recorded
def where(condition: Array, a: Array, b: Array) -> Array:
    """a where the condition is True (not 0), else b, all three broadcast against each other.

    a and b: nodes, numbers or arrays whose dtypes promote to one. The gradient goes to the one that
    was chosen. ShapeError where shapes or dtypes do not fit.

    >>> x = dl.tensor([-1.0, 2.0])
    >>> F.where(x > 0, x, 0.0)
    Tensor([0., 2.], device=numpy)
    """
    a, b = (value if is_number(value) else as_node(value) for value in (a, b))
    return where_op(as_node(condition), a, b)


@recorded
def masked_fill(x: Array, mask: Array, value: float) -> Array:
    """`value` where the mask is True (not 0), else x, broadcast against each other.

    The gradient is 0 where the mask is True, whatever x holds there. ShapeError where the shapes do
    not fit.

    >>> x = dl.tensor([1.0, np.nan])
    >>> F.masked_fill(x, F.isnan(x), 0)
    Tensor([1., 0.], device=numpy)
    """
    return masked_fill_op(as_node(x), as_node(mask), value)


@recorded
def take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    """x at indices along one axis that each column has of its own, PyTorch's gather: for axis 0 of
    a matrix y[i, j] = x[indices[i, j], j].

    x: any dtype. indices: int32 or int64, x's shape but along the axis (ShapeError otherwise).
    OutOfRangeError for one out of range.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.take_along_axis(x, F.argsort(x, axis=1, descending=True), axis=1)
    Tensor([[3., 1.],
            [6., 2.]],
           device=numpy)
    """
    return sorting.take_along_axis_op(as_node(x), as_node(indices), axis)


@recorded
def tril(x: Array, k: int = 0) -> Array:
    """x on and below diagonal k of its last two axes, 0 above; k counts to the right.

    x: any dtype, at least two axes (ShapeError otherwise).

    >>> F.tril(dl.ones(3, 3))
    Tensor([[1., 0., 0.],
            [1., 1., 0.],
            [1., 1., 1.]],
           device=numpy)
    """
    return triangle.tril_op(as_node(x), k)


@recorded
def triu(x: Array, k: int = 0) -> Array:
    """x on and above diagonal k of its last two axes, 0 below; k counts to the right.

    x: any dtype, at least two axes (ShapeError otherwise).

    >>> F.triu(dl.ones(3, 3), 1)
    Tensor([[0., 1., 1.],
            [0., 0., 1.],
            [0., 0., 0.]],
           device=numpy)
    """
    return triangle.triu_op(as_node(x), k)
