"""Steps that run a user's own `compute`. It writes all of its output, returns nothing and leaves
its inputs alone, which are read-only on numpy; debug/contract.py checks this.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...errors import GraphError
from ...graph.node import Node
from ..plan.memory import Step

Call = Callable[..., None]  # of a step's arrays: its inputs, then its outputs
Guard = Callable[[Step, Call], Call]  # a call that is checked


def own_compute(step: Step, use_numpy: bool, guard: Guard | None = None) -> Call:
    """The `compute` of a step as a function of its arrays, called in the form of the assignment."""
    node, count = step.node, len(step.inputs)
    compute: Callable[..., Any] = node.op.compute

    def call(*arrays: Any) -> None:
        inputs, made = list(arrays[:count]), list(arrays[count:])
        if use_numpy:
            inputs = [_read_only(x) for x in inputs]
        output = made[0] if node.op.outputs == 1 else made
        try:
            returned = compute(node.origin, inputs, output, use_numpy)
        except ValueError as error:
            if not use_numpy or "read-only" not in str(error):
                raise
            raise refusal(node, "wrote to a read-only array, as its inputs are") from error
        if returned is not None and returned is not output:
            raise refusal(node, f"returned {type(returned).__name__}, which nobody reads")

    return guard(step, call) if guard is not None else call


def refusal(node: Node, what: str) -> GraphError:
    """The error of a compute that breaks its contract, ready to raise."""
    return GraphError(
        f"operator {node.op.name}: its compute {what}; write the whole result into output_val, "
        f"such as output_val[:] = ..., and nothing else [{node.where}]"
    )


class PythonStep:
    """A step of a native program that runs a user's `compute`, between native segments. The program
    owns it and shows it the arrays of a run.
    """

    native = False
    kind = "python"

    def __init__(self, program: Any, step: Step, guard: Guard | None) -> None:
        if not step.node.op.runs_python:
            raise GraphError(
                f"operator {step.node.op.name} has neither a native kernel nor a compute of its "
                f"own; run on numpy (ctx=None) [{step.node.where}]"
            )
        self.why = f"{step.node.op.name} runs Python"
        self._program = weakref.proxy(program)
        self._step = step
        self._compute = own_compute(step, False, guard)

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


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view of an array that refuses to be written."""
    view = array.view()
    view.flags.writeable = False
    return view
