"""The boxes of a graph's picture: one a node, or one for several where there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...executor.plan.memory import Plan
from ...graph.node import Node, find_topo_sort
from ...graph.spec import Spec
from ..svg import cut

LEAVES = ("feed", "state", "constant")
AGAIN = "again"  # of a box that only names another one
_LETTERS = 38  # that a line of a box may have
_PIECES = 40  # in which a graph beyond the limit is drawn: lines between more are no picture
Shapes = Mapping[Node, Any]
Graph = Node | Iterable[Node] | Plan
Edge = tuple[int, int]


@dataclass(eq=False)
class Box:
    """One box: a node, or several nodes of a graph that is too large.

    nodes: of the graph, Nodes or those of another format. kind: that of a leaf, update, gradient,
    operator, or AGAIN. name: how another box may refer to it.
    """

    nodes: Sequence[Any]
    kind: str
    name: str
    lines: list[str]
    tip: str
    fetched: bool = False

    def named(self) -> None:
        """Shows its name, as others refer to it: a node's includes the operator."""
        if self.name not in self.lines[0]:
            rest = self.lines if len(self.nodes) > 1 else self.lines[1:]
            self.lines = [cut(self.name, _LETTERS), *rest]

    def again(self, words: str) -> Box:
        """A box that refers to this one from elsewhere, with these words."""
        return Box(self.nodes, AGAIN, self.name, [cut(words, _LETTERS)], self.tip)


def boxes_of(
    graph: Graph, shapes: Shapes | None, limit: int | None
) -> tuple[list[Box], list[Edge]]:
    """Boxes in topological order, and the edges between them, each once.

    With a limit there are no edges from what an update writes, which it names.
    """
    order, fetches = _nodes(graph)
    drawn = {node: node for node in order}
    for node in order:
        if node.op.projection:
            drawn[node] = drawn[node.inputs[0]]
    for node in reversed(order):  # a group asks for what it groups
        if node.op.outputs == 0 and node in fetches:
            fetches.update(node.inputs)
    nodes = [node for node in order if node.op.outputs and not node.op.projection]
    fetched = {drawn[node] for node in fetches if node.op.outputs}
    if limit is None or len(nodes) <= limit:
        pieces = [[node] for node in nodes]
    else:
        pieces = _pieces(nodes)
    boxes = [
        _piece(piece, k, fetched) if len(piece) > 1 else _box(piece[0], shapes or {}, fetched)
        for k, piece in enumerate(pieces, 1)
    ]
    at = {node: k for k, piece in enumerate(pieces) for node in piece}
    edges = {
        (at[drawn[x]], at[node]): None
        for node in nodes
        for k, x in enumerate(node.inputs)
        if at[drawn[x]] != at[node] and (limit is None or k not in node.op.writes)
    }
    return boxes, list(edges)


def _nodes(graph: Graph) -> tuple[list[Node], set[Node]]:
    """All nodes, inputs before users, and those that are asked for."""
    if isinstance(graph, Plan):
        order = list(graph.values)
        fetched = {value.node for value in graph.fetches if value is not None}
        used = {x for node in order for x in node.inputs}
        return order, fetched | {node for node in order if node not in used}
    fetches = [graph] if isinstance(graph, Node) else list(graph)
    return find_topo_sort(fetches), set(fetches)


def _pieces(nodes: Sequence[Node]) -> list[list[Node]]:
    """Runs of operators; Parameters and constants belong to the run of their first user."""
    computed = [node for node in nodes if not node.op.leaf]
    size = max(-(-len(computed) // _PIECES), 1)
    runs = [list(computed[k : k + size]) for k in range(0, len(computed), size)]
    taken: set[Node] = set()
    pieces = [[node] for node in nodes if node.op.leaf == "feed"]
    for run in runs:
        sources = (x for node in run for x in node.inputs if x.op.leaf in ("state", "constant"))
        own = [x for x in dict.fromkeys(sources) if x not in taken]
        taken.update(own)
        pieces.append([*own, *run])
    return pieces + [
        [node] for node in nodes if node.op.leaf not in (None, "feed") and node not in taken
    ]


def _kind(node: Node) -> str:
    if node.op.leaf:
        return node.op.leaf
    if node.op.writes:
        return "update"
    return "gradient" if node.backward else "operator"


def _piece(nodes: list[Node], number: int, fetched: set[Node]) -> Box:
    computed = [node for node in nodes if not node.op.leaf]
    counts = Counter(node.op.name for node in computed)
    parts = [f"{name} ×{n}" if n > 1 else name for name, n in counts.most_common(3)]
    more = len(counts) - len(parts)
    lines = [*parts, *([f"and {more} more"] if more else [])]
    tip = "\n".join(map(repr, computed[:12])) + ("\n…" if len(computed) > 12 else "")
    kind = Counter(map(_kind, computed)).most_common(1)[0][0]
    asked = not fetched.isdisjoint(nodes)
    return Box(nodes, kind, f"piece {number}", [cut(line, _LETTERS) for line in lines], tip, asked)


def _box(node: Node, shapes: Shapes, fetched: set[Node]) -> Box:
    inside = ", ".join(step.op.name for step in _body(node))
    lines = [*_names(node), inside, _shape_text(node, shapes)]
    texts = [cut(line, _LETTERS) for line in lines if line]
    tip = f"{node!r}  [{node.where}]"
    if inside:
        inputs = ", ".join(x.name for x in node.inputs)
        tip = f"{node.name} = {node.op.name}({inputs}): {node.attrs['body']}  [{node.where}]"
    return Box([node], _kind(node), node.name, texts, tip, node in fetched)


def _body(node: Node) -> list[Node]:
    """The nodes of a fused node's body."""
    body = node.attrs.get("body")
    return [] if body is None else [step for step in body.steps if not step.op.projection]


def _names(node: Node) -> list[str]:
    """The lines of a box above the shape."""
    if node.op.leaf:
        return [node.name]
    if node.op.writes:
        targets = ", ".join(node.inputs[k].name for k in node.op.writes)
        return [node.op.name, targets]
    own = node.name.rpartition(".")[2].isdigit()
    if own and (node.name.startswith(node.op.name) or "body" in node.attrs):
        return [node.op.name]
    return [f"{node.op.name} {node.name}"]


def _shape_text(node: Node, shapes: Shapes) -> str:
    spec = shapes.get(node, node.spec)
    if spec is None:
        declared = node.attrs.get("shape")
        return "" if declared is None else str(tuple(declared)).replace("None", "·")
    several = spec if node.op.outputs != 1 else (spec,)
    return "; ".join(str(s.shape if isinstance(s, Spec) else tuple(s)) for s in several)
