"""Integer arithmetic for graphs with quantization: products, sums and poolings between dequantized
inputs and a quantized output read and write integers of 8 bits.

Patterns: quantize(relu(conv2d(dequantize(x), dequantize(w)) + bias)), with or without relu and bias
and the same for a matrix product; without the quantization at the end it gives floats. Weights are
constants of 8 bits around 0, with a scale for each output channel. A sum of two dequantized tensors
that is quantized, with or without relu. And what moves elements or selects the largest, between a
dequantization and a quantization by the same numbers, which cancel. Weights are packed here, when
the graph is planned; the bias, less the input's zero point times the weights, is one int32 for each
output. Images are transposed once, to channels last, where a chain of such operators begins, and
back where it ends. int8 tensors become uint8 with 128 more. Remaining constants are dequantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort
from ..graph.spec import FLOAT32
from ..ops.conv.convolution import convolution_bias_op, convolution_op
from ..ops.conv.pooling import max_pool_op
from ..ops.elementwise import add_op, relu_op
from ..ops.leaf import constant_op
from ..ops.matmul import batched_matmul_op, matmul_op
from ..ops.movement import broadcast_to_op, reshape_op, transpose_op
from ..ops.quantize import (
    INT8,
    UINT8,
    dequantize_op,
    packed,
    quantize_op,
    quantized_add_op,
    quantized_conv2d_op,
    quantized_matmul_op,
    quantized_max_pool2d_op,
)
from ..passes.pipeline import Options, Pass
from .shared.rewrite import Graph, exchange

_MOST = 65_000  # inputs of a product: 255 · 127 times as many are below 2^31
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # axes for channels last and back
_MATRICES = (matmul_op, batched_matmul_op)
_KERNELS = {
    convolution_op: "quantized_conv2d",
    convolution_bias_op: "quantized_conv2d",
    matmul_op: "quantized_matmul",
    batched_matmul_op: "quantized_matmul",
}


class Quantized(NamedTuple):
    """A tensor of uint8: its node, and what the integers mean."""

    node: Node
    scale: float
    zero: int


class Weights(NamedTuple):
    """Weights int8 (N, K) of a product, a scale for each output, and the bias in float64."""

    values: np.ndarray
    scale: np.ndarray
    bias: np.ndarray


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph that computes with integers where it can. The graph must be the
    executor's own: its nodes change.
    """
    graph = Graph(fetches)
    if not any(node.op is dequantize_op for node in graph.order):
        return list(fetches)
    lowering = _Lowering(graph, options)
    for node in graph.order:
        with attributed_to(node):
            lowering.visit(node)
    return _dequantized(exchange(fetches, lowering.replaced))


