"""Relu's gradient, and its sums for batch normalization, where a convolution stores the gradient of
its data: neither is made by a kernel that reads it again.

Patterns, of convolutions with channels last: the data gradient [+ another gradient],
relu's gradient of that by bits (relu_bits.py), and the sums of the normalization before relu. The
normalization's own gradient then reads relu's gradient as it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arguments.kinds import Instance, Int
from ...arguments.signature import Signature
from ...dtypes import bfloat16
from ...graph.lines import attributed_to
from ...graph.node import Node
from ...ops.conv.geometry import Windows
from ...ops.elementwise import add_op
from ...ops.norm.batch_norm import EPS, batch_normalize_gradient_op, batch_normalize_sums_op
from ...passes.pipeline import Options, Pass
from ..shared.body import Body, close, in_shape, shaped
from ..shared.image_operators import OverImages, data_gradient_channels_last_op
from ..shared.norm_operators import (
    batch_normalize_map_gradient_op,
    batch_normalize_map_op,
    batch_normalize_map_sums_op,
    keep_by_bits_op,
    keeps_bits,
    relu_bits_sums_ops,
    with_bits,
)
from ..shared.rewrite import Graph, exchange, strip_views, value_of


class GradientSums(OverImages):
    """dz, dscale and dbias: relu's gradient of the data gradient [+ an addend], and its sums.

    Inputs: f and dy of the convolution, the bits of relu, x, mean and variance of the
    normalization, then the addend.
    """

    signature = Signature(
        "*inputs", body=Instance(Body), windows=Instance(Windows), groups=Int(low=1), eps=EPS
    )

    def __init__(self, addends: int) -> None:
        super().__init__("conv2d_data_gradient_channels_last_sums", 3, (2,))
        self._addends = addends
        self.inplace = (6,) if addends else False  # each element of the addend is read before

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return float(node.attrs["eps"]), node.attrs["windows"].argument, node.attrs["groups"]

    def lists(self, node: Node) -> tuple[int]:
        return (self._addends,)


gradient_sums_ops = {addends: GradientSums(addends) for addends in (0, 1)}
_CHANNELS = 64  # which the kernel takes by so many


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph in which data gradients of convolutions are relu's gradients with
    their sums. The graph must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for sums in graph.order:
        if sums.op in relu_bits_sums_ops.values():
            _after_a_sum(graph, sums, replaced)
        elif sums.op is batch_normalize_map_sums_op:
            _after_a_map(graph, sums, replaced)
    return exchange(fetches, replaced)


def _after_a_sum(graph: Graph, sums: Node, replaced: dict[Node, Node]) -> None:
    """Where relu was of a sum, whose gradient is kept for all that read it."""
    x, mean, variance, bits, *dys, _ = sums.inputs
    for k, dy in enumerate(dys):
        if graph.only_user(dy) is sums and _is_gradient(graph, dy):
            others = dys[:k] + dys[k + 1 :]
            made = _made(strip_views(dy), (bits, x, mean, variance), others, sums)
            for value in graph.users[sums]:
                replaced[value] = _value(made, (value.attrs["index"] + 1) % 3, value)
            return


def _after_a_map(graph: Graph, sums: Node, replaced: dict[Node, Node]) -> None:
    """Where relu was of what is normalized: its gradient has one more reader."""
    x, mean, variance, scale, bias, dy, _ = sums.inputs
    maps = [user for user in graph.users[x] if user.op is batch_normalize_map_op]
    maps = [y for y in maps if y.inputs == sums.inputs[:5] and keeps_bits(y)]
    gradients = [
        user
        for user in graph.users[dy]
        if user.op is batch_normalize_map_gradient_op
        and [*user.inputs[:5], user.inputs[7]] == sums.inputs[:6]
    ]
    is_all = len(gradients) == 1 and len(graph.users[dy]) == 2 and not graph.is_fetched(dy)
    if not (is_all and maps and _is_gradient(graph, dy)):
        return
    (gradient,), y = gradients, maps[0]
    if y not in replaced:
        replaced[y] = with_bits(y)
    bits = value_of(replaced[y].inputs[0], 1)
    made = _made(strip_views(dy), (bits, x, mean, variance), [], sums)
    for value in graph.users[sums]:
        replaced[value] = _value(made, value.attrs["index"] + 1, value)
    with attributed_to(gradient):
        dz = in_shape(value_of(made, 0), x.spec.shape)
        of = (x, mean, variance, scale, *gradient.inputs[5:7], dz)
        replaced[gradient] = batch_normalize_gradient_op(*of, eps=sums.attrs["eps"])
        replaced[gradient].stand_for(gradient)


def _is_gradient(graph: Graph, dy: Node) -> bool:
    """True for a data gradient of which nobody reads anything but `dy`, where the kernel fits."""
    node = strip_views(dy)
    if node.op is not data_gradient_channels_last_op or "algo" in node.attrs:
        return False
    fits = node.attrs["windows"].stride == (1, 1) and node.attrs["groups"] == 1
    by_channels = dy.spec.shape[1:] == node.spec.shape[3:] and dy.spec.shape[1] % _CHANNELS == 0
    view = dy
    while view is not node:
        view = view.inputs[0]
        if graph.only_user(view) is None:
            return False
    return fits and by_channels


def _made(gradient: Node, of_norm: Sequence[Node], others: Sequence[Node], sums: Node) -> Node:
    bits, x, mean, variance = of_norm
    eps, shape = sums.attrs["eps"], x.spec.shape
    with attributed_to(sums):
        dy = in_shape(gradient, shape)
        others = [in_shape(other, gradient.spec.shape) for other in others]
        dz = keep_by_bits_op(bits, add_op(dy, in_shape(others[0], shape)) if others else dy)
        of_dz = batch_normalize_sums_op(x, mean, variance, dz, eps=eps, training=True)
        outputs = in_shape(dz, gradient.spec.shape), value_of(of_dz, 0), value_of(of_dz, 1)
        inputs = (*gradient.inputs, bits, x, mean, variance, *others)
        kept = {key: value for key, value in gradient.attrs.items() if key != "body"}
        attrs = {key: value for key, value in kept.items() if key != "precision"}
        made = gradient_sums_ops[len(others)](
            *inputs, body=close(inputs, outputs), eps=eps, **attrs
        )
        made.attrs = {**made.attrs, **kept}
    made.stand_for(sums)
    return made


def _value(made: Node, index: int, like: Node) -> Node:
    """A value in the place of the one that it replaces."""
    value = value_of(made, index, like)
    return shaped(value, like)


def _has_kernels(options: Options) -> bool:
    return options.target.has(gradient_sums_ops[0].kernel, bfloat16)


FUSION = Pass("gradient_sums", fuse, position=57, when=_has_kernels)
