"""fuse_norm: batch normalisation in two kernels each way on a GPU: statistics, and the map with a
shortcut's sum and the activation inside; back the activation's gradient within both the sums and
the gradient (fusion/batch_norm_op.py).

What lies between normalisation and activation is then never stored, so nobody else may read it, but
for gradients that find it again. The gradient before an activation is stored only where something
beside the normalisation reads it, or where it is of a sum: the sums then keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..graph.lines import attributed_to
from ..graph.node import Node, Op, same_nodes
from ..graph.spec import FLOAT32
from ..ops.elementwise import add_op
from ..ops.norm.batch_norm import (
    batch_normalize_gradient_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_statistics_op,
)
from ..passes.rewrite import Graph, exchange, value_of
from .batch_norm_op import (
    batch_normalize_map_gradient_op,
    batch_normalize_map_op,
    batch_normalize_map_sums_op,
    batch_normalize_sums_single_pass_op,
    batch_statistics_single_pass_op,
    relu_sums_ops,
)
from .body import ACTIVATIONS, GRADIENTS, close

_OF_OUTPUT = ("softplus_gradient",)  # relu's is of input and output alike


class Layer(NamedTuple):
    """A normalisation and what follows it."""

    norm: Node
    added: Node  # the sum of it and `addend`, or else itself
    addend: Node | None
    activation: Node | None

    @property
    def last(self) -> Node:
        """What is to be stored."""
        return self.added if self.activation is None else self.activation

    @property
    def name(self) -> str:
        """The kernel of the activation."""
        return "" if self.activation is None else self.activation.op.kernel or ""


class Back(NamedTuple):
    """The gradient of an activation, and what the normalisation before it makes of that."""

    slope: Node
    sums: list[Node]
    gradients: list[Node]
    dys: list[Node]  # that are added to the gradient which the slope is given
    only: bool  # nobody else reads the slope


def fuse_norms(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph with its batch normalisations fused. The graph, simplified for
    native devices, must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    done: set[Node] = set()  # what belongs to a layer, or has been replaced
    for node in graph.order:
        if node.op is batch_normalize_op and node.spec.dtype == FLOAT32:
            layer = _layer(graph, node, done)
            if layer is not None:
                done.update((layer.added, layer.last))
                _fuse(graph, layer, replaced, done)
    for node in graph.order:
        if node.op in (batch_statistics_op, batch_normalize_sums_op) and node not in done:
            _meet(graph, node, replaced)
    return exchange(fetches, replaced)


# ---- what there is ----


def _layer(graph: Graph, norm: Node, done: set[Node]) -> Layer | None:
    added, addend = norm, None
    user = graph.only_user(norm)
    if user is not None and user.op is add_op and user not in done:
        other = user.inputs[1] if user.inputs[0] is norm else user.inputs[0]
        if other.spec[:2] == norm.spec[:2]:
            added, addend = user, other
    found = [user for user in graph.users[added] if _is(user, ACTIVATIONS) and user not in done]
    activation = found[0] if len(found) == 1 else None
    if addend is None and activation is None:
        return None
    return Layer(norm, added, addend, activation)


def _is(node: Node, kernels: Sequence[str]) -> bool:
    """Whether it is one of these activations, or of these gradients."""
    inputs = 1 if kernels is ACTIVATIONS else 2
    same = all(x.spec[:2] == node.spec[:2] for x in node.inputs)
    return node.op.kernel in kernels and len(node.inputs) == inputs and same


def _ways_back(graph: Graph, layer: Layer) -> list[Back]:
    """All that there are kernels for."""
    if layer.activation is None or not layer.norm.inputs[0].spec.size:
        return []
    slopes = dict.fromkeys([*graph.users[layer.activation], *graph.users[layer.added]])
    ways = [_way_back(graph, layer, slope) for slope in slopes if _is_slope(layer, slope)]
    return [way for way in ways if way is not None]


def _is_slope(layer: Layer, node: Node) -> bool:
    kernel = f"{layer.name}_gradient"
    if kernel not in GRADIENTS or node.op.kernel != kernel or not _is(node, GRADIENTS):
        return False
    side = node.inputs[0]
    if layer.addend is not None:
        return layer.name == "relu" and side is layer.activation
    if layer.name == "relu":
        return side is layer.activation or side is layer.added
    return side is (layer.activation if kernel in _OF_OUTPUT else layer.added)


def _way_back(graph: Graph, layer: Layer, slope: Node) -> Back | None:
    users, norm = graph.users[slope], layer.norm
    own = [
        user
        for user in users
        if same_nodes(user.inputs[:3], norm.inputs[:3])
        and user.attrs.get("eps") == norm.attrs["eps"]
    ]
    sums = [u for u in own if u.op is batch_normalize_sums_op and u.inputs[3] is slope]
    gradients = [
        u
        for u in own
        if u.op is batch_normalize_gradient_op
        and u.inputs[3] is norm.inputs[3]
        and u.inputs[6] is slope
        and all(x is not slope for x in u.inputs[:6])
    ]
    only = len(sums) + len(gradients) == len(users) and not graph.is_fetched(slope)
    dys = [slope.inputs[1]]
    total = slope.inputs[1]
    if total.op is add_op and graph.only_user(total) is slope and layer.name == "relu":
        if all(x.spec[:2] == slope.spec[:2] for x in total.inputs):
            dys = total.inputs
    kept = len(sums) == 1 and layer.name == "relu"  # there is a kernel that keeps the slope
    if layer.addend is None and only and users and not (kept and len(dys) > 1):
        return Back(slope, sums, gradients, slope.inputs[1:], True)
    return Back(slope, sums, gradients, dys, only) if kept else None


# ---- what comes of it ----


def _fuse(graph: Graph, layer: Layer, replaced: dict[Node, Node], done: set[Node]) -> None:
    found_again = set()
    for way in _ways_back(graph, layer):
        if layer.addend is None and way.only and len(way.dys) == 1:
            _fuse_activation(graph, layer, way, replaced)
        else:
            _fuse_relu(graph, layer, way, replaced)
        found_again.add(way.slope)
        done.update((way.slope, *way.sums))
    readers = set(graph.users[layer.added]) - found_again
    alone = len(readers) == 1 and layer.activation in readers
    if alone and not graph.is_fetched(layer.added):
        _fuse_map(layer, layer.last, layer.name, replaced)
    elif layer.addend is not None:
        _fuse_map(layer, layer.added, "", replaced)


def _fuse_map(layer: Layer, last: Node, activation: str, replaced: dict[Node, Node]) -> None:
    inputs = [*layer.norm.inputs, *([layer.addend] if layer.addend is not None else [])]
    attrs = {"eps": layer.norm.attrs["eps"], "activation": activation}
    with attributed_to(last):
        made = batch_normalize_map_op(*inputs, body=close(inputs, [last]), **attrs)
    made.stand_for(last)
    replaced[last] = made


def _meet(graph: Graph, node: Node, replaced: dict[Node, Node]) -> None:
    """Statistics or sums by blocks that meet."""
    x = node.inputs[0].spec
    if not x.size or x.dtype != FLOAT32:
        return
    if node.op is batch_statistics_op:
        _replace(graph, node, batch_statistics_single_pass_op, node.inputs, replaced)
    else:
        op, eps = batch_normalize_sums_single_pass_op, node.attrs["eps"]
        _replace(graph, node, op, node.inputs, replaced, eps=eps)


def _fuse_activation(graph: Graph, layer: Layer, way: Back, replaced: dict[Node, Node]) -> None:
    """The activation's gradient within both kernels."""
    x, mean, variance, scale, bias = layer.norm.inputs
    attrs = {"eps": layer.norm.attrs["eps"], "gradient": way.slope.op.kernel}
    dy = way.slope.inputs[1]
    for sums in way.sums:
        inputs = [x, mean, variance, scale, bias, dy]
        _replace(graph, sums, batch_normalize_map_sums_op, inputs, replaced, **attrs)
    for node in way.gradients:
        inputs = [x, mean, variance, scale, bias, *node.inputs[4:6], dy]
        with attributed_to(node):
            body = close(inputs, [node])
            made = batch_normalize_map_gradient_op(*inputs, body=body, **attrs)
        made.stand_for(node)
        replaced[node] = made


