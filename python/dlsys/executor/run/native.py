"""program: binds a plan to a native device and runs it, one library call for each stretch of native
steps.

Feeds and fetches may change between runs, so their addresses are patched in the table of arrays
(lower.py) before each; everything else is settled when the plan is bound.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_char
from typing import Any

import numpy as np

from ...errors import DeviceLostError, DlsysError
from ...graph.spec import Spec
from ...ndarray import NDArray, array
from ...runtime.device import Block, Context, stream
from ...runtime.target import Target, target_of
from ...settings import settings
from ..debug.observe import Observer
from ..debug.report import PlanReport, native_segments, plan_report
from ..plan.arena import aligned
from ..plan.memory import Buffer, Plan, Step, Value
from .cuda_graph import Recorded, Rounds, fixed_slots, rounds_in
from .fetches import Pool
from .python_op import Callback
from .rollback import Undo
from .tables import ArrayTable, Segment
from .transaction import written

_TWIN_NBYTES = 32 << 20  # of an arena that several runs recorded together have twice


class Program:
    """A plan bound to a native device."""

    def __init__(self, plan: Plan, ctx: Context) -> None:
        self.plan = plan
        self._ctx = ctx
        self._target = target_of(ctx)
        self.table = ArrayTable(plan, ctx)
        self.segments = [
            Segment(self.table, ctx, steps) if native else Callback(self, steps[0])
            for native, steps in _stretches(plan.steps)
        ]
        self._python = any(isinstance(segment, Callback) for segment in self.segments)
        self._slot_offsets, self.arena_nbytes = _feed_slots(plan, self._target)
        self._constants = {
            value.buffer: array(value.node.attrs["value"], ctx, value.spec.dtype)
            for value in plan.constants
        }
        wanted = [(k, value) for k, value in enumerate(plan.fetches) if value is not None]
        self._wanted = [value for _, value in wanted]
        # The number of each among these, its number among all fetches, and its arrays.
        self._pools = [(j, k, Pool(ctx, value.spec)) for j, (k, value) in enumerate(wanted)]
        self._blank: list[NDArray | None] = [None] * len(plan.fetches)  # groups stay None
        self._shown: dict[Buffer, NDArray] = {}
        self._own: dict[Buffer, Block] = {}  # with DLSYS_DEBUG_ARENA=separate
        self.runs = 0
        # By which feeds lie on the device: the others are copied to their slots by the host.
        self.recordings: dict[tuple[bool, ...], Recorded] = {}
        self.unrecorded = _why_unrecorded(self.segments, self._target)  # "" or the reason
        self._fetch_slots: list[NDArray] = []

    def bind(self, arena: Block) -> None:
        """Takes an arena of at least `arena_nbytes` bytes; every later run uses it."""
        self._arena = arena
        self.table.place_arena(arena.address)
        if settings.separate_arena:
            self._separate()
        fixed = {value.buffer: value.node.origin.storage.array for value in self.plan.states}  # type: ignore[attr-defined]
        fixed.update(self._constants)
        for buffer, held in fixed.items():
            self.table.place(buffer, held.data_address)
        self._fixed = fixed
        states = [p.storage.array for p in written(self.plan.steps)]
        self._undo = Undo(states, self._ctx) if states else None
        self._proved = self._undo is None  # no step of a run can fail behind an update
        self.recordings.clear()  # they hold the addresses of before
        self.rounds: dict[int, Rounds] = {}  # by how many runs they are
        self._turns: list[Segment] = []  # what these take turns between
        self._apart = False  # several runs could not be recorded together
        self._blocks = [
            arena,
            *self._own.values(),
            *{id(held.block): held.block for held in fixed.values()}.values(),
        ]
        self._slots = [
            None
            if offset is None
            else NDArray.from_block(arena, offset, value.spec.shape, value.spec.dtype)
            for value, offset in zip(self.plan.feeds, self._slot_offsets)
        ]

    def _separate(self) -> None:
        """Gives every buffer of the arena a block of its own."""
        for buffer in self.plan.buffers:
            if buffer.kind == "arena" and buffer not in self._own:
                self._own[buffer] = Block(self._ctx, buffer.nbytes)
                self.table.place(buffer, self._own[buffer].address)

    def run(self, feeds: Sequence[Any], times: int = 1) -> list[NDArray | None]:
        """Queues all steps on the calling thread's stream, `times` over; results are there when
        they are read. From the second run on a GPU replays a recording of them.
        """
        on = stream(self._ctx)
        recorded = self._recorded(feeds, on) if self.runs and not self.unrecorded else None
        self.runs += times
        if recorded is not None:
            return self._replay(recorded, feeds, on, times)
        fetched, keep = self._prepare(feeds, on, self._python)
        try:
            for _ in range(times):
                if self._proved:
                    self._launch(on)
                else:
                    with self._proving():
                        self._launch(on)
        finally:
            del keep
            self._shown.clear()
        return fetched

    @contextlib.contextmanager
    def _proving(self) -> Iterator[None]:
        """Around a run some step of which may fail behind an update."""
        if self._proved:
            yield
            return
        with self._undo or contextlib.nullcontext():
            yield
        self._proved = not self._target.streams  # which has all memory now (undo.py)

    def _launch(self, on: int) -> None:
        for segment in self.segments:
            segment.run(on)

    def report(self) -> PlanReport:
        """How the plan runs now."""
        recorded = next(iter(self.recordings.values()), None)
        why = self.unrecorded or "recorded at its second run"
        segments = native_segments(self.segments, recorded, why)
        return plan_report(self.plan, self.runs, segments, max(self.rounds, default=1))

    def _recorded(self, feeds: Sequence[Any], on: int) -> Recorded | None:
        """The recording for feeds of this kind, made now if there is none; None where the device
        refuses to record the program, which then runs as before.
        """
        kinds = tuple([type(value) is NDArray for value in feeds])
        recorded = self.recordings.get(kinds)
        if recorded is None:
            try:
                recorded = self.recordings[kinds] = self._record(kinds, on)
            except DeviceLostError:
                raise
            except DlsysError as error:
                self.unrecorded = str(error)
                self.recordings.clear()
                message = f"the steps of this plan are launched one by one: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=5)
        return recorded

    def _record(self, kinds: tuple[bool, ...], on: int) -> Recorded:
        self._place_slots()
        return Recorded(self._ctx, self.segments, kinds, self._slots, self._fetch_slots, on)  # type: ignore[arg-type]

    def _rounds_for(self, recorded: Recorded, times: int, on: int) -> Rounds | None:
        """The recording of several runs, where so many are worth one and the device can make it."""
        count = rounds_in(recorded, times)
        if count == 1 or self._apart:
            return None
        if count not in self.rounds:
            self._place_slots()
            try:
                self._turns = self._turns or self._make_turns()
                self.rounds[count] = Rounds(self._turns, count, on)
            except DeviceLostError:
                raise
            except DlsysError as error:
                self._apart = True
                message = f"runs of this plan are launched one by one: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=6)
        return self.rounds.get(count)

    def _make_turns(self) -> list[Segment]:
        """The only segment, and its steps in an arena of their own unless that would be large."""
        own = self.segments[0]
        assert isinstance(own, Segment)
        if self.plan.arena_nbytes > _TWIN_NBYTES:
            return [own]
        arena = Block(self._ctx, self.plan.arena_nbytes)
        table = ArrayTable(self.plan, self._ctx)
        table.place_arena(arena.address)
        for buffer, held in self._fixed.items():
            table.place(buffer, held.data_address)
        self._place_slots(table)
        self._blocks.append(arena)
        return [own, Segment(table, self._ctx, self.plan.steps)]

    def _place_slots(self, table: ArrayTable | None = None) -> None:
        """Lets the steps read and write the slots."""
        place = (table or self.table).place
        if not self._fetch_slots:
            self._fetch_slots = fixed_slots(self._ctx, [value.spec for value in self._wanted])
        values = *self.plan.feeds, *self._wanted
        for value, slot in zip(values, (*self._slots, *self._fetch_slots)):
            assert slot is not None
            place(value.buffer, slot.data_address)

    def _replay(
        self, recorded: Recorded, feeds: Sequence[Any], on: int, times: int
    ) -> list[NDArray | None]:
        self._take_blocks(on)
        rounds = self._rounds_for(recorded, times, on) if times > 1 else None
        keep, addresses = [], recorded.feeds.addresses
        for j, k, dtype in recorded.device_feeds:
            held = self._here(feeds[k], dtype, on)
            addresses[j] = held.data_address
            keep.append(held)
        for k, slot in recorded.host_feeds:
            slot[:] = feeds[k]
        fetched, addresses = self._blank.copy(), recorded.fetches.addresses
        for j, k, pool in self._pools:
            fetched[k] = held = pool.take(on)
            addresses[j] = held.data_address
        try:
            if self._python:
                self._show_slots()
                with self._undo or contextlib.nullcontext():
                    recorded.run(on, times)
            elif rounds is None:
                recorded.run(on, times)
            else:
                rounds.run(recorded, on, times)
        finally:
            del keep
            self._shown.clear()
        return fetched

    def _show_slots(self) -> None:
        """Lets a user's own `compute` see the feeds and fetches of a recorded run."""
        for planned, slot in zip(self.plan.feeds, self._slots):
            assert slot is not None
            self._shown[planned.buffer] = slot
        for fetch, slot in zip(self._wanted, self._fetch_slots):
            self._shown[fetch.buffer] = slot

    def run_observed(self, feeds: Sequence[Any], observe: Observer) -> list[NDArray | None]:
        """The same one step at a time: `observe(step, run, inputs, outputs)` runs each."""
        on = stream(self._ctx)
        fetched, keep = self._prepare(feeds, on, show=True)
        try:
            with self._undo or contextlib.nullcontext():
                for segment in self.segments:
                    for step, call in segment.calls(on):
                        made = step.outputs or [step.inputs[k] for k in step.node.op.writes]
                        inputs = [self.array(value) for value in step.inputs]
                        observe(step, call, inputs, [self.array(value) for value in made])
        finally:
            del keep
            self._shown.clear()
        return fetched

    def run_timed(self, feeds: Sequence[Any]) -> tuple[list[NDArray | None], list[float]]:
        """The same, with the device's milliseconds for each step of the plan."""
        on = stream(self._ctx)
        fetched, keep = self._prepare(feeds, on, self._python)
        try:
            with self._proving():
                ms = [t for segment in self.segments for t in segment.timed(on)]
        finally:
            del keep
            self._shown.clear()
        return fetched, ms

    def poison(self, buffer: Buffer) -> None:
        """Overwrites a buffer that has a block of its own with NaN bytes, in stream order."""
        self._own[buffer].fill(0xFF)

    def array(self, value: Value) -> NDArray:
        """The array that shows a value during a run that shows its feeds and fetches."""
        buffer, spec, start = value.buffer, value.spec, value.skipped_nbytes
        if buffer in self._own:
            return NDArray.from_block(self._own[buffer], start, spec.shape, spec.dtype)
        if buffer.kind == "arena":
            start += max(buffer.offset, 0)
            return NDArray.from_block(self._arena, start, spec.shape, spec.dtype)
        held = self._shown[buffer] if buffer in self._shown else self._fixed[buffer]
        if held.shape == spec.shape:
            return held
        start += held.data_address - held.block.address
        return NDArray.from_block(held.block, start, spec.shape, spec.dtype)

    def _prepare(
        self, feeds: Sequence[Any], on: int, show: bool
    ) -> tuple[list[NDArray | None], list[Any]]:
        """Puts feeds and fetches in place. What comes back second must live until the steps are
        queued.
        """
        self._take_blocks(on)
        place = self.table.place
        keep = []
        for value, planned, slot in zip(feeds, self.plan.feeds, self._slots):
            address, held = self._feed(value, planned.spec, slot, on, show)
            place(planned.buffer, address)
            keep.append(held)
            if show:
                self._shown[planned.buffer] = held
        fetched = self._blank.copy()
        for j, k, pool in self._pools:
            fetched[k] = held = pool.take(on)
            buffer = self._wanted[j].buffer
            place(buffer, held.data_address)
            if show:
                self._shown[buffer] = held
        return fetched, keep

    def _feed(
        self, value: Any, spec: Spec, slot: NDArray | None, on: int, show: bool
    ) -> tuple[int, Any]:
        """The address of a feed, and what keeps it alive."""
        if type(value) is NDArray:
            value = self._here(value, spec.dtype, on)
            return value.data_address, value
        if slot is not None:
            slot[:] = value
            return slot.data_address, slot
        if show:  # a user's own compute gets NDArrays
            copied = array(value, self._ctx, spec.dtype)
            return copied.data_address, copied
        host = np.ascontiguousarray(value, spec.dtype)
        try:  # a quarter of what the array's own interface costs
            return addressof(c_char.from_buffer(host)), host  # type: ignore[arg-type]
        except (TypeError, ValueError):  # it is read-only or empty
            return host.__array_interface__["data"][0], host

    def _take_blocks(self, on: int) -> None:
        """Orders a run on a stream after the last work on its memory."""
        for block in self._blocks:
            if block.stream != on:
                block.use(on)

    def _here(self, value: NDArray, dtype: Any, on: int) -> NDArray:
        """A feed as an array of this device, for reading on a stream."""
        if value.ctx is not self._ctx or value.dtype != dtype:
            value = array(value, self._ctx, dtype)
        if value.block.stream != on:
            value.block.use(on)
        return value


