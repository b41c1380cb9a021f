"""Pictures of a graph: DOT text for Graphviz, and SVG that needs nothing.

Values of operators with several outputs (`node[1]`) and groups are no boxes of their own. A graph
with more nodes than the limit is drawn in pieces: runs of its topological order, which keeps it
acyclic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..executor.plan import Plan
from ..graph.node import Node, Spec, find_topo_sort
from .layered import Layout, layout, rank
from .svg import (
    BLUE,
    GREEN,
    GREY,
    MONO,
    MONO_WIDTH,
    ORANGE,
    PURPLE,
    cut,
    drawing,
    element,
    label,
    text_of,
)

_SIZE = 11  # of letters
_LETTER = MONO_WIDTH * _SIZE
_LINE = 14.0
_RANK_GAP = 30.0
_MARGIN = 12.0
_LETTERS = 38  # that a line of a box may have
_COLOURS = {"feed": BLUE, "state": GREEN, "constant": GREY, "update": ORANGE, "pieces": PURPLE}
_LEGEND = {
    "feed": "fed", "state": "Parameter", "constant": "constant", "update": "update",
    "operator": "operator", "pieces": "several nodes",
}  # fmt: skip
_LEAVES = ("feed", "state", "constant")
_PIECES = 40  # in which a graph beyond the limit is drawn: lines between more are no picture
_NEAR = 2  # ranks between users of a leaf that share one box
Shapes = Mapping[Node, Any]
Graph = Node | Iterable[Node] | Plan
Edge = tuple[int, int]


@dataclass
class _Box:
    """What is drawn as one: a node, or several of a graph that is too large."""

    nodes: list[Node]
    kind: str
    lines: list[str]
    tip: str
    fetched: bool

    @property
    def width(self) -> float:
        return max(len(line) for line in self.lines) * _LETTER + 16

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 10


def graph_dot(graph: Graph, shapes: Shapes | None = None) -> str:
    """The graph behind one node or several, or of a plan, in Graphviz's DOT language, with every
    node.

    `shapes` adds shapes that depend on feeds, as `Executor.infer_shape` finds them in
    `node_to_shape_map`.
    """
    boxes, edges = _boxes(graph, shapes, limit=None)
    lines = ["digraph dlsys {", '  node [shape=box, fontname="monospace", fontsize=10];']
    for k, box in enumerate(boxes):
        words = "\\n".join(_quoted(line) for line in box.lines)
        style = "filled,bold" if box.fetched else "filled"
        fill = _COLOURS.get(box.kind, "#ffffff") + ("40" if box.kind in _COLOURS else "")
        lines.append(
            f'  n{k} [label="{words}", tooltip="{_quoted(box.tip)}", style="{style}", '
            f'fillcolor="{fill}"];'
        )
    lines += [f"  n{source} -> n{target};" for source, target in edges]
    return "\n".join([*lines, "}"]) + "\n"


def graph_svg(graph: Graph, shapes: Shapes | None = None, limit: int = 160) -> str:
    """The graph behind one node or several as SVG, inputs above their users; or the graph of a
    plan, which is what runs after the rewrites.

    Boxes are operators, or with rounded ends what has a value without being computed; thick ones
    are those asked for. The line below the operator's name is its shape, from `shapes` where it
    depends on feeds; a pointer over a box shows the node's text. Updates name the Parameters that
    they write, and a Parameter stands again where a user is far away. More than `limit` nodes are
    drawn in at most 40 pieces, with a note.
    """
    whole, all_edges = _boxes(graph, shapes, limit)
    boxes, edges = _uncrowded(whole, all_edges)
    placed = layout([box.width for box in boxes], edges)
    tops = _tops(boxes, placed.ranks)
    note = _note(whole)
    head = _MARGIN + 22 + (16 if note else 0)
    legend = list(_legend(boxes))
    width = max(placed.width + 2 * _MARGIN, 7.0 * len(note), 100.0 * len(legend) + 2 * _MARGIN)
    height = head + tops[-1] + _MARGIN
    paths = (_path(boxes, placed, tops, edge, bends) for edge, bends in zip(edges, placed.bends))
    shift = (width - placed.width) / 2
    body = [
        element("g", *paths, fill="none", stroke="currentColor", stroke_opacity=0.45),
        *(_drawn(box, x, tops[r]) for box, x, r in zip(boxes, placed.x, placed.ranks)),
    ]
    return drawing(
        width,
        height,
        f"graph of {sum(len(box.nodes) for box in whole)} nodes",
        [
            *legend,
            label(_MARGIN, head - 4, note, opacity=0.75) if note else "",
            element("g", *body, transform=f"translate({shift:.1f} {head:.1f})"),
        ],
    )


# ---- what to draw ----
def _nodes(graph: Graph) -> tuple[list[Node], set[Node]]:
    """All nodes, inputs before users, and those that are asked for."""
    if isinstance(graph, Plan):
        order = list(graph.values)
        fetched = {value.node for value in graph.fetches if value is not None}
        used = {x for node in order for x in node.inputs}
        return order, fetched | {node for node in order if node not in used}
    fetches = [graph] if isinstance(graph, Node) else list(graph)
    return find_topo_sort(fetches), set(fetches)


def _boxes(graph: Graph, shapes: Shapes | None, limit: int | None) -> tuple[list[_Box], list[Edge]]:
    """Boxes in topological order, and the edges between them, each once."""
    order, fetches = _nodes(graph)
    shown = {node: node for node in order}
    for node in order:
        if node.op.selects:
            shown[node] = shown[node.inputs[0]]
    for node in reversed(order):  # a group asks for what it groups
        if node.op.outputs == 0 and node in fetches:
            fetches.update(node.inputs)
    nodes = [node for node in order if node.op.outputs and not node.op.selects]
    fetched = {shown[node] for node in fetches if node.op.outputs}
    pieces = _pieces(nodes, limit)
    boxes = [_box(piece, shapes or {}, fetched) for piece in pieces]
    at = {node: k for k, piece in enumerate(pieces) for node in piece}
    edges = {
        (at[shown[x]], at[node]): None
        for node in nodes
        for x in node.inputs
        if at[shown[x]] != at[node]
    }
    return boxes, list(edges)


def _uncrowded(boxes: list[_Box], edges: list[Edge]) -> tuple[list[_Box], list[Edge]]:
    """The same with fewer long lines: an update names what it writes and has no line from it, and
    what is fed or kept stands again near users that are far from the first.
    """
    written = {
        (node.inputs[i], k)
        for k, node in enumerate(box.nodes[0] for box in boxes)
        if boxes[k].kind == "update"
        for i in node.op.writes
    }
    edges = [edge for edge in edges if (boxes[edge[0]].nodes[0], edge[1]) not in written]
    ranks, users = rank(len(boxes), edges), _users(len(boxes), edges)
    drawn, moved = list(boxes), {}
    for k, box in enumerate(boxes):
        if box.kind not in _LEAVES:
            continue
        stands, first = k, -1
        for user in sorted(users[k], key=ranks.__getitem__):
            if first < 0 or ranks[user] > first + _NEAR:
                if first >= 0:
                    stands = len(drawn)
                    drawn.append(box)
                first = ranks[user]
            moved[k, user] = (stands, user)
    edges = [moved.get(edge, edge) for edge in edges]
    ends = {v for edge in edges for v in edge}
    left = [k for k, box in enumerate(drawn) if k in ends or box.fetched or box.kind not in _LEAVES]
    number = {k: place for place, k in enumerate(left)}
    return [drawn[k] for k in left], [(number[a], number[b]) for a, b in edges]


def _users(count: int, edges: Iterable[Edge]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        users[source].append(target)
    return users


def _pieces(nodes: Sequence[Node], limit: int | None) -> list[list[Node]]:
    if limit is None or len(nodes) <= limit:
        return [[node] for node in nodes]
    size = -(-len(nodes) // _PIECES)
    return [list(nodes[k : k + size]) for k in range(0, len(nodes), size)]


def _box(nodes: list[Node], shapes: Shapes, fetched: set[Node]) -> _Box:
    asked = not fetched.isdisjoint(nodes)
    if len(nodes) > 1:
        counts = Counter(node.op.name for node in nodes if not node.op.leaf)
        counts = counts or Counter(node.op.name for node in nodes)
        parts = [f"{name} ×{n}" if n > 1 else name for name, n in counts.most_common(3)]
        more = len(counts) - len(parts)
        lines = [*parts, *([f"and {more} more"] if more else [])]
        listed = "\n".join(map(repr, nodes[:12])) + ("\n…" if len(nodes) > 12 else "")
        return _Box(nodes, "pieces", [cut(line, _LETTERS) for line in lines], listed, asked)
    node = nodes[0]
    kind = node.op.leaf or ("update" if node.op.writes else "operator")
    lines = [*_names(node), _shape_text(node, shapes)]
    shown = [cut(line, _LETTERS) for line in lines if line]
    return _Box(nodes, kind, shown, f"{node!r}  [{node.where}]", asked)


def _names(node: Node) -> list[str]:
    """What a box says above the shape."""
    if node.op.leaf:
        return [node.name]
    if node.op.writes:
        targets = ", ".join(node.inputs[k].name for k in node.op.writes)
        return [node.op.name, targets]
    own = node.name.rpartition(".")[2].isdigit() and node.name.startswith(node.op.name)
    return [node.op.name] if own else [f"{node.op.name} {node.name}"]


def _shape_text(node: Node, shapes: Shapes) -> str:
    spec = shapes.get(node, node.spec)
    if spec is None:
        declared = node.attrs.get("shape")
        return "" if declared is None else str(tuple("·" if n is None else n for n in declared))
    several = spec if node.op.outputs != 1 else (spec,)
    return "; ".join(str(s.shape if isinstance(s, Spec) else tuple(s)) for s in several)


def _note(boxes: Sequence[_Box]) -> str:
    count = sum(len(box.nodes) for box in boxes)
    if count == len(boxes):
        return ""
    return (
        f"{count:,} nodes, drawn as {len(boxes)} pieces of up to "
        f"{max(len(box.nodes) for box in boxes)} nodes that follow each other"
    )


# ---- how to draw it ----
def _tops(boxes: Sequence[_Box], ranks: Sequence[int]) -> list[float]:
    """The upper end of each rank, and last the lower end of all."""
    heights = [0.0] * (max(ranks, default=-1) + 1)
    for box, r in zip(boxes, ranks):
        heights[r] = max(heights[r], box.height)
    tops = [0.0]
    for height in heights:
        tops.append(tops[-1] + height + _RANK_GAP)
    return [*tops[:-1], max(tops[-1] - _RANK_GAP, 0.0)]


def _path(
    boxes: Sequence[_Box],
    placed: Layout,
    tops: Sequence[float],
    edge: tuple[int, int],
    bends: Sequence[float],
) -> str:
    """A line that leaves downwards, passes straight through ranks and arrives from above."""
    source, target = edge
    r = placed.ranks[source]
    x, y = placed.x[source], tops[r] + boxes[source].height
    words = [f"M{x:.1f} {y:.1f}"]
    for bend in [*bends, placed.x[target]]:
        r += 1
        words.append(_curve(x, y, bend, tops[r]))
        x, y = bend, tops[r]
        if r < placed.ranks[target]:
            y = tops[r + 1] - _RANK_GAP
            words.append(f"V{y:.1f}")
    words.append("m-3 -5 l3 5 l3 -5")
    return element("path", d="".join(words))


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    if abs(x - to_x) < 0.5:
        return f"L{to_x:.1f} {to_y:.1f}"
    middle = (y + to_y) / 2
    return f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"


def _drawn(box: _Box, x: float, y: float) -> str:
    colour = _COLOURS.get(box.kind)
    frame = element(
        "rect",
        x=x - box.width / 2,
        y=y,
        width=box.width,
        height=box.height,
        rx=box.height / 2 if box.kind in _LEAVES else 3,
        fill=colour or "currentColor",
        fill_opacity=0.22 if colour else 0.06,
        stroke=colour or "currentColor",
        stroke_width=2.5 if box.fetched else 1,
    )
    lines = [
        label(
            x,
            y + 5 + _LINE * (k + 0.75),
            line,
            font_weight="bold" if k == 0 and box.kind != "pieces" else None,
            opacity=0.75 if k else None,
        )
        for k, line in enumerate(box.lines)
    ]
    return element(
        "g",
        element("title", text_of(box.tip)),
        frame,
        *lines,
        font_family=MONO,
        font_size=_SIZE,
        text_anchor="middle",
    )


def _legend(boxes: Sequence[_Box]) -> Iterator[str]:
    kinds = {box.kind for box in boxes}
    x = _MARGIN
    for kind, words in _LEGEND.items():
        if kind not in kinds:
            continue
        colour = _COLOURS.get(kind, "currentColor")
        yield element(
            "rect", x=x, y=_MARGIN - 2, width=12, height=12, rx=3,
            fill=colour, fill_opacity=0.3, stroke=colour,
        )  # fmt: skip
        yield label(x + 18, _MARGIN + 8, words)
        x += 100


def _quoted(words: str) -> str:
    return words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
