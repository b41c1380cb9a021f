"""fuse_conv: a small convolution, the relu and the max-pool behind it as one kernel, and all that
their gradients do as one for the data and one for filter and bias (fusion/conv_pool_op.py).

What lies between is then never stored, forward or backward, so it must have no other reader; a
convolution whose gradients do not all fit stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32, normalize_axes
from ..ops.conv.convolution import (
    convolution_bias_op,
    convolution_op,
    data_gradient_op,
    filter_gradient_op,
)
from ..ops.conv.pooling import max_pool_gradient_op, max_pool_op
from ..ops.elementwise import relu_gradient_op, relu_op
from ..ops.movement import reshape_op
from ..ops.reduce import sum_op
from ..passes.rewrite import Graph, exchange, value_of
from .body import close
from .conv_pool_op import (
    Fits,
    Geometry,
    conv_pool_data_gradient_op,
    conv_pool_filter_bias_gradient_op,
    conv_pool_filter_gradient_op,
    conv_pool_op,
    small,
)
from .gemm_epilogue import shaped


class Forward(NamedTuple):
    """A convolution and what follows it: [relu,] pool [, relu]."""

    conv: Node
    relu: Node | None
    before: bool  # the relu is in front of the pool
    pool: Node
    value: Node | None  # the last value, where it is used
    argmax: Node | None
    geometry: Geometry
    fits: Fits


class Backward(NamedTuple):
    """From the gradient of the last value to those of the convolution's inputs."""

    dy: Node
    unpooled: Node  # the pool's gradient
    of_conv: Node  # what the convolution's gradients read
    data: list[Node]
    filters: list[Node]
    biases: list[Node]


def fuse_convolutions(fetches: Sequence[Node], gpu: bool) -> list[Node]:
    """The fetches over a graph with its small convolutions fused for a GPU, or else for the CPU.
    The graph, simplified for native devices, must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for pool in graph.order:
        forward = _forward(graph, pool, gpu) if pool.op is max_pool_op else None
        backwards = _backwards(graph, forward) if forward is not None else None
        if forward is not None and backwards is not None:
            code = _fuse_forward(forward, replaced)
            for backward in backwards:
                _fuse_backward(forward, backward, code, replaced)
    return exchange(fetches, replaced)


# ---- what there is ----


def _forward(graph: Graph, pool: Node, gpu: bool) -> Forward | None:
    source, relu = pool.inputs[0], None
    if source.op is relu_op:
        source, relu = source.inputs[0], source
    if source.op not in (convolution_op, convolution_bias_op) or source.spec.dtype != FLOAT32:
        return None
    if graph.only_user(source) is not (pool if relu is None else relu):
        return None
    if any(graph.is_fetched(node) for node in (relu, pool) if node is not None):
        return None
    if not all(user.op.projection for user in graph.users[pool]):
        return None
    values = {value.attrs["index"]: value for value in graph.users[pool]}
    value, argmax, before = values.get(0), values.get(1), relu is not None
    if argmax is not None and graph.is_fetched(argmax):
        return None
    if relu is None and value is not None and not graph.is_fetched(value):
        relu = next((user for user in graph.users[value] if user.op is relu_op), None)
        if relu is not None and any(user is not relu for user in graph.users[value]):
            relu = None
    x, f = (node.spec for node in source.inputs[:2])
    convolved = source.op.windows(source, x, f)
    pooled = pool.op.windows(pool, pool.inputs[0].spec.shape[2:])  # type: ignore[attr-defined]
    geometry = small(x, f, convolved, pooled, source.attrs["groups"])
    fits = geometry.fits(gpu) if geometry is not None else None
    if geometry is None or fits is None or not fits.forward:
        return None
    last = value if before or relu is None else relu
    return Forward(source, relu, before, pool, last, argmax, geometry, fits)


def _backwards(graph: Graph, forward: Forward) -> list[Backward] | None:
    """Every way back through the pool; None if one of them cannot be fused, or if anything else
    reads what would not be stored.
    """
    ways: list[Backward] = []
    for unpooled in graph.users[forward.argmax] if forward.argmax is not None else ():
        way = _backward(graph, forward, unpooled)
        if way is None:
            return None
        ways.append(way)
    if forward.relu is not None and forward.before:
        known = {forward.pool, *(way.of_conv for way in ways)}
        if not known.issuperset(graph.users[forward.relu]):
            return None
    return ways


def _backward(graph: Graph, forward: Forward, unpooled: Node) -> Backward | None:
    if unpooled.op is not max_pool_gradient_op or graph.is_fetched(unpooled):
        return None
    dy, of_conv = unpooled.inputs[0], unpooled
    if forward.relu is not None:
        masked = graph.only_user(unpooled) if forward.before else dy
        if masked is None or masked.op is not relu_gradient_op:
            return None
        if masked.inputs[0] is not forward.relu:
            return None
        if forward.before:
            if masked.inputs[1] is not unpooled or graph.is_fetched(masked):
                return None
            of_conv = masked
        else:
            dy = masked.inputs[1]
    way = Backward(dy, unpooled, of_conv, [], [], [])
    for user in graph.users[of_conv]:
        kind = _kind(forward, way, user)
        if kind is None:
            return None
        kind.append(user)
    complete = len(way.filters) == 1 and len(way.biases) <= 1
    return way if forward.fits.filter_gradient and complete else None


def _kind(forward: Forward, way: Backward, user: Node) -> list[Node] | None:
    """Which gradient of the convolution a reader of its output's gradient is."""
    x, f = forward.conv.inputs[:2]
    if user.op is sum_op:
        axes = normalize_axes(user, user.attrs["axis"], 4)
        return way.biases if axes == (0, 2, 3) else None
    if user.op not in (data_gradient_op, filter_gradient_op):
        return None
    windows = user.op.windows(user, *(node.spec for node in user.inputs))
    ours = forward.conv.op.windows(forward.conv, x.spec, f.spec)  # type: ignore[attr-defined]
    if windows != ours or user.attrs["groups"] != 1 or user.inputs[1] is not way.of_conv:
        return None
    if user.op is data_gradient_op:
        return way.data if forward.fits.data_gradient else None
    return way.filters if user.inputs[0] is x else None


