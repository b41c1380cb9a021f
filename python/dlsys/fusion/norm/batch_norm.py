"""Batch normalization as two kernels each way on a GPU: the statistics, and the map with a
shortcut's sum and the activation inside; back the activation gradient within both the sums and the
gradient.

Patterns: normalize [+ addend] [activation], where the addend may be normalized too, which then is
not stored in between; the activation gradient with the sums and the gradient of the normalization
that read it. Values between normalization and activation are then never
stored, so only gradients may read them, which recompute them from x in the same operations and so
to the bit; of a sum, relu's saved output tells instead. The gradient before an activation is stored
only where something else reads it, or where it is of a sum: the sums' kernel then writes it.

Statistics and sums are single-pass reductions: the last block to arrive, by a counter for each
channel, combines the partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...graph.lines import attributed_to
from ...graph.node import Node, Op
from ...ops.elementwise import add_op
from ...ops.norm.batch_norm import (
    batch_normalize_gradient_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_statistics_op,
)
from ...passes.pipeline import Options, Pass
from ...runtime.target import Target
from ..shared.body import ACTIVATIONS, GRADIENTS, close
from ..shared.norm_operators import (
    batch_normalize_map_gradient_op,
    batch_normalize_map_op,
    batch_normalize_map_sums_op,
    batch_normalize_sums_single_pass_op,
    batch_statistics_single_pass_op,
    relu_sums_ops,
)
from ..shared.rewrite import Graph, Pattern, exchange, value_of

_OF_OUTPUT = ("softplus_gradient",)  # relu's is of input and output alike


class Layer(NamedTuple):
    """A normalization and what follows it."""

    norm: Node
    added: Node  # the sum of it and `addend`, or else itself
    addend: Node | None
    activation: Node | None
    normalizes_addend: bool = False  # which is a normalization that nobody else reads

    @property
    def last(self) -> Node:
        """The value that is stored."""
        return self.added if self.activation is None else self.activation

    @property
    def addends(self) -> list[Node]:
        """What the map's kernel is given for the addend."""
        if self.addend is None:
            return []
        return self.addend.inputs if self.normalizes_addend else [self.addend]

    @property
    def name(self) -> str:
        """The kernel of the activation."""
        return "" if self.activation is None else self.activation.op.kernel or ""


class Back(NamedTuple):
    """The gradient of an activation, and what the normalization before it makes of that."""

    dact: Node
    sums: list[Node]
    gradients: list[Node]
    dys: list[Node]  # that are added to the gradient which the activation gradient is given
    only: bool  # nobody else reads the activation gradient


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph with its batch normalizations fused. The graph, simplified for
    native devices, must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    done: set[Node] = set()  # what belongs to a layer, or has been replaced
    for node in graph.order:
        if node.op is batch_normalize_op and options.target.has(
            batch_normalize_map_op.kernel, node.spec.dtype
        ):
            layer = _layer(graph, node, done)
            if layer is not None:
                done.update((layer.added, layer.last))
                _fuse(graph, layer, replaced, done)
    for node in graph.order:
        if node.op in (batch_statistics_op, batch_normalize_sums_op) and node not in done:
            _single_pass(graph, node, options.target, replaced)
    return exchange(fetches, replaced)


_SUM = Pattern(add_op, "norm", "addend", name="sum", commutes=True)
_SUMS = Pattern(batch_normalize_sums_op, "x", "mean", "variance", "dact")
_GRADIENTS = Pattern(
    batch_normalize_gradient_op, "x", "mean", "variance", "scale", None, None, "dact"
)


def _layer(graph: Graph, norm: Node, done: set[Node]) -> Layer | None:
    added, addend = norm, None
    user = graph.only_user(norm)
    found = _SUM.match(graph, user, norm=norm) if user is not None and user not in done else None
    if found is not None and found["addend"].spec[:2] == norm.spec[:2]:
        added, addend = found["sum"], found["addend"]
    users = [user for user in graph.users[added] if _is(user, ACTIVATIONS) and user not in done]
    activation = users[0] if len(users) == 1 else None
    if addend is None and activation is None:
        return None
    return Layer(
        norm, added, addend, activation, addend is not None and _is_twin(graph, norm, addend)
    )


def _is_twin(graph: Graph, norm: Node, addend: Node) -> bool:
    """True for another normalization by the same eps, which is read by their sum alone."""
    same = addend.op is batch_normalize_op and addend.attrs["eps"] == norm.attrs["eps"]
    return same and addend is not norm and graph.only_user(addend) is not None


def _is(node: Node, kernels: Sequence[str]) -> bool:
    """True for one of these activations, or of these gradients."""
    inputs = 1 if kernels is ACTIVATIONS else 2
    same = all(x.spec[:2] == node.spec[:2] for x in node.inputs)
    return node.op.kernel in kernels and len(node.inputs) == inputs and same


