"""Captured graphs: the native segments of a program as CUDA graphs, each replayed by one launch.

A graph bakes in addresses. So it reads feeds from fixed slots and writes fetches to fixed slots,
and graph I/O copies, one kernel at either end, move data between the slots and the arrays of a run;
their addresses are all that changes from replay to replay.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...graph.spec import Spec
from ...ndarray import NDArray
from ...runtime.device import Block, Context
from ...runtime.library import DLGraphInfo, DLGraphStreams, load
from ...settings import settings
from ..plan.arena import aligned
from ..plan.memory import Step
from ..run.tables import Segment
from .hazards import MAX_STEPS, Access, Range, dependencies, serialize_large
from .streams import (
    GraphStreams,
    assign_streams,
    chained,
    one_stream,
    ready_inputs,
    wait_for_all,
)  # fmt: skip

_MOST_RUNS = 32  # runs in one unrolled graph: twice as many gain nothing more
_MOST_NODES = 160  # of an unrolled graph: longer ones hardly notice the pause between two launches
_FEWEST_RUNS = 8  # of an unrolled graph, where more of them are not worth their capture
_WORTHWHILE = 4  # launches of an unrolled graph that pay for its capture


class GraphInfo(NamedTuple):
    """The numbers of a captured graph's nodes, by kind."""

    nodes: int
    kernels: int
    copies: int
    fills: int


class GraphCopies:
    """A table of copies (dst, src, nbytes), one side of which is fixed, for the native library."""

    def __init__(self, arrays: Sequence[NDArray], inward: bool) -> None:
        self._table = np.zeros((max(len(arrays), 1), 3), np.uint64)
        for row, slot in zip(self._table, arrays):
            row[0] = row[1] = slot.data_address
            row[2] = slot.nbytes
        self.address = self._table.ctypes.data
        self.count = len(arrays)
        self._open, self._fixed = (1, 0) if inward else (0, 1)
        # The sources of input copies, or the destinations of output copies: set before a replay.
        self.addresses = self._table[:, self._open].data

    def share(self, k: int, address: int) -> None:
        """Puts both sides of a copy at one address, so that there is nothing to copy."""
        self._table[k, :2] = address

    def disconnect(self) -> None:
        """Turns each copy into one from its slot to itself, until its address is set again."""
        self._table[:, self._open] = self._table[:, self._fixed]

    def slots(self) -> list[Range]:
        """The address ranges of the fixed sides."""
        return [(row[self._fixed], row[self._fixed] + row[2]) for row in self.rows()]

    def rows(self) -> list[list[int]]:
        """Every copy as it is now."""
        return self._table[: self.count].tolist()


class CapturedGraph:
    """One captured segment. It keeps the tables of its copies, which it must not outlive."""

    def __init__(
        self, handle: int, copies: tuple[GraphCopies, GraphCopies], streams: GraphStreams
    ) -> None:
        self._library = load()
        self.handle = handle
        self._copies = copies
        self.streams = streams
        self._replay = self._library.cdll.DLGraphReplay
        info = DLGraphInfo()
        self._library.check(self._library.cdll.DLGraphDescribe(handle, ctypes.byref(info)))
        self.info = GraphInfo(*(getattr(info, name) for name in GraphInfo._fields))

    def __del__(self) -> None:
        self._library.cdll.DLGraphFree(self.handle)

    def run(self, on: int, times: int = 1) -> None:
        """Queues replays on a stream: the first reads the feeds, the last writes the fetches."""
        status = self._replay(self.handle, on, times)
        if status:
            self._library.check(status)


