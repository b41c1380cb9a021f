"""Augmentation: each image of a batch changed a little at random, in vectorized numpy.

`Loader(…, augment=[Shift(2), Cutout(8)])` applies a list in order to the raw pixels, before they
are normalized. Any function (images, labels, rng) -> (images, labels) may be in the list:
images are (n, channels, height, width) uint8 or floating and must not be written, `rng` has the
random numbers. warp.py has rotation and scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...describe import described
from ...errors import DataError
from ..dataset import Array, Split
from ..sample_rng import SampleRng

Augment = Callable[[Array, Array, SampleRng], tuple[Array, Array]]
Shape = tuple[int, ...]

_TABLE = 4096  # points of the distribution that mixup draws from


class Augmentation:
    """One way to change images; subclasses say how in `change`."""

    __repr__ = described

    def __call__(self, images: Array, labels: Array, rng: SampleRng) -> tuple[Array, Array]:
        """The samples changed by chance, and their labels as they are, for a batch: images (n,
        channels, height, width), labels (n, …). rng: random numbers of these samples.
        """
        return self.change(images, rng), labels

    def change(self, images: Array, rng: SampleRng) -> Array:
        """New images (n, channels, height, width) of the same dtype."""
        raise NotImplementedError


@dataclass(frozen=True)
class Crop(Augmentation):
    """A part of `size` (height, width; None is the image's own) from anywhere in the image, around
    which `padding` pixels of `fill` are put first.
    """

    size: tuple[int, int] | None = None
    padding: int = 0
    fill: float = 0

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise DataError(f"{self}: expected a padding of 0 or more pixels")

    def change(self, images: Array, rng: SampleRng) -> Array:
        n, channels, *plane = images.shape
        size = tuple(plane if self.size is None else self.size)
        padded = _padded(images, self.padding, self.fill)
        room = [extent - part for extent, part in zip(padded.shape[2:], size)]
        if min(room) < 0 or min(size) < 1:
            raise DataError(f"{self}: there is no such part in images of {images.shape[1:]}")
        windows = np.lib.stride_tricks.sliding_window_view(padded, size, (2, 3))
        return windows[np.arange(n), :, rng.integers(0, room[0]), rng.integers(0, room[1])]


@dataclass(frozen=True)
class Shift(Augmentation):
    """Moves by up to `pixels` along each axis; what comes in is `fill`."""

    pixels: int
    fill: float = 0

    def change(self, images: Array, rng: SampleRng) -> Array:
        return Crop(None, self.pixels, self.fill).change(images, rng)


@dataclass(frozen=True)
class Flip(Augmentation):
    """Mirrors with `probability`: left and right, or top and bottom where `vertical`."""

    vertical: bool = False
    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise DataError(f"{self}: expected a probability from 0 to 1")

    def change(self, images: Array, rng: SampleRng) -> Array:
        flipped = images[:, :, ::-1] if self.vertical else images[..., ::-1]
        chosen = rng.uniform() < self.probability
        out = images.copy()
        out[chosen] = flipped[chosen]
        return out


@dataclass(frozen=True)
class Cutout(Augmentation):
    """A square of `size` pixels around any pixel of the image, cut at the border, becomes `fill`:
    DeVries and Taylor (2017).
    """

    size: int
    fill: float = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(f"{self}: expected a size of at least one pixel")

    def change(self, images: Array, rng: SampleRng) -> Array:
        rows, cols = (
            np.abs(
                2 * (np.arange(extent) - rng.integers(0, extent - 1)[:, None]) + 1 - self.size % 2
            )
            < self.size
            for extent in images.shape[2:]
        )
        out = images.copy()
        np.copyto(out, self.fill, where=(rows[:, :, None] & cols[:, None])[:, None])
        return out


class Mixup(Augmentation):
    """Each image mixed with the next one of its batch, and their labels with them: share · a +
    (1 - share) · b with a share drawn from Beta(alpha, alpha), after Zhang et al. (2018).

    Images become float32 and labels rows of weights (n, classes) float32. It comes last in a list.
    """

    def __init__(self, classes: int, alpha: float = 0.2) -> None:
        if classes < 1 or not alpha > 0:
            raise DataError(
                f"Mixup: expected classes >= 1 and alpha > 0, got {classes} and {alpha}"
            )
        self.classes, self.alpha = classes, alpha
        # The lower half of the distribution in s = x^alpha, in which its density is smooth.
        self._points = np.linspace(0, 0.5**alpha, _TABLE)
        density = (1 - self._points ** (1 / alpha)) ** (alpha - 1)
        area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
        self._below = 0.5 * area / area[-1]

    def __repr__(self) -> str:
        return f"Mixup(classes={self.classes}, alpha={self.alpha})"

    def shares(self, u: Array) -> Array:
        """The quantiles of Beta(alpha, alpha) at `u` in (0, 1)."""
        lower = np.interp(np.minimum(u, 1 - u), self._below, self._points) ** (1 / self.alpha)
        return np.where(u <= 0.5, lower, 1 - lower)

    def __call__(self, images: Array, labels: Array, rng: SampleRng) -> tuple[Array, Array]:
        """Mixtures of pairs of samples, and of their labels as probabilities: images (n, …), labels
        (n, …). rng: random numbers of these samples.
        """
        share = self.shares(rng.uniform()).astype(np.float32)
        return _mixed(images, share), _mixed(self._weights(labels), share)

    def _weights(self, labels: Array) -> Array:
        if labels.ndim == 2:
            return labels
        if labels.size and labels.max() >= self.classes:
            raise DataError(f"{self}: a label is {labels.max()}")
        return np.equal(labels[:, None], np.arange(self.classes)).astype(np.float32)


def _mixed(a: Array, share: Array) -> Array:
    share = share.reshape(-1, *[1] * (a.ndim - 1))
    return share * a + (1 - share) * np.roll(a, -1, axis=0)


def _padded(images: Array, padding: int, fill: float) -> Array:
    if not padding:
        return images
    n, channels, height, width = images.shape
    out = np.empty((n, channels, height + 2 * padding, width + 2 * padding), images.dtype)
    out[:, :, :padding] = out[:, :, -padding:] = fill
    out[..., :padding] = out[..., -padding:] = fill
    out[:, :, padding:-padding, padding:-padding] = images
    return out


class Compose:
    """Augmentations one after the other, for samples of any layout.

    shape: (channels, height, width) in which flattened samples are seen; they are flat again
    afterwards. Not needed for samples that have that layout, or (height, width). steps: the
    augmentations, in order.
    """

    __repr__ = described

    def __init__(self, steps: Sequence[Augment], shape: Shape | None = None) -> None:
        if not isinstance(steps, Iterable) or not all(map(callable, steps)):
            raise DataError(f"augment is {steps!r}, expected a list such as [Shift(2)]")
        self.steps = tuple(steps)
        self.shape = None if shape is None else tuple(shape)

    def __call__(self, images: Array, labels: Array, rng: SampleRng) -> Split:
        """The changed samples. DataError for images whose layout is not known.

        images (n, …) and their labels. rng: random numbers of these samples.
        """
        sample_shape = images.shape[1:]
        images = images.reshape(len(images), *self._seen(sample_shape))
        for step in self.steps:
            images, labels = step(images, labels, rng)
        if len(sample_shape) == 1:
            images = images.reshape(len(images), -1)
        elif len(sample_shape) == 2:
            images = images[:, 0]
        return Split(images, labels)

    def _seen(self, sample_shape: Any) -> Shape:
        if self.shape is not None:
            if len(self.shape) != 3 or np.prod(self.shape) != np.prod(sample_shape):
                raise DataError(
                    f"shape {self.shape} does not fit images of {sample_shape}; expected (channels,"
                    " height, width)"
                )
            return self.shape
        if len(sample_shape) not in (2, 3):
            raise DataError(
                f"images of {sample_shape} cannot be augmented before their layout is known: give "
                "shape=(channels, height, width)"
            )
        return (1, *sample_shape) if len(sample_shape) == 2 else tuple(sample_shape)
