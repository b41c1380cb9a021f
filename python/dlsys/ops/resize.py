"""Operators on images (…, height, width): depth_to_space, space_to_depth and resizing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arguments.kinds import Bool, Input, Int, Kind, OneOf, number
from ..arguments.signature import Signature, declared
from ..errors import GraphError
from ..graph.lines import where
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe, floating
from .conv.geometry import IntPair
from .elementwise import cast_op
from .movement import reshape_op, transpose_op

__all__ = ["depth_to_space_op", "resize", "space_to_depth_op"]


class Factors(Kind):
    """Two positive numbers, for height and width; one stands for both."""

    expected = "one or two finite positive numbers"

    def take(self, value: Any) -> tuple[float, float]:
        both = (number(value),) * 2 if np.ndim(value) == 0 else tuple(map(number, value))
        if len(both) != 2 or not 0 < min(both) <= max(both) < math.inf:
            raise ValueError
        return float(both[0]), float(both[1])


class DepthToSpaceOp(Op):
    """Channels to blocks of pixels: (n, c·r², h, w) becomes (n, c, h·r, w·r).

    Channel number is (row, column, c) by "DCR" and (c, row, column) by "CRD", as in ONNX; "CRD" is
    also called pixel shuffle.
    """

    name = "depth_to_space"
    signature = Signature("x", block=Int(low=1), mode=OneOf("DCR", "CRD", default="DCR"))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        r = node.attrs["block"]
        n, c, h, w = _image_shape(node, specs[0].shape)
        if c % (r * r):
            raise node.error(
                f"{c} channels of {node.inputs[0].name} {specs[0].shape} do not divide by "
                f"block² = {r * r}"
            )
        return specs[0]._replace(shape=(n, c // (r * r), h * r, w * r))

    def simplify(self, node: Node) -> Node:
        r = node.attrs["block"]
        n, c, h, w = node.spec.shape
        h, w = h // r, w // r
        if node.attrs["mode"] == "DCR":
            blocks, axes = (n, r, r, c, h, w), (0, 3, 4, 1, 5, 2)
        else:
            blocks, axes = (n, c, r, r, h, w), (0, 1, 4, 2, 5, 3)
        return reshape_op(transpose_op(reshape_op(node.inputs[0], blocks), axes), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [space_to_depth_op(output_grad, **node.attrs)]


class SpaceToDepthOp(Op):
    """Blocks of pixels to channels: (n, c, h·r, w·r) becomes (n, c·r², h, w); the opposite of
    depth_to_space.
    """

    name = "space_to_depth"
    signature = Signature("x", block=Int(low=1), mode=OneOf("DCR", "CRD", default="DCR"))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        r = node.attrs["block"]
        n, c, h, w = _image_shape(node, specs[0].shape)
        if h % r or w % r:
            raise node.error(
                f"height and width of {node.inputs[0].name} {specs[0].shape} do not divide by "
                f"block = {r}"
            )
        return specs[0]._replace(shape=(n, c * r * r, h // r, w // r))

    def simplify(self, node: Node) -> Node:
        r = node.attrs["block"]
        n, depth, h, w = node.spec.shape
        axes = (0, 3, 5, 1, 2, 4) if node.attrs["mode"] == "DCR" else (0, 1, 3, 5, 2, 4)
        blocks = reshape_op(node.inputs[0], (n, depth // (r * r), h, r, w, r))
        return reshape_op(transpose_op(blocks, axes), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [depth_to_space_op(output_grad, **node.attrs)]


class ResizeOp(Op):
    """x (…, height, width) resized, by the nearest pixel or bilinearly between four.

    With half-pixel centers the middle of pixel i lies at (i + 0.5) · old / new - 0.5, clamped to
    the image; with `align_corners` at i · (old - 1) / (new - 1). The size is given, or that of a
    second input, of which only the shape counts.
    """

    autocast, autocast_inputs = "follow", (0,)
    signature = Signature(
        "x", "*", like=Input(None), size=IntPair(None, low=1, omitted=True),
        scale=Factors(None, omitted=True), align_corners=Bool(False),
    )  # fmt: skip

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = self.kernel = f"resize_{mode}"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape, scale = specs[0].shape, node.attrs.get("scale")
        if len(shape) < 2:
            raise node.error(f"expected (…, height, width), got {node.inputs[0].name} {shape}")
        size = node.attrs.get("size") or specs[-1].shape[-2:]
        if scale is not None:
            size = tuple(int(n * factor) for n, factor in zip(shape[-2:], scale))
        if min(*shape[-2:], *size) < 1:
            raise node.error(
                f"{node.inputs[0].name} {shape} cannot be resized to {size}; an image has at least "
                "one pixel"
            )
        return specs[0]._replace(shape=(*shape[:-2], *size), dtype=floating(specs[0].dtype))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        if self.mode == "nearest":
            return [outputs[0]._replace(shape=(*outputs[0].shape[:-1], inputs[0].shape[-1]))]
        columns = outputs[0]._replace(shape=(*inputs[0].shape[:-1], outputs[0].shape[-1]))
        return [columns, columns, outputs[0]]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, *scratch, y = arrays
        rows = _neighbors(self.mode, node.attrs["align_corners"], x.shape[-2], y.shape[-2])
        cols = _neighbors(self.mode, node.attrs["align_corners"], x.shape[-1], y.shape[-1])
        if self.mode == "nearest":
            np.take(x, rows.low, axis=-2, out=scratch[0], mode="clip")
            np.take(scratch[0], cols.low, axis=-1, out=y, mode="clip")
            return
        across, spare, spare_y = scratch
        _mix(x, cols, -1, spare, across)
        _mix(across, rows, -2, spare_y, y)

    def scalars(self, node: Node) -> tuple[int]:
        return (int(node.attrs["align_corners"]),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, align = node.inputs[0], node.attrs["align_corners"]
        dx = resize_gradient_ops[self.mode](output_grad, x, align_corners=align)
        return [dx, *[None] * (len(node.inputs) - 1)]

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        cast = cast_op(x, node.spec.dtype)
        if x.spec.shape == node.spec.shape:
            return cast
        if len(node.inputs) == 1 and x.spec.dtype == node.spec.dtype:
            return None
        align, size = node.attrs["align_corners"], node.spec.shape[-2:]
        return resize_ops[self.mode](cast, size=size, align_corners=align)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return output.size * (9 if self.mode == "bilinear" else 1)


class ResizeGradientOp(Op):
    """The gradient of resizing: for each pixel the sum of its weights times dy.

    The images have the size of a second input, of which only the shape counts, or the given one.
    """

    autocast, autocast_inputs = "follow", (0,)
    signature = Signature(
        "dy", "*", like=Input(None), size=IntPair(None, low=1, omitted=True),
        align_corners=Bool(False),
    )  # fmt: skip

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = self.kernel = f"resize_{mode}_gradient"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape, size = specs[0].shape, node.attrs.get("size") or specs[-1].shape[-2:]
        fits = len(shape) >= 2 and len(size) == 2 and min(*shape[-2:], *size) > 0
        if not fits or shape[:-2] != specs[-1].shape[:-2]:
            raise node.error(f"images do not fit: {describe(node, specs)}")
        return specs[0]._replace(shape=(*shape[:-2], *size))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        dx, width = outputs[0], inputs[0].shape[-1]
        rows = dx._replace(shape=(*dx.shape[:-1], width))
        row = dx._replace(shape=(*dx.shape[:-2], width))
        return [rows, row, dx._replace(shape=dx.shape[:-1])]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        dy, rows, row, column, dx = arrays
        align = node.attrs["align_corners"]
        _spread(dy, _neighbors(self.mode, align, dx.shape[-2], dy.shape[-2]), -2, row, rows)
        _spread(rows, _neighbors(self.mode, align, dx.shape[-1], dy.shape[-1]), -1, column, dx)

    scalars = ResizeOp.scalars

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        dy, align = node.inputs[0], node.attrs["align_corners"]
        resized = resize_ops[self.mode](output_grad, dy, align_corners=align)
        return [resized, *[None] * (len(node.inputs) - 1)]

    def simplify(self, node: Node) -> Node | None:
        if len(node.inputs) == 1:
            return None
        align, size = node.attrs["align_corners"], node.spec.shape[-2:]
        return resize_gradient_ops[self.mode](node.inputs[0], size=size, align_corners=align)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size * (8 if self.mode == "bilinear" else 1)


class Neighbors(NamedTuple):
    """The two positions that each position of a resized axis reads: (1 - weight) · x[low] + weight
    · x[high].
    """

    low: np.ndarray
    high: np.ndarray
    weight: np.ndarray


@functools.lru_cache(maxsize=64)
def _neighbors(mode: str, align: bool, n: int, m: int) -> Neighbors:
    """The neighbors for an axis of n positions resized to m, as src/operators/resize.h has them."""
    i = np.arange(m, dtype=np.int64)
    if align and m == 1:
        return Neighbors(i, i, np.zeros(1))
    unit = m - 1 if align else 2 * m
    at = i * (n - 1) if align else (2 * i + 1) * n - m
    if mode == "nearest":
        at = (2 * at + unit - 1) // (2 * unit) if align else (at + m) // unit
        return Neighbors(at, at, np.zeros(m))
    at = np.clip(at, 0, (n - 1) * unit)
    low = at // unit
    return Neighbors(low, np.minimum(low + 1, n - 1), at % unit / unit)


def _mix(x: np.ndarray, read: Neighbors, axis: int, scratch: np.ndarray, y: np.ndarray) -> None:
    """y = x resized along one axis."""
    weight = read.weight.astype(y.dtype).reshape((-1,) + (1,) * (-axis - 1))
    np.take(x, read.low, axis=axis, out=y, mode="clip")
    np.multiply(y, 1 - weight, out=y)
    np.take(x, read.high, axis=axis, out=scratch, mode="clip")
    np.multiply(scratch, weight, out=scratch)
    np.add(y, scratch, out=y)


def _spread(
    dy: np.ndarray, read: Neighbors, axis: int, scratch: np.ndarray, dx: np.ndarray
) -> None:
    """dx = the gradient of resizing along one axis; `scratch` has one position of it."""
    dx.fill(0)
    into, given = np.moveaxis(dx, axis, 0), np.moveaxis(dy, axis, 0)
    for position, (low, high, weight) in enumerate(zip(*(values.tolist() for values in read))):
        for k, share in ((low, 1 - weight), (high, weight)):
            if share:
                np.multiply(given[position], share, out=scratch)
                np.add(into[k], scratch, out=into[k])


def _image_shape(node: Node, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    if len(shape) != 4:
        raise node.error(f"expected (n, c, height, width), got {node.inputs[0].name} {shape}")
    return shape[0], shape[1], shape[2], shape[3]


depth_to_space_op = DepthToSpaceOp()
space_to_depth_op = SpaceToDepthOp()
resize_ops = {mode: ResizeOp(mode) for mode in ("nearest", "bilinear")}
resize_gradient_ops = {mode: ResizeGradientOp(mode) for mode in resize_ops}


@declared(
    size=IntPair(low=1), scale=Factors(), mode=OneOf("nearest", "bilinear"), align_corners=Bool()
)
def resize(
    x: Node,
    size: Sequence[int] | None = None,
    scale: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    name: str | None = None,
) -> Node:
    """Images x (…, height, width) resized to `size`, or by `scale` (rounded down).

    mode: "nearest" (of two at one distance, the one that the center lies in, with `align_corners`
    the lower) or "bilinear". align_corners=False has half-pixel centers, PyTorch's "nearest-exact"
    and "bilinear"; True keeps the corners' centers where they are. Its gradient is exact.
    """
    if (size is None) == (scale is None):
        raise GraphError(f"resize: expected either size or scale [{where()}]")
    return resize_ops[mode](x, name=name, size=size, scale=scale, align_corners=align_corners)
