"""Multi-tensor updates: one node of all updates that differ in their Parameters only.

On a native device an update is a launch, and most Parameters are small: the 161 of ResNet-50 are
updated by one kernel. An update that needs the result of another cannot join it, and two groups
must not need each other: updates are therefore grouped by their level, the length of the longest
path of updates that ends with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort
from ..passes.pipeline import Options, Pass
from .shared.rewrite import value_of


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over the graph with its updates grouped, changed in place: it must be the
    executor's own. A graph with two updates of one Parameter stays as it is, to be refused.
    """
    order = find_topo_sort(fetches)
    if not any(node.op.writes for node in order):
        return list(fetches)
    groups = [group for group in _groups(order) if len(group) > 1]
    targets = [node.inputs[k] for node in order for k in node.op.writes]
    if not groups or len(set(targets)) < len(targets):
        return list(fetches)
    results: dict[Node, Node] = {}
    for group in groups:
        with attributed_to(group[0]):
            merged = group[0].op.merged(group)
            for k, node in enumerate(group):
                results[node] = value_of(merged, k, node)
    for node in order:
        if not results.keys().isdisjoint(node.inputs):
            node.inputs = [results.get(x, x) for x in node.inputs]
    for group in groups:
        merged = results[group[0]].inputs[0]
        merged.inputs = [results.get(x, x) for x in merged.inputs]
    return [results.get(node, node) for node in fetches]


def _groups(order: Sequence[Node]) -> list[list[Node]]:
    level: dict[Node, int] = {}
    found: dict[Hashable, list[Node]] = {}
    for node in order:
        height = max([level[x] for x in node.inputs], default=0)
        level[node] = height + bool(node.op.writes)
        key = node.op.merge_key(node) if node.op.writes else None
        if key is not None:
            found.setdefault((key, height), []).append(node)
    return list(found.values())


# On numpy a call costs little, and a gradient dies at its update.
FUSION = Pass("multi_tensor", fuse, position=70, when=lambda options: options.target.native)
