"""Casts: one kernel in place of those that copy Parameters and feeds to floats of 16 bits.

Pattern: casts from float32, of leaves of the graph, that no pointwise program took. They need
nothing that is computed, so that all can be made at the first of them: a network has one of each
Parameter, and most Parameters are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32
from ..ops.elementwise import cast_op
from ..passes.pipeline import Options, Pass
from .shared.body import Body, Fused, close
from .shared.rewrite import Graph, exchange, value_of


class Casts(Fused):
    """Copies of float32 arrays in one dtype of 16 bits."""

    casts = True

    def __init__(self, count: int) -> None:
        super().__init__("casts", count)

    def lists(self, node: Node) -> tuple[int, int]:
        return self.outputs, self.outputs


@lru_cache
def casts_op(count: int) -> Casts:
    """The operator of so many copies."""
    return Casts(count)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph with its copies of leaves made by one node a dtype. The graph must
    be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    by_dtype: dict[Any, list[Node]] = {}
    for node in graph.order:
        if node.op is cast_op and not graph.is_fetched(node) and _copies_leaf(node, options):
            by_dtype.setdefault(node.spec.dtype, []).append(node)
    replaced: dict[Node, Node] = {}
    for nodes in by_dtype.values():
        if len(nodes) > 1:
            replaced |= _together(nodes)
    return exchange(fetches, replaced)


def _copies_leaf(node: Node, options: Options) -> bool:
    x = node.inputs[0]
    copies = x.op.leaf in ("state", "feed") and x.spec.dtype == FLOAT32
    return copies and node.spec.dtype != FLOAT32 and options.target.has("casts", node.spec.dtype)


def _together(nodes: Sequence[Node]) -> dict[Node, Node]:
    inputs = [node.inputs[0] for node in nodes]
    with attributed_to(nodes[0]):
        body: Body = close(inputs, nodes)
        made = casts_op(len(nodes))(*inputs, body=body, name=f"casts of {len(nodes)}")
        made.stand_for(nodes[0])
        return {node: value_of(made, k, node) for k, node in enumerate(nodes)}


# On numpy a call costs little.
FUSION = Pass("casts", fuse, position=65, needs=("casts",))
