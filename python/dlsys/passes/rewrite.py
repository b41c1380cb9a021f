"""What rewrites ask of a graph: its order, who uses a node, and the exchange of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..graph.node import Node, find_topo_sort, output_op


class Graph:
    """A simplified graph while rewrites look at it."""

    def __init__(self, fetches: Sequence[Node]) -> None:
        self.order = find_topo_sort(fetches)
        self.position = {node: k for k, node in enumerate(self.order)}
        self.users: dict[Node, list[Node]] = {node: [] for node in self.order}
        for node in self.order:
            for x in node.inputs:
                self.users[x].append(node)
        self._fetched = frozenset(fetches)

    def only_user(self, node: Node) -> Node | None:
        """The one use of a node; None where it has several, or is fetched."""
        users = self.users[node]
        return users[0] if len(users) == 1 and node not in self._fetched else None

    def is_fetched(self, node: Node) -> bool:
        """Whether the user wants its value."""
        return node in self._fetched

    def before(self, inputs: Sequence[Node], nodes: Sequence[Node]) -> bool:
        """Whether the inputs can all be computed before the first of the nodes.

        Then the nodes can become one: it takes the place of the first in the order, and no cycle
        arises, whatever else is replaced by this rule.
        """
        first = min(self.position[node] for node in nodes)
        return all(self.position[whole(x)] < first for x in inputs)


def whole(node: Node) -> Node:
    """What a reshaped node shows."""
    while node.op.view and not node.op.projection and "offset" not in node.attrs:
        node = node.inputs[0]
    return node


def exchange(fetches: Sequence[Node], replaced: Mapping[Node, Node]) -> list[Node]:
    """The fetches once each replaced node has given way to another, which may have replaced ones
    among its own inputs. Changes the inputs of nodes: the graph must be the executor's own.
    """
    if not replaced:
        return list(fetches)
    seen: set[Node] = set()
    stack = [replaced.get(node, node) for node in fetches]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            node.inputs = [replaced.get(x, x) for x in node.inputs]
            stack += node.inputs
    return [replaced.get(node, node) for node in fetches]


def value_of(made: Node, index: int, like: Node | None = None) -> Node:
    """One value of an operator with several, in the place of the node that it replaces."""
    name = like.name if like is not None else f"{made.name}[{index}]"
    value = output_op(made, index=index, name=name)  # made[index] would tie the two in a circle
    if like is not None:
        value.stand_for(like)
    return value