def _why_unrecorded(segments: Sequence[Segment | Callback], target: Target) -> str:
    """Why a program is never recorded; "" where it may be."""
    if not target.capture:
        return "the CPU runs a program without launches"
    if not settings.capture:
        return "DLSYS_CAPTURE=0"
    if settings.separate_arena:
        return "DLSYS_DEBUG_ARENA=separate"
    if not any(segment.native for segment in segments):
        return "it has no native step"
    return ""


def _stretches(steps: Sequence[Step]) -> list[tuple[bool, list[Step]]]:
    """Consecutive native steps together, each Python step alone."""
    stretches: list[tuple[bool, list[Step]]] = []
    for step in steps:
        native = step.node.op.kernel is not None
        if native and stretches and stretches[-1][0]:
            stretches[-1][1].append(step)
        else:
            stretches.append((native, [step]))
    return stretches


def _feed_slots(plan: Plan, target: Target) -> tuple[list[int | None], int]:
    """Where host feeds are copied to, behind the plan's arena; the CPU reads them where they
    are.
    """
    if not target.streams:
        return [None] * len(plan.feeds), plan.arena_nbytes
    offsets: list[int | None] = []
    end = plan.arena_nbytes
    for value in plan.feeds:
        offsets.append(end)
        end += aligned(value.spec.nbytes)
    return offsets, end
