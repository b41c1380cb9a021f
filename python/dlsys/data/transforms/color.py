"""Augmentations of color and size: brightness, contrast, saturation, hue; crops and resizing.

Colors are those of red, green and blue channels, with gray as the luma of ITU-R BT.601:
0.299 R + 0.587 G + 0.114 B. Images of one channel are their own gray.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import DataError
from ..dataset import Array
from ..sample_rng import SampleRng
from .augment import Augmentation

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True)
class ColorJitter(Augmentation):
    """Changes brightness, contrast and saturation, in this order, by a factor between 1 - x and
    1 + x (never below 0), and turns the hue by up to `hue` of the circle, at most 0.5, either way.

    Brightness scales all values, contrast the distance from the mean gray of the image, saturation
    that from the gray of the pixel. uint8 stays in 0 to 255, floats count as values in [0, 1].
    Saturation and hue need three channels and leave images of one as they are.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        amounts = self.brightness, self.contrast, self.saturation
        if min(amounts) < 0 or not 0 <= self.hue <= 0.5:
            raise DataError(f"{self}: expected amounts of 0 or more, and a hue from 0 to 0.5")

    def change(self, images: Array, rng: SampleRng) -> Array:
        if images.shape[1] not in (1, 3):
            raise DataError(f"{self}: expected images of 1 or 3 channels, got {images.shape[1:]}")
        top = np.float32(255 if images.dtype == np.uint8 else 1)
        x = images.astype(np.float32)
        factors = [
            rng.uniform(max(0.0, 1 - amount), 1 + amount) if amount else None
            for amount in (self.brightness, self.contrast, self.saturation)
        ]
        for factor, toward in zip(factors, (_black, _mean_gray, _gray)):
            if factor is not None:
                x = _blended(x, toward(x), factor, top)
        if self.hue and images.shape[1] == 3:
            x = _turned(x, rng.uniform(-self.hue, self.hue))
        return _in_kind(x, images.dtype)


@dataclass(frozen=True)
class Resize(Augmentation):
    """Makes images `size` (height, width): bilinear, and where they become smaller over all the
    pixels that a new one covers (antialias), as Pillow's BILINEAR does.
    """

    size: tuple[int, int]

    def __post_init__(self) -> None:
        _check_size(self, self.size)

    def change(self, images: Array, rng: SampleRng) -> Array:
        return resized(images, self.size)


@dataclass(frozen=True)
class CenterCrop(Augmentation):
    """The part of `size` (height, width) in the middle."""

    size: tuple[int, int]

    def __post_init__(self) -> None:
        _check_size(self, self.size)

    def change(self, images: Array, rng: SampleRng) -> Array:
        top, left = ((a - b) // 2 for a, b in zip(images.shape[2:], self.size))
        if min(top, left) < 0:
            raise DataError(f"{self}: there is no such part in images of {images.shape[1:]}")
        return images[:, :, top : top + self.size[0], left : left + self.size[1]]


@dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """A part of the image made `size` (height, width): its area a share of the image's between the
    two of `scale`, its width to its height between the two of `ratio`, on a logarithmic scale, cut
    to what fits into the image; anywhere in it. After Szegedy et al. (2015).
    """

    size: tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        _check_size(self, self.size)
        if not (0 < self.scale[0] <= self.scale[1] <= 1 and 0 < self.ratio[0] <= self.ratio[1]):
            raise DataError(f"{self}: expected shares from 0 to 1 and ratios above 0, low to high")

    def change(self, images: Array, rng: SampleRng) -> Array:
        n, channels, *plane = images.shape
        area = rng.uniform(*self.scale) * plane[0] * plane[1]
        ratio = np.exp(rng.uniform(*np.log(self.ratio)))
        extents = [
            np.clip(np.rint(np.sqrt(side)), 1, extent).astype(np.int64)
            for side, extent in zip((area / ratio, area * ratio), plane)
        ]
        corners = [
            np.minimum((rng.uniform() * (extent - part + 1)).astype(np.int64), extent - part)
            for part, extent in zip(extents, plane)
        ]
        out = np.empty((n, channels, *self.size), images.dtype)
        for k, (top, left, height, width) in enumerate(zip(*corners, *extents)):
            part = images[k : k + 1, :, top : top + height, left : left + width]
            out[k] = resized(part, self.size)[0]
        return out


def resized(images: Array, size: tuple[int, int]) -> Array:
    """Images (n, channels, height, width) of another size, see Resize; of the same dtype."""
    if images.shape[2:] == tuple(size):
        return images
    rows, cols = (_weights(old, new) for old, new in zip(images.shape[2:], size))
    x = np.matmul(images.astype(np.float32), cols.T)
    if images.dtype == np.uint8:
        x = np.floor(x + np.float32(0.5))  # between the two axes, as Pillow's bytes are
    return _in_kind(np.matmul(rows, x), images.dtype)


def _weights(old: int, new: int) -> Array:
    """The weight of each old pixel in each new one, (new, old) float32: a triangle around its
    center, as wide as one new pixel and at least one old one on each side.
    """
    scale = old / new
    width = max(scale, 1.0)
    centers = (np.arange(new) + 0.5) * scale
    far = np.abs(np.arange(old) + 0.5 - centers[:, None]) / width
    weights = np.maximum(1 - far, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _blended(x: Array, toward: Array, factor: Array, top: np.float32) -> Array:
    factor = factor.astype(np.float32).reshape(-1, 1, 1, 1)
    return np.clip(factor * x + (1 - factor) * toward, 0, top)


def _black(x: Array) -> Array:
    return np.zeros((), np.float32)


def _gray(x: Array) -> Array:
    return x if x.shape[1] == 1 else np.tensordot(x, _LUMA, (1, 0))[:, None]


def _mean_gray(x: Array) -> Array:
    return _gray(x).mean(axis=(1, 2, 3), keepdims=True)


def _turned(x: Array, turns: Array) -> Array:
    """Colors whose hue, in HSV (Smith 1978), is turned by parts of the circle, (n,)."""
    value, low = x.max(axis=1), x.min(axis=1)
    chroma = value - low
    safe = np.where(chroma > 0, chroma, 1)
    red, green, blue = (x[:, k] for k in range(3))
    sixth = np.where(
        value == red,
        (green - blue) / safe,
        np.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth = sixth + 6 * turns.astype(np.float32)[:, None, None]
    # Each channel is value - chroma · max(0, min(k, 4 - k, 1)) with k = (5, 3, 1 + hue) mod 6.
    ks = [np.mod(offset + sixth, 6) for offset in (5, 3, 1)]
    parts = [value - chroma * np.clip(np.minimum(k, 4 - k), 0, 1) for k in ks]
    return np.stack(parts, axis=1)


def _in_kind(x: Array, dtype: np.dtype) -> Array:
    return (
        np.clip(np.floor(x + 0.5), 0, 255).astype(dtype) if dtype == np.uint8 else x.astype(dtype)
    )


def _check_size(step: Augmentation, size: tuple[int, int]) -> None:
    if np.shape(size) != (2,) or min(size) < 1:
        raise DataError(f"{step}: expected a size (height, width) in pixels")
