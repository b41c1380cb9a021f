"""The inference form of a graph that was built for training: dropout is gone, and batch
normalization takes its running statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort, same_nodes
from ..ops.norm.batch_norm import batch_normalize_op, running_statistics_op
from ..ops.random.sampling import masked_op


def inference_form(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph in inference form; nodes that do not change are the same nodes.

    A batch normalization in training form that keeps no running statistics stays as it is, since
    there are no others than its batch's.
    """
    new: dict[Node, Node] = {}
    for node in find_topo_sort(fetches):
        inputs = [new[x] for x in node.inputs]
        made = _replaced(node, inputs)
        if made is None and same_nodes(inputs, node.inputs):
            made = node
        new[node] = node.derive(inputs, node.spec) if made is None else made
        if made is None:
            new[node].partial = node.partial
    return [new[node] for node in fetches]


def _replaced(node: Node, inputs: list[Node]) -> Node | None:
    """What stands for a node in inference form, None for the node itself."""
    if node.op is masked_op:
        return inputs[0]
    if node.op is not batch_normalize_op or not node.attrs["training"]:
        return None
    update = next((e for e in node.effects if e.op is running_statistics_op), None)
    if update is None:
        return None
    x, _, _, scale, bias = inputs
    attrs = {**node.attrs, "training": False}
    with attributed_to(node):
        made = batch_normalize_op.make((x, *update.inputs[:2], scale, bias), attrs, node.name)
    made.stand_for(node)
    return made
