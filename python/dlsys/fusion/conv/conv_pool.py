"""Convolution and pooling: a small convolution, the relu and the max-pool behind it as one kernel,
and all that their gradients do as one for the data and one for filter and bias.

Pattern: convolution, [relu,] max-pool [, relu], and every way back through the pool. Values
between them are then never stored, so they must have no other reader, and a convolution whose
gradients do not all fit stays as it is. Of the H×W before the pool only a byte a window is kept:
the position of its maximum in row-major order, or CUT where relu lets no gradient pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ...graph.lines import attributed_to
from ...graph.node import Node
from ...graph.spec import FLOAT32, Spec, normalize_axes
from ...ops.conv.convolution import (
    convolution_bias_op,
    convolution_op,
    data_gradient_op,
    filter_gradient_op,
)
from ...ops.conv.geometry import Windows
from ...ops.conv.pooling import max_pool_gradient_op, max_pool_op
from ...ops.conv.tiles import UINT8, pays
from ...ops.elementwise import relu_gradient_op, relu_op
from ...ops.movement import reshape_op
from ...ops.reduce import sum_op
from ...passes.pipeline import Options, Pass
from ...runtime.interface import interface
from ...runtime.target import Target
from ..shared.body import close, shaped
from ..shared.conv_pool_operators import (
    Geometry,
    conv_pool_data_gradient_op,
    conv_pool_filter_bias_gradient_op,
    conv_pool_filter_gradient_op,
    conv_pool_op,
)
from ..shared.rewrite import Graph, Pattern, exchange, value_of

_HW = interface.struct("HW")


class Fits(NamedTuple):
    """Which of a layer's kernels a device has, and has no slower than what they replace."""

    forward: bool
    data_gradient: bool
    filter_gradient: bool


@lru_cache
def fits(geometry: Geometry, target: Target) -> Fits:
    """The fused kernels that a target has for this geometry, of any number of images, in float32:
    at another precision they serve the same.
    """
    g = geometry
    if not target.native:
        return Fits(*3 * (pays(g.channels, g.filters),))
    x, f = (Spec((n, g.channels, *e), FLOAT32) for n, e in ((1, g.plane), (g.filters, g.size)))
    y = Spec((1, g.filters, *g.out), FLOAT32)
    code, attrs = y._replace(dtype=UINT8), (_HW(*g.before), g.window)
    return Fits(
        target.fits("conv2d_pool", x, f, [], y, code, *attrs, 1, 0),
        target.fits("conv2d_pool_data_gradient", f, y, code, x, *attrs, 0),
        target.fits("conv2d_pool_filter_gradient", x, y, code, [f], *attrs, 0),
    )


def small(x: Spec, f: Spec, conv: Windows, pool: Windows, groups: int) -> Geometry | None:
    """The geometry of a convolution of x by f that is pooled, if these operators can have it: at
    stride 1, in one group, under square windows of 2 or 3 that neither overlap nor reach over the
    edge.
    """
    window = pool.size[0]
    around = zip(conv.size, conv.before, conv.after)
    plain = conv.stride == conv.dilation == (1, 1) and groups == 1
    plain = plain and all(max(before, after) < k for k, before, after in around)
    tiled = window in (2, 3) and pool.size == pool.stride == (window, window)
    tiled = tiled and pool.dilation == (1, 1)
    inside = all(n * window <= extent for n, extent in zip(pool.out, pool.image))
    if not (plain and tiled and inside) or pool.before != (0, 0):
        return None
    sizes = conv.image, conv.size, conv.before, pool.image, window, pool.out
    return Geometry(x.shape[1], f.shape[0], *sizes)


# ---- the pattern ----


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


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph with its small convolutions fused. The graph,
    simplified for native devices, must be the executor's own: its nodes change."""
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for pool in graph.order:
        forward = _forward(graph, pool, options.target) if pool.op is max_pool_op else None
        backwards = _backwards(graph, forward) if forward is not None else None
        if forward is not None and backwards is not None:
            code = _fuse_forward(forward, replaced)
            for backward in backwards:
                _fuse_backward(forward, backward, code, replaced)
    return exchange(fetches, replaced)


# ---- what there is ----


_CONV = Pattern((convolution_op, convolution_bias_op), name="conv", alone=True)
_FORWARD = Pattern(
    max_pool_op, Pattern(relu_op, _CONV, name="relu", hidden=True) | _CONV, hidden=True
)
# Ways back to what the convolution's gradients read: with the relu in front of the pool, with it
# behind the pool, and without one.
_UNPOOLED = Pattern(max_pool_gradient_op, "dy", "argmax", name="unpooled", alone=True)
_BACK_TO_RELU = Pattern(relu_gradient_op, "relu", _UNPOOLED, hidden=True)
_BACK_FROM_RELU = Pattern(
    max_pool_gradient_op, Pattern(relu_gradient_op, "relu", "dy"), "argmax", name="unpooled",
    hidden=True,
)  # fmt: skip
_BACK = Pattern(max_pool_gradient_op, "dy", "argmax", name="unpooled", hidden=True)


def _forward(graph: Graph, pool: Node, target: Target) -> Forward | None:
    found = _FORWARD.match(graph, pool)
    if found is None or not target.has(conv_pool_op.kernel, found["conv"].spec.dtype):
        return None
    if "algo" in found["conv"].attrs:  # the fused kernels are no rung
        return None
    if not all(user.op.projection for user in graph.users[pool]):
        return None
    conv, relu = found["conv"], found.get("relu")
    values = {value.attrs["index"]: value for value in graph.users[pool]}
    value, argmax, before = values.get(0), values.get(1), relu is not None
    if argmax is not None and graph.is_fetched(argmax):
        return None
    if relu is None and value is not None and not graph.is_fetched(value):
        readers = dict.fromkeys(graph.users[value])
        relu = next(iter(readers)) if [x.op for x in readers] == [relu_op] else None
    x, f = (node.spec for node in conv.inputs[:2])
    convolved = conv.op.windows(conv, x, f)  # type: ignore[attr-defined]
    pooled = pool.op.windows(pool, pool.inputs[0].spec.shape[2:])  # type: ignore[attr-defined]
    geometry = small(x, f, convolved, pooled, conv.attrs["groups"])
    kernels = fits(geometry, target) if geometry is not None else None
    if geometry is None or kernels is None or not kernels.forward:
        return None
    last = value if before or relu is None else relu
    return Forward(conv, relu, before, pool, last, argmax, geometry, kernels)


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
    pattern, last = _BACK, unpooled
    known: dict[str, Node] = {}
    if forward.relu is not None:
        pattern, known = _BACK_FROM_RELU, {"relu": forward.relu}
        if forward.before:
            user = graph.only_user(unpooled)
            pattern, last = _BACK_TO_RELU, unpooled if user is None else user
    found = pattern.match(graph, last, **known)
    if found is None:
        return None
    way = Backward(found["dy"], unpooled, last, [], [], [])
    for user in graph.users[last]:
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
        """The gradients over (first, dy, argmax): relu's gradient is in the codes."""
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


FUSION = Pass(
    "conv_pool",
    fuse,
    position=10,
    needs=("conv2d_pool", "conv2d_pool_data_gradient", "conv2d_pool_filter_gradient"),
)
