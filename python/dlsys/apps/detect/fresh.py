"""Batches of made scenes, each seen once: processes make them while the network trains."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from ...data.numbered import NumberedBatches
from ...data.prefetch import ordered_map
from ...graph.node import Node
from . import made
from .network import positions, targets
from .scenes import Array, normalized, pixels_of

_MOST = 28  # processes


class FreshScenes(NumberedBatches):
    """Batches for `train.fit`, as SceneLoader has them, of varied scenes of 128 × 128 pixels that
    are made for them. What a batch has is a function of (seed, its number) alone. Processes that
    the first epoch starts make them ahead; they end with the loader.
    """

    def __init__(self, batch_size: int, steps: int, seed: int = 0) -> None:
        self._seed = seed
        self._workers = max(1, min((os.cpu_count() or 1) - 2, _MOST))
        self._pool: ProcessPoolExecutor | None = None
        places, classes = len(positions(made.SIDE)), len(made.NAMES)
        fields = {
            "image": ((3, made.SIDE, made.SIDE), np.float32),
            "target": ((places, classes + 4), np.float32),
        }
        super().__init__(batch_size, steps, fields)

    def batch(self, number: int) -> tuple[Array, Array]:
        """The images and targets of a batch, by its number since the first epoch's beginning."""
        pixels, wanted = _made(self._seed, number, self.batch_size)
        return normalized(pixels), wanted

    def epoch(self, number: int, start: int = 0) -> Generator[dict[Node, Any], None, None]:
        """The feeds of each batch of an epoch, from batch `start` on, made ahead by processes."""
        if self._pool is None:
            # A process that has used a GPU cannot be forked.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, _ignore_interrupts)
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        pool, (rank, size) = self._pool, self._share
        rows = self.batch_size // size

        def make(number: int) -> tuple[Array, Array]:
            arrays = pool.submit(_made, self._seed, number, self.batch_size).result()
            pixels, wanted = (x[rank * rows : (rank + 1) * rows] for x in arrays)
            return normalized(pixels), wanted

        numbers = range(number * len(self) + start, (number + 1) * len(self))
        for arrays in ordered_map(make, numbers, self._workers, 2 * self._workers):
            yield dict(zip(self.inputs(), arrays))


def _made(seed: int, number: int, count: int) -> tuple[Array, Array]:
    """The pixels (count, 128, 128, 3) uint8 and the targets of a batch."""
    rng, maker = np.random.default_rng((seed, number)), _maker()
    places, classes = positions(made.SIDE), len(made.NAMES)
    scenes = [maker.scene(rng) for _ in range(count)]
    wanted = [targets(places, one.boxes, one.labels, classes) for one in scenes]
    return np.stack([pixels_of(one.photo) for one in scenes]), np.stack(wanted)


@functools.cache
def _maker() -> made.Maker:
    return made.Maker(held=False, varied=True)


def _ignore_interrupts() -> None:
    """Leaves Ctrl-C to the process that trains, which ends these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
