"""Linear layers in a row, of a few rows, in one launch: their outputs stay in shared memory.

Pattern: matrix-vector products as `matvec.py` makes them, with a bias and perhaps an activation but
no normalization and no residual, each the only reader of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..arguments.kinds import Instance, Int
from ..arguments.signature import Signature
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..passes.pipeline import Options, Pass
from ..runtime.interface import interface
from ..runtime.target import Target
from .shared.body import Body, Fused, close
from .shared.rewrite import Graph, chains, exchange

_MOST = 4  # layers
_CODE_BITS = 8  # of an activation's number


class MatvecChainOp(Fused):
    """Inputs: x (m, k), the weights of each layer (n, k), and then the biases (n)."""

    tolerance = 1e-4
    reads_host = tells_host = True

    def __init__(self) -> None:
        super().__init__("matvec_chain")
        self.signature = Signature("*inputs", body=Instance(Body), activations=Int(0))

    def lists(self, node: Node) -> tuple[int, int]:
        layers = len(node.inputs) // 2
        return layers, layers

    def scalars(self, node: Node) -> tuple[int]:
        return (node.attrs["activations"],)


matvec_chain_op = MatvecChainOp()


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose chains of matrix-vector products are fused. The graph must be
    the executor's own: its nodes change.
    """
    replaced: dict[Node, Node] = {}
    for layers in chains(Graph(fetches), _is_layer, partial(_fits, options.target), _MOST):
        with attributed_to(layers[-1]):
            replaced[layers[-1]] = _made(layers)
    return exchange(fetches, replaced)


def _is_layer(node: Node) -> bool:
    attrs = node.attrs
    if node.op.kernel != "matvec":
        return False
    return attrs["biased"] and not attrs["normalizes"] and not attrs["adds"]


def _fits(target: Target, layers: list[Node]) -> bool:
    weights, biases = ([layer.inputs[k].spec for layer in layers] for k in (1, 2))
    x, y = layers[0].inputs[0].spec, layers[-1].spec
    return target.fits("matvec_chain", x, weights, biases, _activations(layers), y)


def _activations(layers: list[Node]) -> int:
    numbers = [interface.activations.get(layer.attrs["activation"], 0) for layer in layers]
    return sum(number << k * _CODE_BITS for k, number in enumerate(numbers))


def _made(layers: list[Node]) -> Node:
    weights, biases = ([layer.inputs[k] for layer in layers] for k in (1, 2))
    inputs = [layers[0].inputs[0], *weights, *biases]
    body = close(inputs, [layers[-1]])
    made = matvec_chain_op(*inputs, body=body, activations=_activations(layers))
    made.stand_for(layers[-1])
    made.spec = layers[-1].spec
    return made


FUSION = Pass(
    "matvec_chain",
    fuse,
    position=26,
    needs=("matvec_chain",),
    when=lambda options: not options.one_by_one and options.precision == "fp32",
)
