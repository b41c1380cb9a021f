"""Fused MLP head: the small dense layers at a network's end, their loss, and the gradients back
through them, which one block keeps in shared memory all the way for a few rows.

Pattern: a fused cross-entropy, the dense layers below it that nobody else reads the last of, and
the gradients of their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..graph.lines import attributed_to
from ..graph.node import Node, output_op
from ..graph.spec import FLOAT32, Spec
from ..passes.pipeline import Options, Pass
from ..runtime.interface import interface
from ..runtime.target import Target
from .shared.body import close, in_shape, shaped
from .shared.head_operators import HEADS, Layer, head_op
from .shared.rewrite import Graph, exchange, strip_views, value_of

LAYERS = ("matmul", "matmul_bias", "matmul_map")
_Options = interface.struct("HeadOptions")


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph with its heads fused. The graph must be the executor's own, with its
    products and losses fused: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    heads: dict[Node, Sequence[Node]] = {}  # each node that was replaced: its head's inputs
    for node in graph.order:
        head = _find_head(graph, node, options.target) if node.op.kernel in HEADS else None
        if head is None:
            continue
        members = {node, *head.values, *head.layers}
        if _reaches(head.inputs, members, heads):
            continue
        with attributed_to(node):
            made = _fused_head(head)
        for k, old in enumerate(head.values):
            replaced[old] = shaped(value_of(made, k, old), old)
        heads.update(dict.fromkeys(members, head.inputs))
    return exchange(fetches, replaced)


class _Head(NamedTuple):
    """The nodes of a head: layers first to last, the gradients of their inputs last to first."""

    loss: Node  # the fused cross-entropy, and its two values
    total: Node
    dlogits: Node
    layers: list[Node]
    gradients: list[Node]

    @property
    def inputs(self) -> list[Node]:
        biases = [layer.inputs[2] for layer in self.layers if layer.op.kernel == "matmul_bias"]
        weights = [layer.inputs[1] for layer in self.layers]
        return [self.layers[0].inputs[0], *weights, *biases, *self.loss.inputs[1:]]

    @property
    def values(self) -> list[Node]:
        return [self.total, self.dlogits, *self.layers[:-1], *self.gradients]


def _find_head(graph: Graph, loss: Node, target: Target) -> _Head | None:
    values = {node.attrs["index"]: node for node in graph.users[loss]}
    layers = _layers_below(graph, loss, target)
    if 1 not in values or not layers:
        return None
    total = values[0] if 0 in values else output_op(loss, index=0)
    gradients: list[Node] = []
    dy = values[1]
    for layer in reversed(layers):
        dx = next((x for x, _ in graph.readers(dy) if _passes_back(x, dy, layer)), None)
        if dx is None:
            break
        gradients.append(dx)
        dy = dx
    return _Head(loss, total, values[1], layers, gradients)


def _layers_below(graph: Graph, loss: Node, target: Target) -> list[Node]:
    """The layers first to last; none where somebody else wants the logits."""
    layers: list[Node] = []
    source = loss.inputs[0]
    while True:
        node = strip_views(source)
        if node.op.kernel not in LAYERS or node.attrs["trans_A"] or "algo" in node.attrs:
            break
        if node.spec.dtype != FLOAT32:
            break
        if node.spec.shape[-1] != source.spec.shape[-1]:  # its rows are others
            break
        last = not layers
        if last and (node.attrs.get("activation") or not _is_read_by(graph, node, loss)):
            break
        if not _fits([node, *layers], loss, target):
            break
        layers.insert(0, node)
        source = node.inputs[0]
    return layers


def _fits(layers: Sequence[Node], loss: Node, target: Target) -> bool:
    """True where the kernel does these layers and the loss, whatever gradients it makes."""
    *values, logits = (layer.spec for layer in layers)
    weights = [layer.inputs[1].spec for layer in layers]
    biases = [layer.inputs[2].spec for layer in layers if layer.op.kernel == "matmul_bias"]
    labels, workspace = (x.spec for x in loss.inputs[1:])
    given = layers[0].inputs[0].spec, weights, biases, labels, workspace, _Options()
    made: tuple = (Spec((), FLOAT32), logits, values, [])
    return target.fits(HEADS[loss.op.name], *given, *made)


def _is_read_by(graph: Graph, node: Node, reader: Node) -> bool:
    """True where nobody else reads a value, and it once."""
    found = [x for x, _ in graph.readers(node)]
    return len(found) == 1 and found[0] is reader


def _passes_back(node: Node, dy: Node, layer: Node) -> bool:
    """True for the gradient of a layer's input, made of dy, the gradient of its output."""
    if node.op.kernel not in ("matmul", "matmul_gradient") or node.attrs["trans_A"]:
        return False
    if "algo" in node.attrs:
        return False
    same_weight = node.inputs[1] is layer.inputs[1]
    transposed = node.attrs["trans_B"] != layer.attrs["trans_B"]
    side = node.inputs[2] if node.op.kernel == "matmul_gradient" else layer.inputs[0]
    own = strip_views(node.inputs[0]) is strip_views(dy) and strip_views(side) is strip_views(
        layer.inputs[0]
    )
    return same_weight and transposed and own


def _reaches(
    inputs: Sequence[Node], goals: set[Node], heads: Mapping[Node, Sequence[Node]]
) -> bool:
    """True where inputs depend on any of the goals; a replaced node needs what its head does."""
    stack, seen = list(inputs), set(inputs)
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        for x in (*node.inputs, *heads.get(node, ())):
            if x not in seen:
                seen.add(x)
                stack.append(x)
    return False


def _fused_head(head: _Head) -> Node:
    loss, layers, gradients = head.loss, head.layers, head.gradients
    dacts = [dx.attrs.get("gradient") or "" for dx in gradients]
    dacts += [""] * (len(layers) - len(gradients))
    made = [
        Layer(
            transposed=layer.attrs["trans_B"],
            has_bias=layer.op.kernel == "matmul_bias",
            activation=layer.attrs.get("activation") or "",
            dact=dact,
        )
        for layer, dact in zip(layers, reversed(dacts))
    ]
    rows, classes = layers[-1].spec.shape
    flat = [in_shape(head.total, ()), in_shape(head.dlogits, (rows, classes))]
    x = head.inputs[0]
    sides = [dx.inputs[2] for dx in gradients if dx.op.kernel == "matmul_gradient"]
    aliases = {side: x for side in sides if side is not x and strip_views(side) is strip_views(x)}
    body = close(head.inputs, [*flat, *head.values[2:]], aliases)
    op = head_op(loss.op, len(layers), sum(layer.has_bias for layer in made), len(gradients))
    attrs = {name: loss.attrs[name] for name in ("scale", "dy")}
    node = op(*head.inputs, body=body, layers=tuple(made), **attrs)
    node.stand_for(loss)
    return node


FUSION = Pass("mlp_head", fuse, position=40, needs=tuple(HEADS.values()))
