"""The arena packer finds offsets for intervals, so that no two that live at the same time overlap:
best fit in time order over a list of gaps; where that is not as tight as can be, and the program is
not very long, in two other orders too, in time quadratic in the number of intervals.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

ALIGNMENT = 256
_EXACT_LIMIT = 3000  # intervals up to which the tight strategy is quick

Span = tuple[int, int, int]  # nbytes, first step, last step (inclusive)
Gap = tuple[int, int]  # free bytes: the first, and the one behind the last


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
    least, packed = largest_live_sum(spans, ALIGNMENT), _in_time_order(spans)
    for power in (0, 1):
        if packed[1] > least and len(spans) <= _EXACT_LIMIT:
            packed = min(packed, _largest_first(spans, power), key=lambda one: one[1])
    return packed


def largest_live_sum(spans: Sequence[Span], alignment: int = 1) -> int:
    """The largest sum of (rounded) bytes that are alive at one step: no arena can be smaller."""
    changes: dict[int, int] = {}
    for nbytes, first, last in spans:
        rounded = -(-nbytes // alignment) * alignment
        changes[first] = changes.get(first, 0) + rounded
        changes[last + 1] = changes.get(last + 1, 0) - rounded
    return max(itertools.accumulate(changes[step] for step in sorted(changes)), default=0)


def _largest_first(spans: Sequence[Span], power: int) -> tuple[list[int], int]:
    """The span of the most bytes x steps^power goes first, into the smallest gap of its time."""
    offsets = [0] * len(spans)
    sizes = [-nbytes * (last - first + 1) ** power for nbytes, first, last in spans]
    placed: list[tuple[int, int, int, int]] = []  # start, end, first step, last step; by address
    for k in sorted(range(len(spans)), key=lambda k: (sizes[k], spans[k][1])):
        nbytes, (_, first, last) = aligned(spans[k][0]), spans[k]
        covered, smallest, at = 0, math.inf, -1
        for start, end, other_first, other_last in placed:
            if other_first <= last and other_last >= first:
                if nbytes <= start - covered < smallest:
                    smallest, at = start - covered, covered
                if end > covered:
                    covered = end
        offsets[k] = at if at >= 0 else covered
        bisect.insort(placed, (offsets[k], offsets[k] + nbytes, first, last))
    return offsets, max((end for _, end, _, _ in placed), default=0)


def _in_time_order(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Each span takes the smallest gap that is free when it begins; gaps merge when spans end."""
    offsets = [0] * len(spans)
    top = done = 0
    ending = sorted(range(len(spans)), key=lambda k: spans[k][2])
    gaps: list[Gap] = []  # by address
    for k in sorted(range(len(spans)), key=lambda k: (spans[k][1], -spans[k][0])):
        while done < len(ending) and spans[ending[done]][2] < spans[k][1]:
            ended = ending[done]
            _give(gaps, offsets[ended], offsets[ended] + aligned(spans[ended][0]))
            done += 1
        nbytes = aligned(spans[k][0])
        fitting = [gap for gap in gaps if gap[1] - gap[0] >= nbytes]
        if fitting:
            start, end = min(fitting, key=lambda gap: gap[1] - gap[0])
            at = bisect.bisect_left(gaps, (start, end))
            gaps[at : at + 1] = [(start + nbytes, end)] if start + nbytes < end else []
        else:  # the arena grows, from the gap at its end if there is one
            start = gaps.pop()[0] if gaps and gaps[-1][1] == top else top
            top = start + nbytes
        offsets[k] = start
    return offsets, top


def _give(gaps: list[Gap], start: int, end: int) -> None:
    """Adds a gap, merged with its neighbors."""
    at = bisect.bisect_left(gaps, (start, end))
    if at < len(gaps) and gaps[at][0] == end:
        end = gaps.pop(at)[1]
    if at and gaps[at - 1][1] == start:
        at -= 1
        start = gaps.pop(at)[0]
    gaps.insert(at, (start, end))
