"""Augmentations that turn and stretch images about their centers, with bilinear interpolation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import DataError
from ..dataset import Array
from ..sample_rng import SampleRng
from .augment import Augmentation

_CHUNK = 1 << 15  # pixels at a time, so that scratch stays in the cache


@dataclass(frozen=True)
class Rotate(Augmentation):
    """Turns by an angle between -degrees and degrees; corners that come in are `fill`."""

    degrees: float
    fill: float = 0

    def change(self, images: Array, rng: SampleRng) -> Array:
        angle = np.radians(rng.uniform(-self.degrees, self.degrees))
        cos, sin = np.cos(angle), np.sin(angle)
        return warped(images, np.array([[cos, sin], [-sin, cos]]).transpose(2, 0, 1), self.fill)


@dataclass(frozen=True)
class Scale(Augmentation):
    """Magnifies by a factor between low and high, the same along both axes; borders that come in
    are `fill`.
    """

    low: float
    high: float
    fill: float = 0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise DataError(f"{self}: expected 0 < low <= high")

    def change(self, images: Array, rng: SampleRng) -> Array:
        factor = rng.uniform(self.low, self.high)
        return warped(images, np.eye(2) / factor[:, None, None], self.fill)


def warped(images: Array, matrices: Array, fill: float = 0) -> Array:
    """Images (n, channels, height, width) whose pixel at p, a (row, column) from the center, is the
    old value at `matrix @ p`, bilinear between four pixels; beyond the border there is `fill`.

    matrices: (n, 2, 2). uint8 is rounded to the nearest.
    """
    rows = max(1, _CHUNK // int(np.prod(images.shape[2:])))
    out = np.empty_like(images)
    for first in range(0, len(images), rows):
        part = slice(first, first + rows)
        out[part] = _warped(images[part], matrices[part].astype(np.float32), fill)
    return out


def _warped(images: Array, matrices: Array, fill: float) -> Array:
    n, channels, height, width = images.shape
    # A border of one pixel before and two behind holds what lies beyond, so that nothing is asked.
    bordered = np.full((channels, n, height + 3, width + 3), fill, np.float32)
    bordered[:, :, 1:-2, 1:-2] = images.transpose(1, 0, 2, 3)
    row, down = _sources(matrices[:, 0], height, width, height)
    col, right = _sources(matrices[:, 1], height, width, width)
    at = (row + np.arange(n)[:, None, None] * (height + 3)) * (width + 3) + col
    out = np.empty(images.shape, np.float32)
    for channel in range(channels):
        flat = bordered[channel].reshape(-1)
        above, below = (
            left + right * (flat.take(start + 1) - left)
            for start in (at, at + (width + 3))
            for left in [flat.take(start)]
        )
        out[:, channel] = above + down * (below - above)
    return np.rint(out, out=out) if images.dtype == np.uint8 else out


def _sources(weights: Array, height: int, width: int, extent: int) -> tuple[Array, Array]:
    """The source of pixels along one axis: a position in the bordered image, and the fraction.

    weights: (n, 2), of a pixel's row and column.
    """
    rows = np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2)
    cols = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
    center = np.float32((extent - 1) / 2 + 1)
    position = (weights[:, :1] * rows + center)[:, :, None] + (weights[:, 1:] * cols)[:, None]
    np.clip(position, 0, extent + 1, out=position)
    floor = position.astype(np.int64)
    return floor, position - floor.astype(np.float32)
