"""fresh_draws: each run draws new random numbers, where nothing in the graph advances their step.

Numbers are a function of the step that a random operator reads. Where a training step, or whatever
else is fetched, advances it, they are new in the next run already. Elsewhere the step must stay as
it is, since training counts on it: there the operator reads a step made of it and of the number of
the run, which the executor counts in state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort, hooks


def draw_anew(fetches: Sequence[Node], draws: Node) -> list[Node]:
    """The fetches over the graph, changed in place: it must be the executor's own; where it draws
    by `draws`, a Parameter of one int64, a last one more that advances it and has no value.
    """
    order = find_topo_sort(fetches)
    advanced = {node.inputs[k] for node in order for k in node.op.writes}
    made: dict[Node, Node] = {}
    for node in order:
        if not node.op.random:
            continue
        step = node.inputs[node.op.step_at]
        if step.op.leaf != "state" or step in advanced:
            continue
        with attributed_to(node):
            if step not in made:
                made[step] = hooks["step_of_draw"](step, draws)
            node.inputs[node.op.step_at] = made[step]
    if not made:
        return list(fetches)
    with attributed_to(next(iter(made.values()))):
        return [*fetches, hooks["group"](hooks["advance_step"](draws), name="draw")]