class _Lowering:
    """The walk over a graph, inputs before users."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self._graph, self._options = graph, options
        self.replaced: dict[Node, Node] = {}
        self._made: dict[Node, Quantized] = {}  # by the quantize node
        self._channels_last: dict[Node, Node] = {}  # images, by their node in either layout

    def visit(self, node: Node) -> None:
        """Finds what may be computed in integers at a node."""
        if node.op is quantize_op:
            self._visit_quantize(node)
        elif node.op in _KERNELS and self._has(_KERNELS[node.op]):
            self._visit_product(node)

    def _has(self, kernel: str) -> bool:
        return not self._options.target.native or self._options.target.has(kernel)

    # ---- tensors ----
    def _visit_quantize(self, node: Node) -> None:
        numbers = _numbers(node)
        if numbers is None or node in self._made:
            return
        made = self._sum(node, *numbers)
        made = self._moved(node, *numbers) if made is None else made
        if made is None and node.spec.dtype == INT8:
            zero = constant_op(np.array(numbers[1], np.uint8))
            scale_of = reshape_op(node.inputs[1], ())
            made = quantize_op(node.inputs[0], scale_of, zero)
        self._enter(node, node if made is None else made, *numbers)

    def _enter(self, node: Node, made: Node, scale: float, zero: int) -> None:
        """Notes what stands for a quantize node, and dequantizes that for all other readers."""
        self._made[node] = Quantized(made, scale, zero)
        if made is node:
            return
        made.stand_for(node)
        if node.spec.dtype == UINT8:
            self.replaced[node] = made
            return
        for reader in self._graph.users[node]:
            if reader.op is dequantize_op and not self._graph.is_fetched(node):
                moved = constant_op(np.array(zero, np.uint8))
                self.replaced[reader] = dequantize_op(made, reader.inputs[1], moved)

    def _source(self, x: Node) -> Quantized | None:
        """The integers that a node dequantizes; None where it does something else."""
        if x.op is not dequantize_op or x.spec.dtype != FLOAT32:
            return None
        numbers, before = _numbers(x), x.inputs[0]
        if before in self._made:
            made = self._made[before]
            return made if numbers == (made.scale, made.zero) else None
        return Quantized(before, *numbers) if numbers and before.spec.dtype == UINT8 else None

    def _last(self, node: Node) -> Node:
        """Images in the layout (N, H, W, C)."""
        if node not in self._channels_last:
            n, c, h, w = node.spec.shape
            one = c == 1 or h * w == 1
            made = reshape_op(node, (n, h, w, c)) if one else transpose_op(node, _LAST)
            self._channels_last[node] = made
        return self._channels_last[node]

    def _first(self, node: Node) -> Node:
        """Images (N, H, W, C) in the layout of all other operators."""
        n, h, w, c = node.spec.shape
        one = c == 1 or h * w == 1
        made = reshape_op(node, (n, c, h, w)) if one else transpose_op(node, _FIRST)
        self._channels_last[made] = node
        return made

    # ---- products ----
    def _visit_product(self, node: Node) -> None:
        x, weights = self._source(node.inputs[0]), _weights(node)
        if x is None or weights is None:
            return
        top, bias = self._with_bias(node, weights)
        relu = self._graph.only_user(top)
        end = relu if relu is not None and relu.op is relu_op else top
        users = self._graph.users[end]
        if users and all(u.op is quantize_op and _numbers(u) for u in users):
            if not self._graph.is_fetched(end):
                for user in users:
                    scale, zero = _numbers(user) or (1.0, 0)
                    low = zero if end is not top else 0
                    result = dict(zero=zero, low=low)
                    made = self._product(node, x, weights._replace(bias=bias), scale, result)
                    self._enter(user, made, scale, zero)
                return
        made = self._product(node, x, weights._replace(bias=bias), 1.0, {"dtype": FLOAT32})
        made.stand_for(top)
        self.replaced[top] = made

    def _with_bias(self, node: Node, weights: Weights) -> tuple[Node, np.ndarray]:
        """The product with the bias that is added to it, and that bias."""
        user = self._graph.only_user(node)
        if user is not None and user.op is add_op and node.op in _MATRICES:
            other = user.inputs[1] if user.inputs[0] is node else user.inputs[0]
            while other.op in (broadcast_to_op, reshape_op):
                other = other.inputs[0]
            value = _value(other)
            if value is not None and value.size in (1, len(weights.bias)):
                return user, weights.bias + value.reshape(-1)
        return node, weights.bias

    def _product(
        self, node: Node, x: Quantized, weights: Weights, scale: float, result: dict[str, Any]
    ) -> Node:
        """A product in integers, in the layout of the node."""
        of_sums = np.float32(x.scale) * weights.scale.astype(np.float32)
        rows, values = x.node, weights.values
        if node.op in _MATRICES:
            rows, values = self._rows(rows, values)
        bias = np.rint(weights.bias / of_sums.astype(np.float64))
        bias -= x.zero * values.sum(axis=1, dtype=np.int64)
        limits = np.iinfo(np.int32)
        operands = (
            constant_op(packed(values)),
            constant_op(np.clip(bias, limits.min, limits.max).astype(np.int32)),
            constant_op(of_sums / np.float32(scale)),
        )
        if node.op in _MATRICES:
            return quantized_matmul_op(rows, *operands, **result)
        attrs = {key: node.attrs[key] for key in ("stride", "padding", "dilation")}
        size = node.inputs[1].spec.shape[2:]
        images = self._last(x.node)
        return self._first(
            quantized_conv2d_op(images, *operands, size=size, pad=x.zero, **attrs, **result)
        )

    def _rows(self, x: Node, values: np.ndarray) -> tuple[Node, np.ndarray]:
        """The rows of a product and its weights (N, K): where the rows are images that were made
        flat, with the inputs in the order that these have as channels last.
        """
        images = x.inputs[0] if x.op is reshape_op else x
        last = self._channels_last.get(images)
        if last is None or len(images.spec.shape) != 4:
            return x, values
        n, c, h, w = images.spec.shape
        if x.spec.shape != (n, c * h * w):
            return x, values
        moved = values.reshape(-1, c, h * w).transpose(0, 2, 1).reshape(values.shape)
        return reshape_op(last, x.spec.shape), moved

    # ---- sums, and what moves elements ----
    def _sum(self, node: Node, scale: float, zero: int) -> Node | None:
        top = node.inputs[0]
        low = zero if top.op is relu_op else 0
        top = top.inputs[0] if top.op is relu_op else top
        if top.op is not add_op or not self._has("quantized_add"):
            return None
        a, b = map(self._source, top.inputs)
        if a is None or b is None or a.node.spec.shape != b.node.spec.shape:
            return None
        scales = np.float32(a.scale) / np.float32(scale), np.float32(b.scale) / np.float32(scale)
        offset = np.float32(zero - float(scales[0]) * a.zero - float(scales[1]) * b.zero)
        attrs = dict(scale_a=scales[0], scale_b=scales[1], offset=offset, low=low)
        known = self._channels_last
        if a.node in known and b.node in known:
            return self._first(quantized_add_op(known[a.node], known[b.node], **attrs))
        return quantized_add_op(a.node, b.node, **attrs)

    def _moved(self, node: Node, scale: float, zero: int) -> Node | None:
        """What an operator makes of the integers, where it commutes with quantization."""
        top = node.inputs[0]
        same = self._source(top)
        if same is not None and (same.scale, same.zero) == (scale, zero):
            return same.node
        pool = top.inputs[0] if top.op.projection and top.attrs["index"] == 0 else None
        pool = pool if pool is not None and pool.op is max_pool_op else None
        mover = top if pool is None else pool
        if pool is None and not (top.op.movement and len(top.inputs) == 1):
            return None
        x = self._source(mover.inputs[0])
        if x is None or (x.scale, x.zero) != (scale, zero):
            return None
        if pool is None:
            return top.derive([x.node], top.spec._replace(dtype=UINT8))
        if not self._has("quantized_max_pool2d"):
            return None
        windows = pool.op.windows(pool, pool.inputs[0].spec.shape[2:])  # type: ignore[attr-defined]
        if windows.out != top.spec.shape[2:] or _open_ended(windows):
            return None
        attrs = dict(size=windows.size, stride=windows.stride, dilation=windows.dilation)
        padding = windows.padding
        return self._first(quantized_max_pool2d_op(self._last(x.node), padding=padding, **attrs))


def _open_ended(windows: Any) -> bool:
    """True where the last windows reach over the padding, as `ceil_mode` lets them."""
    return any(
        (n - 1) * s + e > i + sum(p)
        for n, s, e, i, p in zip(
            windows.out, windows.stride, windows.extents, windows.image, windows.padding
        )
    )


def _numbers(node: Node) -> tuple[float, int] | None:
    """The scale and the zero point of one value each, as for uint8."""
    scale, zero = node.inputs[1], node.inputs[2]
    if scale.op is not constant_op or zero.op is not constant_op or scale.spec.size != 1:
        return None
    shift = 128 if zero.spec.dtype == INT8 else 0
    value = float(np.float32(scale.attrs["value"].item()))
    if zero.spec.dtype not in (INT8, UINT8) or not value > 0:
        return None
    return value, int(zero.attrs["value"].item()) + shift


def _value(node: Node) -> np.ndarray | None:
    """The floats of a constant, also of a dequantized one, in float64."""
    if node.op is constant_op:
        return node.attrs["value"].astype(np.float64)
    if node.op is not dequantize_op or any(x.op is not constant_op for x in node.inputs):
        return None
    x, scale, zero = (each.attrs["value"].astype(np.float64) for each in node.inputs)
    axis = [1] * x.ndim
    if scale.ndim:
        axis[node.attrs["axis"] % x.ndim] = -1
    return (x - zero.reshape(axis)) * scale.reshape(axis)


def _weights(node: Node) -> Weights | None:
    """The weights of a product, None where they are no constants of 8 bits around 0."""
    w = node.inputs[1]
    matrix = node.op in _MATRICES
    if w.op is not dequantize_op or any(x.op is not constant_op for x in w.inputs):
        return None
    if matrix and (len(w.spec.shape) != 2 or node.attrs["trans_A"]):
        return None
    if not matrix and node.attrs["groups"] != 1:
        return None
    values, scale, zero = (x.attrs["value"] for x in w.inputs)
    rows = 0 if not matrix or node.attrs["trans_B"] else 1
    along = scale.size == 1 or w.attrs["axis"] % values.ndim == rows
    if values.dtype not in (INT8, UINT8) or not along:
        return None
    if np.any(zero != (128 if values.dtype == UINT8 else 0)) or not np.all(scale > 0):
        return None
    signed = (values.astype(np.int16) - int(zero.flat[0])).astype(np.int8)
    signed = np.moveaxis(signed, 1, -1) if not matrix else signed.T if rows else signed
    signed = signed.reshape(signed.shape[0], -1)
    bias = np.zeros(len(signed))
    if node.op is convolution_bias_op:
        value = _value(node.inputs[2])
        if value is None:
            return None
        bias = bias + value
    scales = np.broadcast_to(scale.reshape(-1), len(signed))
    return Weights(signed, scales, bias) if signed.shape[1] <= _MOST else None


def _dequantized(fetches: Sequence[Node]) -> list[Node]:
    """The fetches with floats for constants that are still dequantized at each run."""
    replaced: dict[Node, Node] = {}
    for node in find_topo_sort(fetches):
        if node.op is dequantize_op:
            value = _value(node)
            if value is not None:
                replaced[node] = constant_op(value.astype(np.float32))
                replaced[node].stand_for(node)
    return exchange(fetches, replaced)


FUSION = Pass("quantized", fuse, position=5)
