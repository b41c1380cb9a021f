"""Reductions, scans and sorts. `axis` is one axis, of reductions also a tuple of axes or None for
all of them, negative ones counted from the end; `keepdims` keeps the reduced axes as extent 1.
ShapeError for an axis that x does not have.
"""

from __future__ import annotations

from ..ops import reduce, sorting
from ..ops.comparison import equal_op, not_equal_op
from ..ops.elementwise import as_node
from ..ops.optim.apply import global_norm_op
from ..ops.scan import cumprod_op, cumsum_op, recurrence_op
from .record import Array, recorded

__all__ = [
    "all", "any", "argmax", "argmin", "argsort", "cumprod", "cumsum", "global_norm", "logsumexp",
    "max", "mean", "min", "prod", "recurrence", "sort", "std", "sum", "topk", "var",
]  # fmt: skip

Axis = int | tuple[int, ...] | None


@recorded
def all(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """True where no element over `axis` is 0 or False; over no elements too.

    x: any shape and dtype; the result is bool. keepdims: keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> F.all(x, axis=1)
    Tensor([ True, False], device=numpy)
    >>> bool((x == x).all())
    True
    """
    return equal_op(reduce.sum_op(equal_op(as_node(x), 0), axis, keepdims), 0)


@recorded
def any(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """True where an element over `axis` is neither 0 nor False; False over no elements.

    x: any shape and dtype; the result is bool. keepdims: keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [0.0, 0.0]])
    >>> F.any(x, axis=1)
    Tensor([ True, False], device=numpy)
    """
    return not_equal_op(reduce.sum_op(not_equal_op(as_node(x), 0), axis, keepdims), 0)


@recorded
def sum(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """The sum of x over `axis`.

    x: any shape; floats keep their dtype, integers and truth values add up as int64. keepdims:
    keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.sum(x)
    Tensor(12., device=numpy)
    >>> F.sum(x, axis=1, keepdims=True)
    Tensor([[4.],
            [8.]],
           device=numpy)
    """
    return reduce.sum_op(as_node(x), axis, keepdims)


@recorded
def mean(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """The mean of x over `axis`, NaN over no elements.

    x: any shape; floats keep their dtype, integers give floats. keepdims: keeps the axes that go,
    with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.mean(x, axis=0)
    Tensor([1.5, 4.5], device=numpy)
    """
    return reduce.mean_op(as_node(x), axis, keepdims)


@recorded
def max(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """The largest element of x over `axis`, NaN where there is one; the first of several gets the
    gradient.

    x: any shape and dtype, at least one element along the axes (ShapeError otherwise). keepdims:
    keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.max(x, axis=1)
    Tensor([3., 6.], device=numpy)
    """
    return reduce.max_op(as_node(x), axis, keepdims)


@recorded
def min(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """The smallest element of x over `axis`, NaN where there is one; the first of several gets the
    gradient.

    x: any shape and dtype, at least one element along the axes (ShapeError otherwise). keepdims:
    keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.min(x, axis=1)
    Tensor([1., 2.], device=numpy)
    """
    return reduce.min_op(as_node(x), axis, keepdims)


@recorded
def prod(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """The product of the elements of x over `axis`.

    x: any shape; floats keep their dtype, integers and truth values multiply as int64. keepdims:
    keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.prod(x, axis=1)
    Tensor([ 3., 12.], device=numpy)
    """
    return reduce.prod_op(as_node(x), axis, keepdims)


@recorded
def var(x: Array, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> Array:
    """The variance of x over `axis`: Σ (x - mean)² / (n - ddof), NaN where n <= ddof.

    x: any shape; floats keep their dtype, integers give floats. ddof is numpy's word: 1 gives the
    variance of a sample, PyTorch's default. keepdims: keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.var(x, axis=0)
    Tensor([0.25, 2.25], device=numpy)
    >>> F.var(x, axis=0, ddof=1)
    Tensor([0.5, 4.5], device=numpy)
    """
    return reduce.var_op(as_node(x), axis, keepdims, ddof)


@recorded
def std(x: Array, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> Array:
    """The standard deviation of x over `axis`, the root of `var`; its gradient is NaN where it is
    0.

    x: any shape; floats keep their dtype, integers give floats. ddof: as for `var`. keepdims: keeps
    the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.std(x, axis=0)
    Tensor([0.5, 1.5], device=numpy)
    """
    return reduce.std_op(as_node(x), axis, keepdims, ddof)


@recorded
def logsumexp(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """log Σ exp(x) over `axis`, finite for any finite x.

    x: any shape; floats keep their dtype, integers give floats. keepdims: keeps the axes that go,
    with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.logsumexp(x, axis=1)
    Tensor([3.126928, 6.01815 ], device=numpy)
    """
    return reduce.logsumexp_op(as_node(x), axis, keepdims)


@recorded
def argmax(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """The index (int64) of the first largest element of x over `axis`, or of the first NaN.

    x: any shape and dtype, at least one element along the axes (ShapeError otherwise). Over several
    axes it counts them in row-major order. keepdims: keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.argmax(x, axis=1)
    Tensor([1, 1], device=numpy)
    """
    return reduce.argmax_op(as_node(x), axis, keepdims)


@recorded
def argmin(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """The index (int64) of the first smallest element of x over `axis`, or of the first NaN.

    x: any shape and dtype, at least one element along the axes (ShapeError otherwise). Over several
    axes it counts them in row-major order. keepdims: keeps the axes that go, with extent 1.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.argmin(x, axis=1)
    Tensor([0, 0], device=numpy)
    """
    return reduce.argmin_op(as_node(x), axis, keepdims)


@recorded
def cumsum(x: Array, axis: int = -1, reverse: bool = False) -> Array:
    """The sums of x along one axis up to and with each element; from the end with `reverse`.

    x: at least one dimension; floats keep their dtype, integers and truth values add up as int64.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.cumsum(x, axis=1)
    Tensor([[1., 4.],
            [2., 8.]],
           device=numpy)
    """
    return cumsum_op(as_node(x), axis, reverse)


@recorded
def global_norm(*arrays: Array) -> Array:
    """The Euclidean norm sqrt(Σ x²) over all elements of all arrays, such as gradients.

    arrays: floats of any shapes; the result is one number.

    >>> F.global_norm(dl.tensor([3.0, 0.0]), dl.tensor([[4.0]]))
    Tensor(5., device=numpy)
    """
    return global_norm_op(*map(as_node, arrays))


@recorded
def cumprod(x: Array, axis: int = -1, reverse: bool = False) -> Array:
    """The products of x along one axis up to and with each element; from the end with `reverse`.

    x: any shape; floats keep their dtype, integers and truth values multiply as int64. The gradient
    is right beside zeros too.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.cumprod(x, axis=1)
    Tensor([[ 1.,  3.],
            [ 2., 12.]],
           device=numpy)
    """
    return cumprod_op(as_node(x), axis, reverse)


@recorded
def recurrence(
    a: Array, b: Array, axis: int = -1, reverse: bool = False, initial: float = 0.0
) -> Array:
    """y[k] = a[k] · y[k - 1] + b[k] along one axis, a first-order linear recurrence: running means,
    discounted returns, linear state-space models. `initial` stands before the first element; with
    `reverse` it runs from the end.

    a and b: floats of one shape (ShapeError otherwise).

    >>> F.recurrence(dl.tensor([0.5, 0.5, 0.5]), dl.tensor([1.0, 1.0, 1.0]))
    Tensor([1.  , 1.5 , 1.75], device=numpy)
    """
    a, b = as_node(a), as_node(b)
    return recurrence_op(a, b, axis=axis, reverse=reverse, initial=initial)


@recorded
def sort(x: Array, axis: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """x sorted along one axis, and the index in x of each element, int64.

    x: any shape and dtype. Equal elements stay in order, NaN counts as the largest number. The
    gradient of an element goes to where it came from. descending: the largest first.

    >>> x = dl.tensor([3.0, 1.0, 2.0])
    >>> values, index = F.sort(x)
    >>> values
    Tensor([1., 2., 3.], device=numpy)
    >>> index
    Tensor([1, 2, 0], device=numpy)
    """
    return sorting.sort_op(as_node(x), axis, descending)


@recorded
def argsort(x: Array, axis: int = -1, descending: bool = False) -> Array:
    """The indices that sort x along one axis, int64.

    x: any shape and dtype. Equal elements stay in order, NaN counts as the largest number.

    >>> x = dl.tensor([3.0, 1.0, 2.0])
    >>> F.argsort(x, descending=True)
    Tensor([0, 2, 1], device=numpy)
    """
    return sorting.argsort_op(as_node(x), axis, descending)


@recorded
def topk(x: Array, k: int, axis: int = -1, largest: bool = True) -> tuple[Array, Array]:
    """The k largest elements along one axis (or the smallest), the best first, and their indices,
    int64; of equal ones the first, NaN counts as the largest number.

    x: any shape and dtype, at least k elements along the axis (ShapeError otherwise).

    >>> x = dl.tensor([3.0, 1.0, 2.0])
    >>> values, index = F.topk(x, 2)
    >>> values
    Tensor([3., 2.], device=numpy)
    >>> index
    Tensor([0, 2], device=numpy)
    """
    return sorting.topk_op(as_node(x), k, axis, largest)
