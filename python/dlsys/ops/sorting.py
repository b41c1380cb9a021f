"""Sorting along an axis, the largest or smallest elements, and elements at indices along an axis.

Sorts are stable: equal elements stay in order, in a descending sort as well. NaN counts as the
largest number, -0 equals 0. Indices are int64 and have no gradient; values pass theirs to where
they came from.

How many elements are not 0, or are distinct, depends on values: shapes here never do, so that a
plan is made once. A mask and `where_op`, or `topk_op` with a fixed k, take that place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments.kinds import Bool, Int
from ..arguments.signature import Signature, declared
from ..dtypes import INT64
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe, normalize_axes
from .indexing import check_indices, check_range

__all__ = ["argsort_op", "sort_op", "take_along_axis_op", "topk_op"]


class SortOp(Op):
    """x sorted along one axis, of which the first k elements are given (None: all): two outputs,
    the values and their indices in x, int64.
    """

    name = kernel = "sort"
    autocast = "follow"
    outputs = 2
    any_dtype = True
    discrete_outputs = (1,)
    signature = Signature("x", axis=Int(-1), descending=Bool(False), k=Int(None, low=0))

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        shape, k = list(specs[0].shape), node.attrs["k"]
        (axis,) = normalize_axes(node, node.attrs["axis"], len(shape))
        if k is not None and k > shape[axis]:
            raise node.error(
                f"k is {k}, and {node.inputs[0].name} {specs[0].shape} has {shape[axis]} elements "
                f"along axis {axis}"
            )
        shape[axis] = shape[axis] if k is None else k
        return specs[0]._replace(shape=tuple(shape)), Spec(tuple(shape), INT64, declared=False)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, values, indices = arrays
        axis = node.attrs["axis"]
        if node.attrs["descending"]:  # the reverse of an ascending sort of the reverse is stable
            order = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
            order = x.shape[axis] - 1 - np.flip(order, axis)
        else:
            order = np.argsort(x, axis=axis, kind="stable")
        key = [slice(None)] * x.ndim
        key[axis] = slice(values.shape[axis])
        np.copyto(indices, order[tuple(key)])
        np.copyto(values, np.take_along_axis(x, indices, axis))

    def scalars(self, node: Node) -> tuple[int, int]:
        return node.attrs["axis"] % len(node.inputs[0].spec.shape), int(node.attrs["descending"])

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        if output_grad[0] is None:
            return [None]
        x, axis = node.inputs[0], node.attrs["axis"]
        return [put_along_axis_op(output_grad[0], node[1], x, axis=axis, distinct=True)]


class TakeAlongOp(Op):
    """x at indices along one axis, given for each of its columns: y[i, j] = x[indices[i, j], j] for
    axis 0 of a matrix, as numpy's take_along_axis and PyTorch's gather.

    indices: int32 or int64 of x's shape but along the axis, where they may be any number. One out
    of range raises OutOfRangeError.
    """

    name = "take_along_axis"
    kernel = "take_along"
    autocast = "follow"
    fallible = any_dtype = True
    signature = Signature("x", "indices", axis=Int(-1))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[1], node.inputs[1].name)
        _check_columns(node, specs[0], specs)
        return specs[0]._replace(shape=specs[1].shape)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, indices, y = arrays
        axis = node.attrs["axis"]
        check_range(node, "index", indices, x.shape[axis])
        np.copyto(y, np.take_along_axis(x, indices, axis))

    def scalars(self, node: Node) -> tuple[int]:
        return (node.attrs["axis"] % len(node.inputs[0].spec.shape),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, indices = node.inputs
        axis = node.attrs["axis"]
        return [put_along_axis_op(output_grad, indices, x, axis=axis, distinct=False), None]


class PutAlongLikeOp(Op):
    """The sum of updates over the places of `x` that `take_along_axis` reads; only x's shape
    counts. `distinct` says that no index occurs twice in a column.
    """

    name = "put_along_axis"
    signature = Signature("updates", "indices", "x", axis=Int(), distinct=Bool())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[1], node.inputs[1].name)
        _check_columns(node, specs[2], specs)
        return specs[0]._replace(shape=specs[2].shape)

    def simplify(self, node: Node) -> Node:
        updates, indices, x = node.inputs
        (axis,) = normalize_axes(node, node.attrs["axis"], len(x.spec.shape))
        size, distinct = x.spec.shape[axis], node.attrs["distinct"]
        return _put_along(updates, indices, axis=axis, size=size, distinct=distinct)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        indices, axis = node.inputs[1], node.attrs["axis"]
        return [take_along_axis_op(output_grad, indices, axis=axis), None, None]


class PutAlongOp(Op):
    """Zeros with `size` positions along an axis, to which updates are added at indices."""

    name = kernel = "put_along"
    autocast = "follow"
    fallible = True
    any_dtype = (1,)
    signature = Signature("updates", "indices", axis=Int(), size=Int(low=0), distinct=Bool())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape = list(specs[0].shape)
        shape[node.attrs["axis"]] = node.attrs["size"]
        return specs[0]._replace(shape=tuple(shape))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        updates, indices, y = arrays
        axis = node.attrs["axis"]
        check_range(node, "index", indices, y.shape[axis])
        y.fill(0)
        at: list[np.ndarray] = list(np.indices(indices.shape, sparse=True))
        at[axis] = indices
        np.add.at(y, tuple(at), updates)

    def scalars(self, node: Node) -> tuple[int, int]:
        return node.attrs["axis"], int(node.attrs["distinct"])


def _check_columns(node: Node, x: Spec, specs: tuple[Spec, ...]) -> None:
    """Refuses indices, and updates before them, that have another shape than x beside the axis."""
    (axis,) = normalize_axes(node, node.attrs["axis"], len(x.shape))
    shape = specs[1].shape
    columns = x.shape[:axis] + shape[axis : axis + 1] + x.shape[axis + 1 :]
    if shape != columns or (specs[0] is not x and specs[0].shape != shape):
        raise node.error(f"shapes differ beside axis {axis}: {describe(node, specs)}")


_sort = SortOp()
take_along_axis_op = TakeAlongOp()
put_along_axis_op = PutAlongLikeOp()
_put_along = PutAlongOp()


@declared(axis=Int(), descending=Bool())
def sort_op(x: Node, axis: int = -1, descending: bool = False) -> tuple[Node, Node]:
    """x sorted along one axis, and the index in x of each element, int64; stable, NaN largest.

    descending: the largest first.
    """
    values, indices = _sort(x, axis=axis, descending=descending)
    return values, indices


@declared(axis=Int(), descending=Bool())
def argsort_op(x: Node, axis: int = -1, descending: bool = False) -> Node:
    """The indices that sort x along one axis, int64; stable, NaN largest.

    descending: the largest first.
    """
    return _sort(x, axis=axis, descending=descending)[1]


@declared(k=Int(low=0), axis=Int(), largest=Bool())
def topk_op(x: Node, k: int, axis: int = -1, largest: bool = True) -> tuple[Node, Node]:
    """The k largest elements along one axis (or the smallest), the best first, and their indices,
    int64; of equal ones the first. ShapeError where there are fewer than k.

    x: the array.
    """
    values, indices = _sort(x, axis=axis, descending=largest, k=k)
    return values, indices
