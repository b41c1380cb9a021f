"""The native runner of a target with graphs: it captures a program at its second run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import DeviceLostError, DlsysError
from ...ndarray import NDArray
from ...runtime.device import Block, Context, stream
from ...runtime.target import Target
from ...settings import settings
from ..plan.memory import Plan
from ..run.native import Program
from ..run.python_step import Guard
from ..run.runner import SegmentReport
from ..run.tables import ArrayTable, Segment
from .graph import CapturedProgram, UnrolledGraph, fixed_slots, runs_to_unroll
from .host import HostGraph, fits

_MOST_DOUBLED_NBYTES = 32 << 20  # of an arena that an unrolled graph has twice


class CapturingProgram(Program):
    """A program whose runs after the first replay captured graphs, as far as the device can."""

    def __init__(
        self, plan: Plan, ctx: Context, target: Target, guard: Guard | None = None
    ) -> None:
        super().__init__(plan, ctx, target, guard)
        # By which feeds lie on the device: the others are copied to their slots by the host.
        self.captured: dict[tuple[bool, ...], CapturedProgram] = {}
        self.why_not_captured = self._why_not_captured()
        self._fetch_slots: list[NDArray] = []

    def _why_not_captured(self) -> str:
        """The reason why the program is never captured; "" where it may be."""
        if not settings.capture:
            return "DLSYS_CAPTURE=0"
        if settings.separate_arena:
            return "DLSYS_DEBUG_ARENA=separate"
        if not any(segment.native for segment in self.segments):
            return "it has no native step"
        return ""

    def bind(self, arena: Block) -> None:
        """Takes an arena of at least `arena_nbytes` bytes; every later run uses it."""
        super().bind(arena)
        for buffer in self.plan.buffers:
            if buffer.kind == "window":  # what other ranks read
                held = buffer.node.attrs["group"].window(self._ctx, buffer.nbytes)
                self._fixed[buffer] = held
                self._blocks.append(held.block)
                self.table.place(buffer, held.data_address)
        self.captured.clear()  # they hold the addresses of before
        self.unrolled_graphs: dict[int, UnrolledGraph] = {}  # by their number of runs
        self._alternating: list[Segment] = []  # the segments that these alternate between
        self._cannot_unroll = False
        self._host_graph: HostGraph | None = None

    @property
    def unrolled(self) -> int:  # type: ignore[override]
        """The most runs that one launch makes so far."""
        return max(self.unrolled_graphs, default=1)

    def run(self, feeds: Sequence[Any], times: int = 1) -> list[NDArray | None]:
        """Queues all steps on the calling thread's stream, `times` over; results are there when
        they are read. From the second run on it replays captured graphs.
        """
        if not self.runs or self.why_not_captured:
            return super().run(feeds, times)
        on = stream(self._ctx)
        captured = self._captured(feeds, on)
        if captured is None:
            return super().run(feeds, times)
        self.runs += times
        return self._replay(captured, feeds, on, times)

    def segments_report(self) -> list[SegmentReport]:
        """The pieces in which the plan runs now."""
        captured = next(iter(self.captured.values()), None)
        graphs = iter(captured.graphs if captured else ())
        why = self.why_not_captured or "captured at its second run"
        found = []
        for segment in self.segments:
            if not isinstance(segment, Segment):
                found.append(SegmentReport(segment.kind, 1, why=segment.why))
            elif captured is None:
                found.append(SegmentReport("native", segment.count, why=why))
            else:
                graph = next(graphs)
                counts = graph.info.nodes, graph.info.kernels
                paths = graph.streams.count, graph.streams.longest
                found.append(SegmentReport("captured", segment.count, *counts, *paths))
        return found

    def _captured(self, feeds: Sequence[Any], on: int) -> CapturedProgram | None:
        """The graphs for feeds of these kinds, captured now if there are none; None where the
        device cannot capture the program, which then runs as before.
        """
        kinds = tuple([type(value) is NDArray for value in feeds])
        captured = self.captured.get(kinds)
        if captured is None:
            try:
                captured = self.captured[kinds] = self._capture(kinds, on)
            except DeviceLostError:
                raise
            except DlsysError as error:
                self.why_not_captured = str(error)
                self.captured.clear()
                message = f"the steps of this plan are launched one by one: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=6)
        return captured

    def _capture(self, kinds: tuple[bool, ...], on: int) -> CapturedProgram:
        self._place_slots()
        return CapturedProgram(self._ctx, self.segments, kinds, self._slots, self._fetch_slots, on)  # type: ignore[arg-type]

    def _unrolled(self, captured: CapturedProgram, times: int, on: int) -> UnrolledGraph | None:
        """The unrolled graph, where so many runs are worth one and the device can capture it."""
        count = runs_to_unroll(captured, times)
        if count == 1 or self._cannot_unroll:
            return None
        if count not in self.unrolled_graphs:
            self._place_slots()
            try:
                self._alternating = self._alternating or self._double_buffered()
                self.unrolled_graphs[count] = UnrolledGraph(self._alternating, count, on)
            except DeviceLostError:
                raise
            except DlsysError as error:
                self._cannot_unroll = True
                message = f"runs of this plan are launched one by one: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=7)
        return self.unrolled_graphs.get(count)

    def _double_buffered(self) -> list[Segment]:
        """The only segment, and its steps in a second arena unless that would be large."""
        own = self.segments[0]
        assert isinstance(own, Segment)
        if self.plan.arena_nbytes > _MOST_DOUBLED_NBYTES:
            return [own]
        arena = Block(self._ctx, self.plan.arena_nbytes)
        table = ArrayTable(self.plan, self._ctx)
        table.place_arena(arena.address)
        for buffer, held in self._fixed.items():
            table.place(buffer, held.data_address)
        self._place_slots(table)
        self._blocks.append(arena)
        return [own, Segment(table, self._ctx, self.plan.steps)]

    def run_on_host(self, feeds: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """The fetches of one run, fresh arrays of the host, by a graph that reads and writes pinned
        memory; None where that is not to be had, and in the first run.
        """
        if not self.runs or self.why_not_captured:
            return None
        on = stream(self._ctx)
        graph = self._host_graph or self._capture_on_host(on)
        if graph is None:
            return None
        self._take_blocks(on)
        self.runs += 1
        return graph.run(feeds, on)

    def _capture_on_host(self, on: int) -> HostGraph | None:
        (first, *others) = self.segments
        if others or not isinstance(first, Segment) or None in self.plan.fetches:
            return None
        self._place_slots()
        slots = [slot for slot in (*self._slots, *self._fetch_slots) if slot is not None]
        if self._rollback is None and fits(slots):
            self._host_graph = HostGraph(first, self.plan, slots, on)
        return self._host_graph

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
        self, captured: CapturedProgram, feeds: Sequence[Any], on: int, times: int
    ) -> list[NDArray | None]:
        self._take_blocks(on)
        unrolled = self._unrolled(captured, times, on) if times > 1 else None
        keep, addresses = [], captured.feeds.addresses
        for j, k, dtype in captured.device_feeds:
            held = self._here(feeds[k], dtype, on)
            addresses[j] = held.data_address
            keep.append(held)
        for k, slot in captured.host_feeds:
            slot[:] = feeds[k]
        fetched, addresses = self._blank.copy(), captured.fetches.addresses
        for j, k, arrays in self._outputs:
            fetched[k] = held = arrays.take(on)
            addresses[j] = held.data_address
        try:
            if self._on_host:
                self._show_slots()
                with self._rollback or contextlib.nullcontext():
                    captured.run(on, times)
            elif unrolled is None:
                captured.run(on, times)
            else:
                unrolled.run(captured, on, times)
        finally:
            del keep
            self._bound.clear()
        return fetched

    def _show_slots(self) -> None:
        """Lets steps on the host see the feeds and fetches of a replay."""
        for planned, slot in zip(self.plan.feeds, self._slots):
            assert slot is not None
            self._bound[planned.buffer] = slot
        for fetch, slot in zip(self._wanted, self._fetch_slots):
            self._bound[fetch.buffer] = slot
