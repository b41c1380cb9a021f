"""Normalization over the batch and over rows."""

from __future__ import annotations

import math
from typing import Any

from ....graph.node import Node
from ....ops.elementwise import cast_op
from ....ops.math.power import pow_byconst_op
from ....ops.movement import reshape_op
from ....ops.norm.storage import dtype_of_sums
from ....ops.reduce import mean_op, sum_op
from ..registry import rule
from ..trace import Emitter

# ---- over the batch ----


def _channels(node: Node, values: Node, like: Node) -> Node:
    """One number a channel, shaped to broadcast over x (N, C, …)."""
    ndim = len(node.inputs[0].spec.shape)
    return cast_op(reshape_op(values, (-1,) + (1,) * (ndim - 2)), like.spec.dtype)


def _beside_channels(x: Node) -> tuple[int, ...]:
    return tuple(axis for axis in range(len(x.spec.shape)) if axis != 1)


@rule("batch_statistics")
def _statistics(g: Emitter, node: Node, name: str) -> tuple[str, str]:
    x = cast_op(node.inputs[0], node.spec[0].dtype)
    axes = _beside_channels(x)
    centered = x - mean_op(x, axes, keepdims=True)
    return g.value(mean_op(x, axes)), g.value(mean_op(centered * centered, axes))


@rule("batch_normalize", "BatchNormalization")
def _batch_normalize(
    g: Emitter, node: Node, x: str, mean: str, variance: str, scale: str, bias: str
) -> str:
    dtype, sums = node.spec.dtype, dtype_of_sums(node.spec.dtype)
    dtypes = (dtype, dtype, dtype, sums, sums)
    order = (0, 3, 4, 1, 2)
    names = (x, scale, bias, mean, variance)
    given = [g.cast(n, node.inputs[k].spec.dtype, d) for n, k, d in zip(names, order, dtypes)]
    return g("BatchNormalization", *given, epsilon=float(node.attrs["eps"]))


def _normalized(node: Node) -> Node:
    """x̂ of a node whose first inputs are x, mean and variance."""
    x, mean, variance = node.inputs[:3]
    inverse = pow_byconst_op(variance + node.attrs["eps"], -0.5)
    return (x - _channels(node, mean, x)) * _channels(node, inverse, x)


@rule("batch_normalize_sums")
def _batch_sums(g: Emitter, node: Node, *names: str) -> tuple[str, str]:
    dy = node.inputs[3]
    axes = _beside_channels(dy)
    return g.value(sum_op(dy * _normalized(node), axes)), g.value(sum_op(dy, axes))


@rule("batch_normalize_gradient")
def _batch_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, _, variance, scale, dscale, dbias, dy = node.inputs
    count = x.spec.size // x.spec.shape[1]
    factor = scale * pow_byconst_op(variance + node.attrs["eps"], -0.5)
    rest = _channels(node, dbias, x) + _normalized(node) * _channels(node, dscale, x)
    return _channels(node, factor, x) * (dy - rest * (1 / count))


# ---- over rows ----


@rule("row_normalize", "LayerNormalization, GroupNormalization, RMSNormalization (from 23)")
def _row_normalize(g: Emitter, node: Node, x: str, scale: str, bias: str) -> Any:
    """ONNX's operators where they have the form, else the formula."""
    groups, centered = node.attrs["groups"], node.attrs["centered"]
    epsilon = float(node.attrs["eps"])
    same = len({i.spec.dtype for i in node.inputs}) == 1
    if same and groups is None and centered:
        axis = -len(node.inputs[1].spec.shape)
        return g("LayerNormalization", x, scale, bias, axis=axis, epsilon=epsilon)
    if same and groups is None and g.opset >= 23:
        axis = -len(node.inputs[1].spec.shape)
        return g("Add", g("RMSNormalization", x, scale, axis=axis, epsilon=epsilon), bias)
    if same and groups is not None and centered and g.opset >= 21:
        count = groups or node.inputs[1].spec.size
        return g("GroupNormalization", x, scale, bias, num_groups=count, epsilon=epsilon)
    rows = _Rows(node)
    scaled = rows.channels(rows.normalized) * rows.column(node.inputs[1])
    y = scaled + rows.column(node.inputs[2])
    return cast_op(reshape_op(y, node.spec.shape), node.spec.dtype)


@rule("row_normalize_gradient")
def _row_gradient(g: Emitter, node: Node, *names: str) -> Node:
    rows = _Rows(node)
    _, scale, dy = node.inputs
    d = rows.flat(rows.channels(dy) * rows.column(scale))
    gradient = d - rows.normalized * mean_op(d * rows.normalized, -1, keepdims=True)
    if node.attrs["centered"]:
        gradient = gradient - mean_op(d, -1, keepdims=True)
    return cast_op(reshape_op(gradient * rows.inverse, node.spec.shape), node.spec.dtype)


@rule("row_normalize_sums")
def _row_sums(g: Emitter, node: Node, *names: str) -> tuple[str, str]:
    rows = _Rows(node)
    dy, shape = rows.channels(node.inputs[2]), node.spec[0].shape
    sums = [sum_op(dy * rows.channels(rows.normalized), (0, 2)), sum_op(dy, (0, 2))]
    return tuple(g.value(reshape_op(x, shape)) for x in sums)  # type: ignore[return-value]


class _Rows:
    """x of a node as rows (rows, length), its normalized form, and views by channel."""

    def __init__(self, node: Node) -> None:
        x, scale = node.inputs[0].spec, node.inputs[1].spec
        groups = node.attrs["groups"]
        self.dtype = dtype_of_sums(x.dtype)
        if groups is None:
            outer = math.prod(x.shape[: len(x.shape) - len(scale.shape)])
            self._extents, per_outer = (outer, scale.size, 1), 1
        else:
            self._extents = (x.shape[0], x.shape[1], math.prod(x.shape[2:]))
            per_outer = groups or x.shape[1]
        outer, channels, inner = self._extents
        self._shape = (outer * per_outer, channels // per_outer * inner)
        rows = self.flat(node.inputs[0])
        if node.attrs["centered"]:
            rows = rows - mean_op(rows, -1, keepdims=True)
        variance = mean_op(rows * rows, -1, keepdims=True)
        self.inverse = pow_byconst_op(variance + node.attrs["eps"], -0.5)
        self.normalized = rows * self.inverse

    def flat(self, x: Node) -> Node:
        """x as rows."""
        return reshape_op(cast_op(x, self.dtype), self._shape)

    def channels(self, x: Node) -> Node:
        """x as (outer, channels, inner)."""
        return reshape_op(cast_op(x, self.dtype), self._extents)

    def column(self, values: Node) -> Node:
        """One number a channel, to broadcast over (outer, channels, inner)."""
        return reshape_op(cast_op(values, self.dtype), (self._extents[1], 1))
