"""Operators of heads, the dense layers at a network's end with their loss, which several fusions
make or read; the fusion `mlp_head` says what they are for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ...arguments.kinds import Instance, Number
from ...arguments.signature import Signature
from ...graph.node import Node, Op
from ...ops.matmul import precision_number
from ...runtime.interface import interface
from .body import Body, Fused

# By the kernel of the loss that it ends in.
HEADS = {
    "fused_cross_entropy": "fused_mlp_head",
    "fused_sparse_cross_entropy": "fused_sparse_mlp_head",
}
_Layer, _Options = map(interface.struct, ("HeadLayer", "HeadOptions"))


class Layer(NamedTuple):
    """A dense layer of a head: activation(x op(W) + bias) forward, dact(x, dy op(W)^T) back."""

    transposed: bool
    has_bias: bool
    activation: str = ""  # of the interface, or none
    dact: str = ""  # of the interface, or none; of the layer's own input

    @property
    def argument(self) -> Any:
        """The kernel's."""
        activation = interface.activations.get(self.activation, 0)
        dact = interface.activation_gradients.get(self.dact, 0)
        return _Layer(self.transposed, self.has_bias, activation, dact)


class FusedHead(Fused):
    """The dense layers at a network's end, their loss as `loss`, a fused cross-entropy, has it, and
    the gradients back through the last `back` of them. Inputs: x, the weights, the biases, the
    labels, the workspace of the loss. Values: the loss, the gradient of the logits, the outputs of
    all layers but the last, and the gradients of the layers' inputs, last layer first. Attributes:
    body, layers (a tuple of Layer), scale, dy.
    """

    tolerance = 1e-4
    fallible = True
    has_precision = True  # of the products by which very many rows are done
    zeroed_workspace = (-1,)

    def __init__(self, loss: Op, layers: int, biases: int, back: int) -> None:
        super().__init__(HEADS[loss.name], 1 + layers + back)
        self._lists = layers, biases, layers - 1, back
        factors = dict(scale=Number(nan=True), dy=Number(nan=True))
        self.signature = Signature(
            "*inputs", body=Instance(Body), layers=Instance(tuple), **factors
        )
        assert isinstance(loss.any_dtype, tuple)
        self.any_dtype = tuple(layers + biases + k for k in loss.any_dtype)

    def scalars(self, node: Node) -> tuple[Any]:
        factors = {name: node.attrs[name] for name in ("scale", "dy")}
        layers = tuple(layer.argument for layer in node.attrs["layers"])
        return (_Options(precision=precision_number(node), layers=layers, **factors),)

    def lists(self, node: Node) -> tuple[int, ...]:
        return self._lists


@lru_cache
def head_op(loss: Op, layers: int, biases: int, back: int) -> FusedHead:
    """The head of so many layers that ends in the loss of `loss`."""
    return FusedHead(loss, layers, biases, back)
