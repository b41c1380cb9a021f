"""report: how an executor's plans run on their device, and what broke a step into pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.device import Context, Counters, MemoryStats, counters, memory_stats
from ...runtime.target import target_of
from ..plan.memory import Plan
from ..run.cuda_graph import Recording


@dataclass(frozen=True)
class SegmentReport:
    """Consecutive steps that run in one piece.

    `kind` is recorded (a CUDA graph: one launch), native (one library call), numpy, or python (a
    user's own compute). `nodes` and `kernels` are those of the recording; its steps run in `lanes`
    beside each other, at most `longest` of them one after the other. `why` says what keeps the
    segment from being recorded, or that an operator of this name ends the ones beside it.
    """

    kind: str
    steps: int
    nodes: int = 0
    kernels: int = 0
    lanes: int = 0
    longest: int = 0
    why: str = ""


@dataclass(frozen=True)
class PlanReport:
    """One plan: the shapes of its feeds, how often it ran, and its pieces. One launch makes up to
    `together` runs where many are queued. `algorithms` are those that the autotuner
    selected, such as "conv2d by cudnn fft".
    """

    feeds: tuple[tuple[str, tuple[int, ...]], ...]
    runs: int
    steps: int
    arena_nbytes: int
    segments: tuple[SegmentReport, ...]
    together: int = 1
    algorithms: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        """Launches (on a GPU) or calls of a run: one a recorded segment, one a step of others."""
        return sum(
            1 if segment.kind == "recorded" else segment.steps
            for segment in self.segments
            if segment.kind != "python"
        )


@dataclass(frozen=True)
class Report:
    """What an executor has made of its graph. `since` counts from the executor's making, over the
    whole process; None without a native device.
    """

    ctx: Context | None
    plans: tuple[PlanReport, ...]
    since: dict[str, int] | None

    def __str__(self) -> str:
        lines = [f"{len(self.plans)} plan(s) on {self.ctx or 'numpy'}"]
        unit = "launch(es)" if target_of(self.ctx).streams else "kernel call(s)"
        for plan in self.plans:
            shapes = ", ".join(f"{name} {shape}" for name, shape in plan.feeds) or "no feeds"
            lines.append(
                f"  {shapes}: {plan.runs:,} runs of {plan.steps} steps, {plan.launches} {unit} "
                f"a run, arena {plan.arena_nbytes:,} bytes"
            )
            if plan.together > 1:
                lines.append(f"    up to {plan.together} runs in one launch where many are queued")
            lines += [f"    {_segment_text(segment)}" for segment in plan.segments]
            if plan.algorithms:
                lines.append(f"    autotuned: {_counted(plan.algorithms)}")
        if self.since is not None:
            counts = ", ".join(f"{name} {count:,}" for name, count in self.since.items())
            lines.append(f"  in this process since the executor was made: {counts}")
        return "\n".join(lines)


class Since:
    """The device's counters from now on."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._start = self._now()

    def _now(self) -> tuple[Counters, MemoryStats]:
        return counters(), memory_stats(self._ctx)

    def counts(self) -> dict[str, int]:
        """How far they have moved."""
        (made, memory), (made0, memory0) = self._now(), self._start
        moved = {name: value - getattr(made0, name) for name, value in made._asdict().items()}
        allocations = memory.device_allocations - memory0.device_allocations
        return moved | {"device_allocations": allocations}


def plan_report(
    plan: Plan, runs: int, segments: Sequence[SegmentReport], together: int = 1
) -> PlanReport:
    """What to say of one plan."""
    feeds = tuple((value.node.name, value.spec.shape) for value in plan.feeds)
    marked = (step.node for step in plan.steps if "algorithm" in step.node.attrs)
    algorithms = tuple(f"{node.op.name} by {node.attrs['algorithm']}" for node in marked)
    counts = runs, len(plan.steps), plan.arena_nbytes
    return PlanReport(feeds, *counts, tuple(segments), together, algorithms)


def native_segments(segments: Sequence[Any], recorded: Any, why: str) -> list[SegmentReport]:
    """The pieces of a native program; `recorded` is its recording or None, then `why` not."""
    made = iter([s for s in recorded.segments if isinstance(s, Recording)] if recorded else [])
    found = []
    for segment in segments:
        if not segment.native:
            found.append(SegmentReport("python", 1, why=f"{segment.name} runs Python"))
        elif recorded:
            one = next(made)
            counts = one.info.nodes, one.info.kernels, one.lanes.count, one.lanes.longest
            found.append(SegmentReport("recorded", segment.count, *counts))
        else:
            found.append(SegmentReport("native", segment.count, why=why))
    return found


def _segment_text(segment: SegmentReport) -> str:
    if segment.kind == "recorded":
        return (
            f"{segment.steps} steps recorded: {segment.nodes} nodes, of them {segment.kernels} "
            f"kernels, in {segment.lanes} lane(s), at most {segment.longest} in a row"
        )
    steps = "1 step" if segment.steps == 1 else f"{segment.steps} steps"
    return f"{steps} {segment.kind}" + (f": {segment.why}" if segment.why else "")


def _counted(names: Sequence[str]) -> str:
    counts = Counter(names).items()
    return ", ".join(name + (f" ({count} x)" if count > 1 else "") for name, count in counts)
