"""stop_gradient: a value that counts as a constant for gradients."""

from __future__ import annotations

import numpy as np

from ..graph.node import Node, Op
from ..graph.signature import Signature
from ..graph.spec import Spec

__all__ = ["stop_gradient_op"]


class StopGradientOp(Op):
    """x itself, through which no gradient passes."""

    name = "stop_gradient"
    view = movement = any_dtype = True
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        np.copyto(arrays[1], arrays[0])

    def simplify(self, node: Node) -> Node:
        return node.inputs[0]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


stop_gradient_op = StopGradientOp()
