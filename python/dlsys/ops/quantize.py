"""Quantization: integers of 8 bits for floats, and operators that compute with them.

A tensor of floats is x ≈ scale · (q - zero), as in Jacob et al., "Quantization and training of
neural networks for efficient integer-arithmetic-only inference" (2018): `zero` is the integer that
stands for 0. `quantize_op` and `dequantize_op` are ONNX's QuantizeLinear and DequantizeLinear. A
graph in which these two stand around products is what users build, export and import;
`fusion/quantized.py` puts the other operators of this file in its place, which read and write
integers.

Products accumulate in int32, which is exact, and requantize as `requantized` says, in float32, so
that every device gets the same bits. Images are channels last there, (N, H, W, C): the products sum
over channels, four bytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import DType, Int, Number
from ..arguments.signature import Signature
from ..graph.node import Node, Op
from ..graph.spec import FLOAT32, Spec, describe
from .conv.geometry import IntPair, Padding, Windows, slide

__all__ = ["dequantize_op", "quantize_op"]

UINT8, INT8, INT32 = np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.int32)
PANEL, STEP = 16, 4  # output channels and inputs that one vector of packed weights has
_EXACT = 512  # products of 8 bits whose sum is exact in float32: 512 · 255 · 128 < 2^24


def _against(node: Node, scale: Any, ndim: int) -> list[int]:
    """The shape in which scales or zero points of one value, or of an axis, meet x."""
    shape = [1] * ndim
    if len(scale.shape) == 1:
        shape[node.attrs["axis"] % ndim] = -1
    return shape


class _Linear(Op):
    """What quantization and dequantization have in common: a scale and a zero point, of one value
    each, shape (), or one for each position of `axis`.
    """

    any_dtype = True
    signature = Signature("x", "scale", "zero", axis=Int(0))

    def check(self, node: Node, *specs: Spec) -> None:
        """Refuses scales and zero points that do not fit x."""
        x, scale, zero = specs
        axis = node.attrs["axis"]
        if scale.shape != zero.shape or len(scale.shape) > 1:
            raise node.error(
                f"scale and zero must be one number each, or a vector each of one length, got "
                f"{describe(node, specs)}"
            )
        if scale.shape:
            if not -len(x.shape) <= axis < len(x.shape) or x.shape[axis] != scale.shape[0]:
                raise node.error(
                    f"no scale for each position of axis {axis}, got {describe(node, specs)}"
                )

    def scalars(self, node: Node) -> tuple[int]:
        return (node.attrs["axis"] % max(len(node.spec.shape), 1),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, None, None]


class QuantizeOp(_Linear):
    """clip(round(x / scale) + zero), to even, in the dtype of `zero`, uint8 or int8, of whose range
    it takes the ends. x: floats of any shape. scale: positive, () or (n,) along `axis`.
    """

    name = kernel = "quantize"
    reads_host = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        self.check(node, *specs)
        if specs[2].dtype not in (UINT8, INT8, None):
            raise node.error(f"zero must be uint8 or int8, got {specs[2].dtype}")
        return Spec(specs[0].shape, specs[2].dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, scale, zero, q = arrays
        shape = _against(node, scale, x.ndim)
        info = np.iinfo(q.dtype)
        offset = zero.reshape(shape).astype(x.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            units = np.divide(x, scale.reshape(shape), dtype=x.dtype)
            np.clip(units, info.min - offset, info.max - offset, out=units)
            np.nan_to_num(units, copy=False)
            np.copyto(q, np.rint(units) + offset, casting="unsafe")


class DequantizeOp(_Linear):
    """(x - zero) · scale as float32. x: uint8, int8 or int32 of any shape, `zero` of its dtype.
    scale: () or (n,) along `axis`.
    """

    name = kernel = "dequantize"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        self.check(node, *specs)
        x, _, zero = (spec.dtype for spec in specs)
        if x is not None and (x not in (UINT8, INT8, INT32) or zero != x):
            raise node.error(f"x and zero must both be uint8, int8 or int32, got {x} and {zero}")
        return Spec(specs[0].shape, FLOAT32)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, scale, zero, y = arrays
        shape = _against(node, scale, x.ndim)
        centered = x.astype(np.int64) - zero.reshape(shape)
        np.copyto(y, centered.astype(np.float32) * scale.reshape(shape).astype(np.float32))


# ---- packed weights ----


def packed(weights: np.ndarray) -> np.ndarray:
    """Weights int8 (N, K) in the layout of the kernels, as uint8 of the same bits: (N / 16, K / 4,
    64), panels of 16 output channels with four consecutive inputs of each channel side by side,
    both filled up with zeros.
    """
    n, k = weights.shape
    padded = np.zeros((-(-n // PANEL) * PANEL, -(-k // STEP) * STEP), np.int8)
    padded[:n, :k] = weights
    panels = padded.reshape(-1, PANEL, padded.shape[1] // STEP, STEP).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(panels).view(np.uint8).reshape(*panels.shape[:2], PANEL * STEP)


def unpacked(weights: np.ndarray, n: int, k: int) -> np.ndarray:
    """The weights int8 (N, K) of their packed layout."""
    panels = weights.view(np.int8).reshape(*weights.shape[:2], PANEL, STEP)
    return panels.transpose(0, 2, 1, 3).reshape(panels.shape[0] * PANEL, -1)[:n, :k]


def requantized(
    sums: np.ndarray, multiplier: Any, zero: int, low: int, high: int, y: np.ndarray
) -> None:
    """y = clip(round(sums · multiplier) + zero, low, high), to even: products in float32, of which
    each device makes the same. A float y gets sums · multiplier.
    """
    scaled = sums.astype(np.float32) * np.asarray(multiplier, np.float32)
    if y.dtype.kind == "f":
        np.copyto(y, scaled)
        return
    np.clip(scaled, np.float32(low - zero), np.float32(high - zero), out=scaled)
    np.copyto(y, np.rint(scaled) + zero, casting="unsafe")


def _sums(rows: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """rows (M, K) uint8 times weights (N, K) int8 plus bias: (M, N) in int32, exactly."""
    total = np.broadcast_to(bias, (len(rows), len(weights))).astype(np.int32)
    for k in range(0, rows.shape[1], _EXACT):
        left, right = rows[:, k : k + _EXACT], weights[:, k : k + _EXACT]
        total += (left.astype(np.float32) @ right.astype(np.float32).T).astype(np.int32)
    return total


RESULT = dict(
    dtype=DType(UINT8),
    zero=Int(0, low=0, high=255),
    low=Int(0, low=0, high=255),
    high=Int(255, low=0, high=255),
)


class _Product(Op):
    """The base of products: x times packed weights plus bias int32 (N,), requantized by one
    multiplier for each output channel, float32 (N,); in float32 where `dtype` says so. `zero` is
    what stands for 0 in the result, `low` and `high` are bounds of it, as an activation sets them.
    """

    any_dtype = True
    vocabulary = False
    tolerance = 0.0

    def check(self, node: Node, k: int, *specs: Spec) -> int:
        """The number of output channels. ShapeError for weights that are not those of K inputs."""
        x, w, bias, multiplier = specs
        n = bias.shape[0] if len(bias.shape) == 1 else -1
        if w.shape != (-(-n // PANEL), -(-k // STEP), PANEL * STEP) or multiplier.shape != (n,):
            raise node.error(f"packed weights do not fit {k} inputs: {describe(node, specs)}")
        return n

    def requantize(self, node: Node, arrays: Sequence[np.ndarray], rows: np.ndarray) -> None:
        """Writes the product of rows (M, K)."""
        _, w, bias, multiplier, y = arrays
        n, attrs = len(bias), node.attrs
        sums = _sums(rows, unpacked(w, n, rows.shape[1]), bias)
        requantized(
            sums, multiplier, attrs["zero"], attrs["low"], attrs["high"], y.reshape(len(rows), n)
        )

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return node.attrs["zero"], node.attrs["low"], node.attrs["high"]


class QuantizedMatMulOp(_Product):
    """x uint8 (…, K) times packed weights: (…, N)."""

    name = kernel = "quantized_matmul"
    signature = Signature("x", "w", "bias", "multiplier", **RESULT)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if not specs[0].shape:
            raise node.error(f"expected x (…, K), got {describe(node, specs)}")
        n = self.check(node, specs[0].shape[-1], *specs)
        return Spec((*specs[0].shape[:-1], n), node.attrs["dtype"])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        self.requantize(node, arrays, arrays[0].reshape(-1, arrays[0].shape[-1]))

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * output.size * inputs[0].shape[-1]


class _OverImages(Op):
    """An operator over windows of x (N, H, W, C)."""

    def windows(self, node: Node, x: Spec) -> Windows:
        """The windows over the images. ShapeError for what are none."""
        if len(x.shape) != 4:
            raise node.error(f"expected x (N, H, W, C), got {x.shape}")
        return slide(node, x.shape[1:3], node.attrs["size"])


class QuantizedConv2dOp(_OverImages, _Product):
    """x uint8 (N, H, W, C) convolved with packed filters, whose inputs go by (row, column,
    channel) of the window `size`: (N, oH, oW, O). `pad` is what stands for 0 in x.
    """

    name = kernel = "quantized_conv2d"
    signature = Signature(
        "x", "w", "bias", "multiplier", size=IntPair(low=1), stride=IntPair(1, low=1),
        padding=Padding(0), dilation=IntPair(1, low=1), pad=Int(0, low=0, high=255), **RESULT,
    )  # fmt: skip

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, windows = specs[0], self.windows(node, specs[0])
        n = self.check(node, math.prod(windows.size) * x.shape[3], *specs)
        return Spec((x.shape[0], *windows.out, n), node.attrs["dtype"])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x = arrays[0]
        windows = self.windows(node, Spec(x.shape, x.dtype))
        columns = np.moveaxis(_windows(x, windows, node.attrs["pad"]), 3, -1)
        self.requantize(node, arrays, columns.reshape(arrays[-1].size // len(arrays[2]), -1))

    def scalars(self, node: Node) -> tuple[Any, ...]:
        windows = self.windows(node, node.inputs[0].spec)
        return windows.argument, node.attrs["pad"], *super().scalars(node)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        height, width = node.attrs["size"]
        return 2 * output.size * height * width * inputs[0].shape[3]


def _windows(x: np.ndarray, windows: Windows, pad: int) -> np.ndarray:
    """The windows of images (N, H, W, C): a view (N, oH, oW, C, height, width)."""
    wide = np.pad(x, ((0, 0), *windows.padding, (0, 0)), constant_values=pad)
    seen = np.lib.stride_tricks.sliding_window_view(wide, windows.extents, axis=(1, 2))
    (down, across), (rows, columns) = windows.stride, windows.dilation
    heights, widths = ((n - 1) * s + 1 for n, s in zip(windows.out, windows.stride))
    return seen[:, :heights:down, :widths:across, :, ::rows, ::columns]


class QuantizedMaxPoolOp(_OverImages):
    """The largest element of each window of x uint8 (N, H, W, C): (N, oH, oW, C)."""

    name = kernel = "quantized_max_pool2d"
    any_dtype = True
    vocabulary = False
    signature = Signature(
        "x", size=IntPair(low=1), stride=IntPair(1, low=1), padding=Padding(0),
        dilation=IntPair(1, low=1),
    )  # fmt: skip

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x = specs[0]
        return Spec((x.shape[0], *self.windows(node, x).out, x.shape[3]), x.dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        windows = self.windows(node, Spec(x.shape, x.dtype))
        np.copyto(y, _windows(x, windows, 0).max(axis=(4, 5)))

    def scalars(self, node: Node) -> tuple[Any]:
        return (self.windows(node, node.inputs[0].spec).argument,)


def _short(scale: float) -> float:
    """A scale rounded to 16 bits: its product with a uint8 is exact in float32, and so the same
    where a compiler contracts product and sum.
    """
    fraction, exponent = np.frexp(np.float64(scale))
    return float(np.ldexp(np.rint(fraction * 2.0**16), int(exponent) - 16))


class QuantizedAddOp(Op):
    """The sum of two quantized tensors of one shape, uint8: round(a · scale_a + b · scale_b +
    offset), between `low` and `high`. Scales are in units of the result's, and the offset has the
    three zero points.
    """

    name = kernel = "quantized_add"
    any_dtype = True
    vocabulary = False
    signature = Signature(
        "a", "b", scale_a=Number(finite=True), scale_b=Number(finite=True),
        offset=Number(finite=True), low=Int(0, low=0, high=255), high=Int(255, low=0, high=255),
    )  # fmt: skip

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if specs[0].shape != specs[1].shape:
            raise node.error(f"shapes differ: {describe(node, specs)}")
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        a, b, y = arrays
        scale_a, scale_b, offset, low, high = map(np.float32, self.scalars(node))
        total = a.astype(np.float32) * scale_a
        total += b.astype(np.float32) * scale_b
        total += offset
        np.copyto(y, np.rint(np.clip(total, low, high)), casting="unsafe")

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        attrs = node.attrs
        scales = _short(attrs["scale_a"]), _short(attrs["scale_b"])
        return *scales, float(np.float32(attrs["offset"])), attrs["low"], attrs["high"]


quantize_op = QuantizeOp()
dequantize_op = DequantizeOp()
quantized_matmul_op = QuantizedMatMulOp()
quantized_conv2d_op = QuantizedConv2dOp()
quantized_max_pool2d_op = QuantizedMaxPoolOp()
quantized_add_op = QuantizedAddOp()
