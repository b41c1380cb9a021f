"""Reports: how an executor's plans run on their device, and what broke a step into pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...describe import drawn_by
from ...dtypes import FLOAT32, is_narrow
from ...graph.node import find_topo_sort
from ...runtime.device import Context, Counters, MemoryStats, counters, memory_stats
from ...runtime.target import target_of
from ..plan.memory import Plan, Step
from ..recompute import Recomputed
from ..run.runner import Runner, SegmentReport
from .text import columns

_LAYOUTS = (0, 2, 3, 1), (0, 3, 1, 2)  # the axes of (N, H, W, C) in (N, C, H, W), and back


class NarrowSteps(NamedTuple):
    """What a plan does in floats of 16 bits: the steps that read or write them, those that only
    cast from or to them, and the products that run in float32 between casts, having no kernel.
    """

    computing: int
    casting: int
    wide: tuple[str, ...]

    def __str__(self) -> str:
        text = f"16 bits: {self.computing} steps, and {self.casting} that cast"
        return text + (f"; in float32: {_counted(self.wide)}" if self.wide else "")


class LastChannels(NamedTuple):
    """The convolutions of a plan whose images have their channels last, their gradients included,
    and the transposes between that layout and the user's which no kernel took over, with the bytes
    that they read and write.
    """

    convolutions: int
    transposes: int
    nbytes: int

    def __str__(self) -> str:
        moved = f" of {self.nbytes:,} bytes" if self.transposes else ""
        text = f"channels last: {self.convolutions} convolutions, {self.transposes} transpose(s)"
        return text + moved


class Exchange(NamedTuple):
    """A step of a plan that communicates: what it is called, its arrays, the bytes that this rank
    gives and those that pass it (of n ranks a sum passes 2 (n - 1) / n of its bytes, twice what a
    gather does). `beside` of the plan's `steps` depend on it in neither way, so that a GPU may run
    them meanwhile. `ms` is its time where a `profile.Profile` has recorded runs.
    """

    name: str
    arrays: int
    nbytes: int
    bus_nbytes: float
    beside: int
    steps: int
    ms: float | None = None

    @property
    def bus_gigabytes_per_second(self) -> float | None:
        """The speed as NCCL's tests count it, which can be held against that of the links."""
        return None if self.ms is None else self.bus_nbytes / max(self.ms, 1e-9) * 1e-6

    def __str__(self) -> str:
        arrays = f"{self.arrays} array{'s' * (self.arrays != 1)}"
        text = (
            f"{self.name}: {arrays}, {self.nbytes:,} bytes, {self.beside} of {self.steps} steps "
            "can run beside it"
        )
        if self.ms is None:
            return text
        return f"{text}; {self.ms:.3f} ms, {self.bus_gigabytes_per_second:.1f} GB/s on the bus"


class PlanReport(NamedTuple):
    """One plan: the shapes of its feeds, its runs so far, and its pieces. One launch makes up to
    `unrolled` runs where many are queued. `algorithms` are those that the autotuner
    selected, such as "conv2d by cudnn fft". `narrow` is None where nothing is of 16 bits,
    `last_channels` where all images lie as the user's do. `exchanged` has what is exchanged with
    other ranks, buckets of gradients among it. `recomputed` says what runs twice to stay within the
    executor's memory.
    """

    feeds: tuple[tuple[str, tuple[int, ...]], ...]
    runs: int
    steps: int
    arena_nbytes: int
    segments: tuple[SegmentReport, ...]
    unrolled: int = 1
    algorithms: tuple[str, ...] = ()
    narrow: NarrowSteps | None = None
    last_channels: LastChannels | None = None
    exchanged: tuple[Exchange, ...] = ()
    recomputed: Recomputed | None = None

    @property
    def launches(self) -> int:
        """Launches (on a GPU) or calls of a run: one a captured segment, one a step of others."""
        return sum(
            1 if segment.kind == "captured" else segment.steps
            for segment in self.segments
            if segment.kind != "python"
        )


