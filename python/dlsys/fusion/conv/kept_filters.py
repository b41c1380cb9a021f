"""Convolutions whose filters do not change keep them in the layout of their kernel: packed for the
product or transformed for Winograd's tiles by the first run, not by every one. A GPU reads filters
as they lie and keeps none: its kernel serves few images, by several blocks for each sum.

Patterns: a convolution by a Parameter, with or without bias, and behind it an array of the result's
shape that is added, and relu; whatever is missing is left out. Only programs for inference run this
pass, since the filters must stay as they are: `dlsys.inference` names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arguments.kinds import Bool, Instance
from ...arguments.signature import Signature
from ...graph.lines import attributed_to
from ...graph.node import Node
from ...graph.spec import FLOAT32, Spec
from ...ops.conv.convolution import convolution_bias_op, convolution_op
from ...ops.elementwise import add_op, relu_op
from ...ops.leaf import constant_op
from ...passes.pipeline import Options, Pass
from ...runtime.target import Target
from ..shared.body import Body, Fused, close
from ..shared.rewrite import Graph, exchange

_CONVOLUTIONS = (convolution_op, convolution_bias_op)
_FLOAT_NBYTES = 4


class KeptConvolutionOp(Fused):
    """Inputs: x, filter, then, as the attributes say, bias (O,) and a residual of the result's
    shape; last the store, which the first run fills.
    """

    tolerance = 1e-4
    zeroed_workspace = (-1,)

    def __init__(self) -> None:
        super().__init__("conv2d_kept")
        self.signature = Signature(
            "*inputs", body=Instance(Body), convolution=Instance(Node), adds=Bool(), relu=Bool()
        )

    def lists(self, node: Node) -> tuple[int, int]:
        return int(node.attrs["convolution"].op is convolution_bias_op), int(node.attrs["adds"])

    def scalars(self, node: Node) -> tuple[Any, ...]:
        windows, groups, *_ = node.attrs["convolution"].op.scalars(node.attrs["convolution"])
        return windows, groups, int(node.attrs["relu"])


kept_convolution_op = KeptConvolutionOp()


class _Layer(NamedTuple):
    """A convolution with what follows it that nothing else reads."""

    residual: Node | None
    relu: bool
    last: Node


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose convolutions keep their filters. The graph must be the
    executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op in _CONVOLUTIONS and _is_fixed(node) and node not in replaced:
            numel = store_numel(node, options.target)
            if numel:
                layer = _layer(graph, node)
                with attributed_to(layer.last):
                    replaced[layer.last] = made(node, *layer, numel)
    return exchange(fetches, replaced)


def _is_fixed(node: Node) -> bool:
    """True for float32 arrays, a filter that is a Parameter, and no algorithm by name."""
    floats = all(x.spec.dtype == FLOAT32 for x in node.inputs)
    return floats and node.inputs[1].op.leaf == "state" and node.attrs.get("algo") is None


def store_numel(node: Node, target: Target) -> int:
    """The floats that a target keeps of a convolution's filters, 0 where it keeps none."""
    windows, groups, *_ = node.op.scalars(node)
    arrays = node.inputs[0].spec, node.inputs[1].spec, node.spec
    return target.workspace("conv2d_store", *arrays, windows, groups) // _FLOAT_NBYTES


def _layer(graph: Graph, node: Node) -> _Layer:
    last, residual, relu = node, None, False
    user = graph.only_user(last)
    if user is not None and user.op is add_op and user.spec == last.spec:
        left, right = user.inputs
        other = right if left is last else left
        if other is not last and other.spec == last.spec and graph.before([other], [node]):
            residual, last = other, user
            user = graph.only_user(last)
    if user is not None and user.op is relu_op:
        relu, last = True, user
    return _Layer(residual, relu, last)


def made(node: Node, residual: Node | None, relu: bool, last: Node, numel: int) -> Node:
    """What stands for `last`: a convolution with a store of so many floats, and what follows it."""
    store = constant_op(np.zeros(numel, np.float32), name=f"{node.inputs[1].name}.kept")
    store.spec = Spec((numel,), FLOAT32)
    inputs = [*node.inputs, *([residual] if residual is not None else []), store]
    one = kept_convolution_op(
        *inputs, body=close(inputs, [last]), convolution=node, adds=residual is not None, relu=relu
    )
    one.stand_for(last)
    one.spec = last.spec
    return one


KEPT_FILTERS = Pass("kept_filters", fuse, position=44, needs=("conv2d_kept", "conv2d_store"))
