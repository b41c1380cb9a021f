"""Scans: the running sum over an axis, and the product of all other elements over any axes."""

from __future__ import annotations

import numpy as np

from ..graph.kinds import Axes, Bool, Int
from ..graph.node import Node, Op
from ..graph.signature import Signature, declared
from ..graph.spec import Spec, floating, normalize_axes
from .axes import AlongAxesOp, AxisKernel, around, summed_dtype

__all__ = ["cumsum_op"]


def _cumsum(x: np.ndarray, y: np.ndarray, reverse: bool) -> None:
    step = -1 if reverse else 1
    dtype = np.float64 if y.dtype.kind == "f" else None  # roundings add up
    np.cumsum(x[:, ::step], axis=1, dtype=dtype, out=y[:, ::step])


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


@declared(axis=Int(), reverse=Bool())
def cumsum_op(x: Node, axis: int = -1, reverse: bool = False, name: str | None = None) -> Node:
    """Sums of x along one axis up to and with each element; from the end with `reverse`."""
    return _cumulative(x, axis=axis, reverse=reverse, name=name)
