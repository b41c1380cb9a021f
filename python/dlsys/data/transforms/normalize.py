"""Normalization of pixels: one scale and one shift a channel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError
from ..dataset import Array, Dataset

_CHUNK = 1 << 22  # elements summed at a time
_PART = 1 << 16  # elements scaled at a time, so that scratch stays in the cache
_LEVELS = 255.0  # of uint8 pixels, which count as values in [0, 1]


class Normalization(NamedTuple):
    """(x - mean) / std with a number a channel; uint8 pixels are divided by 255 before."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, dataset: Dataset) -> Normalization:
        """The one that gives this set, the training set, mean 0 and deviation 1 in each channel.

        Images (n, channels, height, width) have a number a channel, all others one. A channel of
        one value everywhere is only shifted. dataset: the training set.
        """
        planes = _planes(dataset.sample_shape)
        levels = _LEVELS if dataset.dtype == np.uint8 else 1.0
        mean = _means(dataset, planes, np.zeros(planes), 1)
        std = np.sqrt(_means(dataset, planes, mean, 2))
        std[std == 0] = levels
        return cls(tuple((mean / levels).tolist()), tuple((std / levels).tolist()))

    def agrees(self, other: Normalization) -> bool:
        """True if it equals another one; one value counts for every channel.

        other: the other one.
        """
        return all(len(a) == len(b) or 1 in (len(a), len(b)) for a, b in zip(self, other)) and all(
            bool(np.all(np.asarray(a) == np.asarray(b))) for a, b in zip(self, other)
        )

    def affine(self, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """scale and shift (channels,) float32: scale · x + shift normalizes pixels of `dtype`."""
        mean, std = np.array(self.mean, np.float64), np.array(self.std, np.float64)
        levels = _LEVELS if dtype == np.uint8 else 1.0
        return (1 / (std * levels)).astype(np.float32), (-mean / std).astype(np.float32)


PLAIN = Normalization((0.0,), (1.0,))


def normalization_of(given: Any, sample_shape: tuple[int, ...]) -> Normalization:
    """The meaning of a loader's `normalize=`: None only brings uint8 to [0, 1]; a mean and a
    deviation are scalars or one value a channel. DataError unless they fit the samples.
    """
    if given is None:
        return PLAIN
    try:
        mean, std = (tuple(np.atleast_1d(np.asarray(part, np.float64)).tolist()) for part in given)
    except (TypeError, ValueError):
        raise DataError(
            f"normalize is {given!r}, expected None or a pair (mean, std), such as "
            "Normalization.of(training set)"
        ) from None
    size = int(np.prod(sample_shape))
    fits = len(mean) == len(std) and size % len(mean) == 0 and min(std) > 0
    if not (fits and np.isfinite([mean, std]).all()):
        raise DataError(
            f"normalize: mean {mean} and std {std} do not fit images of {sample_shape}: one "
            "positive deviation a mean, one finite number or one a channel"
        )
    return Normalization(mean, std)


def normalized(images: Array, scale: Array, shift: Array) -> Array:
    """scale · images + shift as float32, a number a plane; the same bits as a native device's."""
    planes, n = scale.size, len(images)
    flat = np.ascontiguousarray(images).reshape(n, planes, images.size // max(n * planes, 1))
    out = np.empty(flat.shape, np.float32)
    slopes, offsets = (a.astype(np.float64).reshape(planes, 1) for a in (scale, shift))
    if images.dtype == np.uint8:
        for plane, table in enumerate((np.arange(256) * slopes + offsets).astype(np.float32)):
            out[:, plane] = table[flat[:, plane]]
    else:
        rows = max(1, _PART * n // max(images.size, 1))
        for first in range(0, n, rows):
            out[first : first + rows] = flat[first : first + rows] * slopes + offsets
    return out.reshape(images.shape)


def _planes(sample_shape: tuple[int, ...]) -> int:
    return sample_shape[0] if len(sample_shape) == 3 else 1


def _means(dataset: Dataset, planes: int, center: Array, power: int) -> Array:
    """The mean of (x - center)^power of each channel."""
    size = int(np.prod(dataset.sample_shape))
    rows = max(1, _CHUNK // size)
    total = np.zeros(planes)
    for first in range(0, len(dataset), rows):
        images = dataset.take(slice(first, first + rows)).images
        deviation = images.reshape(len(images), planes, -1) - center.reshape(planes, 1)
        total += (deviation**power).sum(axis=(0, 2))
    return total / (len(dataset) * (size // planes))
