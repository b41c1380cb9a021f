"""The numpy runner: runs a plan step by step, every operator writing into the arena with `out=`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..plan.memory import Buffer, Plan, Step, Value
from .custom_compute import Guard, own_compute, read_only
from .parameters import aligned_bytes
from .runner import Observer, SegmentReport

# How steps see a feed or fetch: from which element on, in which shape and whether read-only (None:
# as it is), with their arguments and positions.
Patches = dict[tuple[int, tuple[int, ...], bool] | None, list[tuple[list, int]]]


class NumpyRunner:
    """A plan bound to numpy memory."""

    unrolled = 1

    def __init__(self, plan: Plan, guard: Guard | None = None) -> None:
        self.plan = plan
        self._guard = guard
        self.arena_nbytes = plan.arena_nbytes
        self.runs = 0
        self._views: dict[tuple, np.ndarray] = {}
        self._outside: dict[Buffer, np.ndarray] = {
            value.buffer: _state_array(value) for value in plan.states
        }
        for value in plan.constants:
            self._outside[value.buffer] = value.node.attrs["value"]
        fetched = (value for value in plan.fetches if value is not None)
        self._from_run = [*plan.feeds, *fetched]  # their arrays come with each run
        self._full_shapes = {value.buffer: value.spec.shape for value in self._from_run}
        self._patches: dict[Buffer, Patches] = {}
        self._arena = aligned_bytes(0)
        self._steps: list[tuple[Callable, list]] = []

    def bind(self, arena: np.ndarray) -> None:
        """Takes an arena of at least `plan.arena_nbytes` bytes; every later run uses it."""
        self._arena = arena
        self._views.clear()
        self._patches = {value.buffer: {} for value in self._from_run}
        self._steps = [self._bound(step) for step in self.plan.steps]
        self._feeds = [(self._patches[x.buffer], x.spec.dtype) for x in self.plan.feeds]
        self._fetches = [
            None
            if value is None
            else (self._patches[value.buffer], value.spec.shape, value.spec.dtype)
            for value in self.plan.fetches
        ]

    def run(self, feeds: Sequence[np.ndarray], times: int = 1) -> list[np.ndarray | None]:
        """Runs all steps, `times` over; `feeds` are in the order of `plan.feeds` and have the
        planned shapes; floats are cast to the planned dtype.
        """
        fetched = self._patch(feeds)
        self.runs += times
        with np.errstate(all="ignore"):
            for _ in range(times):
                for call, arguments in self._steps:
                    call(*arguments)
        return fetched

    def segments_report(self) -> list[SegmentReport]:
        """One piece, of all steps."""
        return [SegmentReport("numpy", len(self.plan.steps))]

    def run_observed(
        self, feeds: Sequence[np.ndarray], observe: Observer
    ) -> list[np.ndarray | None]:
        """Runs one step at a time: `observe(step, run, inputs, outputs)` runs each."""
        fetched = self._patch(feeds)
        with np.errstate(all="ignore"):
            for step, (call, arguments) in zip(self.plan.steps, self._steps):
                inputs = arguments[: len(step.inputs)]
                outputs = [arguments[k] for k in _written(step)]
                observe(step, partial(call, *arguments), inputs, outputs)
        return fetched

    def poison(self, buffer: Buffer) -> None:
        """Overwrites a buffer of the arena with NaN bytes."""
        self._arena[buffer.offset : buffer.offset + buffer.nbytes] = 0xFF

    def run_timed(self, feeds: Sequence[np.ndarray]) -> tuple[list[np.ndarray | None], list[float]]:
        """Runs once; the fetches, and the milliseconds that each step of the plan took."""
        ms: list[float] = []

        def observe(step: Step, run: Callable[[], None], *arrays: list) -> None:
            start = time.perf_counter()
            run()
            ms.append((time.perf_counter() - start) * 1e3)

        return self.run_observed(feeds, observe), ms

    def _patch(self, feeds: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        for (patches, dtype), array in zip(self._feeds, feeds):
            _show(array if array.dtype == dtype else array.astype(dtype), patches)
        fetched: list[np.ndarray | None] = []
        for fetch in self._fetches:
            if fetch is None:
                fetched.append(None)
                continue
            patches, full_shape, dtype = fetch
            array = np.empty(full_shape, dtype)
            fetched.append(array)
            _show(array, patches)
        return fetched

    def _bound(self, step: Step) -> tuple[Callable, list]:
        values = [*step.inputs, *step.workspace, *step.outputs]
        node, op = step.node, step.node.op
        if op.kernel is None:
            values = [*step.inputs, *step.outputs]
        arguments: list[Any] = [None] * len(values)
        for k, value in enumerate(values):
            sealed = op.kernel is None and k < len(step.inputs)
            if value.buffer in self._patches:
                self._note(value, arguments, k, sealed)
            else:
                array = self._array(value)
                arguments[k] = read_only(array) if sealed else array
        if op.kernel is None:
            return own_compute(step, True, self._guard), arguments
        return partial(op.numpy, node), arguments

    def _note(self, value: Value, arguments: list, k: int, sealed: bool) -> None:
        """Notes the places of a value's array, which comes with a run."""
        shown = None
        if sealed or self._full_shapes[value.buffer] != value.spec.shape:
            shown = (value.offset, value.spec.shape, sealed)
        self._patches[value.buffer].setdefault(shown, []).append((arguments, k))

    def _array(self, value: Value) -> np.ndarray:
        buffer, spec = value.buffer, value.spec
        if buffer in self._outside:
            array = self._outside[buffer]
            return array if array.shape == spec.shape else _part(array, value.offset, spec.shape)
        start = max(buffer.offset, 0) + value.skipped_nbytes
        key = (start, spec.shape, spec.dtype)
        if key not in self._views:  # equal views are one object, which shows in-place use
            self._views[key] = np.ndarray(spec.shape, spec.dtype, self._arena, start)
        return self._views[key]


def _show(array: np.ndarray, patches: Patches) -> None:
    """Puts an array where the steps see it: one object a shape, so that in-place use shows."""
    for part, places in patches.items():
        shown = array if part is None else _part(array, *part)
        for arguments, k in places:
            arguments[k] = shown


def _part(
    array: np.ndarray, offset: int, shape: tuple[int, ...], sealed: bool = False
) -> np.ndarray:
    """The elements from index `offset` on, as many as the shape has."""
    size = math.prod(shape)
    if size != array.size:
        array = array.reshape(-1)[offset : offset + size]
    part = array.reshape(shape)
    return read_only(part) if sealed else part


def _written(step: Step) -> Sequence[int]:
    """The positions of the arguments that a step writes."""
    if step.node.op.writes:
        return step.node.op.writes
    scratch = len(step.workspace) if step.node.op.kernel is not None else 0
    start = len(step.inputs) + scratch
    return range(start, start + len(step.outputs))


def _state_array(value: Value) -> np.ndarray:
    return value.node.origin.storage.array  # type: ignore[attr-defined]