# ---- what comes of it ----


def _fuse_forward(forward: Forward, replaced: dict[Node, Node]) -> Node:
    """Notes what takes the place of the last value; the codes of the maxima."""
    conv, pool = forward.conv, forward.pool
    with attributed_to(conv):
        value, argmax = forward.value, forward.argmax
        outputs = [
            value_of(pool, 0) if value is None else value,
            value_of(pool, 1) if argmax is None else argmax,
        ]
        made = conv_pool_op(
            *conv.inputs,
            body=close(conv.inputs, outputs),
            geometry=forward.geometry,
            relu=forward.relu is not None,
        )
        made.stand_for(pool)
        if value is not None:
            replaced[value] = value_of(made, 0, value)
        return value_of(made, 1, argmax)


def _fuse_backward(forward: Forward, way: Backward, code: Node, replaced: dict[Node, Node]) -> None:
    argmax = way.unpooled.inputs[1]
    unpooled = way.unpooled.derive([way.dy, argmax], way.unpooled.spec)

    def body_of(first: Node, gradients: Sequence[Node]) -> dict:
        """The gradients over (first, dy, argmax): the relu's part is in the codes."""
        inputs = first, way.dy, argmax
        derived = [
            g.derive([unpooled if x is way.of_conv else x for x in g.inputs], g.spec)
            for g in gradients
        ]
        outputs = [derived[0], *map(_flat, derived[1:])]
        return {"body": close(inputs, outputs), "geometry": forward.geometry}

    for node in way.data:
        with attributed_to(node):
            f = node.inputs[0]
            made = conv_pool_data_gradient_op(f, way.dy, code, **body_of(f, [node]))
            made.stand_for(node)
            replaced[node] = made
    gradients = [*way.filters, *way.biases]
    x, node = forward.conv.inputs[0], way.filters[0]
    with attributed_to(node):
        if not way.biases:
            made = conv_pool_filter_gradient_op(x, way.dy, code, **body_of(x, gradients))
            made.stand_for(node)
            replaced[node] = made
            return
        made = conv_pool_filter_bias_gradient_op(x, way.dy, code, **body_of(x, gradients))
        made.stand_for(node)
        replaced[node] = value_of(made, 0, node)
        total = way.biases[0]
        replaced[total] = shaped(value_of(made, 1, total), total)


def _flat(node: Node) -> Node:
    """A bias's gradient without the axes that its sum may have kept."""
    return node if len(node.spec.shape) == 1 else reshape_op(node, (node.spec.size,))