class Report(NamedTuple):
    """The plans of an executor. `since` counts from the executor's making, over the
    whole process; None without a native device.
    """

    ctx: Context | None
    plans: tuple[PlanReport, ...]
    since: dict[str, int] | None

    def _repr_html_(self) -> str:  # a NamedTuple takes no assigned one
        return drawn_by("text_html")(self)

    def __repr__(self) -> str:
        return f"Report({len(self.plans)} plan(s) on {self.ctx or 'numpy'})"

    def __str__(self) -> str:
        lines = [f"{len(self.plans)} plan(s) on {self.ctx or 'numpy'}"]
        unit = "launch(es)" if target_of(self.ctx).streams else "kernel call(s)"
        for plan in self.plans:
            shapes = ", ".join(f"{name} {shape}" for name, shape in plan.feeds) or "no feeds"
            lines.append(
                f"  {shapes}: {plan.runs:,} runs of {plan.steps} steps, {plan.launches} {unit} "
                f"a run, arena {plan.arena_nbytes:,} bytes"
            )
            if plan.unrolled > 1:
                lines.append(f"    up to {plan.unrolled} runs in one launch where many are queued")
            lines += [f"    {_segment_text(segment)}" for segment in plan.segments]
            if plan.narrow is not None:
                lines.append(f"    {plan.narrow}")
            if plan.last_channels is not None:
                lines.append(f"    {plan.last_channels}")
            if plan.exchanged:
                total = sum(exchange.nbytes for exchange in plan.exchanged)
                lines.append(f"    exchanged with other ranks a run, in bytes: {total:,}")
                lines += [f"      {exchange}" for exchange in plan.exchanged]
            if plan.recomputed is not None:
                lines.append(f"    {plan.recomputed}")
            if plan.algorithms:
                lines.append(f"    autotuned: {_counted(plan.algorithms)}")
        if self.since is not None:
            counts = ", ".join(f"{name} {count:,}" for name, count in self.since.items())
            lines.append(f"  in this process since the executor was made: {counts}")
        return "\n".join(lines)


