"""The native runner: binds a plan to a device and runs each stretch of native steps by one call.

Feeds and fetches may change between runs, so their addresses are patched in the table of arrays
(tables.py) before each; everything else is fixed when the plan is bound.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from typing import Any

from ...dtypes import stored
from ...graph.spec import Spec
from ...ndarray import NDArray, array
from ...runtime.device import Block, Context, stream
from ...runtime.target import Target
from ...settings import settings
from ..plan.arena import ALIGNMENT, aligned
from ..plan.memory import Buffer, Plan, Step, Value
from .fetches import OutputCache
from .python_step import Guard, PythonStep
from .rollback import Rollback
from .runner import Observer, Runner, SegmentReport
from .tables import ArrayTable, Segment
from .transaction import written


class Program(Runner):
    """A plan bound to a native device."""

    def __init__(
        self, plan: Plan, ctx: Context, target: Target, guard: Guard | None = None
    ) -> None:
        self.plan = plan
        self._guard = guard
        self._ctx = ctx
        self._target = target
        self.table = ArrayTable(plan, ctx)
        self.segments = self._segments()
        self._on_host = not all(segment.native for segment in self.segments)
        self._slot_offsets, self.arena_nbytes = _feed_slots(plan, self._target)
        self._constants = {
            value.buffer: array(value.node.attrs["value"], ctx, value.spec.dtype)
            for value in plan.constants
        }
        wanted = [(k, value) for k, value in enumerate(plan.fetches) if value is not None]
        self._wanted = [value for _, value in wanted]
        # The index of each among these and among all fetches, and its arrays.
        self._outputs = [
            (j, k, OutputCache(ctx, value.spec)) for j, (k, value) in enumerate(wanted)
        ]
        self._blank: list[NDArray | None] = [None] * len(plan.fetches)  # groups stay None
        self._bound: dict[Buffer, NDArray] = {}
        self._own: dict[Buffer, Block] = {}  # with DLSYS_DEBUG_ARENA=separate

    def _segments(self) -> list[Segment | PythonStep]:
        """Consecutive steps with kernels together, each other step alone."""
        found: list[Segment | PythonStep] = []
        for native, group in itertools.groupby(self.plan.steps, self._is_native):
            if native:
                found.append(Segment(self.table, self._ctx, list(group)))
            else:
                name = self._target.name
                found += [PythonStep(self, step, name, self._guard) for step in group]
        return found

    def _is_native(self, step: Step) -> bool:
        return self._target.has(step.node.op.kernel, step.dtype)

    def bind(self, arena: Block) -> None:
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
        # The host runs ahead of a GPU: on the CPU a Transaction sees to what fails.
        self._rollback = Rollback(states, self._ctx) if states and self._target.streams else None
        self._changed = {id(held.block) for held in states}
        # A step behind an update may fail: one on the host alone, as memory is planned.
        self._may_fail = self._rollback is not None and self._on_host
        blocks = {id(held.block): held.block for held in fixed.values()}
        self._blocks = [arena, *self._own.values(), *blocks.values()]
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
        they are read.
        """
        on = stream(self._ctx)
        self.runs += times
        fetched, keep = self._prepare(feeds, on, self._on_host)
        try:
            for _ in range(times):
                if self._rollback is None or not self._may_fail:
                    self._launch(on)
                else:
                    with self._rollback:
                        self._launch(on)
        finally:
            del keep
            self._bound.clear()
        return fetched

    def _launch(self, on: int) -> None:
        for segment in self.segments:
            segment.run(on)

    def segments_report(self) -> list[SegmentReport]:
        why = f"the target {self._target.name} has no graphs"
        return [
            SegmentReport("native", segment.count, why=why)
            if isinstance(segment, Segment)
            else SegmentReport(segment.kind, 1, why=segment.why)
            for segment in self.segments
        ]

    def run_observed(self, feeds: Sequence[Any], observe: Observer) -> list[NDArray | None]:
        def launch(on: int) -> None:
            for segment in self.segments:
                for step, call in segment.calls(on):
                    made = step.outputs or [step.inputs[k] for k in step.node.op.writes]
                    inputs = [self.array(value) for value in step.inputs]
                    observe(step, call, inputs, [self.array(value) for value in made])

        return self._watched(feeds, launch, show=True)

    def run_timed(self, feeds: Sequence[Any]) -> tuple[list[NDArray | None], list[float]]:
        ms: list[float] = []

        def launch(on: int) -> None:
            for segment in self.segments:
                ms.extend(segment.timed(on))

        return self._watched(feeds, launch, self._on_host), ms

    def _watched(
        self, feeds: Sequence[Any], launch: Callable[[int], None], show: bool
    ) -> list[NDArray | None]:
        """Runs once by a function that waits for steps, and may stop the run at any."""
        on = stream(self._ctx)
        fetched, keep = self._prepare(feeds, on, show)
        try:
            with self._rollback or contextlib.nullcontext():
                launch(on)
        finally:
            del keep
            self._bound.clear()
        return fetched

    def poison(self, buffer: Buffer) -> None:
        self._own[buffer].fill(0xFF)

    def array(self, value: Value) -> NDArray:
        """The array that shows a value during a run that shows its feeds and fetches."""
        buffer, spec, start = value.buffer, value.spec, value.skipped_nbytes
        if buffer in self._own:
            return NDArray.from_block(self._own[buffer], start, spec.shape, spec.dtype)
        if buffer.kind == "arena":
            start += max(buffer.offset, 0)
            return NDArray.from_block(self._arena, start, spec.shape, spec.dtype)
        held = self._bound[buffer] if buffer in self._bound else self._fixed[buffer]
        if held.shape == spec.shape:
            return held
        start += held.data_address - held.block.address
        return NDArray.from_block(held.block, start, spec.shape, spec.dtype)

    def _prepare(
        self, feeds: Sequence[Any], on: int, show: bool
    ) -> tuple[list[NDArray | None], list[Any]]:
        """Puts feeds and fetches in place; the second result must outlive the queueing of steps."""
        self._take_blocks(on)
        place = self.table.place
        keep = []
        for value, planned, slot in zip(feeds, self.plan.feeds, self._slots):
            address, held = self._feed(value, planned.spec, slot, on, show)
            place(planned.buffer, address)
            keep.append(held)
            if show:
                self._bound[planned.buffer] = held
        fetched = self._blank.copy()
        for j, k, arrays in self._outputs:
            fetched[k] = held = arrays.take(on)
            buffer = self._wanted[j].buffer
            place(buffer, held.data_address)
            if show:
                self._bound[buffer] = held
        return fetched, keep

    def _feed(
        self, value: Any, spec: Spec, slot: NDArray | None, on: int, show: bool
    ) -> tuple[int, Any]:
        """The address of a feed, and what keeps it alive."""
        if type(value) is NDArray:
            value = self._here(value, spec.dtype, on)
            if slot is None or self._may_be_read(value):
                return value.data_address, value
        if slot is not None:
            slot[:] = value
            return slot.data_address, slot
        if show:  # a user's own compute gets NDArrays
            copied = array(value, self._ctx, spec.dtype)
            return copied.data_address, copied
        host = stored(value, spec.dtype)
        try:  # a quarter of what the array's own interface costs
            return addressof(c_char.from_buffer(host)), host  # type: ignore[arg-type]
        except (TypeError, ValueError):  # it is read-only or empty
            return host.__array_interface__["data"][0], host

    def _may_be_read(self, feed: NDArray) -> bool:
        """True for an array of the device that kernels can read where it is: aligned as workspace
        was planned for, and none of the memory that the run writes.
        """
        return feed.data_address % ALIGNMENT == 0 and id(feed.block) not in self._changed

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


def _feed_slots(plan: Plan, target: Target) -> tuple[list[int | None], int]:
    """The offsets of the slots for host feeds, behind the plan's arena, and the end of the last. A
    device without streams reads feeds where they are.
    """
    if not target.streams:
        return [None] * len(plan.feeds), plan.arena_nbytes
    offsets: list[int | None] = []
    end = plan.arena_nbytes
    for value in plan.feeds:
        offsets.append(end)
        end += aligned(value.spec.nbytes)
    return offsets, end
