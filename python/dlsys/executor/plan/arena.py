"""The arena packer finds offsets for intervals, so that no two that live at the same time overlap.

Two strategies, both deterministic: largest first with best fit (tight, quadratic in the number of
intervals, with numpy doing the scans), and for very long programs best fit in time order over a
sorted list of gaps.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 256
_EXACT_LIMIT = 3000  # intervals up to which the tight strategy is quick

Span = tuple[int, int, int]  # nbytes, first step, last step (inclusive)


def aligned(nbytes: int) -> int:
    """nbytes rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(spans: Sequence[Span], share: bool = True) -> tuple[list[int], int]:
    """The offset of every span and the size of the arena, all in bytes and aligned to 256."""
    if not share:
        offsets = [0]
        for nbytes, _, _ in spans:
            offsets.append(offsets[-1] + aligned(nbytes))
        return offsets[:-1], offsets[-1]
    candidates = [_in_time_order(spans)]
    if len(spans) <= _EXACT_LIMIT:
        candidates.append(_largest_first(spans))
    return min(candidates, key=lambda packed: packed[1])


def _largest_first(spans: Sequence[Span]) -> tuple[list[int], int]:
    """The largest span goes first, each into the smallest gap between those alive with it."""
    order = sorted(range(len(spans)), key=lambda k: (-spans[k][0], spans[k][1]))
    first = np.array([span[1] for span in spans], dtype=np.int64)
    last = np.array([span[2] for span in spans], dtype=np.int64)
    starts = np.zeros(len(spans), dtype=np.int64)
    ends = np.zeros(len(spans), dtype=np.int64)  # 0 while not placed
    top = 0
    for k in order:
        nbytes = aligned(spans[k][0])
        meets = np.flatnonzero((first <= last[k]) & (last >= first[k]) & (ends > 0))
        meets = meets[np.argsort(starts[meets], kind="stable")]
        starts[k] = _smallest_gap(starts[meets], ends[meets], nbytes)
        ends[k] = starts[k] + nbytes
        top = max(top, int(ends[k]))
    return starts.tolist(), top


def _smallest_gap(starts: np.ndarray, ends: np.ndarray, nbytes: int) -> int:
    if not len(starts):
        return 0
    covered = np.maximum.accumulate(ends)
    gap_start = np.concatenate(([0], covered[:-1]))
    room = starts - gap_start
    fits = np.flatnonzero(room >= nbytes)
    if len(fits):
        return int(gap_start[fits[np.argmin(room[fits])]])
    return int(covered[-1])


def _in_time_order(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Each span takes the smallest gap that is free when it begins; gaps merge when spans end."""
    offsets = [0] * len(spans)
    ending = sorted(range(len(spans)), key=lambda k: spans[k][2])
    gaps = _Gaps()
    done = 0
    for k in sorted(range(len(spans)), key=lambda k: (spans[k][1], -spans[k][0])):
        while done < len(ending) and spans[ending[done]][2] < spans[k][1]:
            ended = ending[done]
            gaps.give(offsets[ended], aligned(spans[ended][0]))
            done += 1
        offsets[k] = gaps.take(aligned(spans[k][0]))
    return offsets, gaps.top


class _Gaps:
    """Free intervals below `top`, found by size and merged by address."""

    def __init__(self) -> None:
        self.top = 0
        self._by_size: list[tuple[int, int]] = []  # (nbytes, start), sorted
        self._starting: dict[int, int] = {}  # start → nbytes
        self._ending: dict[int, int] = {}  # end → start

    def take(self, nbytes: int) -> int:
        at = bisect.bisect_left(self._by_size, (nbytes, 0))
        if at == len(self._by_size):
            return self._extend(nbytes)
        size, start = self._by_size[at]
        self._remove(start, size)
        if size > nbytes:
            self._insert(start + nbytes, size - nbytes)
        return start

    def give(self, start: int, nbytes: int) -> None:
        if start in self._ending:
            before = self._ending[start]
            size = start - before
            self._remove(before, size)
            start, nbytes = before, nbytes + size
        if start + nbytes in self._starting:
            size = self._starting[start + nbytes]
            self._remove(start + nbytes, size)
            nbytes += size
        self._insert(start, nbytes)

    def _extend(self, nbytes: int) -> int:
        start = self._ending.get(self.top, self.top)  # grow the gap at the end, if there is one
        if start < self.top:
            self._remove(start, self.top - start)
        self.top = start + nbytes
        return start

    def _insert(self, start: int, nbytes: int) -> None:
        bisect.insort(self._by_size, (nbytes, start))
        self._starting[start] = nbytes
        self._ending[start + nbytes] = start

    def _remove(self, start: int, nbytes: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (nbytes, start))]
        del self._starting[start]
        del self._ending[start + nbytes]