class CountersSince:
    """The changes of a device's counters from now on."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._start = self._now()

    def _now(self) -> tuple[Counters, MemoryStats]:
        return counters(), memory_stats(self._ctx)

    def counts(self) -> dict[str, int]:
        """The changes so far."""
        (made, memory), (made0, memory0) = self._now(), self._start
        moved = {name: value - getattr(made0, name) for name, value in made._asdict().items()}
        allocations = memory.device_allocations - memory0.device_allocations
        return moved | {"device_allocations": allocations}


def plan_report(runner: Runner, recorder: Any = None) -> PlanReport:
    """The report of one plan; of the times of its exchanges, too, where a recorder knows them."""
    plan = runner.plan
    feeds = tuple((value.node.name, value.spec.shape) for value in plan.feeds)
    marked = (step.node for step in plan.steps if "algorithm" in step.node.attrs)
    algorithms = tuple(f"{node.op.name} by {node.attrs['algorithm']}" for node in marked)
    counts = runner.runs, len(plan.steps), plan.arena_nbytes
    segments = tuple(runner.segments_report())
    step_ms = getattr(recorder, "step_ms", lambda plan: None)(plan)
    exchanged = tuple(
        _exchange(plan, k, None if step_ms is None else step_ms[k])
        for k, step in enumerate(plan.steps)
        if step.node.op.communicates
    )
    return PlanReport(
        feeds,
        *counts,
        segments,
        unrolled=runner.unrolled,
        algorithms=algorithms,
        narrow=_narrow_steps(plan),
        last_channels=_last_channels(plan),
        exchanged=exchanged,
        recomputed=plan.recomputed,
    )


def _exchange(plan: Plan, at: int, ms: float | None) -> Exchange:
    step = plan.steps[at]
    node = step.node
    before, after = set(find_topo_sort([node])), {node}
    for reader in find_topo_sort([later.node for later in plan.steps]):
        if not after.isdisjoint(reader.inputs):
            after.add(reader)
    beside = sum(x.node not in before and x.node not in after for x in plan.steps)
    size = node.attrs["group"].size
    sent = [step.inputs[k] for k in node.op.gradient_inputs] or step.inputs[: node.op.outputs]
    given = sum(value.spec.nbytes for value in sent)
    made = sum(value.spec.nbytes for value in step.outputs)
    ring = (size - 1) / size
    factor = {
        "all_reduce": 2 * ring,
        "all_gather": ring,
        "reduce_scatter": ring,
        "all_to_all": ring,
    }
    kind = "all_reduce" if node.op.gradient_inputs else node.op.name  # which an update makes, too
    bus = factor.get(kind, size - 1.0 if node.op.writes else 1.0) * max(given, made)
    return Exchange(node.op.name, node.op.outputs, given, bus, beside, len(plan.steps), ms)


def _narrow_steps(plan: Plan) -> NarrowSteps | None:
    computing, casting, wide = 0, 0, []
    for step in plan.steps:
        values = [value.spec.dtype for value in (*step.inputs, *step.outputs)]
        # numpy holds as float32 what is cast to bfloat16.
        narrow = any(map(is_narrow, (*values, step.node.attrs.get("dtype"))))
        casting += narrow and step.node.op.casts
        computing += narrow and not step.node.op.casts
        if not narrow and step.node.op.autocast == "bf16" and FLOAT32 in values:
            wide.append(step.node.op.name)
    return NarrowSteps(computing, casting, tuple(wide)) if computing or casting else None


def _last_channels(plan: Plan) -> LastChannels | None:
    kernels = [step.node.op.kernel or "" for step in plan.steps]
    convolutions = [k for k in kernels if k.startswith("conv2d") and "channels_last" in k]
    moved = [
        sum(value.spec.nbytes for value in (*step.inputs, *step.outputs))
        for step in plan.steps
        if step.node.attrs.get("axes") in _LAYOUTS
    ]
    return LastChannels(len(convolutions), len(moved), sum(moved)) if convolutions else None


def _segment_text(segment: SegmentReport) -> str:
    if segment.kind == "captured":
        return (
            f"{segment.steps} steps captured: {segment.nodes} nodes, of them {segment.kernels} "
            f"kernels, in {segment.streams} stream(s), at most {segment.longest} in a row"
        )
    steps = "1 step" if segment.steps == 1 else f"{segment.steps} steps"
    return f"{steps} {segment.kind}" + (f": {segment.why}" if segment.why else "")


def _counted(names: Sequence[str]) -> str:
    counts = Counter(names).items()
    return ", ".join(name + (f" ({count} x)" if count > 1 else "") for name, count in counts)


def plan_line(plan: Plan) -> str:
    """A plan in one line."""
    return f"Plan({len(plan.steps)} steps, arena {plan.arena_nbytes:,} bytes)"


def plan_text(plan: Plan) -> str:
    """A plan as text: its counts, and a line for each step with the memory that it writes."""
    head = (
        f"{len(plan.steps)} steps; without reuse {plan.unshared_nbytes:,} bytes, largest sum "
        f"of live bytes {plan.live_nbytes:,}, arena {plan.arena_nbytes:,}"
    )
    steps = [_row(k, step) for k, step in enumerate(plan.steps)]
    rows = columns([_HEADINGS, *steps], right=(0, 3, 4))
    heads = [head] if plan.recomputed is None else [head, str(plan.recomputed)]
    return "\n".join([*heads, *("  ".join(row).rstrip() for row in rows)])


_HEADINGS = ("step", "operator", "writes", "bytes", "offset", "lifetime")


def _row(k: int, step: Step) -> tuple[str, ...]:
    output = (step.outputs or step.inputs)[0]
    buffer = output.buffer
    algorithm = step.node.attrs.get("algorithm")  # where the autotuner selected one
    return (
        str(k),
        step.node.op.name + (f" by {algorithm}" if algorithm else ""),
        f"{output.node.name} {output.spec.shape}",
        f"{buffer.nbytes:,}",
        f"{buffer.offset:,}" if buffer.kind == "arena" else buffer.kind,
        f"{buffer.first}–{buffer.last}",
    )
