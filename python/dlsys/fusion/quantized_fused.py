"""Quantized convolutions of few images with what stands around them, which is a launch each
otherwise.

Pattern: [quantize, and the change to channels last,] quantized_conv2d [, a sum with another
quantized tensor, or a max-pool by windows of 2 x 2 that do not overlap]. What is in brackets is
left out where it is not there or something else reads it. Values between are never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arguments.kinds import Instance, Int
from ..arguments.signature import Signature
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32
from ..ops.movement import reshape_op, transpose_op
from ..ops.quantize import (
    UINT8,
    quantize_op,
    quantized_add_op,
    quantized_conv2d_op,
    quantized_max_pool2d_op,
)
from ..passes.pipeline import Options, Pass
from ..runtime.target import Target
from .shared.body import Body, Fused, close
from .shared.rewrite import Graph, exchange

_POOL = 2  # positions along a side of a window
_NO_SUM = (0.0, 0.0, 0.0, 0)


class QuantizedConvolutionOp(Fused):
    """Inputs: x, packed filters, bias and multiplier of a quantized_conv2d; then, where `unit` is
    1, what x, in float32 and (N, C, H, W), is quantized by; then, where `sum` is a node, what is
    added.
    """

    tolerance = 0.0
    reads_host = True

    def __init__(self) -> None:
        super().__init__("quantized_conv2d_fused", any_dtype=True)
        self.signature = Signature(
            "*inputs", body=Instance(Body), convolution=Instance(Node), unit=Int(0, low=0, high=1),
            pool=Int(1, low=1, high=_POOL), sum=Instance(tuple),
        )  # fmt: skip

    def lists(self, node: Node) -> tuple[int, int]:
        return 2 * node.attrs["unit"], int(bool(node.attrs["sum"]))

    def scalars(self, node: Node) -> tuple[Any, ...]:
        convolution, added = node.attrs["convolution"], node.attrs["sum"] or _NO_SUM
        scalars = convolution.op.scalars(convolution)
        return *scalars, node.attrs["pool"], *added


quantized_convolution_op = QuantizedConvolutionOp()


class _Layer(NamedTuple):
    """A convolution with what stands around it that nothing else reads."""

    convolution: Node
    quantization: Node | None
    sum: Node | None
    pool: Node | None

    @property
    def last(self) -> Node:
        parts = (part for part in (self.sum, self.pool) if part is not None)
        return next(parts, self.convolution)

    @property
    def found(self) -> bool:
        return self.last is not self.convolution or self.quantization is not None


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose quantized convolutions are fused with their surroundings. The
    graph must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op is quantized_conv2d_op:
            layer = _layer(graph, node)
            for one in (layer, layer._replace(quantization=None)):
                if one.found and _fits(one, options.target):
                    with attributed_to(one.last):
                        replaced[one.last] = _made(one)
                    break
    return exchange(fetches, replaced)


def _layer(graph: Graph, node: Node) -> _Layer:
    user = graph.only_user(node) if node.spec.dtype == UINT8 else None
    added = pooled = None
    if user is not None and user.op is quantized_add_op:
        other = _other(user, node)
        added = user if other is not node and graph.before([other], [node]) else None
    elif user is not None and user.op is quantized_max_pool2d_op and _is_tiled(user):
        pooled = user
    return _Layer(node, _quantization(graph, node), added, pooled)


def _other(add: Node, node: Node) -> Node:
    return add.inputs[1] if add.inputs[0] is node else add.inputs[0]


def _is_tiled(pool: Node) -> bool:
    """True for windows of 2 x 2 beside each other, from the first element on."""
    windows = pool.op.windows(pool, pool.inputs[0].spec)  # type: ignore[attr-defined]
    square = (_POOL, _POOL)
    inside = all(n * _POOL <= extent for n, extent in zip(windows.out, windows.image))
    plain = windows.size == windows.stride == square and windows.dilation == (1, 1)
    return plain and inside and not any(map(any, windows.padding))


def _quantization(graph: Graph, node: Node) -> Node | None:
    """The quantization of the images, by one scale, that a convolution alone reads."""
    moved = node.inputs[0]
    if moved.op not in (reshape_op, transpose_op) or graph.only_user(moved) is not node:
        return None
    found = moved.inputs[0]
    n, c, h, w = found.spec.shape if len(found.spec.shape) == 4 else (-1, -1, -1, -1)
    if found.op is not quantize_op or moved.spec.shape != (n, h, w, c):
        return None
    if moved.op is transpose_op and tuple(moved.attrs["axes"]) != (0, 2, 3, 1):
        return None
    if moved.op is reshape_op and c != 1 and h * w != 1:
        return None
    x, scale, zero = found.inputs
    one = scale.spec.size == 1 and x.spec.dtype == FLOAT32 and zero.spec.dtype == UINT8
    return found if one and graph.only_user(found) is moved else None


def _inputs(layer: _Layer) -> list[Node]:
    inputs = list(layer.convolution.inputs)
    if layer.quantization is not None:
        inputs[0] = layer.quantization.inputs[0]
        inputs += layer.quantization.inputs[1:]
    return inputs if layer.sum is None else [*inputs, _other(layer.sum, layer.convolution)]


def _numbers(layer: _Layer) -> tuple[float, ...]:
    """The scales of a sum, the convolution's first, its offset and its least value."""
    if layer.sum is None:
        return ()
    scale_a, scale_b, offset, low, _ = layer.sum.op.scalars(layer.sum)
    swapped = layer.sum.inputs[0] is not layer.convolution
    return (scale_b, scale_a, offset, low) if swapped else (scale_a, scale_b, offset, low)


def _fits(layer: _Layer, target: Target) -> bool:
    specs = [x.spec for x in _inputs(layer)]
    added = specs.pop() if layer.sum is not None else None
    scalars = layer.convolution.op.scalars(layer.convolution)
    pool = 1 if layer.pool is None else _POOL
    numbers = _numbers(layer) or _NO_SUM
    return target.fits(
        "quantized_conv2d_fused", *specs[:4], specs[4:], [added] if added else [], *scalars, pool,
        *numbers, layer.last.spec,
    )  # fmt: skip


def _made(layer: _Layer) -> Node:
    inputs = _inputs(layer)
    made = quantized_convolution_op(
        *inputs,
        body=close(inputs, [layer.last]),
        convolution=layer.convolution,
        unit=int(layer.quantization is not None),
        pool=1 if layer.pool is None else _POOL,
        sum=_numbers(layer),
    )
    made.stand_for(layer.last)
    made.spec = layer.last.spec
    return made


FUSION = Pass("quantized_fused", fuse, position=6, needs=("quantized_conv2d_fused",))
