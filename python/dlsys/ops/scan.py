"""Scans: running sums and products along an axis, the linear recurrence that their gradients come
down to, and the product of all other elements over any axes.
"""

from __future__ import annotations

import numpy as np

from ..arguments.kinds import Axes, Bool, Int, Number
from ..arguments.signature import Signature, declared
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe, floating, normalize_axes, promote
from .axes import AlongAxesOp, AxisKernel, around, summed_dtype
from .elementwise import cast_op
from .indexing import getitem_op
from .movement import reshape_op
from .pad import pad_op

__all__ = ["cumprod_op", "cumsum_op", "recurrence_op"]


def _cumsum(x: np.ndarray, y: np.ndarray, reverse: bool) -> None:
    step = -1 if reverse else 1
    dtype = np.float64 if y.dtype.kind == "f" else None  # roundings add up
    np.cumsum(x[:, ::step], axis=1, dtype=dtype, out=y[:, ::step])


def _cumprod(x: np.ndarray, y: np.ndarray, reverse: bool) -> None:
    step = -1 if reverse else 1
    dtype = np.float64 if y.dtype.kind == "f" else y.dtype
    np.copyto(y[:, ::step], np.cumprod(x[:, ::step], axis=1, dtype=dtype), casting="same_kind")


def _others(x: np.ndarray, before: np.ndarray, after: np.ndarray, y: np.ndarray) -> None:
    n = x.shape[1]
    before[:, :1] = after[:, n - 1 :] = 1
    if n > 1:
        np.cumprod(x[:, :-1], axis=1, dtype=np.float64, out=before[:, 1:])
        np.cumprod(x[:, :0:-1], axis=1, dtype=np.float64, out=after[:, n - 2 :: -1])
    np.multiply(before, after, out=y, casting="same_kind")


def _others_workspace(x: Spec, y: Spec) -> list[Spec]:
    return [x._replace(dtype=np.dtype(np.float64))] * 2


def _others_tangent(
    x: np.ndarray, g: np.ndarray, before: np.ndarray, change_before: np.ndarray,
    y: np.ndarray, dy: np.ndarray,
) -> None:  # fmt: skip
    """Writes `_others` of x to y and its change along g to dy: from the front, then from behind."""
    if not x.size:
        return
    product, change = np.ones(x[:, 0].shape), np.zeros(x[:, 0].shape)
    for k in range(x.shape[1]):
        before[:, k], change_before[:, k] = product, change
        product, change = product * x[:, k], change * x[:, k] + product * g[:, k]
    product, change = np.ones(x[:, 0].shape), np.zeros(x[:, 0].shape)
    for k in reversed(range(x.shape[1])):
        dy[:, k] = change_before[:, k] * product + before[:, k] * change
        y[:, k] = before[:, k] * product
        product, change = product * x[:, k], change * x[:, k] + product * g[:, k]


_cumsum_kernel = AxisKernel(
    "cumsum", _cumsum, summed_dtype, keeps=True, signature=Signature("x", reverse=Bool())
)
_cumprod_kernel = AxisKernel(
    "cumprod", _cumprod, summed_dtype, keeps=True, signature=Signature("x", reverse=Bool())
)
_others_kernel = AxisKernel(
    "prod_others", _others, floating, keeps=True, workspace=_others_workspace
)
_tangent_kernel = AxisKernel(
    "prod_others_tangent", _others_tangent, floating, keeps=True, outputs=2,
    workspace=_others_workspace, signature=Signature("x", "g"),
)  # fmt: skip


class OthersChangeOp(Op):
    """The change of `prod_others` of x along g, and, since it is symmetric, its gradient for g."""

    name = "prod_others_change"
    signature = Signature("x", "g", axis=Axes(None))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def simplify(self, node: Node) -> Node:
        x, g = node.inputs
        before = x.spec.shape
        order, shape = around(before, normalize_axes(node, node.attrs["axis"], len(before)))
        grouped = [_tangent_kernel.grouped(y, node.spec.dtype, order, shape) for y in (x, g)]
        return _tangent_kernel.ungrouped(_tangent_kernel(*grouped)[1], order, before)


_others_change = OthersChangeOp()
# for each element the product of all others, so that a zero among them does no harm
prod_others: AlongAxesOp = AlongAxesOp(
    "prod_others",
    _others_kernel,
    lambda node, dy: [_others_change(node.inputs[0], dy, axis=node.attrs["axis"])],
    Signature("x", axis=Axes(None)),
)
_cumulative: AlongAxesOp = AlongAxesOp(
    "cumsum",
    _cumsum_kernel,
    lambda node, dy: [_cumulative(dy, axis=node.attrs["axis"], reverse=not node.attrs["reverse"])],
    Signature("x", axis=Int(-1), reverse=Bool(False)),
)


