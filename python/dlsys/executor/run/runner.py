"""The interface of runners: a plan bound to memory, which an executor runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...errors import GraphError
from ..plan.memory import Buffer, Plan, Step

Observer = Callable[[Step, Callable[[], None], list, list], None]  # step, run, inputs, outputs


class SegmentReport(NamedTuple):
    """Consecutive steps that run in one piece.

    `kind` is captured (a CUDA graph: one launch), native (one library call), numpy, or python (a
    user's own compute). `nodes` and `kernels` are those of the captured graph; its steps run in
    `streams` graph streams, at most `longest` of them one after the other. `why` says what keeps
    the segment from being captured or native, or which operator ends its neighbors.
    """

    kind: str
    steps: int
    nodes: int = 0
    kernels: int = 0
    streams: int = 0
    longest: int = 0
    why: str = ""


class Runner(ABC):
    """A plan bound to memory."""

    plan: Plan
    arena_nbytes: int  # of the arena that it is to be bound to
    runs = 0  # so far
    unrolled = 1  # the most runs that one launch makes so far

    @abstractmethod
    def bind(self, arena: Any) -> None:
        """Takes an arena of at least `arena_nbytes` bytes; every later run uses it."""

    @abstractmethod
    def run(self, feeds: Sequence[Any], times: int = 1) -> list[Any]:
        """Runs all steps, `times` over, and returns the fetches of the last; `feeds` are in the
        order of `plan.feeds` and have the planned shapes; they are cast to the planned dtypes.
        """

    @abstractmethod
    def run_observed(self, feeds: Sequence[Any], observe: Observer) -> list[Any]:
        """Runs once, each step by `observe(step, run, inputs, outputs)`."""

    @abstractmethod
    def run_timed(self, feeds: Sequence[Any]) -> tuple[list[Any], list[float]]:
        """Runs once; the fetches, and the milliseconds of each step of the plan."""

    @abstractmethod
    def poison(self, buffer: Buffer) -> None:
        """Overwrites a buffer with NaN bytes; it must have memory of its own."""

    @abstractmethod
    def segments_report(self) -> list[SegmentReport]:
        """The pieces in which the plan runs now."""


def second_run() -> GraphError:
    """The error of a second run at the same time, which is refused rather than made to wait."""
    return GraphError(
        "this executor is running already, in another thread or around an operator of its own; "
        "make one executor for each"
    )
