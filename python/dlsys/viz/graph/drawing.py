"""Pictures of a graph: DOT text for Graphviz, and SVG that needs nothing.

Values of operators with several outputs (`node[1]`) and groups are no boxes of their own. A graph
with more nodes than the limit is drawn in pieces: runs of its topological order, which keeps it
acyclic.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..svg import (
    BLUE,
    GRAY,
    GREEN,
    MONO,
    MONO_WIDTH,
    ORANGE,
    PURPLE,
    drawing,
    element,
    label,
    text_of,
)
from .boxes import AGAIN, LEAVES, Box, Edge, Graph, Shapes, boxes_of
from .far_edges import uncrowded
from .layered import Layout, layout

_SIZE = 11  # of letters
_LETTER = MONO_WIDTH * _SIZE
_LINE = 14.0
_RANK_GAP = 30.0
_MARGIN = 12.0
_ASKED = 2.5  # width of the lines around what is asked for
_COLORS = {"feed": BLUE, "state": GREEN, "constant": GRAY, "update": ORANGE, "gradient": PURPLE}
_LEGEND = {
    "feed": "fed", "state": "Parameter", "constant": "constant", "operator": "operator",
    "gradient": "backward", "update": "update", AGAIN: "elsewhere, by name",
}  # fmt: skip


def graph_dot(graph: Graph, shapes: Shapes | None = None) -> str:
    """The graph behind one node or several, or of a plan, in Graphviz's DOT language, with every
    node.

    `shapes` adds shapes that depend on feeds, as `Executor.infer_shape` finds them in
    `node_to_shape_map`.
    """
    boxes, edges = boxes_of(graph, shapes, limit=None)
    lines = ["digraph dlsys {", '  node [shape=box, fontname="monospace", fontsize=10];']
    for k, box in enumerate(boxes):
        words = "\\n".join(_quoted(line) for line in box.lines)
        style = "filled,bold" if box.fetched else "filled"
        fill = _COLORS.get(box.kind, "#ffffff") + ("40" if box.kind in _COLORS else "")
        lines.append(
            f'  n{k} [label="{words}", tooltip="{_quoted(box.tip)}", style="{style}", '
            f'fillcolor="{fill}"];'
        )
    lines += [f"  n{source} -> n{target};" for source, target in edges]
    return "\n".join([*lines, "}"]) + "\n"


def graph_svg(graph: Graph, shapes: Shapes | None = None, limit: int = 240) -> str:
    """The graph behind one node or several as SVG, inputs above their users; or the graph of a
    plan, which is what runs after the rewrites.

    Boxes are operators, or with round ends what has a value without being computed; thick ones are
    those asked for. Below the name are the body of a fused operator and the shape, from
    `shapes` where it depends on feeds; a pointer over a box shows the node's text. Updates name the
    Parameters that they write. A Parameter is repeated near users that are far away, and in a
    crowded drawing a dashed box names the far end of an edge that is left out. More than `limit`
    nodes are drawn in about 40 pieces, with a note.
    """
    return boxes_svg(*boxes_of(graph, shapes, limit))


def boxes_svg(all_boxes: list[Box], all_edges: list[Edge]) -> str:
    """Boxes, inputs before their users, and edges between their numbers, as SVG."""
    boxes, edges = uncrowded(all_boxes, all_edges)
    placed = layout([_width(box) for box in boxes], edges)
    tops = _tops(boxes, placed.ranks)
    note = _note(all_boxes)
    head = _MARGIN + 22 + (16 if note else 0)
    legend, legend_end = _legend(boxes)
    width = max(placed.width + 2 * _MARGIN, 7.0 * len(note), legend_end)
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
        f"graph of {sum(len(box.nodes) for box in all_boxes):,} nodes",
        [
            *legend,
            label(_MARGIN, head - 4, note, opacity=0.75) if note else "",
            element("g", *body, transform=f"translate({shift:.1f} {head:.1f})"),
        ],
    )


def _note(boxes: Sequence[Box]) -> str:
    count = sum(len(box.nodes) for box in boxes)
    if count == len(boxes):
        return ""
    return (
        f"{count:,} nodes, drawn as {len(boxes)} pieces of up to "
        f"{max(len(box.nodes) for box in boxes)} nodes that follow each other"
    )


def _width(box: Box) -> float:
    return max(map(len, box.lines), default=0) * _LETTER + 16


def _height(box: Box) -> float:
    return len(box.lines) * _LINE + 10


def _tops(boxes: Sequence[Box], ranks: Sequence[int]) -> list[float]:
    """The upper end of each rank, and last the lower end of all."""
    heights = [0.0] * (max(ranks, default=-1) + 1)
    for box, r in zip(boxes, ranks):
        heights[r] = max(heights[r], _height(box))
    tops = [0.0]
    for height in heights:
        tops.append(tops[-1] + height + _RANK_GAP)
    return [*tops[:-1], max(tops[-1] - _RANK_GAP, 0.0)]


def _path(
    boxes: Sequence[Box],
    placed: Layout,
    tops: Sequence[float],
    edge: Edge,
    bends: Sequence[float],
) -> str:
    """A line that leaves downwards, passes straight through ranks and arrives from above."""
    source, target = edge
    r = placed.ranks[source]
    x, y = placed.x[source], tops[r + 1] - _RANK_GAP
    words = [f"M{x:.1f} {tops[r] + _height(boxes[source]):.1f}V{y:.1f}"]
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


def _drawn(box: Box, x: float, y: float) -> str:
    width = _width(box)
    frame = _frame(box.kind, box.fetched, x - width / 2, y, width, _height(box))
    lines = [
        label(
            x,
            y + 5 + _LINE * (k + 0.75),
            line,
            font_weight="bold" if k == 0 and box.kind != AGAIN else None,
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


def _legend(boxes: Sequence[Box]) -> tuple[list[str], float]:
    """The legend of the kinds of boxes, and its right end."""
    kinds = {box.kind for box in boxes}
    samples = [(kind, False, words) for kind, words in _LEGEND.items() if kind in kinds]
    samples += [("operator", True, "asked for")] * any(box.fetched for box in boxes)
    drawn, x = [], _MARGIN
    for kind, asked, words in samples:
        drawn += [_frame(kind, asked, x, _MARGIN - 2, 16, 12), label(x + 22, _MARGIN + 8, words)]
        x += 40 + 6.5 * len(words)
    return drawn, x


def _frame(kind: str, asked: bool, x: float, y: float, width: float, height: float) -> str:
    color = _COLORS.get(kind)
    opacity = 0.22 if color else 0.0 if kind == AGAIN else 0.06
    return element(
        "rect",
        x=x,
        y=y,
        width=width,
        height=height,
        rx=height / 2 if kind in LEAVES else 3,
        fill=color or "currentColor",
        fill_opacity=opacity,
        stroke=color or "currentColor",
        stroke_width=_ASKED if asked else 1,
        stroke_dasharray="3 3" if kind == AGAIN else None,
        stroke_opacity=0.6 if kind == AGAIN else None,
    )


def _quoted(words: str) -> str:
    return words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
