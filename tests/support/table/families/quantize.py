"""The rows of samples.py for quantization and for operators with integers of 8 bits. Numbers are
chosen so that float32 and float64 are exact alike: a rounding of halves is one on every device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops import quantize
from support.table.families.device_batch import pixels
from support.table.rows import Case, Sample, case, classes, refuse

Array = np.ndarray


def eighths(rng: np.random.Generator, shape: Any) -> Array:
    return rng.integers(-400, 400, shape) / 8


def powers(rng: np.random.Generator, shape: Any) -> Array:
    return 2.0 ** rng.integers(-4, 3, shape)


def along(v: Array, x: Array, axis: int) -> Array:
    return np.moveaxis(np.broadcast_to(v, (*np.moveaxis(x, axis, -1).shape,)), -1, axis)


def quantized(x: Array, scale: Array, zero: Array, axis: int = 0) -> Array:
    info = np.iinfo(zero.dtype)
    units = np.round(x / along(scale, x, axis)) + along(zero, x, axis)
    return np.minimum(np.maximum(units, info.min), info.max).astype(zero.dtype)


def dequantized(x: Array, scale: Array, zero: Array, axis: int = 0) -> Array:
    return (x.astype(np.float64) - along(zero, x, axis)) * along(scale, x, axis)


def weight(w: Array, n: int, k: int) -> Array:
    """The packed weights, element by element."""
    at = np.ndindex(n, k)
    flat = [w.view(np.int8)[i // 16, j // 4, i % 16 * 4 + j % 4] for i, j in at]
    return np.array(flat, np.int64).reshape(n, k)


def result(sums: Array, multiplier: Array, attrs: dict[str, Any]) -> Array:
    scaled = sums * multiplier
    if attrs.get("dtype") == np.float32:
        return scaled
    moved = np.round(scaled) + attrs.get("zero", 0)
    return np.clip(moved, attrs.get("low", 0), attrs.get("high", 255)).astype(np.uint8)


def multiplied(x: Array, w: Array, bias: Array, multiplier: Array, **attrs: Any) -> Array:
    sums = x.astype(np.int64) @ weight(w, len(bias), x.shape[-1]).T + bias
    return result(sums, multiplier, attrs)


def convolved(x: Array, w: Array, bias: Array, multiplier: Array, **attrs: Any) -> Array:
    """Window by window."""
    (height, width), c = attrs["size"], x.shape[3]
    stride, dilation = attrs.get("stride", 1), attrs.get("dilation", 1)
    around, pad = (attrs.get("padding", 0),) * 2, attrs.get("pad", 0)
    wide = np.pad(x, ((0, 0), around, around, (0, 0)), constant_values=pad)
    h, v = ((n - 1) * dilation + 1 for n in (height, width))
    rows = range(0, wide.shape[1] - h + 1, stride)
    columns = range(0, wide.shape[2] - v + 1, stride)
    matrix = weight(w, len(bias), height * width * c).T
    windows = [
        wide[:, i : i + h : dilation, j : j + v : dilation].reshape(len(x), -1)
        for i in rows
        for j in columns
    ]
    sums = np.stack(windows, 1).astype(np.int64) @ matrix + bias
    return result(sums.reshape(len(x), len(rows), len(columns), -1), multiplier, attrs)


def pooled(x: Array, size: Any, stride: int, padding: int = 0, dilation: int = 1) -> Array:
    around = (padding, padding)
    wide = np.pad(x, ((0, 0), around, around, (0, 0)))
    h, v = ((n - 1) * dilation + 1 for n in size)
    return np.stack([
        np.stack([
            wide[:, i : i + h : dilation, j : j + v : dilation].max(axis=(1, 2))
            for j in range(0, wide.shape[2] - v + 1, stride)
        ], 1)
        for i in range(0, wide.shape[1] - h + 1, stride)
    ], 1)  # fmt: skip


def added(
    a: Array, b: Array, scale_a: float, scale_b: float, offset: float, **bounds: int
) -> Array:
    total = np.round(a * scale_a + b * scale_b + offset)
    return np.clip(total, bounds.get("low", 0), bounds.get("high", 255)).astype(np.uint8)


def product(shape: Any, n: int, k: int, **attrs: Any) -> Case:
    """A product of x by weights (n, k) within the range of int8."""

    def weights(rng: np.random.Generator, shape: Any) -> Array:
        return quantize.packed(rng.integers(-128, 128, (n, k)).astype(np.int8))

    domain = (
        pixels,
        weights,
        classes(20_000, np.int32),
        lambda rng, shape: np.full(shape, 2.0**-11),
    )
    packed = (-(-n // 16), -(-k // 4), 64)
    return case(shape, packed, (n,), (n,), domain=domain, **attrs)


UINT8, INT8, INT32 = (classes(120, t) for t in (np.uint8, np.int8, np.int32))
NO_OFFSET = classes(1, np.int32)
LINEAR = (((5,), ()), ((3, 7), (3,)), ((2, 3, 4, 5), ()), ((0, 3), ()), ((300, 257), ()))
FLOAT = {"dtype": np.float32}
NO_PARTS: dict[str, Any] = dict(differentiable=(), specials=False, storages=(), ulps=0)
QUANTIZED = (
    Sample(
        "quantize", quantize.quantize_op, quantized,
        tuple(case(x, s, s, domain=(eighths, powers, UINT8)) for x, s in LINEAR)
        + (case((2, 3, 5), (3,), (3,), domain=(eighths, powers, UINT8), axis=1),),
        refusals=(
            refuse(r"no scale for each position of axis 0", (3, 4), (2,), (2,),
                   dtypes=("float32", "float32", "uint8")),
            refuse("zero must be uint8 or int8", (3,), (), ()),
        ),
        **NO_PARTS,
    ),
    Sample(
        "dequantize", quantize.dequantize_op, dequantized,
        tuple(
            case(x, s, s, domain=(kind, powers, zero))
            for x, s in LINEAR
            for kind, zero in ((UINT8, UINT8), (INT32, NO_OFFSET))  # ONNX has none of int32
        )
        + (case((2, 3, 5), (3,), (3,), domain=(UINT8, powers, UINT8), axis=-2),),
        refusals=(refuse("must both be uint8, int8 or int32", (3,), (), ()),),
        **NO_PARTS,
    ),
    Sample(
        "quantized_matmul", quantize.quantized_matmul_op, multiplied,
        (
            product((3, 8), 5, 8), product((2, 7), 33, 7, zero=9, low=9),
            product((1, 400), 120, 400, zero=3, high=200), product((2, 3, 12), 16, 12, **FLOAT),
            product((0, 4), 4, 4), product((131, 259), 70, 259, zero=128),
            product((16_900, 16), 40, 16, low=7),
        ),
        refusals=(
            refuse("packed weights do not fit 3 inputs", (2, 3), (1, 2, 64), (4,), (4,),
                   dtypes=("uint8", "uint8", "int32", "float32")),
        ),
        **NO_PARTS,
    ),
    Sample(
        "quantized_conv2d", quantize.quantized_conv2d_op, convolved,
        (
            product((2, 5, 6, 3), 5, 27, size=(3, 3), padding=1, pad=7),
            product((1, 9, 8, 1), 6, 25, size=(5, 5), padding=2, zero=4, low=4),
            product((2, 4, 4, 8), 20, 8, size=(1, 1), **FLOAT),
            product((1, 4, 5, 6), 3, 6, size=(1, 1), zero=128),
            product((1, 9, 9, 4), 17, 24, size=(2, 3), stride=2, dilation=2, padding=1, pad=200),
            product((3, 12, 11, 16), 40, 144, size=(3, 3), padding=1, zero=128),
            product((2, 21, 19, 16), 66, 144, size=(3, 3), padding=2, dilation=2, pad=99),
            product((1, 130, 121, 3), 66, 75, size=(5, 5), stride=2, padding=2, pad=7),
            product((2, 5, 2100, 5), 6, 30, size=(2, 3), padding=1, pad=7, **FLOAT),
        ),
        **NO_PARTS,
    ),
    Sample(
        "quantized_max_pool2d", quantize.quantized_max_pool2d_op, pooled,
        tuple(
            case(shape, domain=pixels, **attrs)
            for shape in [(2, 6, 5, 3), (1, 8, 9, 21), (0, 4, 4, 2)]
            for attrs in [
                dict(size=(2, 2), stride=2), dict(size=(3, 2), stride=1, padding=1),
                dict(size=(2, 2), stride=1, dilation=2),
            ]
        ),
        refusals=(refuse(r"expected x \(N, H, W, C\)", (3, 4), dtypes=("uint8",), size=(1, 1)),),
        **NO_PARTS,
    ),
    Sample(
        "quantized_add", quantize.quantized_add_op, added,
        tuple(
            case(s, s, domain=pixels, scale_a=0.75, scale_b=0.3125, offset=-20.5, low=3, high=250)
            for s in [(5,), (0, 2), (3, 4, 2, 7), (40_000,)]
        ),
        refusals=(
            refuse("shapes differ", (3,), (4,), dtypes=("uint8", "uint8"), scale_a=1.0,
                   scale_b=1.0, offset=0.0),
        ),
        **NO_PARTS,
    ),
)  # fmt: skip
