"""Observers of runs, step by step, for DLSYS_DEBUG and profiles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import KernelError
from ...runtime.device import Context, synchronize
from ...settings import settings
from ..plan.memory import Buffer, Step
from ..run.runner import Observer, Runner
from .check import checker


def observer(ctx: Context | None) -> Observer:
    """Runs a step, then prints its time (level 2) or stops at the first NaN or infinity (nan)."""

    def observe(step: Step, run: Callable[[], None], inputs: list, outputs: list) -> None:
        ranges = [_range(x) for x in inputs] if settings.debug_nan else []
        start = time.perf_counter()
        run()
        if ctx is not None:
            synchronize(ctx)
        ms = (time.perf_counter() - start) * 1e3
        if settings.debug >= 2:
            print(_line(step, ms))
        if settings.debug_nan:
            _refuse_nan(step, outputs, ranges)

    return observe


def poisoner(runner: Runner) -> Observer:
    """Runs a step, then fills the buffers that nobody reads any more with NaN bytes."""
    dying: dict[int, list[Buffer]] = {}
    for buffer in runner.plan.buffers:
        if buffer.kind == "arena" and buffer.nbytes:
            dying.setdefault(buffer.last, []).append(buffer)
    numbers = itertools.count()

    def observe(step: Step, run: Callable[[], None], inputs: list, outputs: list) -> None:
        run()
        for buffer in dying.get(next(numbers), ()):
            runner.poison(buffer)

    return observe


def may_stop() -> bool:
    """True when DLSYS_DEBUG may stop a run at any step."""
    return settings.debug >= 4 or settings.debug_nan


def run_watched(runner: Runner, feeds: list[Any], ctx: Context | None, recorder: Any) -> list[Any]:
    """Runs once, step by step, for a recorder (profile.Profile) or as DLSYS_DEBUG says."""
    if recorder is not None:
        fetched, ms = runner.run_timed(feeds)
        recorder.add(runner.plan, ms)
        return fetched
    if settings.debug >= 4:
        return runner.run_observed(feeds, checker(None))
    if settings.debug >= 2 or settings.debug_nan:
        return runner.run_observed(feeds, observer(ctx))
    return runner.run_observed(feeds, poisoner(runner))


def flops(step: Step) -> int:
    """Floating-point operations of a step."""
    output = (step.outputs or step.inputs)[0].spec
    return step.node.op.cost(step.node, [value.spec for value in step.inputs], output)


def traffic(step: Step) -> int:
    """Bytes that a step reads and writes at least."""
    op = step.node.op
    written = step.outputs or [step.inputs[k] for k in op.writes]
    picked = sum(
        min(source.spec.size, made.spec.size) * source.spec.dtype.itemsize
        for source, made in zip(step.inputs[: op.gathers], step.outputs)
    )
    return picked + sum(value.spec.nbytes for value in [*step.inputs[op.gathers :], *written])


def _line(step: Step, ms: float) -> str:
    seconds = max(ms, 1e-6) * 1e-3
    return (
        f"{step.node.name:<32} {ms:>9.4f} ms {traffic(step) / seconds * 1e-9:>8.1f} GB/s "
        f"{flops(step) / seconds * 1e-9:>8.1f} GFLOP/s  [{step.node.where}]"
    )


def _range(array: Any) -> str:
    values = array if isinstance(array, np.ndarray) else array.asnumpy()
    if not values.size:
        return "empty"
    bad = values.dtype.kind == "f" and not np.isfinite(values).all()
    return f"{values.min():.4g} … {values.max():.4g}" if not bad else "with NaN or infinity"


def _refuse_nan(step: Step, outputs: list[Any], ranges: list[str]) -> None:
    for array in outputs:
        values = array if isinstance(array, np.ndarray) else array.asnumpy()
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            kind = "NaN" if np.isnan(values).any() else "infinity"
            inputs = (f"{x.node.name} ({r})" for x, r in zip(step.inputs, ranges))
            raise KernelError(
                f"{step.node.name} ({step.node.op.name}) is the first node that made {kind}; its "
                f"inputs are {', '.join(inputs)} [{step.node.where}]"
            )
