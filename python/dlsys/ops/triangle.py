"""The triangles of matrices: what lies on one side of a diagonal of the last two axes."""

from __future__ import annotations

import numpy as np

from ..arguments.kinds import Int
from ..arguments.signature import Signature
from ..graph.node import Node, Op
from ..graph.spec import Spec
from .comparison import where_op
from .leaf import constant_op, zeroslike_op

__all__ = ["tril_op", "triu_op"]


class TriangleOp(Op):
    """x with zeros on one side of diagonal k of its last two axes."""

    signature = Signature("x", k=Int(0))

    def __init__(self, name: str, lower: bool) -> None:
        self.name = name
        self._lower = lower
        kept, side = ("on and below", "above") if lower else ("on and above", "below")
        self.doc = (
            f"x {kept} diagonal k of its last two axes, 0 elsewhere: k counts from the main "
            f"diagonal, {side} which it leaves nothing, to the right."
        )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if len(specs[0].shape) < 2:
            raise node.error(
                f"expected at least two dimensions, got {node.inputs[0].name} {specs[0].shape}"
            )
        return specs[0]

    def simplify(self, node: Node) -> Node:
        x, k = node.inputs[0], node.attrs["k"]
        rows, columns = x.spec.shape[-2:]
        below = np.tri(rows, columns, k if self._lower else k - 1, dtype=np.bool_)
        return where_op(constant_op(below if self._lower else ~below), x, zeroslike_op(x))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [self(output_grad, k=node.attrs["k"])]


tril_op = TriangleOp("tril", lower=True)
triu_op = TriangleOp("triu", lower=False)