def _ways_back(graph: Graph, layer: Layer) -> list[Back]:
    """All that there are kernels for."""
    if layer.activation is None or not layer.norm.inputs[0].spec.size:
        return []
    users = dict.fromkeys([*graph.users[layer.activation], *graph.users[layer.added]])
    ways = [_way_back(graph, layer, user) for user in users if _is_dact(layer, user)]
    return [way for way in ways if way is not None]


def _is_dact(layer: Layer, node: Node) -> bool:
    kernel = f"{layer.name}_gradient"
    if kernel not in GRADIENTS or node.op.kernel != kernel or not _is(node, GRADIENTS):
        return False
    side = node.inputs[0]
    if layer.addend is not None:
        return layer.name == "relu" and side is layer.activation
    if layer.name == "relu":
        return side is layer.activation or side is layer.added
    return side is (layer.activation if kernel in _OF_OUTPUT else layer.added)


def _way_back(graph: Graph, layer: Layer, dact: Node) -> Back | None:
    users, norm = graph.users[dact], layer.norm
    known = dict(zip(("x", "mean", "variance", "scale"), norm.inputs), dact=dact)
    own = [user for user in users if user.attrs.get("eps") == norm.attrs["eps"]]
    sums = [user for user in own if _SUMS.match(graph, user, **known)]
    gradients = [
        user
        for user in own
        if _GRADIENTS.match(graph, user, **known) and all(x is not dact for x in user.inputs[:6])
    ]
    only = len(sums) + len(gradients) == len(users) and not graph.is_fetched(dact)
    dys = [dact.inputs[1]]
    total = dact.inputs[1]
    if total.op is add_op and graph.only_user(total) is dact and layer.name == "relu":
        if all(x.spec[:2] == dact.spec[:2] for x in total.inputs):
            dys = total.inputs
    kept = len(sums) == 1 and layer.name == "relu"  # there is a kernel that writes dact
    if layer.addend is None and only and users and not (kept and len(dys) > 1):
        return Back(dact, sums, gradients, dact.inputs[1:], True)
    return Back(dact, sums, gradients, dys, only) if kept else None


# ---- what comes of it ----


def _fuse(graph: Graph, layer: Layer, replaced: dict[Node, Node], done: set[Node]) -> None:
    found_again = set()
    for way in _ways_back(graph, layer):
        if layer.addend is None and way.only and len(way.dys) == 1:
            _fuse_activation(graph, layer, way, replaced)
        else:
            _fuse_relu(graph, layer, way, replaced)
        found_again.add(way.dact)
        done.update((way.dact, *way.sums))
    readers = set(graph.users[layer.added]) - found_again
    alone = len(readers) == 1 and layer.activation in readers
    if alone and not graph.is_fetched(layer.added):
        _fuse_map(layer, layer.last, layer.name, replaced)
    elif layer.addend is not None:
        _fuse_map(layer, layer.added, "", replaced)


def _fuse_map(layer: Layer, last: Node, activation: str, replaced: dict[Node, Node]) -> None:
    inputs = [*layer.norm.inputs, *layer.addends]
    attrs = {"eps": layer.norm.attrs["eps"], "activation": activation}
    with attributed_to(last):
        made = batch_normalize_map_op(*inputs, body=close(inputs, [last]), **attrs)
    made.stand_for(last)
    replaced[last] = made


def _single_pass(graph: Graph, node: Node, target: Target, replaced: dict[Node, Node]) -> None:
    """Statistics or sums as a single-pass reduction."""
    x = node.inputs[0].spec
    if not x.size or not target.has(batch_statistics_single_pass_op.kernel, x.dtype):
        return
    if node.op is batch_statistics_op:
        _replace(graph, node, batch_statistics_single_pass_op, node.inputs, replaced)
    else:
        op, eps = batch_normalize_sums_single_pass_op, node.attrs["eps"]
        _replace(graph, node, op, node.inputs, replaced, eps=eps)


def _fuse_activation(graph: Graph, layer: Layer, way: Back, replaced: dict[Node, Node]) -> None:
    """The activation's gradient within both kernels."""
    x, mean, variance, scale, bias = layer.norm.inputs
    attrs = {"eps": layer.norm.attrs["eps"], "gradient": way.dact.op.kernel}
    dy = way.dact.inputs[1]
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
        graph, way.sums[0], op, inputs, replaced, also=[way.dact], eps=layer.norm.attrs["eps"]
    )
    replaced[way.dact] = value_of(made, 2, way.dact)


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


FUSION = Pass(
    "batch_norm",
    fuse,
    position=50,
    needs=(
        "batch_statistics_single_pass",
        "batch_normalize_map",
        "batch_normalize_sums_single_pass",
        "batch_normalize_map_sums",
        "batch_normalize_map_gradient",
        "batch_normalize_relu_sums",
    ),
)
