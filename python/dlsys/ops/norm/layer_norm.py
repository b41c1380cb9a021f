"""Layer, group, instance and RMS normalization: every row of values by its own statistics.

One operator forward and two back, over rows that a `groups` attribute names: None for the trailing
axes that `scale` has, n for n groups of channels of x (N, C, …), 0 for a group a channel.
Statistics are taken anew in the backward operators, so nothing is kept for them but x.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arguments.kinds import Bool, Int, Number
from ...arguments.signature import Signature, declared
from ...graph.node import Node, Op
from ...graph.spec import Spec
from ..elementwise import cast_like_op
from ..leaf import zeroslike_op
from ..math.power import pow_byconst_op
from ..movement import ReshapedOp, reshape_like_op, reshape_op
from ..reduce import mean_op, sum_op
from .storage import dtype_of_sums, dtype_of_values

__all__ = [
    "group_normalization", "instance_normalization", "layer_normalization",
    "layer_normalization_op", "rms_normalization",
]  # fmt: skip

Extents = tuple[int, int, int]
EPS = Number(above=0, finite=True)
GROUPS = Int(None, low=0)


class ViewOp(ReshapedOp):
    """x as (outer, channels, inner), or with `rows` as (rows, length); the channels are scale's."""

    name = "normalization_view"
    signature = Signature("x", "scale", "*", groups=GROUPS, rows=Bool())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        outer, channels, inner = extents = _extents(node, *specs)
        if not node.attrs["rows"]:
            return specs[0]._replace(shape=extents)
        groups = _groups(node, channels)
        return specs[0]._replace(shape=(outer * groups, channels // groups * inner))


class RowNormalizationOp(Op):
    """Base of the three operators: x first, scale second, and how they make rows of x."""

    def scalars(self, node: Node) -> tuple[int, int, int, float]:
        x, scale = node.inputs[0].spec, node.inputs[1].spec
        _, channels, inner = _extents(node, x, scale)
        length = channels // _groups(node, channels) * inner
        return length, inner, int(node.attrs["centered"]), float(node.attrs["eps"])

    def _views(self, node: Node, scale: np.ndarray, *arrays: np.ndarray) -> tuple[Any, list]:
        """Scale or bias for (outer, channels, inner), and arrays of x's shape so and as rows."""
        specs = (Spec(arrays[0].shape, None), Spec(scale.shape, None))
        outer, channels, inner = extents = _extents(node, *specs)
        rows = outer * _groups(node, channels)
        length = arrays[0].size // max(rows, 1)
        views = [(x.reshape(extents), x.reshape(rows, length)) for x in arrays]
        return (channels, 1), views

    def _normalize(self, node: Node, x: np.ndarray, row: np.ndarray, out: np.ndarray) -> None:
        """Writes x̂ to `out` and leaves 1 / deviation of each row in `row`; both are 2-D."""
        if node.attrs["centered"]:
            _row_mean(x, row)
            np.subtract(x, row, out=out)
        else:
            np.copyto(out, x)
        length = max(x.shape[1], 1)
        np.einsum("rk,rk->r", out, out, out=row[:, 0])
        np.multiply(row, 1 / length, out=row)
        np.add(row, node.attrs["eps"], out=row)
        np.sqrt(row, out=row)
        np.reciprocal(row, out=row)
        np.multiply(out, row, out=out)


class RowNormalizeOp(RowNormalizationOp):
    """x̂ · scale + bias, where x̂ = (x - mean) / sqrt(variance + eps) of each row; the mean is 0
    unless `centered`.
    """

    name = kernel = "row_normalize"
    autocast, autocast_inputs = "follow", (0,)
    signature = Signature("x", "scale", "bias", "*", groups=GROUPS, centered=Bool(), eps=EPS)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        _extents(node, *specs[:2])
        if specs[2].shape != specs[1].shape:
            raise node.error(f"scale and bias differ: {describe_inputs(node, specs, 1, 2)}")
        dtype = dtype_of_values(node, specs, own=(0,), affine=(1, 2))
        return Spec(specs[0].shape, dtype, any(s.declared for s in specs))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [_per_row(node, inputs, dtype_of_sums(outputs[0].dtype))]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, scale, bias, row, y = arrays
        column, ((_, x), (y3, y)) = self._views(node, scale, x, y)
        self._normalize(node, x, row, y)
        np.multiply(y3, scale.reshape(column), out=y3)
        np.add(y3, bias.reshape(column), out=y3)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, scale, bias = node.inputs
        sums = row_normalize_sums_op(x, scale, output_grad, **node.attrs)
        of_x = row_normalize_gradient_op(x, scale, output_grad, **node.attrs)
        return [of_x, cast_like_op(sums[0], scale), cast_like_op(sums[1], bias)]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 7 * output.size


class RowNormalizeGradientOp(RowNormalizationOp):
    """With d = dy · scale: (d - mean(d) - x̂ · mean(d · x̂)) / sqrt(variance + eps) of each row,
    without mean(d) unless `centered`: the gradient of x.
    """

    name = kernel = "row_normalize_gradient"
    autocast, autocast_inputs = "follow", (0, 2)
    signature = Signature("x", "scale", "dy", "*", groups=GROUPS, centered=Bool(), eps=EPS)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        _extents(node, *specs[:2])
        _check_gradient(node, specs)
        dtype = dtype_of_values(node, specs, own=(0, 2), affine=(1,))
        return Spec(specs[0].shape, dtype, any(s.declared for s in specs))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        dtype = dtype_of_sums(outputs[0].dtype)
        row = _per_row(node, inputs, dtype)
        return [row, row, Spec(outputs[0].shape, dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, scale, dy, inverse, row, xhat, dx = arrays
        views = self._views(node, scale, x, dy, xhat, dx)
        column, ((_, x), (dy3, _), (_, xhat), (dx3, dx)) = views
        self._normalize(node, x, inverse, xhat)
        np.multiply(dy3, scale.reshape(column), out=dx3)
        length = max(x.shape[1], 1)
        np.einsum("rk,rk->r", dx, xhat, out=row[:, 0])
        np.multiply(row, 1 / length, out=row)
        np.multiply(xhat, row, out=xhat)
        if node.attrs["centered"]:
            _row_mean(dx, row)
            np.subtract(dx, row, out=dx)
        np.subtract(dx, xhat, out=dx)
        np.multiply(dx, inverse, out=dx)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, scale, dy = node.inputs
        attrs = node.attrs
        view = dict(groups=attrs["groups"], rows=False)
        column = reshape_op(cast_like_op(scale, x), (-1, 1))
        flat = lambda v: normalization_view_op(v, scale, groups=attrs["groups"], rows=True)  # noqa: E731
        d_ = reshape_like_op(normalization_view_op(dy, scale, **view) * column, x)
        rows, d, g = flat(x), flat(d_), flat(output_grad)
        mean = lambda v: mean_op(v, axis=-1, keepdims=True)  # noqa: E731
        moved = rows - mean(rows) if attrs["centered"] else rows
        r = pow_byconst_op(mean(moved * moved) + attrs["eps"], -0.5)
        xhat = moved * r
        b, c, inner = mean(d * xhat), mean(g * xhat), mean(g * d)
        of_d, of_g = d, g
        if attrs["centered"]:
            a, e = mean(d), mean(g)
            of_d, of_g, inner = d - a, g - e, inner - a * e
        of_x = -r * r * (xhat * (inner - 3 * b * c) + c * of_d + b * of_g)
        projected = reshape_like_op((of_g - xhat * c) * r, x)
        projected = normalization_view_op(projected, scale, **view)
        of_scale = sum_op(projected * normalization_view_op(dy, scale, **view), axis=(0, 2))
        return [
            reshape_like_op(of_x, x),
            cast_like_op(reshape_like_op(of_scale, scale), scale),
            reshape_like_op(projected * column, dy),
        ]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 12 * output.size


class RowNormalizeSumsOp(RowNormalizationOp):
    """Σ dy · x̂ and Σ dy over all rows: the gradients of scale and bias. Only the shape of
    scale counts.
    """

    name = kernel = "row_normalize_sums"
    autocast, autocast_inputs = "follow", (0, 2)
    signature = Signature("x", "scale", "dy", "*", groups=GROUPS, centered=Bool(), eps=EPS)
    outputs = 2

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        _extents(node, *specs[:2])
        _check_gradient(node, specs)
        dtype = dtype_of_sums(dtype_of_values(node, specs, own=(0, 2), affine=(1,)))
        declared = any(s.declared for s in specs)
        return Spec(specs[1].shape, dtype, declared), Spec(specs[1].shape, dtype, declared)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        dtype = outputs[0].dtype
        return [_per_row(node, inputs, dtype), Spec(inputs[0].shape, dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, scale, dy, row, xhat, dscale, dbias = arrays
        _, ((_, x), (dy, _), (xhat3, xhat)) = self._views(node, scale, x, dy, xhat)
        self._normalize(node, x, row, xhat)
        np.multiply(xhat3, dy, out=xhat3)
        np.sum(xhat3, axis=(0, 2), out=dscale.reshape(-1))
        np.sum(dy, axis=(0, 2), out=dbias.reshape(-1))

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        x, scale, dy = node.inputs
        weights = [zeroslike_op(scale) if grad is None else grad for grad in output_grad]
        of_x = row_normalize_gradient_op(x, weights[0], dy, **node.attrs)
        return [of_x, None, row_normalize_op(x, *weights, **node.attrs)]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 8 * inputs[0].size


@declared(eps=EPS)
def layer_normalization(x: Node, scale: Node, bias: Node, eps: float = 1e-5) -> Node:
    """(x - mean) / sqrt(variance + eps) · scale + bias over the trailing axes that scale and bias
    have, such as x (…, features) with scale and bias (features,).

    Mean and variance (over the count) are of each of the leading positions alone. Over x of 16
    bits, scale and bias are of its dtype or float32. ShapeError where shapes or dtypes do not fit.
    After Ba, Kiros and Hinton, "Layer normalization" (2016).
    """
    return row_normalize_op(x, scale, bias, groups=None, centered=True, eps=eps)


@declared(eps=EPS)
def rms_normalization(x: Node, scale: Node, bias: Node | None = None, eps: float = 1e-5) -> Node:
    """x / sqrt(mean(x²) + eps) · scale (+ bias) over the trailing axes that scale has.

    ShapeError where the shapes do not fit. After Zhang and Sennrich (2019).
    """
    bias = zeroslike_op(scale) if bias is None else bias
    return row_normalize_op(x, scale, bias, groups=None, centered=False, eps=eps)


@declared(groups=Int(low=1), eps=EPS)
def group_normalization(x: Node, scale: Node, bias: Node, groups: int, eps: float = 1e-5) -> Node:
    """(x - mean) / sqrt(variance + eps) · scale + bias of x (N, C, …), the statistics those of each
    of `groups` groups of neighboring channels of each of the N; scale and bias are (C,).

    ShapeError where the shapes do not fit or groups does not divide C. After Wu and He (2018).
    """
    return row_normalize_op(x, scale, bias, groups=groups, centered=True, eps=eps)


@declared(eps=EPS)
def instance_normalization(x: Node, scale: Node, bias: Node, eps: float = 1e-5) -> Node:
    """`group_normalization` with a group a channel. After Ulyanov, Vedaldi and Lempitsky (2016)."""
    return row_normalize_op(x, scale, bias, groups=0, centered=True, eps=eps)


def _extents(node: Node, x: Spec, scale: Spec) -> Extents:
    """x's shape as (outer, channels, inner), where scale has a number a channel."""
    groups, ndim = node.attrs["groups"], len(scale.shape)
    if groups is None:
        if not ndim or x.shape[-ndim:] != scale.shape:
            raise node.error(
                f"scale {scale.shape} does not have the shape of the last axes of x {x.shape}"
            )
        return Spec(x.shape[:-ndim], None).size, scale.size, 1
    if len(x.shape) < 2 or scale.shape != x.shape[1:2]:
        raise node.error(
            f"expected x (N, C, …) and a scale of (C,), got {x.shape} and {scale.shape}"
        )
    _groups(node, x.shape[1])
    return x.shape[0], x.shape[1], Spec(x.shape[2:], None).size


def _groups(node: Node, channels: int) -> int:
    """The number of rows for each position of the outer axis."""
    groups = node.attrs["groups"]
    if groups is None:
        return 1
    if groups and channels % groups:
        raise node.error(f"{groups} groups do not divide {channels} channels")
    return groups or max(channels, 1)


def _row_mean(x: np.ndarray, out: np.ndarray) -> None:
    np.sum(x, axis=1, keepdims=True, out=out)
    np.multiply(out, 1 / max(x.shape[1], 1), out=out)


def _per_row(node: Node, inputs: list[Spec], dtype: np.dtype | None) -> Spec:
    outer, channels, _ = _extents(node, inputs[0], inputs[1])
    return Spec((outer * _groups(node, channels), 1), dtype)


def _check_gradient(node: Node, specs: tuple[Spec, ...]) -> None:
    if specs[2].shape != specs[0].shape:
        raise node.error(f"the gradient is not of x's shape: {describe_inputs(node, specs, 0, 2)}")


def describe_inputs(node: Node, specs: tuple[Spec, ...], *chosen: int) -> str:
    """Some inputs with their shapes."""
    return " and ".join(f"{node.inputs[k].name} {specs[k].shape}" for k in chosen)


normalization_view_op = ViewOp()
row_normalize_op = RowNormalizeOp()
row_normalize_gradient_op = RowNormalizeGradientOp()
row_normalize_sums_op = RowNormalizeSumsOp()

layer_normalization_op = layer_normalization
