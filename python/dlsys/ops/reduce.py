"""Sums and means over axes, and their opposites: summing to and repeating to another node's
shape.
"""

from __future__ import annotations

import numpy as np

from ..graph.node import Node, Op, Spec
from ..graph.shapes import broadcast_axes, floating, merge_shapes, normalize_axes
from ..graph.signature import Axes, Bool, Signature
from .elementwise import cast_op, mul_byconst_op
from .leaf import full_op
from .movement import broadcast_to_op, reshape_op


class SumOp(Op):
    """Sum over `axis` (None: all), or the mean with `mean=True`; `keepdims` keeps the axes as
    extent 1.
    """

    name = "sum"
    kernel = "reduce_sum"
    tolerance = 1e-4
    signature = Signature("x", axis=Axes(None, also="axes"), keepdims=Bool(False))

    def __init__(self, mean: bool = False) -> None:
        self._mean = mean
        self.name = "mean" if mean else "sum"
        self.doc = (
            f"The {self.name} of x over `axis` (None: all axes); `keepdims` keeps the axes as "
            "extent 1."
        )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        axes = normalize_axes(node, node.attrs["axis"], len(specs[0].shape))
        keepdims = node.attrs["keepdims"]
        shape = [1 if axis in axes else n for axis, n in enumerate(specs[0].shape)]
        if not keepdims:
            shape = [n for axis, n in enumerate(shape) if axis not in axes]
        if self._mean:
            return Spec(tuple(shape), floating(specs[0].dtype), specs[0].declared)
        return _summed(specs[0], tuple(shape))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        axes = normalize_axes(node, node.attrs["axis"], x.ndim)
        if (
            axes == tuple(range(len(axes)))
            and len(axes) < x.ndim
            and x.dtype.kind == "f"
            and x.size
        ):
            # numpy adds rows one after the other; a product adds them in blocks, faster and closer
            rows = x.size // y.size
            np.matmul(np.ones(rows, x.dtype), x.reshape(rows, y.size), out=y.reshape(y.size))
        else:
            np.sum(x, axis=axes, keepdims=node.attrs["keepdims"], dtype=y.dtype, out=y)
        if self._mean:
            np.multiply(y, y.size / x.size if x.size else np.nan, out=y)

    def scalars(self, node: Node) -> tuple[int, float]:
        spec = node.inputs[0].spec
        assert spec is not None and node.spec is not None
        axes = normalize_axes(node, node.attrs["axis"], len(spec.shape))
        count = spec.size // max(node.spec.size, 1)
        scale = (1.0 / count if count else float("nan")) if self._mean else 1.0
        return sum(1 << axis for axis in axes), scale

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        attrs = dict(axis=node.attrs["axis"], keepdims=node.attrs["keepdims"], mean=self._mean)
        return [expand_like_op(output_grad, node.inputs[0], **attrs)]

    def simplify(self, node: Node) -> Node | None:
        x, spec = node.inputs[0], node.inputs[0].spec
        assert spec is not None and node.spec is not None
        axes = normalize_axes(node, node.attrs["axis"], len(spec.shape))
        if x.op.constant_fill and spec.size:
            count = 1 if self._mean else spec.size // node.spec.size
            return full_op(node.spec.shape, x.attrs["value"] * count, node.spec.dtype)
        same = all(spec.shape[axis] == 1 for axis in axes) and spec.dtype == node.spec.dtype
        return reshape_op(node.inputs[0], node.spec.shape) if same else None

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size


class SumAxisZeroOp(Op):
    """The assignment's sum over axis 0; of a vector it has the shape (1,)."""

    name = "reducesumaxiszero"
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if not specs[0].shape:
            raise node.error(f"expected at least one dimension, got {node.inputs[0].name} ()")
        return _summed(specs[0], specs[0].shape[1:] or (1,))

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return reshape_op(sum_op(node.inputs[0], axis=0), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [broadcast_like_op(output_grad, node.inputs[0])]


class ExpandLikeOp(Op):
    """The opposite of a sum or mean: x repeated over `axis` to the shape of `like`."""

    name = "expand_like"
    signature = Signature(
        "x", "like", axis=Axes(None, also="axes"), keepdims=Bool(False), mean=Bool(False)
    )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype = floating(specs[0].dtype) if node.attrs["mean"] else specs[0].dtype
        return Spec(specs[1].shape, dtype, specs[0].declared)

    def simplify(self, node: Node) -> Node:
        x, like = node.inputs[0].spec, node.inputs[1].spec
        assert x is not None and like is not None
        axes = normalize_axes(node, node.attrs["axis"], len(like.shape))
        kept = tuple(1 if axis in axes else n for axis, n in enumerate(like.shape))
        count = like.size // max(x.size, 1)
        small = reshape_op(node.inputs[0], kept)
        if node.attrs["mean"]:
            small = mul_byconst_op(small, 1.0 / count if count else float("nan"))
        return broadcast_to_op(small, like.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        reduce = mean_op if node.attrs["mean"] else sum_op
        return [reduce(output_grad, axis=node.attrs["axis"], keepdims=node.attrs["keepdims"]), None]


class BroadcastLikeOp(Op):
    """x repeated to the shape of another node by numpy's rule; the assignment's
    `broadcastto_op(A, B)`.
    """

    name = "broadcast_like"
    signature = Signature("x", "like")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if merge_shapes(specs[0].shape, specs[1].shape) != specs[1].shape:
            raise node.error(
                f"{node.inputs[0].name} {specs[0].shape} does not broadcast to "
                f"{node.inputs[1].name} {specs[1].shape}"
            )
        return Spec(specs[1].shape, specs[0].dtype, specs[0].declared)

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return broadcast_to_op(node.inputs[0], node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [sum_to_like_op(output_grad, node.inputs[0]), None]


class SumToLikeOp(Op):
    """The gradient of broadcasting: x summed over the axes along which `like` was repeated."""

    name = "sum_to_like"
    signature = Signature("x", "like")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if merge_shapes(specs[0].shape, specs[1].shape) != specs[0].shape:
            raise node.error(
                f"{node.inputs[0].name} {specs[0].shape} cannot be summed to "
                f"{node.inputs[1].name} {specs[1].shape}"
            )
        return Spec(specs[1].shape, specs[0].dtype, specs[0].declared)

    def simplify(self, node: Node) -> Node:
        x = node.inputs[0]
        assert node.spec is not None and x.spec is not None
        if x.spec.shape == node.spec.shape:
            return x
        total = sum_op(x, axis=broadcast_axes(node.spec.shape, x.spec.shape))
        return cast_op(reshape_op(total, node.spec.shape), node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [broadcast_like_op(output_grad, node.inputs[0]), None]


def _summed(x: Spec, shape: tuple[int, ...]) -> Spec:
    """The spec of a sum of x: integers add up as int64."""
    integral = x.dtype is not None and x.dtype.kind != "f"
    return Spec(shape, np.dtype(np.int64) if integral else x.dtype, x.declared)


sum_op = reduce_sum_op = SumOp()
mean_op = reduce_mean_op = SumOp(mean=True)
reducesumaxiszero_op = SumAxisZeroOp()
expand_like_op = ExpandLikeOp()
broadcast_like_op = broadcastto_op = BroadcastLikeOp()
sum_to_like_op = SumToLikeOp()


def sum_to_like(x: Node, like: Node) -> Node:
    """`sum_to_like_op`, left out where both shapes are known to be equal."""
    known = x.spec is not None and like.spec is not None
    return x if known and x.spec.shape == like.spec.shape else sum_to_like_op(x, like)
