"""One bit an element instead of relu's output, where only relu's gradient within the sums of a
batch normalization reads it for that: a sixteenth of the bytes of 16 bits, a 32nd of float32's.

Pattern: relu(normalized x + addend), as batch_norm.py makes it with channels last, and the sums of
its gradient. The map keeps a bit for each element that is positive.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.lines import attributed_to
from ...graph.node import Node
from ...ops.elementwise import add_op
from ...ops.norm.batch_norm import batch_normalize_sums_op
from ...passes.pipeline import Options, Pass
from ..shared.body import close
from ..shared.norm_operators import (
    keep_by_bits_op,
    keeps_bits,
    relu_bits_sums_ops,
    relu_sums_ops,
    with_bits,
)
from ..shared.rewrite import Graph, exchange, value_of


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose gradients of relu read bits. The graph must be the executor's
    own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for sums in graph.order:
        if sums.op in (relu_sums_ops[True, 1], relu_sums_ops[True, 2]):
            y = sums.inputs[3]
            if keeps_bits(y):
                if y not in replaced:
                    replaced[y] = with_bits(y)
                _read_bits(graph, sums, value_of(replaced[y].inputs[0], 1), replaced)
    return exchange(fetches, replaced)


def _read_bits(graph: Graph, sums: Node, bits: Node, replaced: dict[Node, Node]) -> None:
    """Puts the sums by bits in place of those by relu's output."""
    x, mean, variance, _, *dys, _ = sums.inputs
    eps = sums.attrs["eps"]
    with attributed_to(sums):
        dz = keep_by_bits_op(bits, dys[0] if len(dys) == 1 else add_op(*dys))
        of_dz = batch_normalize_sums_op(x, mean, variance, dz, eps=eps, training=True)
        inputs = (x, mean, variance, bits, *dys)
        body = close(inputs, (value_of(of_dz, 0), value_of(of_dz, 1), dz))
        made = relu_bits_sums_ops[len(dys)](*inputs, body=body, eps=eps)
    made.stand_for(sums)
    for value in graph.users[sums]:
        replaced[value] = value_of(made, value.attrs["index"], value)


FUSION = Pass("relu_bits", fuse, position=56, needs=("batch_normalize_relu_bits",))
