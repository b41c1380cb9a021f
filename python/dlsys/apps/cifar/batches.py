"""Batches of images that are cut and mirrored on the device, and a made stand-in for CIFAR-10."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import functional as F
from ...autodiff import Generator, Node
from ...data import Dataset, DeviceLoader
from ...data.dataset import Sets
from ...data.formats.cifar import CLASSES

_BLOCK = 4  # pixels a side of the parts that a made image consists of


class MovedLoader(DeviceLoader):
    """A `DeviceLoader` of images (n, C, H, W) whose batches are cut at random from images with
    `margin` mirrored pixels around them, and flipped from left to right half of the time, each
    image for itself, by the graph of the training step. What a batch has is a function of (seed,
    its number) alone. Arguments else as of DeviceLoader, which shuffles here.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        margin: int = 4,
        seed: int = 0,
        normalize: Any = None,
    ) -> None:
        self._source, self._margin = Generator(seed), margin
        super().__init__(dataset, batch_size, shuffle=True, seed=seed, normalize=normalize)

    def inputs(self) -> tuple[Node, ...]:
        """Images (batch_size, C, H, W) float32 and labels."""
        images, labels = super().inputs()
        return moved(images, self._margin, self._source), labels

    def seek(self, step: int) -> None:
        """Makes `step`, counted from the first batch of epoch 0, the next one."""
        super().seek(step)
        self._source.step.set(np.int64(step))


def moved(x: Node, margin: int, source: Generator) -> Node:
    """x (N, C, H, W) with each image shifted by up to `margin` pixels down and across, where its
    mirror image goes on, and flipped half of the time.
    """
    count, channels, height, width = x.shape
    drawn = F.random_uniform((count, 3), generator=source)
    down, across = (
        F.reshape(F.astype(F.floor(drawn[:, k] * float(2 * margin + 1)), np.int64), (-1, 1, 1, 1))
        for k in range(2)
    )
    flipped = F.reshape(drawn[:, 2] < 0.5, (-1, 1, 1, 1))
    both = (margin, margin)
    padded = F.pad(x, ((0, 0), (0, 0), both, both), mode="reflect")
    rows = down + np.arange(height).reshape(1, 1, -1, 1)
    columns = np.arange(width).reshape(1, 1, 1, -1)
    columns = across + F.where(flipped, columns[..., ::-1].copy(), columns)
    wide = (count, channels, height, width + 2 * margin)
    cut = F.take_along_axis(padded, F.broadcast_to(rows, wide), axis=2)
    return F.take_along_axis(cut, F.broadcast_to(columns, x.shape), axis=3)


def made_sets(train: int = 45_000, held: int = 5_000, test: int = 10_000, seed: int = 0) -> Sets:
    """A stand-in for CIFAR-10 in its shapes and classes: a symmetric colored pattern of its own for
    each class under noise of larger size. It says how long an epoch takes, and whether a network
    learns at all, and nothing about photographs.
    """
    rng = np.random.default_rng(seed)
    patterns = _grown(rng.normal(size=(len(CLASSES), 3, 8, 8)))
    patterns = patterns + patterns[..., ::-1] + rng.normal(size=(len(CLASSES), 3, 1, 1))
    counts = train, held, test
    parts = []
    for count in counts:
        labels = rng.integers(len(CLASSES), size=count)
        noise = _grown(rng.normal(size=(count, 3, 8, 8)).astype(np.float32))
        values = 127 + 25 * patterns[labels] + 50 * noise
        parts.append(Dataset(np.clip(values, 0, 255).astype(np.uint8), labels, CLASSES))
    return Sets(*parts)


def _grown(values: np.ndarray) -> np.ndarray:
    """Each value as a block of pixels."""
    return values.repeat(_BLOCK, axis=2).repeat(_BLOCK, axis=3)
