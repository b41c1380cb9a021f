"""Independent formulas for the rows of families/movement.py, concat.py and resize.py."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from support.table.rows import Shape

ALL = slice(None)


def grown(x: np.ndarray, shape: Shape, starts: Shape, steps: Shape, value: float) -> np.ndarray:
    y = np.full(shape, float(value))
    for at in np.ndindex(x.shape):
        y[tuple(a + s * k for a, s, k in zip(starts, steps, at))] = x[at]
    return y


def undone(dy: np.ndarray, x: np.ndarray, key: Any) -> np.ndarray:
    numbers = np.arange(x.size).reshape(x.shape)[key]
    flat = np.zeros(x.size)
    flat[numbers.ravel()] = dy.ravel()
    return flat.reshape(x.shape)


def taken(x: np.ndarray, indices: np.ndarray, axis: int = 0) -> np.ndarray:
    axis %= x.ndim
    rows = np.moveaxis(x, axis, 0)[indices.astype(np.int64)]
    front = range(indices.ndim)
    return np.moveaxis(rows, front, [axis + k for k in front])


def scattered(updates: np.ndarray, indices: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
    axis %= updates.ndim - indices.ndim + 1
    lead, tail = updates.shape[:axis], updates.shape[axis + indices.ndim :]
    flat = updates.reshape(*lead, indices.size, *tail)
    y = np.zeros((*lead, size, *tail))
    for k, row in enumerate(indices.ravel()):
        y[(*[ALL] * axis, int(row))] += flat[(*[ALL] * axis, k)]
    return y


def gathered_back(dy: np.ndarray, indices: np.ndarray, x: np.ndarray, axis: int = 0) -> np.ndarray:
    return scattered(dy, indices, x.shape[axis], axis)


def one_hot(indices: np.ndarray, depth: int, dtype: str = "float32") -> np.ndarray:
    return (np.arange(depth) == indices[..., None]).astype(np.float64)


def joined(*arrays: np.ndarray, axis: int = 0) -> np.ndarray:
    rows = [row for array in arrays for row in np.moveaxis(array, axis, 0)]
    axis %= arrays[0].ndim
    empty = np.zeros((*arrays[0].shape[:axis], 0, *arrays[0].shape[axis + 1 :]))
    return np.moveaxis(np.array(rows), 0, axis) if rows else empty


def part_of(dy: np.ndarray, *inputs: np.ndarray, index: int, axis: int) -> np.ndarray:
    before = sum(x.shape[axis] for x in inputs[:index])
    return np.moveaxis(np.moveaxis(dy, axis, 0)[before:][: inputs[index].shape[axis]], 0, axis)


def padded(
    x: np.ndarray, paddings: Any, mode: str = "constant", constant_values: float = 0
) -> np.ndarray:
    more = {"constant_values": constant_values} if mode.lower() == "constant" else {}
    if not x.ndim:
        return x
    return np.pad(x, [(p, p) if np.ndim(p) == 0 else p for p in paddings], mode.lower(), **more)


def unpadded(dy: np.ndarray, paddings: Any, mode: str) -> np.ndarray:
    """Every element of dy is added to the one that padding copies to its place."""
    shape = tuple(n - before - after for n, (before, after) in zip(dy.shape, paddings))
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return np.bincount(
        padded(numbers, paddings, mode).ravel(), dy.ravel(), minlength=numbers.size
    ).reshape(shape)


def untiled(dy: np.ndarray, x: np.ndarray, reps: Shape) -> np.ndarray:
    numbers = np.tile(np.arange(x.size).reshape(x.shape), reps).ravel()
    return np.bincount(numbers, dy.ravel(), minlength=x.size).reshape(x.shape)


def pixels(channel_of: Any) -> Any:
    """depth_to_space, where channel_of(c, row, column, channels, block) is the input's channel."""

    def formula(x: np.ndarray, block: int, mode: str = "DCR") -> np.ndarray:
        n, depth, height, width = x.shape
        y = np.empty((n, depth // block**2, height * block, width * block))
        for b, c, i, j in np.ndindex(y.shape):
            channel = channel_of[mode](c, i % block, j % block, y.shape[1], block)
            y[b, c, i, j] = x[b, channel, i // block, j // block]
        return y

    return formula


to_space = pixels(
    {
        "DCR": lambda c, row, col, channels, block: (row * block + col) * channels + c,
        "CRD": lambda c, row, col, channels, block: (c * block + row) * block + col,
    }
)


def to_depth(x: np.ndarray, block: int, mode: str = "DCR") -> np.ndarray:
    n, channels, height, width = x.shape
    shape = (n, channels * block**2, height // block, width // block)
    numbers = to_space(np.arange(float(np.prod(shape))).reshape(shape), block, mode).astype(int)
    y = np.empty(int(np.prod(shape)))
    y[numbers.ravel()] = x.ravel()
    return y.reshape(shape)


def weights_of(n: int, m: int, mode: str, align: bool) -> np.ndarray:
    """The matrix (m, n) that resizes an axis, in exact fractions until the end."""
    matrix = np.zeros((m, n))
    for i in range(m):
        if align:
            at = Fraction(i * (n - 1), m - 1) if m > 1 else Fraction(0)
        else:
            at = Fraction(2 * i + 1, 2) * n / m - Fraction(1, 2)
        if mode == "nearest":
            half = Fraction(1, 2)
            nearest = -((half - at) // 1) if align else (at + half) // 1  # ties: down, or up
            matrix[i, int(nearest)] = 1
            continue
        at = min(max(at, Fraction(0)), Fraction(n - 1))
        low = int(at)
        matrix[i, low] += float(1 - (at - low))
        if at > low:
            matrix[i, low + 1] += float(at - low)
    return matrix


def resized(
    x: np.ndarray, size: Any = None, scale: Any = None, mode: str = "", align_corners: bool = False
) -> np.ndarray:
    if size is None:
        factors = (scale, scale) if np.ndim(scale) == 0 else scale
        size = [int(n * factor) for n, factor in zip(x.shape[-2:], factors)]
    size = (size, size) if np.ndim(size) == 0 else size
    height, width = (weights_of(n, m, mode, align_corners) for n, m in zip(x.shape[-2:], size))
    if mode == "nearest":
        return x[..., height.argmax(axis=1), :][..., width.argmax(axis=1)]
    return np.einsum("ih,...hw,jw->...ij", height, x, width)


def shrunk(dy: np.ndarray, size: Any, align_corners: bool, mode: str) -> np.ndarray:
    height, width = (weights_of(n, m, mode, align_corners) for n, m in zip(size, dy.shape[-2:]))
    return np.einsum("ih,...ij,jw->...hw", height, dy, width)
