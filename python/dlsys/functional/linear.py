"""Products of vectors and matrices."""

from __future__ import annotations

from ..ops import einsum as sums_of_products
from ..ops import grouped
from ..ops import matmul as products
from ..ops.elementwise import as_node
from .record import Array, optional, recorded

__all__ = ["einsum", "grouped_matmul", "linear", "matmul", "outer"]


@recorded
def matmul(
    a: Array,
    b: Array,
    transpose_a: bool = False,
    transpose_b: bool = False,
    algo: str | None = None,
) -> Array:
    """a @ b over the last two axes, (…, m, k) and (…, k, n) to (…, m, n); the axes before them
    broadcast by numpy's rule. A vector is a row on the left and a column on the right.

    transpose_a and transpose_b exchange the last two axes first; they are not for vectors. Floats
    of one dtype, or integers. `algo` names the rung of the ladder by which the product and its
    gradients are computed, such as "tiled"; without it DLSYS_GEMM does. ShapeError where the inner
    extents differ, SignatureError for an unknown rung; NotApplicableError, when it is computed, for
    a rung that the device lacks or that cannot serve the product.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.matmul(x, [1.0, -1.0])
    Tensor([-2., -4.], device=numpy)
    >>> F.matmul(x, x, transpose_b=True)
    Tensor([[10., 20.],
            [20., 40.]],
           device=numpy)
    """
    a, b = as_node(a), as_node(b)
    if not (transpose_a or transpose_b):
        return products.product(a, b, algo)
    both = products.matmul_op if a.ndim == b.ndim == 2 else products.batched_matmul_op
    return both(a, b, transpose_a, transpose_b, algo=algo)


@recorded
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x @ weightᵀ + bias: x (…, inputs), weight (outputs, inputs) and bias (outputs,) to
    (…, outputs).

    Floats of one dtype. ShapeError where the shapes do not fit.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.linear(x, [[1.0, 1.0]], [0.5])
    Tensor([[4.5],
            [8.5]],
           device=numpy)
    """
    return products.linear_op(as_node(x), as_node(weight), optional(bias), trans_B=True)


@recorded
def grouped_matmul(
    x: Array,
    weight: Array,
    group_sizes: Array,
    transpose_weight: bool = False,
    algo: str | None = None,
) -> Array:
    """x @ weight[g] for the rows of each group g: x (m, k), weight (groups, k, n) and group_sizes
    (groups,) to (m, n), as the experts of a mixture compute tokens that are sorted by expert.

    Group 0 is the first rows, as many as its size says, group 1 those behind it; rows behind all
    groups become zeros. transpose_weight is for a weight (groups, n, k). Floats of one dtype, or
    integers; sizes of int32 or int64, which may change from run to run. `algo` is that of `matmul`.
    ShapeError where shapes do not fit; OutOfRangeError, when it is computed, for a size that is
    negative or more than the rows that are left. A GPU tells of that when its results are looked
    at, and computes with the nearest size that fits.

    >>> x = dl.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> F.grouped_matmul(x, [[[10.0]], [[-1.0]]], np.array([1, 2]))
    Tensor([[10.],
            [-2.],
            [-3.],
            [ 0.]],
           device=numpy)
    """
    return grouped.grouped_matmul_op(
        as_node(x), as_node(weight), as_node(group_sizes), transpose_weight, algo=algo
    )


@recorded
def outer(a: Array, b: Array) -> Array:
    """The products a_i · b_j of two vectors (m,) and (n,): (m, n).

    a: (m,). b: (n,). ShapeError for other than vectors.

    >>> F.outer(dl.tensor([1, 2]), dl.tensor([10, 20]))
    Tensor([[10, 20],
            [20, 40]],
           device=numpy)
    """
    return products.outer_op(as_node(a), as_node(b))


@recorded
def einsum(equation: str, *operands: Array) -> Array:
    """A sum of products in Einstein's notation, such as "bij,bjk->bik".

    equation: as of numpy, a letter an axis; without "->" the result has the letters that occur
    once, in alphabetical order. operands: an array for each of its terms. GraphError for
    an ellipsis, a letter twice in one operand or in the result; ShapeError for a letter with two
    extents.

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.einsum("ij,kj->ik", x, x)
    Tensor([[10., 20.],
            [20., 40.]],
           device=numpy)
    """
    return sums_of_products.einsum(equation, *map(as_node, operands))
