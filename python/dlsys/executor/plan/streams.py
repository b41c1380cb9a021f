"""lanes: which steps need which, and so which of them a GPU may run beside each other.

A step needs an earlier one that wrote what it reads, or that read or wrote what it writes, byte for
byte. Steps go into a few lanes; what is in one lane runs in order, and a step waits besides for
those that it needs from other lanes. Sets of steps are the bits of integers.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

LARGE = 8 << 20  # bytes from which a kernel fills the chip, and company only gets in its way
# Steps of a program whose order is taken apart, which takes as many bits as its square; longer ones
# are one chain. ResNet-50's training step has about a thousand.
MOST = 4096
_SETTLED = 64  # inputs of a step, of which the kernel is told
_ROOTS = 2  # steps that wait for nothing; each further one lengthens every launch by over 1 µs

Range = tuple[int, int]  # of addresses: the first byte, and the one behind the last
Key = TypeVar("Key", bound=Hashable)


class Access(NamedTuple):
    """The memory that a step reads and writes."""

    reads: Sequence[Range]
    writes: Sequence[Range]


class Order(Generic[Key]):
    """Which steps come after which, by what they read and write; whatever stands for memory."""

    def __init__(self) -> None:
        self.behind: list[int] = []  # of each step: itself and all that it comes after
        self._written: dict[Key, int] = {}  # `behind` of the last writer
        self._touched: dict[Key, int] = {}  # of the last writer and of all readers since

    def add(self, reads: Iterable[Key], writes: Iterable[Key]) -> int:
        """Adds the next step; returns the earlier ones that it comes after."""
        reads, writes = list(reads), list(writes)
        before = self.before(reads)
        for key in writes:
            before |= self.touched(key)
        behind = before | 1 << len(self.behind)
        self.behind.append(behind)
        for key in reads:
            self._touched[key] = self.touched(key) | behind
        for key in writes:
            self._written[key] = self._touched[key] = behind
        return before

    def before(self, reads: Iterable[Key]) -> int:
        """The steps that whoever reads this now comes after."""
        before = 0
        for key in reads:
            before |= self._written.get(key, 0)
        return before

    def touched(self, key: Key) -> int:
        """All steps after which this memory may get a new value."""
        return self._touched.get(key, 0)


def needs(accesses: Sequence[Access]) -> list[list[int]]:
    """For each step the earlier ones that it needs, the latest first, without those that these
    need.
    """
    edges = sorted({edge for access in accesses for both in access for r in both for edge in r})
    order: Order[int] = Order()
    found = []
    for access in accesses:
        reads, writes = ([cell for r in side for cell in _cells(edges, r)] for side in access)
        before, direct = order.add(reads, writes), []
        while before:
            latest = before.bit_length() - 1
            direct.append(latest)
            before &= ~order.behind[latest]
        found.append(direct)
    return found


def in_turn(needed: Sequence[list[int]], accesses: Sequence[Access]) -> list[list[int]]:
    """The same, with each step on large memory after the one before it that is such a step too."""
    ordered = list(needed)
    before = None
    for k, access in enumerate(accesses):
        if all(end - begin < LARGE for side in access for begin, end in side):
            continue
        if before is not None and before not in ordered[k]:
            ordered[k] = sorted([*ordered[k], before], reverse=True)
        before = k
    return ordered


def _cells(edges: Sequence[int], part: Range) -> range:
    """The pieces that no other range cuts, by number."""
    return range(bisect.bisect_left(edges, part[0]), bisect.bisect_left(edges, part[1]))


@dataclass(frozen=True)
class Lanes:
    """The lane of each step; pairs (step, earlier step that it waits for), in the order of the
    steps; and how many steps the longest chain of them has.
    """

    lane: list[int]
    waits: list[tuple[int, int]]
    longest: int
    settled: list[int] | None = None  # of each step, as `settled` finds them

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return max(self.lane, default=-1) + 1

    def padded(self, before: int, after: int) -> Lanes:
        """The same with steps at either end that do nothing."""
        waits = [(k + before, earlier + before) for k, earlier in self.waits]
        lane = [0] * before + self.lane + [0] * after
        settled = self.settled and [0] * before + self.settled + [0] * after
        return Lanes(lane, waits, self.longest, settled)


def settled(
    lane: Sequence[int], inputs: Sequence[Sequence[Range]], accesses: Sequence[Access]
) -> list[int]:
    """For each step its inputs, as bits, that the step before it in its lane does not write: a
    kernel that is set up while that one still runs may read them at once.
    """
    found = []
    before: dict[int, int] = {}
    for k, own in enumerate(lane):
        written = accesses[before[own]].writes if own in before else None
        bits = 0
        if written is not None:
            for number, (begin, end) in enumerate(inputs[k][:_SETTLED]):
                free = all(end <= first or last <= begin for first, last in written)
                bits |= free << number
        found.append(bits)
        before[own] = k
    return found


def chain(steps: int) -> Lanes:
    """All steps in one lane."""
    return Lanes([0] * steps, [], steps)


def in_lanes(needed: Sequence[Sequence[int]], limit: int) -> Lanes:
    """Puts steps into at most `limit` lanes, given the ones that each needs (see `needs`)."""
    heirs = _heirs(needed)
    lane: list[int] = []
    waits: list[tuple[int, int]] = []
    tails: list[int] = []  # the last step of each lane
    behind: list[int] = []  # as in Order, with what the lanes add
    depth: list[int] = []
    roots: list[int] = []
    for k, wanted in enumerate(needed):
        if not wanted and len(roots) == _ROOTS:
            wanted = roots[:1]
        elif not wanted:
            roots.append(k)
        chosen = _lane(k, wanted, tails, heirs, behind, depth, limit)
        before = tails[chosen : chosen + 1]
        covered = behind[before[0]] if before else 0
        for earlier in wanted:
            if not covered >> earlier & 1:
                before.append(earlier)
                waits.append((k, earlier))
                covered |= behind[earlier]
        lane.append(chosen)
        tails[chosen : chosen + 1] = [k]
        behind.append(covered | 1 << k)
        depth.append(1 + max((depth[earlier] for earlier in before), default=0))
    return Lanes(lane, waits, max(depth, default=0))


def _heirs(needed: Sequence[Sequence[int]]) -> list[int]:
    """For each step the one that goes on in its lane: of those that need it, the one with the
    longest chain behind it; -1 where nothing needs it.
    """
    heirs = [-1] * len(needed)
    height = [1] * len(needed)
    for k in reversed(range(len(needed))):  # so that of equals the first is taken
        for earlier in needed[k]:
            if height[k] + 1 >= height[earlier]:
                height[earlier], heirs[earlier] = height[k] + 1, k
    return heirs


def _lane(
    k: int,
    wanted: Sequence[int],
    tails: Sequence[int],
    heirs: Sequence[int],
    behind: Sequence[int],
    depth: Sequence[int],
    limit: int,
) -> int:
    """The lane of step k: that of the step whose heir it is; else one that makes it wait for
    nothing else, a new one where there is none; else the one that is through first.
    """
    lanes = range(len(tails))
    inherited = [lane for lane in lanes if heirs[tails[lane]] == k and tails[lane] in wanted]
    if inherited:
        return max(inherited, key=lambda lane: depth[tails[lane]])
    before = 0
    for earlier in wanted:
        before |= behind[earlier]
    open_lanes = [lane for lane in lanes if heirs[tails[lane]] < k]  # no heir, or it went elsewhere
    free = [lane for lane in open_lanes if before >> tails[lane] & 1]
    if free:
        return max(free, key=lambda lane: depth[tails[lane]])
    if len(tails) < limit:
        return len(tails)
    return min(open_lanes or lanes, key=lambda lane: depth[tails[lane]])
