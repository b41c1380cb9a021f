"""Random numbers of samples, a function of (seed, epoch, sample, count drawn before)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..describe import described
from ..ops.random.philox import philox
from .dataset import Array

_AUGMENTS = 0x6175676D  # plus the block: the counter's fourth word, beyond all nodes' ids
_MASK = 0xFFFFFFFF


class SampleRng:
    """Random numbers for the samples of a batch, which do not depend on how batches are cut.

    samples: their indices in the data set, (n,), below 2^32. Each call draws once more for each of
    them. seed, epoch: integers that the numbers depend on.
    """

    __repr__ = described

    def __init__(self, seed: int, epoch: int, samples: Any) -> None:
        self._samples = np.asarray(samples, np.uint64)
        self._key = (seed & _MASK, seed >> 32 & _MASK)
        self._epoch = epoch
        self._block = 0
        self._words: list[Array] = []

    def words(self) -> Array:
        """uint64 below 2^32."""
        if not self._words:
            epoch = (self._epoch & _MASK, self._epoch >> 32 & _MASK)
            counter = (self._samples, *epoch, _AUGMENTS + self._block)
            self._words = list(philox(counter, self._key)[::-1])
            self._block += 1
        return self._words.pop()

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Array:
        """float64 in (low, high)."""
        return low + (self.words() + 0.5) * 2.0**-32 * (high - low)

    def integers(self, low: int, high: int) -> Array:
        """int64 from low to high, both included; high - low < 2^31."""
        span = np.uint64(high - low + 1)
        return (self.words() * span >> np.uint64(32)).astype(np.int64) + low
