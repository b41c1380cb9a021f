"""Steps that Python runs: a user's own `compute`, and where a device lacks a kernel the numpy form
of its operator.

A compute writes all of its output, returns nothing and leaves its inputs alone, which are read-only
on numpy; debug/contract.py checks this.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...dtypes import host, is_integral
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


def numpy_form(step: Step) -> Call:
    """The numpy form of a step's operator on copies of its arrays on the host, which waits for the
    device. An operator without one raises GraphError as it runs.
    """
    node, op, count = step.node, step.node.op, len(step.inputs)
    made_specs = [value.spec for value in step.outputs]
    scratch_specs = op.workspace(node, [value.spec for value in step.inputs], made_specs)

    def call(*arrays: Any) -> None:
        inputs = [x.asnumpy() for x in arrays[:count]]
        made = [np.empty(spec.shape, host(spec.dtype)) for spec in made_specs]
        scratch = [np.empty(spec.shape, host(spec.dtype)) for spec in scratch_specs]
        with np.errstate(all="ignore"):
            op.numpy(node, *inputs, *scratch, *made)
        for k in op.writes:
            arrays[k][:] = inputs[k]
        for array, result in zip(arrays[count:], made):
            array[:] = result

    return call


class PythonStep:
    """A step of a native program that Python runs, between native segments. The program owns it and
    shows it the arrays of a run; the executor's report tells its `why`.
    """

    native = False

    def __init__(self, program: Any, step: Step, target: str, guard: Guard | None) -> None:
        op, dtype = step.node.op, step.dtype
        if op.kernel is not None:
            self.kind = "numpy"
            of = f" of {dtype}" if is_integral(dtype) else ""
            self.why = (
                f"{target} has no kernel {op.kernel}{of}; {op.name} falls back to numpy on the host"
            )
            if op.communicates:
                self.why = f"{op.name} exchanges arrays of the host"
            self._call = numpy_form(step)
        elif op.runs_python:
            self.kind, self.why = "python", f"{op.name} runs Python"
            self._call = own_compute(step, False, guard)
        else:
            raise GraphError(
                f"operator {op.name} has neither a native kernel nor a compute of its own; run on "
                f"numpy (ctx=None) [{step.node.where}]"
            )
        self._program = weakref.proxy(program)
        self._step = step

    def run(self, on: int) -> None:
        """Calls it with the arrays of the run, in stream order."""
        values = *self._step.inputs, *self._step.outputs
        self._call(*map(self._program.array, values))

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
