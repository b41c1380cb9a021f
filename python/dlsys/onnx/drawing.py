"""A picture of an ONNX file: its nodes with what they are made with, as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..viz.graph.boxes import Box, Edge
from ..viz.graph.drawing import boxes_svg
from ..viz.svg import cut
from .importer.reader import read
from .package import onnx_package

_LETTERS = 38  # of a line
_PIECES = 60  # in which a larger graph is drawn
_SHOWN = ("kernel_shape", "strides", "pads", "dilations", "group", "axis", "axes", "perm",
          "epsilon", "mode", "hidden_size", "direction", "transB", "to")  # fmt: skip


def picture(file: str | Path, limit: int = 240) -> str:
    """The graph of an ONNX file as SVG, inputs above their users.

    A box has a node's operator, its attributes, the shapes of its weights, and the shape of its
    result as far as ONNX's shape inference knows it; a pointer over it shows the names. Weights are
    no boxes of their own. More than `limit` nodes are drawn in up to 60 pieces, with a note. Graphs
    inside of branches and loops are not drawn; their boxes say how many nodes they have.

    file: its path. DataError for a file that cannot be read.

    >>> dl.onnx.export(nn.MLP((4, 3), seed=0), "build/mlp.onnx", inputs=(None, 4))
    >>> dl.onnx.picture("build/mlp.onnx")[:4]
    '<svg'
    """
    model = read(file)
    try:
        graph = onnx_package("onnx.shape_inference").infer_shapes(model).graph
    except Exception:  # of a model that is not valid, which is drawn without shapes
        graph = model.graph
    return boxes_svg(*_Picture(graph).boxes(limit))


class _Picture:
    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._weights = {t.name: tuple(t.dims) for t in graph.initializer}
        ports = (*graph.value_info, *graph.input, *graph.output)
        self._shapes = {v.name: _shape(v) for v in ports}
        self._wanted = {v.name for v in graph.output}
        self._inputs = [v for v in graph.input if v.name not in self._weights]

    def boxes(self, limit: int) -> tuple[list[Box], list[Edge]]:
        """The boxes, and the edges between them."""
        nodes = list(self._graph.node)
        size = 1 if len(nodes) <= limit else -(-len(nodes) // min(_PIECES, limit))
        runs = [nodes[k : k + size] for k in range(0, len(nodes), size)]
        boxes = [self._feed(v) for v in self._inputs]
        made = {v.name: k for k, v in enumerate(self._inputs)}
        edges: dict[Edge, None] = {}
        for run in runs:
            at = len(boxes)
            boxes.append(self._box(run[0]) if size == 1 else self._piece(run, at))
            for node in run:
                made |= dict.fromkeys(filter(None, node.output), at)
                edges |= {(made[x], at): None for x in _reads(node) if made.get(x, at) != at}
        return boxes, list(edges)

    def _feed(self, value: Any) -> Box:
        return Box(
            [value], "feed", value.name, [cut(value.name, _LETTERS), _shape(value)], value.name
        )

    def _box(self, node: Any) -> Box:
        shapes = [f"{'·'.join(map(str, self._weights[x]))}" for x in node.input
                  if self._weights.get(x)]  # fmt: skip
        lines = [node.op_type, _attributes(node)]
        lines += [f"by {', '.join(shapes)}" if shapes else ""]
        lines += [self._shapes.get(node.output[0], "") if node.output else ""]
        tip = f"{node.name} {node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)}"
        asked = not self._wanted.isdisjoint(node.output)
        texts = [cut(line, _LETTERS) for line in lines if line]
        return Box([node], "operator", node.name or node.op_type, texts, tip, asked)

    def _piece(self, run: Sequence[Any], number: int) -> Box:
        counts = Counter(node.op_type for node in run)
        lines = [f"{name} ×{n}" if n > 1 else name for name, n in counts.most_common(3)]
        lines += [f"and {len(counts) - 3} more"] if len(counts) > 3 else []
        asked = any(not self._wanted.isdisjoint(node.output) for node in run)
        tip = "\n".join(f"{node.op_type} {node.name}" for node in run[:12])
        return Box(
            run, "operator", f"piece {number}", [cut(x, _LETTERS) for x in lines], tip, asked
        )


def _reads(node: Any) -> set[str]:
    """The values that a node reads, and the graphs inside of it."""
    found = set(filter(None, node.input))
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            found = found.union(*map(_reads, graph.node))
    return found


def _attributes(node: Any) -> str:
    """The attributes that tell most, on one line."""
    value = onnx_package("onnx.helper").get_attribute_value
    words = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            words.append(f"{attribute.name}: {len(attribute.g.node)} nodes")
        elif attribute.name in _SHOWN:
            given = value(attribute)
            shown = given.decode() if isinstance(given, bytes) else given
            words.append(f"{attribute.name}={list(shown) if isinstance(shown, list) else shown}")
    return ", ".join(words)


def _shape(value: Any) -> str:
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return ""
    extents = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "·"
               for d in kind.shape.dim]  # fmt: skip
    return f"({', '.join(extents)})"