class RecurrenceKernel(Op):
    """The recurrence along the middle axis of a and b (outer, n, inner)."""

    name = kernel = "recurrence"
    signature = Signature("a", "b", reverse=Bool(), initial=Number())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        a, b, y = arrays
        state = np.full(a[:, 0].shape if a.size else (), node.attrs["initial"], np.float64)
        for k in range(a.shape[1])[:: -1 if node.attrs["reverse"] else 1]:
            state = state * a[:, k] + b[:, k]
            y[:, k] = state

    def scalars(self, node: Node) -> tuple[int, float]:
        return int(node.attrs["reverse"]), float(node.attrs["initial"])


class RecurrenceOp(Op):
    """y[k] = a[k] · y[k - 1] + b[k] along one axis, in floats: a first-order linear recurrence.
    `initial` stands before the first element; with `reverse` it runs from the end.

    a and b have one shape. ShapeError where they have not.
    """

    name = "recurrence"
    signature = Signature(
        "a", "b", axis=Int(-1), reverse=Bool(False), initial=Number(0.0, finite=True)
    )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if specs[0].shape != specs[1].shape:
            raise node.error(f"expected one shape, got {describe(node, specs)}")
        normalize_axes(node, node.attrs["axis"], len(specs[0].shape))
        dtype = floating(promote(node, *specs))
        return Spec(specs[0].shape, dtype, any(spec.declared for spec in specs))

    def simplify(self, node: Node) -> Node:
        shape, attrs = node.spec.shape, dict(node.attrs)
        _, grouped = around(shape, normalize_axes(node, attrs.pop("axis"), len(shape)))
        inputs = [reshape_op(cast_op(x, node.spec.dtype), grouped) for x in node.inputs]
        return reshape_op(_recurrence_kernel(*inputs, **attrs), shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        """A recurrence too, from the other end: db[k] = dy[k] + a[k + 1] · db[k + 1]."""
        axis, reverse, initial = (node.attrs[key] for key in ("axis", "reverse", "initial"))
        after = shifted_op(node.inputs[0], axis, 0.0, reverse=not reverse)
        db = recurrence_op(after, output_grad, axis=axis, reverse=not reverse)
        return [db * shifted_op(node, axis, initial, reverse=reverse), db]


class ShiftedOp(Op):
    """x moved on by one position along an axis, with `value` at the one that becomes free: the
    first, or with `reverse` the last.
    """

    name = "shifted"
    signature = Signature("x", axis=Int(), value=Number(), reverse=Bool())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        normalize_axes(node, node.attrs["axis"], len(specs[0].shape))
        return specs[0]

    def simplify(self, node: Node) -> Node:
        x, reverse = node.inputs[0], node.attrs["reverse"]
        ndim = len(x.spec.shape)
        axis = node.attrs["axis"] % ndim
        paddings: list[tuple[int, int]] = [(0, 0)] * ndim
        paddings[axis] = (0, 1) if reverse else (1, 0)
        key = [slice(None)] * axis + [slice(1, None) if reverse else slice(None, -1)]
        return getitem_op(pad_op(x, paddings, "constant", node.attrs["value"]), tuple(key))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [shifted_op(output_grad, node.attrs["axis"], 0.0, not node.attrs["reverse"])]


def _product_gradient(node: Node, dy: Node) -> list[Node | None]:
    """Of the running products y of x, right for zeros too: the products before an element, times
    the sum of dy times the products from behind it on, which is a recurrence.
    """
    x, axis, reverse = node.inputs[0], node.attrs["axis"], node.attrs["reverse"]
    after = shifted_op(x, axis, 0.0, reverse=not reverse)
    sums = recurrence_op(after, dy, axis=axis, reverse=not reverse)
    return [shifted_op(node, axis, 1.0, reverse=reverse) * sums]


_recurrence_kernel = RecurrenceKernel()
recurrence_op = RecurrenceOp()
shifted_op = ShiftedOp()
_running_product: AlongAxesOp = AlongAxesOp(
    "cumprod", _cumprod_kernel, _product_gradient, Signature("x", axis=Int(-1), reverse=Bool(False))
)


@declared(axis=Int(), reverse=Bool())
def cumprod_op(x: Node, axis: int = -1, reverse: bool = False, name: str | None = None) -> Node:
    """Products of x along one axis up to and with each element; from the end with `reverse`."""
    return _running_product(x, axis=axis, reverse=reverse, name=name)


@declared(axis=Int(), reverse=Bool())
def cumsum_op(x: Node, axis: int = -1, reverse: bool = False, name: str | None = None) -> Node:
    """Sums of x along one axis up to and with each element; from the end with `reverse`."""
    return _cumulative(x, axis=axis, reverse=reverse, name=name)
