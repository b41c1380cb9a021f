"""Quantized linear layers in a row, of a few rows, in one launch: what flows between them stays in
shared memory.

Pattern: quantized products of matrices, each the only reader of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..arguments.kinds import Instance, Int
from ..arguments.signature import Signature
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..ops.quantize import quantized_matmul_op
from ..passes.pipeline import Options, Pass
from ..runtime.target import Target
from .shared.body import Body, Fused, close
from .shared.rewrite import Graph, chains, exchange

_MOST = 4  # layers
_NUMBERS = ("zero", "low", "high")  # of a layer's result, a byte each


class QuantizedChainOp(Fused):
    """Inputs: x uint8 (m, k), the packed weights of each layer, then the biases, then the
    multipliers (n). `zero`, `low` and `high` have eight bits for each layer.
    """

    tolerance = 0.0
    tells_host = True

    def __init__(self) -> None:
        super().__init__("quantized_matmul_chain", any_dtype=True)
        numbers = {name: Int(0) for name in _NUMBERS}
        self.signature = Signature("*inputs", body=Instance(Body), **numbers)

    def lists(self, node: Node) -> tuple[int, int, int]:
        layers = len(node.inputs) // 3
        return layers, layers, layers

    def scalars(self, node: Node) -> tuple[int, ...]:
        return tuple(node.attrs[name] for name in _NUMBERS)


quantized_chain_op = QuantizedChainOp()


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose chains of quantized products are fused. The graph must be the
    executor's own: its nodes change.
    """
    replaced: dict[Node, Node] = {}
    for layers in chains(Graph(fetches), _is_layer, partial(_fits, options.target), _MOST):
        with attributed_to(layers[-1]):
            replaced[layers[-1]] = _made(layers)
    return exchange(fetches, replaced)


def _is_layer(node: Node) -> bool:
    return node.op is quantized_matmul_op


def _fits(target: Target, layers: list[Node]) -> bool:
    x, *lists = layers[0].inputs[0].spec, *([o.spec for o in part] for part in _operands(layers))
    return target.fits("quantized_matmul_chain", x, *lists, *_numbers(layers), layers[-1].spec)


def _operands(layers: list[Node]) -> list[list[Node]]:
    """The weights of the layers, their biases and their multipliers."""
    return [[layer.inputs[k] for layer in layers] for k in (1, 2, 3)]


def _numbers(layers: list[Node]) -> list[int]:
    return [sum(layer.attrs[name] << 8 * k for k, layer in enumerate(layers)) for name in _NUMBERS]


def _made(layers: list[Node]) -> Node:
    inputs = [layers[0].inputs[0], *(x for part in _operands(layers) for x in part)]
    made = quantized_chain_op(
        *inputs, body=close(inputs, [layers[-1]]), **dict(zip(_NUMBERS, _numbers(layers)))
    )
    made.stand_for(layers[-1])
    made.spec = layers[-1].spec
    return made


FUSION = Pass("quantized_chain", fuse, position=7, needs=("quantized_matmul_chain",))
