"""Calibration: the range of each tensor that is to be quantized, over batches of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import DataError

_BINS = 2048  # of a histogram
_LEVELS = 128  # of the positive half of a range of 8 bits
_HELD = 0.999  # of the elements, that a threshold holds: one value that is frequent, such as a
# background's, would else draw it to where the levels are finest
_STRIDE = 8  # bins between the thresholds that entropy compares

Range = tuple[float, float]
# Runs the model over all batches: the arrays of the tensors, in their order, for each batch.
Batches = Callable[[], Iterable[Sequence[np.ndarray]]]


def minmax(batches: Batches, percentile: float) -> list[Range]:
    """The least and the largest element of each tensor."""
    found: list[Range] = []
    for arrays in batches():
        seen = [(float(x.min()), float(x.max())) for x in arrays if x.size]
        if not np.isfinite(seen).all():
            raise DataError("quantize: the model gives NaN or infinity for the calibration data")
        found = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(found, seen)] or seen
    return found


def by_percentile(batches: Batches, percentile: float) -> list[Range]:
    """The range that holds `percentile` of the elements, as many left out at either end."""
    ranges = minmax(batches, percentile)
    found = []
    for (low, high), counts in zip(ranges, _histograms(batches, ranges)):
        edges = np.linspace(low, high, _BINS + 1)
        outside = counts.sum() * (1 - percentile / 100) / 2
        first = np.searchsorted(np.cumsum(counts), outside, side="right")
        last = _BINS - np.searchsorted(np.cumsum(counts[::-1]), outside, side="right")
        found.append((float(edges[first]), float(edges[max(last, first + 1)])))
    return found


def by_entropy(batches: Batches, percentile: float) -> list[Range]:
    """The range within ±T, where T gives the least relative entropy between the distribution of
    magnitudes and the same in 128 levels: Migacz, "8-bit inference with TensorRT" (2017). Zeros are
    not counted, which every range holds exactly, and T holds 99.9 % of the others.
    """
    ranges = minmax(batches, percentile)
    largest = [(0.0, max(abs(low), abs(high))) for low, high in ranges]
    magnitudes = _histograms(lambda: (_magnitudes(xs) for xs in batches()), largest)
    found = []
    for (low, high), (_, top), counts in zip(ranges, largest, magnitudes):
        threshold = top * _threshold(counts.astype(np.float64)) / _BINS
        found.append((max(low, -threshold), min(high, threshold)))
    return found


METHODS = {"minmax": minmax, "percentile": by_percentile, "entropy": by_entropy}


def _magnitudes(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.abs(x[x != 0]) for x in arrays]


def _histograms(batches: Batches, ranges: Sequence[Range]) -> list[np.ndarray]:
    """The counts of each tensor's elements in equal bins of its range."""
    counts = [np.zeros(_BINS, np.int64) for _ in ranges]
    for arrays in batches():
        for x, (low, high), total in zip(arrays, ranges, counts):
            total += np.histogram(x, _BINS, (low, high if high > low else low + 1))[0]
    return counts


def _threshold(counts: np.ndarray) -> int:
    """The number of bins up to the threshold of the least relative entropy."""
    best, least = _BINS, np.inf
    held = int(np.searchsorted(np.cumsum(counts), _HELD * counts.sum())) + 1
    for bins in range(max(_LEVELS, held), _BINS + 1, _STRIDE):
        clipped = counts[:bins].copy()
        clipped[-1] += counts[bins:].sum()
        entropy = _divergence(clipped, _in_levels(counts[:bins]))
        if entropy < least:
            best, least = bins, entropy
    return best


def _in_levels(counts: np.ndarray) -> np.ndarray:
    """The counts as 128 levels tell them: each level's sum, spread over its bins that are not
    empty.
    """
    level = np.arange(len(counts)) * _LEVELS // len(counts)
    used = counts > 0
    sums = np.bincount(level, counts, _LEVELS)
    filled = np.bincount(level, used, _LEVELS)
    return np.where(used, (sums / np.maximum(filled, 1))[level], 0.0)


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Σ p log(p / q) of two histograms, infinite where q has nothing of p."""
    if not p.sum() or not q.sum():
        return np.inf
    p, q = p / p.sum(), q / q.sum()
    used = p > 0
    if np.any(q[used] == 0):
        q = np.maximum(q, 1e-12)
    return float(np.sum(p[used] * np.log(p[used] / q[used])))
