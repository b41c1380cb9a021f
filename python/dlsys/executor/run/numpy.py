"""The numpy runner: runs a plan step by step, every operator writing into the arena with `out=`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...runtime.host_threads import quiet
from ..plan.memory import Buffer, Plan, Step, Value
from .python_step import Guard, own_compute
from .runner import Observer, Runner, SegmentReport

# The arguments that show a feed or fetch, by its first element and shape there: lists, positions.
Uses = dict[tuple[int, tuple[int, ...]], list[tuple[list, int]]]


class NumpyRunner(Runner):
    """A plan bound to numpy memory."""

    def __init__(self, plan: Plan, guard: Guard | None = None) -> None:
        self.plan, self.arena_nbytes = plan, plan.arena_nbytes
        self._shares = any(step.node.op.shares for step in plan.steps)
        self._guard = guard
        self._outside: dict[Buffer, np.ndarray] = {
            value.buffer: value.node.origin.storage.array  # type: ignore[attr-defined]
            for value in plan.states
        }
        for value in plan.constants:
            self._outside[value.buffer] = value.node.attrs["value"]

    def bind(self, arena: np.ndarray) -> None:
        self._arena = arena
        self._views: dict[tuple, np.ndarray] = {}
        fetches = [(k, value) for k, value in enumerate(self.plan.fetches) if value is not None]
        # Their arrays come with each run.
        given = [*self.plan.feeds, *(value for _, value in fetches)]
        self._uses: dict[Buffer, Uses] = {value.buffer: {} for value in given}
        self._steps = [self._bound(step) for step in self.plan.steps]
        self._feeds = [(self._uses[x.buffer], x.spec.dtype) for x in self.plan.feeds]
        self._fetches = [(k, self._uses[y.buffer], *y.spec[:2]) for k, y in fetches]

    def run(self, feeds: Sequence[np.ndarray], times: int = 1) -> list[np.ndarray | None]:
        fetched = self._show(feeds)
        self.runs += times
        with quiet(self._shares):
            for _ in range(times):
                for call, arguments in self._steps:
                    call(*arguments)
        return fetched

    def segments_report(self) -> list[SegmentReport]:
        return [SegmentReport("numpy", len(self.plan.steps))]

    def run_observed(
        self, feeds: Sequence[np.ndarray], observe: Observer
    ) -> list[np.ndarray | None]:
        fetched = self._show(feeds)
        with quiet(self._shares):
            for step, (call, arguments) in zip(self.plan.steps, self._steps):
                count = len(step.inputs)
                made = arguments[count + len(step.workspace) :]
                written = [arguments[k] for k in step.node.op.writes]
                observe(step, partial(call, *arguments), arguments[:count], made or written)
        return fetched

    def run_timed(self, feeds: Sequence[np.ndarray]) -> tuple[list[np.ndarray | None], list[float]]:
        ms: list[float] = []

        def observe(step: Step, run: Callable[[], None], *arrays: list) -> None:
            start = time.perf_counter()
            run()
            ms.append((time.perf_counter() - start) * 1e3)

        return self.run_observed(feeds, observe), ms

    def poison(self, buffer: Buffer) -> None:
        self._arena[buffer.offset : buffer.offset + buffer.nbytes] = 0xFF

    def _show(self, feeds: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Puts feeds, and new arrays for fetches, where the steps see them."""
        fetched: list[np.ndarray | None] = [None] * len(self.plan.fetches)
        for (uses, dtype), array in zip(self._feeds, feeds):
            _put(array if array.dtype == dtype else array.astype(dtype), uses)
        for k, uses, shape, dtype in self._fetches:
            fetched[k] = array = np.empty(shape, dtype)
            _put(array, uses)
        return fetched

    def _bound(self, step: Step) -> tuple[Callable[..., None], list]:
        """The function that runs a step, and its arguments."""
        arguments: list[Any] = []
        for k, value in enumerate((*step.inputs, *step.workspace, *step.outputs)):
            arguments.append(None)
            if value.buffer in self._uses:
                part = value.offset, value.spec.shape
                self._uses[value.buffer].setdefault(part, []).append((arguments, k))
            else:
                arguments[k] = self._array(value)
        if step.node.op.kernel is None:
            return own_compute(step, True, self._guard), arguments
        return step.node.op.bound(step.node), arguments

    def _array(self, value: Value) -> np.ndarray:
        buffer, spec = value.buffer, value.spec
        if buffer in self._outside:
            return _part(self._outside[buffer], value.offset, spec.shape)
        start = max(buffer.offset, 0) + value.skipped_nbytes
        key = (start, spec.shape, spec.dtype)
        if key not in self._views:  # equal views are one object, which shows in-place use
            self._views[key] = np.ndarray(spec.shape, spec.dtype, self._arena, start)
        return self._views[key]


def _put(array: np.ndarray, uses: Uses) -> None:
    """Puts an array where the steps see it: one object a shape, so that in-place use shows."""
    for part, arguments_at in uses.items():
        shown = _part(array, *part)
        for arguments, k in arguments_at:
            arguments[k] = shown


def _part(array: np.ndarray, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """The elements from index `offset` on, as many as the shape has."""
    if array.shape == shape:
        return array
    size = math.prod(shape)
    if size != array.size:
        array = array.reshape(-1)[offset : offset + size]
    return array.reshape(shape)
