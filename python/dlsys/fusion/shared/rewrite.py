"""rewrite: a graph as fusions see it, patterns to find in it, and the exchange of nodes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...graph.node import Node, Op, find_topo_sort, output_op


class Graph:
    """A simplified graph while rewrites look at it."""

    def __init__(self, fetches: Sequence[Node]) -> None:
        self.order = find_topo_sort(fetches)
        self._fetched = frozenset(fetches)

    @functools.cached_property
    def users(self) -> dict[Node, list[Node]]:
        """The nodes that read each node, once for each input."""
        users: dict[Node, list[Node]] = {node: [] for node in self.order}
        for node in self.order:
            for x in node.inputs:
                users[x].append(node)
        return users

    @functools.cached_property
    def position(self) -> dict[Node, int]:
        """The position of each node in the order."""
        return {node: k for k, node in enumerate(self.order)}

    def only_user(self, node: Node) -> Node | None:
        """The one use of a node; None where it has several, or is fetched."""
        users = self.users[node]
        return users[0] if len(users) == 1 and node not in self._fetched else None

    def is_fetched(self, node: Node) -> bool:
        """True where the user wants its value."""
        return node in self._fetched

    def before(self, inputs: Sequence[Node], nodes: Sequence[Node]) -> bool:
        """True where the inputs can all be computed before the first of the nodes.

        Then the nodes can become one: it takes the place of the first in the order, and no cycle
        arises, whatever else is replaced by this rule.
        """
        first = min(self.position[node] for node in nodes)
        return all(self.position[strip_views(x)] < first for x in inputs)

    def readers(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """The nodes that read a value, each with the view of it that it reads. What is fetched is
        its own reader.
        """
        if self.is_fetched(node):
            yield node, node
        for user in self.users[node]:
            if strip_views(user) is user:
                yield user, node
            else:
                yield from self.readers(user)


def strip_views(node: Node) -> Node:
    """The node whose values a reshaped one shows."""
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


def chains(
    graph: Graph,
    is_layer: Callable[[Node], bool],
    fits: Callable[[list[Node]], bool],
    most: int,
) -> Iterator[list[Node]]:
    """Rows of 2 to `most` layers, each the only reader of the one before it, by its first input;
    each row as long as it fits.
    """
    taken: set[Node] = set()
    for first in graph.order:
        if first in taken or not is_layer(first):
            continue
        layers = [first]
        while len(layers) < most:
            user = graph.only_user(layers[-1])
            follows = user is not None and is_layer(user) and user.inputs[0] is layers[-1]
            if user is None or not follows or not fits([*layers, user]):
                break
            layers.append(user)
        if len(layers) > 1:
            taken.update(layers)
            yield layers


class Pattern:
    """A shape of subgraph, matched from its last node upwards.

    ops: an operator or the name of a kernel, or a tuple of them. inputs: for each input a pattern,
    a name that the input gets, or None for any; no inputs at all leaves them open. name: what the
    node itself is found as. alone: nothing but this pattern reads it. hidden: it is not fetched.
    commutes: the two inputs may come in either order. `a | b` is a where it matches, or else b.

    A name that is found twice, or was given to `match`, means one node.
    """

    def __init__(
        self,
        ops: Op | str | tuple[Op | str, ...],
        *inputs: Pattern | str | None,
        name: str = "",
        alone: bool = False,
        hidden: bool = False,
        commutes: bool = False,
    ) -> None:
        self._ops = frozenset(ops if isinstance(ops, tuple) else (ops,))
        self._orders = (inputs, inputs[::-1]) if commutes else (inputs,)
        self._name = name
        self._alone = alone
        self._hidden = hidden
        self._others: tuple[Pattern, ...] = ()
        self._last = self._ops  # of this pattern or another one that is as good

    def __or__(self, other: Pattern) -> Pattern:
        either = copy.copy(self)
        either._others = (*self._others, other)
        either._last = self._last | other._last
        return either

    def match(self, graph: Graph, node: Node, **known: Node) -> dict[str, Node] | None:
        """The nodes by their names if the node ends such a subgraph, else None."""
        if node.op not in self._last and node.op.kernel not in self._last:
            return None
        return next(self._ways(graph, node, known), None)

    def _ways(
        self, graph: Graph, node: Node, found: Mapping[str, Node]
    ) -> Iterator[dict[str, Node]]:
        own = _bound(found, self._name, node) if self._fits(graph, node) else None
        if own is not None:
            for wanted in self._orders:
                if not wanted:
                    yield own
                elif len(wanted) == len(node.inputs):
                    yield from _matches(graph, [*zip(wanted, node.inputs)], own)
        for other in self._others:
            yield from other._ways(graph, node, found)

    def _fits(self, graph: Graph, node: Node) -> bool:
        if self._ops.isdisjoint((node.op, node.op.kernel)):
            return False
        if self._alone and graph.only_user(node) is None:
            return False
        return not (self._hidden and graph.is_fetched(node))


def _matches(
    graph: Graph,
    pairs: Sequence[tuple[Pattern | str | None, Node]],
    found: Mapping[str, Node],
) -> Iterator[dict[str, Node]]:
    """The ways in which each pattern fits its node."""
    if not pairs:
        yield dict(found)
        return
    (wanted, node), *rest = pairs
    if isinstance(wanted, Pattern):
        for way in wanted._ways(graph, node, found):
            yield from _matches(graph, rest, way)
        return
    own = _bound(found, wanted or "", node)
    if own is not None:
        yield from _matches(graph, rest, own)


def _bound(found: Mapping[str, Node], name: str, node: Node) -> dict[str, Node] | None:
    """`found` with one more name; None where that is another node already."""
    if found.get(name, node) is not node:
        return None
    return {**found, name: node} if name else dict(found)
