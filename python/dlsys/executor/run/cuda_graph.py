"""recording: a program's native segments as CUDA graphs, replayed with one launch each.

A recording bakes in addresses. So feeds are read from fixed slots and fetches are written to fixed
slots, and one kernel at either end copies between the slots and the arrays of the run; the
addresses of those are all that changes from replay to replay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...graph.spec import Spec
from ...ndarray import NDArray
from ...runtime.device import Block, Context
from ...runtime.library import DLGraphInfo, DLGraphStreams, load
from ..plan.arena import aligned
from ..plan.streams import Lanes, Range

_ROUNDS = 32  # runs that one launch makes: twice as many gain nothing more
_NODES = 160  # of a recording of several runs: longer ones hardly notice the pause between two
_FEW = 8  # of them, at least, where more are not worth it
_WORTH = 4  # launches of several runs that pay for recording them


class GraphInfo(NamedTuple):
    """What a recording consists of."""

    nodes: int
    kernels: int
    copies: int
    fills: int


class Ports:
    """A table of copies (dst, src, nbytes) whose one side is fixed, for the native library."""

    def __init__(self, arrays: Sequence[NDArray], inward: bool) -> None:
        self._table = np.zeros((max(len(arrays), 1), 3), np.uint64)
        for row, slot in zip(self._table, arrays):
            row[0] = row[1] = slot.data_address
            row[2] = slot.nbytes
        self.address = self._table.ctypes.data
        self.count = len(arrays)
        self._open, self._fixed = (1, 0) if inward else (0, 1)
        # Where each copy comes from, or goes to: set them before a replay.
        self.addresses = self._table[:, self._open].data

    def close(self) -> None:
        """Lets each copy be one from its slot to itself, until it is connected again."""
        self._table[:, self._open] = self._table[:, self._fixed]

    def slots(self) -> list[Range]:
        """Where the fixed sides are."""
        return [(row[self._fixed], row[self._fixed] + row[2]) for row in self.rows()]

    def rows(self) -> list[list[int]]:
        """Every copy as it is now."""
        return self._table[: self.count].tolist()


class Recording:
    """One recorded segment. It keeps what it must outlive: the tables of its ports."""

    def __init__(self, handle: int, ports: tuple[Ports, Ports], lanes: Lanes) -> None:
        self._library = load()
        self._handle = handle
        self._ports = ports
        self.lanes = lanes
        self._replay = self._library.cdll.DLGraphReplay
        info = DLGraphInfo()
        self._library.check(self._library.cdll.DLGraphDescribe(handle, ctypes.byref(info)))
        self.info = GraphInfo(*(getattr(info, name) for name in GraphInfo._fields))

    def __del__(self) -> None:
        self._library.cdll.DLGraphFree(self._handle)

    def run(self, on: int, times: int = 1) -> None:
        """Queues replays on a stream: the first reads the feeds, the last writes the fetches."""
        status = self._replay(self._handle, on, times)
        if status:
            self._library.check(status)


def lanes_struct(lanes: Lanes) -> tuple[Any, Any]:
    """The lanes for the native library, None where there is nothing to tell; and what they must not
    outlive.
    """
    if lanes.count == 1 and lanes.settled is None:
        return None, None
    lane, waits = np.array(lanes.lane, np.int32), np.array(lanes.waits, np.int32)
    settled = np.array(lanes.settled or (), np.uint64)
    told = settled.ctypes.data if len(settled) else None
    struct = DLGraphStreams(lane.ctypes.data, waits.ctypes.data, len(waits), told)
    return ctypes.byref(struct), (lane, waits, settled)


class Copies:
    """The copies of a set of ports one by one, where no recording begins or ends with them."""

    def __init__(self, ctx: Context, ports: Ports) -> None:
        self._library = load()
        self._ctx = ctx.struct
        self._ports = ports

    def run(self, on: int) -> None:
        """Queues them on a stream."""
        copy = self._library.cdll.DLMemoryCopy
        for dst, src, nbytes in self._ports.rows():
            self._library.check(copy(dst, self._ctx, src, self._ctx, nbytes, on))


class Recorded:
    """A program on fixed slots: its native segments recorded, what Python does between them."""

    def __init__(
        self,
        ctx: Context,
        segments: Sequence[Any],
        kinds: Sequence[bool],
        slots: Sequence[NDArray],
        fetches: Sequence[NDArray],
        on: int,
    ) -> None:
        copied = [k for k, on_device in enumerate(kinds) if on_device]  # the host writes the others
        # The number of a feed among those, its number among all, and the dtype that is read.
        self.device_feeds = [(j, k, slots[k].dtype) for j, k in enumerate(copied)]
        self.host_feeds = [(k, slot) for k, slot in enumerate(slots) if not kinds[k]]
        feeds = [slots[k] for k in copied]
        self.feeds, self.fetches = Ports(feeds, inward=True), Ports(fetches, inward=False)
        nothing = Ports((), inward=True)
        self.segments: list[Any] = []
        for k, segment in enumerate(segments):
            if not segment.native:
                self.segments.append(segment)
                continue
            before = self.feeds if k == 0 else nothing
            after = self.fetches if k == len(segments) - 1 else nothing
            self.segments.append(segment.record(on, before, after))
        if not segments[0].native and feeds:
            self.segments.insert(0, Copies(ctx, self.feeds))
        if not segments[-1].native and fetches:
            self.segments.append(Copies(ctx, self.fetches))

    def run(self, on: int, times: int) -> None:
        """Queues runs on a stream, with the ports connected as they are."""
        if len(self.segments) == 1:
            self.segments[0].run(on, times)
            return
        for _ in range(times):
            for segment in self.segments:
                segment.run(on)


def rounds_in(recorded: Recorded, times: int) -> int:
    """How many runs to record together where `times` are queued: as many as one launch makes, or
    half as many, down to a few; 1 where that gains nothing.
    """
    (first, *others) = recorded.segments
    if others or not isinstance(first, Recording):
        return 1
    count = max(1, min(_ROUNDS, _NODES // max(first.info.nodes, 1)))
    while times < _WORTH * count:
        if count <= _FEW:
            return 1
        count = max(count // 2, _FEW)
    return count


class Rounds:
    """Several runs of a program with one segment as one recording, for runs that are queued many at
    a time: it saves the pauses between launches, and a run begins beside the one before. For that
    the runs take turns between `segments`, the same steps in memory of their own: what a run begins
    with, such as its batch, is then made while the one before computes. It reads the feeds from
    their slots and leaves the fetches in theirs.
    """

    def __init__(self, segments: Sequence[Any], count: int, on: int) -> None:
        nothing = Ports((), inward=True)
        self.count = count
        turns = [segments[k % len(segments)] for k in range(count)]
        self._recording = segments[0].record(on, nothing, nothing, turns)

    def run(self, recorded: Recorded, on: int, times: int) -> None:
        """Queues runs on a stream; the first and the last are single ones, with their copies."""
        whole = (times - 2) // self.count
        recorded.run(on, 1)
        self._recording.run(on, whole)
        recorded.feeds.close()  # they were read: an array that shows a Parameter has changed since
        recorded.run(on, times - 1 - whole * self.count)


def fixed_slots(ctx: Context, specs: Sequence[Spec]) -> list[NDArray]:
    """Arrays with places of their own in one new block."""
    offsets = [0]
    for spec in specs:
        offsets.append(offsets[-1] + aligned(spec.nbytes))
    block = Block(ctx, offsets[-1])
    return [
        NDArray.from_block(block, offset, spec.shape, spec.dtype)
        for offset, spec in zip(offsets, specs)
    ]
