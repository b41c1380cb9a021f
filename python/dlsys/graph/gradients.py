"""Reverse-mode differentiation: gradients are nodes like any other, so they can be
differentiated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import GraphError
from .collector import paused_collector
from .lines import attributed_to, where
from .node import Node, find_topo_sort, hooks


def gradients(output_node: Node, node_list: Sequence[Node], seed: Node | None = None) -> list[Node]:
    """A node for the gradient of `output_node` (of the sum of its elements, each times that of
    `seed` where one is given) with respect to each of `node_list`.

    A node that the output does not depend on gets zeros of its shape. GraphError names an operator
    on the way that has no gradient.
    """
    for node in [output_node, *node_list]:
        if not isinstance(node, Node):
            raise GraphError(f"gradients: expected nodes, got {type(node).__name__}")
        if node.op.outputs != 1:
            raise GraphError(
                f"gradients: {node.name} has {node.op.outputs} values; name one of them"
            )
    order = find_topo_sort([output_node])
    needed = _depends_on(order, node_list)
    if seed is None:
        with attributed_to(output_node, backward=True):
            seed = hooks["ones_like"](output_node)
    pieces: dict[Node, list] = {output_node: [seed]}
    totals: dict[Node, Node] = {}
    with paused_collector():
        for node in reversed(order):
            if node in needed and node in pieces:
                with attributed_to(node, backward=True):
                    _back_through(node, pieces, totals, needed)
    return [totals[node] if node in totals else hooks["zeros_like"](node) for node in node_list]


def _depends_on(order: Iterable[Node], node_list: Iterable[Node]) -> set[Node]:
    needed = set(node_list)
    for node in order:
        if not needed.isdisjoint(node.inputs):
            needed.add(node)
    return needed


def _back_through(
    node: Node, pieces: dict[Node, list], totals: dict[Node, Node], needed: set[Node]
) -> None:
    if node.op.outputs > 1:  # its pieces are (index, gradient) pairs, left by its outputs
        grads: list = [None] * node.op.outputs
        for index, grad in pieces.pop(node):
            grads[index] = grad
        _spread(node, grads, pieces, needed)
        return
    total = totals[node] = sum_node_list(pieces.pop(node))
    if node.op.projection:
        pieces.setdefault(node.inputs[0], []).append((node.attrs["index"], total))
    elif node.inputs and not needed.isdisjoint(node.inputs):
        _spread(node, total, pieces, needed)


def _spread(node: Node, output_grad: Any, pieces: dict[Node, list], needed: set[Node]) -> None:
    input_grads = node.op.gradient(node, output_grad)
    if not isinstance(input_grads, (list, tuple)) or len(input_grads) != len(node.inputs):
        raise GraphError(
            f"the gradient of operator {node.op.name} returned {input_grads!r}, expected a list of "
            f"{len(node.inputs)}, one for each input [{node.where}]"
        )
    for grad in input_grads:
        if grad is not None and not isinstance(grad, Node):
            raise GraphError(
                f"the gradient of operator {node.op.name} returned the wrong kind of thing, "
                f"{type(grad).__name__}, expected nodes or None [{node.where}]"
            )
    for x, grad in zip(node.inputs, input_grads):
        if grad is not None and x in needed:
            pieces.setdefault(x, []).append(grad)


def sum_node_list(node_list: Sequence[Node]) -> Node:
    """The sum of the nodes of `node_list` as a node."""
    if not node_list:
        raise GraphError(f"sum_node_list: expected at least one node [{where()}]")
    total = node_list[0]
    for node in node_list[1:]:
        total = hooks["add"](total, node)
    return total
