"""Steps that run a user's own `compute`, and the checks of its contract: it writes all of its
output, returns nothing and leaves its inputs alone.

A compute that breaks it would silently return memory of an earlier run, or spoil a value that
others read. So inputs are read-only on numpy, and the first call of each operator of a plan, and
every call while steps are watched (DLSYS_DEBUG), is checked: the output is filled with a pattern
beforehand that must be gone afterwards, and on native devices the inputs must have kept their
bytes.

The pattern of floats is a signaling NaN with a payload of its own. Arithmetic never makes one, and
what reads it passes the payload on in a quiet NaN; a NaN that an operator computes has another
payload. Integers of four and eight bytes and bools have the byte 0xA5 throughout. One and two bytes
have too few values for a pattern of one: theirs is drawn anew for each element, and the output
counts as unwritten where more elements than chance explains have kept it, or all of four bytes or
more.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from ...dtypes import bfloat16
from ...errors import GraphError
from ...ndarray import NDArray
from ...settings import settings
from ..plan.memory import Step

# By the size of a float: the pattern, and the bits that arithmetic may change in it, which are the
# sign and the one that makes it quiet.
_NAN = {
    2: (0x7DA5, 0x8200),
    4: (0x7FA5A5A5, 0x80400000),
    8: (0x7FF4A5A5A5A5A5A5, 0x8008000000000000),
}
_FEW = 8  # elements that may have kept the pattern of small integers by chance, and one in
_ONE_IN = 16  # this many more, where chance has one in 256


class Compute:
    """The `compute` of a step, as a function of its arrays: inputs, then outputs."""

    def __init__(self, step: Step, use_numpy: bool) -> None:
        self._node = step.node
        self._use_numpy = use_numpy
        self._count = len(step.inputs)
        read = {value.buffer for value in step.inputs}
        made = {value.buffer for value in step.outputs}
        # In-place operators share memory between the two, which says nothing then.
        self._fresh = [k for k, y in enumerate(step.outputs) if y.buffer not in read]
        self._kept = [k for k, x in enumerate(step.inputs) if x.buffer not in made]
        self._checked = False

    def __call__(self, *arrays: Any) -> None:
        inputs, outputs = list(arrays[: self._count]), list(arrays[self._count :])
        if self._checked and not settings.stepwise:
            self._call(inputs, outputs)
            return
        # Numpy's inputs are read-only.
        kept = [] if self._use_numpy else [(inputs[k], inputs[k].asnumpy()) for k in self._kept]
        poisoned = [(outputs[k], _poison(outputs[k])) for k in self._fresh]
        self._call(inputs, outputs)
        for array, before in kept:
            if array.asnumpy().tobytes() != before.tobytes():
                array[:] = before
                self._refuse("wrote to an input, which others read too")
        for array, pattern in poisoned:
            if _left(array, pattern):
                self._refuse("left a part of its output unwritten, or read it before writing it")
        self._checked = True

    def _call(self, inputs: list[Any], outputs: list[Any]) -> None:
        """Calls it in the form of the assignment."""
        node = self._node
        output = outputs[0] if node.op.outputs == 1 else outputs
        call: Callable[..., Any] = node.op.compute
        try:
            returned: Any = call(node.origin, inputs, output, self._use_numpy)
        except ValueError as error:
            if not self._use_numpy or "read-only" not in str(error):
                raise
            self._refuse("wrote to a read-only array, as its inputs are", error)
        if returned is not None and returned is not output:
            self._refuse(f"returned {type(returned).__name__}, which nobody reads")

    def _refuse(self, what: str, error: Exception | None = None) -> NoReturn:
        node = self._node
        raise GraphError(
            f"operator {node.op.name}: its compute {what}; write the whole result into output_val, "
            f"such as output_val[:] = ..., and nothing else [{node.where}]"
        ) from error


class PythonStep:
    """A step of a native program that runs a user's `compute`, between native segments. The program
    owns it and shows it the arrays of a run.
    """

    native = False
    kind = "python"

    def __init__(self, program: Any, step: Step) -> None:
        if not step.node.op.runs_python:
            raise GraphError(
                f"operator {step.node.op.name} has neither a native kernel nor a compute of its "
                f"own; run on numpy (ctx=None) [{step.node.where}]"
            )
        self.why = f"{step.node.op.name} runs Python"
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


def read_only(array: np.ndarray) -> np.ndarray:
    """A view of an array that refuses to be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def _poison(array: Any) -> np.ndarray | None:
    """Fills an array with its pattern and returns that, None where there is none to tell."""
    pattern = _pattern(tuple(array.shape), array.dtype)
    if pattern is not None:
        array[...] = pattern
    return pattern


def _pattern(shape: Sequence[int], dtype: np.dtype) -> np.ndarray | None:
    if dtype.kind == "f":
        if dtype.itemsize not in _NAN or dtype is bfloat16:
            return None
        bits, _ = _NAN[dtype.itemsize]
        return np.full(shape, bits, f"u{dtype.itemsize}").view(dtype)
    size = int(np.prod(shape))
    nbytes = size * dtype.itemsize
    drawn = dtype.kind != "b" and dtype.itemsize < 4
    raw = np.random.default_rng(0).bytes(nbytes) if drawn else b"\xa5" * nbytes
    return np.frombuffer(raw, dtype).reshape(shape)


def _left(array: Any, pattern: np.ndarray | None) -> bool:
    """True when an array has kept some of its pattern."""
    if pattern is None or not pattern.size:
        return False
    host = array.asnumpy() if isinstance(array, NDArray) else array
    size, kind = pattern.dtype.itemsize, pattern.dtype.kind
    same = host.view(f"u{size}") ^ pattern.view(f"u{size}")
    if kind == "f":
        same &= ~np.array(_NAN[size][1], same.dtype)
    count = same.size - np.count_nonzero(same)
    if kind in "fb" or size >= 4:
        return count > 0
    return count > _FEW + same.size / _ONE_IN or (count == same.size and same.nbytes >= 4)