def capture(
    segment: Segment,
    on: int,
    inputs: GraphCopies,
    outputs: GraphCopies,
    unrolled: Sequence[Segment] = (),
) -> CapturedGraph:
    """Captures a segment between two sets of copies, with the addresses that its arrays have now;
    or `unrolled`: this segment and others of the same steps, one after the other.
    """
    handle = ctypes.c_void_p()
    capture_program = load().cdll.DLProgramCapture
    copies = (inputs.address, inputs.count, outputs.address, outputs.count)
    streams = streams_of(unrolled or [segment], inputs, outputs)
    struct, _arrays = _streams_struct(streams)
    program = segment.handle
    if unrolled:
        records, words = _concatenated(unrolled)  # a program reads them: keep them alive
        program = segment.program(records, words)
    try:
        status = capture_program(
            program, segment.ctx.struct, on, *copies, struct, ctypes.byref(handle)
        )
        if status:
            segment.fail(status, program)
    finally:
        if unrolled:
            load().cdll.DLProgramFree(program)
    assert handle.value is not None
    return CapturedGraph(handle.value, (inputs, outputs), streams)


def streams_of(
    segments: Sequence[Segment], inputs: GraphCopies, outputs: GraphCopies
) -> GraphStreams:
    """The graph streams of the input copies, the steps and the output copies, in the memory that
    they have now.
    """
    tasks = [(segment, step) for segment in segments for step in segment.steps]
    accesses = [_access(segment, step) for segment, step in tasks]
    if inputs.count:  # a feed may show a Parameter: it is read before any is written
        written = [r for step in segments[0].steps for r in _updated(segments[0], step)]
        accesses.insert(0, Access(written, inputs.slots()))
    if outputs.count:
        accesses.append(Access(outputs.slots(), []))
    if settings.streams == 1 or len(accesses) > MAX_STEPS:
        found = one_stream(len(accesses))
    else:
        first = int(bool(inputs.count))
        ops = [step.node.op for _, step in tasks]
        talk = [k for k, op in enumerate(ops, first) if op.communicates]
        apart = [k for k in talk if not ops[k - first].writes]
        direct = serialize_large(dependencies(accesses), accesses, apart)
        wait_for_all(direct, [k for k in apart if tasks[k - first][1].node.attrs.get("behind")][:1])
        # What a sum waits for is best the first to go on, so that it is the first to be done.
        touched = [sum(b - a for side in x for a, b in side) for x in accesses] if apart else ()
        found = assign_streams(chained(direct, talk), settings.streams, apart, touched)
        read: list[list[Range]] = [[]] * bool(inputs.count)
        read += [[*map(segment.table.bytes_of, step.inputs)] for segment, step in tasks]
        read += [[]] * bool(outputs.count)
        found = replace(found, ready_inputs=ready_inputs(found.stream, read, accesses))
    return found.padded(int(not inputs.count), int(not outputs.count))


def _access(segment: Segment, step: Step) -> Access:
    bytes_of, writes = segment.table.bytes_of, step.node.op.writes
    read = [value for k, value in enumerate(step.inputs) if k not in writes]
    made = map(bytes_of, (*step.workspace, *step.outputs))
    return Access([*map(bytes_of, read)], [*made, *_updated(segment, step)])


def _updated(segment: Segment, step: Step) -> list[Range]:
    op = step.node.op
    summed = op.gradient_inputs if op.communicates else ()  # in place, over ranks
    changed = (*op.writes, *op.zeroed_workspace, *summed)
    return [segment.table.bytes_of(step.inputs[k]) for k in changed]


def _streams_struct(streams: GraphStreams) -> tuple[Any, Any]:
    """The DLGraphStreams, None where all is in order in one stream; and the arrays it points to."""
    if streams.count == 1 and streams.ready_inputs is None:
        return None, None
    stream, waits = np.array(streams.stream, np.int32), np.array(streams.waits, np.int32)
    ready = np.array(streams.ready_inputs or (), np.uint64)
    ready_at = ready.ctypes.data if len(ready) else None
    struct = DLGraphStreams(stream.ctypes.data, waits.ctypes.data, len(waits), ready_at)
    return ctypes.byref(struct), (stream, waits, ready)


