"""callback: a step that runs a user's `compute` from Python, between native segments."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any

from ...errors import GraphError
from ..plan.memory import Step
from .custom_compute import Compute


class Callback:
    """One such step of a program, which owns it and shows it the arrays of a run."""

    native = False

    def __init__(self, program: Any, step: Step) -> None:
        if not step.node.op.runs_python:
            raise GraphError(
                f"operator {step.node.op.name} has neither a native kernel nor a compute of its "
                f"own; run on numpy (ctx=None) [{step.node.where}]"
            )
        self.name = step.node.op.name
        self._program = weakref.proxy(program)
        self._step = step
        self._compute = Compute(step, use_numpy=False)

    def run(self, on: int) -> None:
        """Calls `compute` with NDArrays on the same stream."""
        step = self._step
        arrays = [self._program.array(value) for value in (*step.inputs, *step.outputs)]
        self._compute(*arrays)

    def calls(self, on: int) -> list[tuple[Step, Any]]:
        """The step with what runs it."""
        return [(self._step, partial(self.run, on))]

    def timed(self, on: int) -> list[float]:
        """Runs it and returns the milliseconds that Python took."""
        start = time.perf_counter()
        self.run(on)
        return [(time.perf_counter() - start) * 1e3]
