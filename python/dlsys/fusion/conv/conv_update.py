"""Convolution updates: the gradients of a small convolution's filter and bias with the optimizer's
rule in the sum that ends them.

Pattern: an update, and filter gradients of a fused convolution and pooling whose values are
gradients of that update and nothing else. Blocks leave parts of these gradients, which a second
kernel adds; a GPU steps filter and bias there, so that no gradient is written and no kernel of the
update follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ...graph.lines import attributed_to
from ...graph.node import Node
from ...graph.spec import FLOAT32
from ...ops.matmul import precision_number
from ...ops.optim.apply import RuleOp, options_of, several
from ...passes.pipeline import Options, Pass
from ...runtime.interface import interface
from ..shared.body import close
from ..shared.conv_pool_operators import (
    ConvPoolFilterGradientOp,
    Geometry,
    conv_pool_filter_bias_gradient_op,
    conv_pool_filter_gradient_op,
)
from ..shared.rewrite import Graph, exchange
from ..shared.update_operators import (
    UpdateOfBody,
    changed_by,
    replaced_update,
    source_of,
    states_of,
)

_HW = interface.struct("HW")


class ConvPoolUpdate(UpdateOfBody):
    """A rule applied to the filter and perhaps the bias of a fused convolution and pooling.

    Inputs: the states of filter and bias as RuleOp has them; x, dy and the codes of the filter's
    gradient, which the body is; the rate and options of the rule. The values are the new filter
    and bias. Attributes: body, geometry, and those of the rule.
    """

    has_precision = True

    def __init__(self, update: RuleOp) -> None:
        super().__init__(f"conv2d_pool_{update.name}", update, 3)
        code = len(self.writes) + 2
        assert isinstance(self.any_dtype, tuple)
        self.any_dtype = (code, *self.any_dtype)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        geometry: Geometry = node.attrs["geometry"]
        pool = _HW(*geometry.before), geometry.window
        return options_of(self.update.rule, node.attrs), *pool, precision_number(node)

    def lists(self, node: Node) -> tuple[int, ...]:
        states, _, *options = self.update.lists(node)
        return states, *options


@lru_cache
def conv_pool_update(update: RuleOp, parameters: int) -> ConvPoolUpdate:
    """The operator for a filter, and perhaps a bias, under the rule of `update`."""
    return ConvPoolUpdate(several(update, parameters))


class _Layer(NamedTuple):
    """A filter gradient, and which gradients of an update its values are."""

    gradient: Node
    taken: list[int]


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose updates of small convolutions make their gradients. The graph
    must be the executor's own, with its updates grouped: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if isinstance(node.op, RuleOp) and options.target.has(f"conv2d_pool_{node.op.name}"):
            made = [
                (_fused(node, node.op, one), one.taken) for one in _layers(graph, node, node.op)
            ]
            if made:
                replaced.update(replaced_update(graph, node, node.op, made))
    return exchange(fetches, replaced)


_GRADIENTS = conv_pool_filter_gradient_op, conv_pool_filter_bias_gradient_op


def _layers(graph: Graph, update: Node, op: RuleOp) -> Iterator[_Layer]:
    found: dict[Node, dict[int, int]] = {}  # of each filter gradient which gradient a value is
    for k in range(op.outputs):
        source = source_of(graph, update.inputs[len(op.writes) + k], _GRADIENTS)
        if source is not None:
            found.setdefault(source[0], {})[source[1]] = k
    for node, gradients in found.items():
        of = node.op
        assert isinstance(of, ConvPoolFilterGradientOp)
        float32 = all(x.spec.dtype == FLOAT32 for x in (*node.inputs[:2], update.inputs[0]))
        complete = len(gradients) == of.outputs == max(1, len(graph.users[node]))
        if complete and float32 and not any(map(changed_by, node.inputs)):
            yield _Layer(node, [gradients[index] for index in range(of.outputs)])


def _fused(update: Node, op: RuleOp, layer: _Layer) -> Node:
    gradient, taken = layer
    first = len(op.writes)
    with attributed_to(update):
        body = close(gradient.inputs, [update.inputs[first + k] for k in taken])
        made = conv_pool_update(op, len(taken))
        rest = update.inputs[first + op.outputs :]
        inputs = [*states_of(update, op, taken), *gradient.inputs, *rest]
        attrs = {**update.attrs, "body": body, "geometry": gradient.attrs["geometry"]}
        node = Node(made, inputs, attrs, f"{made.name} of {len(taken)}")
        node.stand_for(update)
    return node


FUSION = Pass("conv_update", fuse, position=82, needs=("conv2d_pool_sgd_update",))