def _concatenated(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """The records and words of segments of the same number of steps, one after the other."""
    words_of = {id(segment): segment.words for segment in segments}
    begins = dict(zip(words_of, itertools.accumulate(map(len, words_of.values()), initial=0)))
    records = np.concatenate([segment.records for segment in segments])
    records[:, 1] += np.repeat([begins[id(segment)] for segment in segments], segments[0].count)
    return records, np.concatenate([*words_of.values()])


class _SeparateCopies:
    """Graph I/O copies queued one by one, where a program begins or ends with a Python step."""

    def __init__(self, ctx: Context, copies: GraphCopies) -> None:
        self._library = load()
        self._ctx = ctx.struct
        self._copies = copies

    def run(self, on: int) -> None:
        """Queues them on a stream."""
        copy = self._library.cdll.DLMemoryCopy
        for dst, src, nbytes in self._copies.rows():
            self._library.check(copy(dst, self._ctx, src, self._ctx, nbytes, on))


class CapturedProgram:
    """A program on fixed slots: its native segments captured, its Python steps between them."""

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
        # The index of a feed among the copied ones and among all, and the dtype that is read.
        self.device_feeds = [(j, k, slots[k].dtype) for j, k in enumerate(copied)]
        self.host_feeds = [(k, slot) for k, slot in enumerate(slots) if not kinds[k]]
        feeds = [slots[k] for k in copied]
        self.feeds = GraphCopies(feeds, inward=True)
        self.fetches = GraphCopies(fetches, inward=False)
        nothing = GraphCopies((), inward=True)
        self.segments: list[Any] = []
        for k, segment in enumerate(segments):
            if not segment.native:
                self.segments.append(segment)
                continue
            inputs = self.feeds if k == 0 else nothing
            outputs = self.fetches if k == len(segments) - 1 else nothing
            self.segments.append(capture(segment, on, inputs, outputs))
        if not segments[0].native and feeds:
            self.segments.insert(0, _SeparateCopies(ctx, self.feeds))
        if not segments[-1].native and fetches:
            self.segments.append(_SeparateCopies(ctx, self.fetches))

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The graphs of its native segments, in order."""
        return [segment for segment in self.segments if isinstance(segment, CapturedGraph)]

    def run(self, on: int, times: int) -> None:
        """Queues runs on a stream, with the copies connected as they are."""
        if len(self.segments) == 1:
            self.segments[0].run(on, times)
            return
        for _ in range(times):
            for segment in self.segments:
                segment.run(on)


def runs_to_unroll(program: CapturedProgram, times: int) -> int:
    """The number of runs to unroll into one graph where `times` are queued: as many as one launch
    makes, or half as many, down to a few; 1 where that gains nothing.
    """
    (first, *others) = program.segments
    if others or not isinstance(first, CapturedGraph):
        return 1
    count = max(1, min(_MOST_RUNS, _MOST_NODES // max(first.info.nodes, 1)))
    while times < _WORTHWHILE * count:
        if count <= _FEWEST_RUNS:
            return 1
        count = max(count // 2, _FEWEST_RUNS)
    return count


class UnrolledGraph:
    """Several runs of a program with one segment, unrolled into one CUDA graph. They alternate
    between `segments`, the same steps in two arenas (double buffering), so that run i + 1's batch
    load overlaps run i. It reads the feeds from their slots and leaves the fetches in theirs.
    """

    def __init__(self, segments: Sequence[Segment], count: int, on: int) -> None:
        nothing = GraphCopies((), inward=True)
        self.count = count
        unrolled = [segments[k % len(segments)] for k in range(count)]
        self._graph = capture(segments[0], on, nothing, nothing, unrolled)

    def run(self, program: CapturedProgram, on: int, times: int) -> None:
        """Queues runs on a stream; the first and the last are single ones, with their copies."""
        launches = (times - 2) // self.count
        program.run(on, 1)
        self._graph.run(on, launches)
        # The feeds were read: an array that shows a Parameter has changed since.
        program.feeds.disconnect()
        program.run(on, times - 1 - launches * self.count)


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
