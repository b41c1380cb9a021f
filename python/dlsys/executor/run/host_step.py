"""The fallback of a step whose kernel the target lacks: its operator's numpy form on the host."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any

import numpy as np

from ...dtypes import host
from ...graph.spec import Spec
from ..plan.memory import Step


class HostStep:
    """A step of a native program that numpy runs, on copies of its arrays, between segments.

    It waits for the device, so it costs a round trip; the executor's report names it. An operator
    without a numpy form raises GraphError as it runs.
    """

    native = False
    kind = "numpy"

    def __init__(self, program: Any, step: Step, target: str) -> None:
        node, op = step.node, step.node.op
        self.name = op.name
        self.why = f"{target} has no kernel {op.kernel}; {op.name} falls back to numpy on the host"
        self._program = weakref.proxy(program)
        self._step = step
        made = [value.spec for value in step.outputs]
        inputs = [value.spec for value in step.inputs]
        self._scratch = [*op.workspace(node, inputs, made)]

    def run(self, on: int) -> None:
        """Copies the inputs to the host, computes, and copies back what the step wrote."""
        step, array = self._step, self._program.array
        inputs = [array(value).asnumpy() for value in step.inputs]
        made = [_empty(value.spec) for value in step.outputs]
        with np.errstate(all="ignore"):
            step.node.op.numpy(step.node, *inputs, *map(_empty, self._scratch), *made)
        for k in step.node.op.writes:
            array(step.inputs[k])[:] = inputs[k]
        for value, result in zip(step.outputs, made):
            array(value)[:] = result

    def calls(self, on: int) -> list[tuple[Step, Any]]:
        """The step with the function that runs it."""
        return [(self._step, partial(self.run, on))]

    def timed(self, on: int) -> list[float]:
        """Runs it and returns the milliseconds that it took on the host."""
        start = time.perf_counter()
        self.run(on)
        return [(time.perf_counter() - start) * 1e3]


def _empty(spec: Spec) -> np.ndarray:
    return np.empty(spec.shape, host(spec.dtype))