def _fuse_relu(graph: Graph, layer: Layer, way: Back, replaced: dict[Node, Node]) -> None:
    """Relu's gradient within the sums, which keep it for all who read it."""
    assert layer.activation is not None
    output = layer.addend is not None
    sides = [layer.activation] if output else layer.norm.inputs[3:]
    inputs = [*layer.norm.inputs[:3], *sides, *way.dys]
    op = relu_sums_ops[output, len(way.dys)]
    made = _replace(
        graph, way.sums[0], op, inputs, replaced, also=[way.slope], eps=layer.norm.attrs["eps"]
    )
    replaced[way.slope] = value_of(made, 2, way.slope)


def _replace(
    graph: Graph,
    node: Node,
    op: Op,
    inputs: Sequence[Node],
    replaced: dict[Node, Node],
    also: Sequence[Node] = (),
    **attrs: Any,
) -> Node:
    """Puts an operator over `inputs` in place of one with two values; it may have others."""
    values = {value.attrs["index"]: value for value in graph.users[node]}
    with attributed_to(node):
        outputs = [values[k] if k in values else value_of(node, k) for k in (0, 1)]
        made = op(*inputs, body=close(inputs, [*outputs, *also]), **attrs)
        made.stand_for(node)
        for k, value in values.items():
            replaced[value] = value_of(made, k, value)
    return made
