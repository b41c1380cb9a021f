"""Checks of the contract of a user's own `compute`: it writes all of its output, returns nothing
and leaves its inputs alone.

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

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...dtypes import bfloat16
from ...ndarray import NDArray
from ...settings import settings
from ..plan.memory import Step
from ..run.python_step import refusal

# By the size of a float: the pattern, and the bits that arithmetic may change in it, which are the
# sign and the one that makes it quiet.
_NAN = {
    2: (0x7DA5, 0x8200),
    4: (0x7FA5A5A5, 0x80400000),
    8: (0x7FF4A5A5A5A5A5A5, 0x8008000000000000),
}
_FEW = 8  # elements that may have kept the pattern of small integers by chance, and one in
_ONE_IN = 16  # this many more, where chance has one in 256


class Checked:
    """The `compute` of a step as a function of its arrays, inputs, then outputs, that raises
    GraphError where a checked call breaks the contract.
    """

    def __init__(self, step: Step, call: Callable[..., None]) -> None:
        self._node = step.node
        self._call = call
        read = {value.buffer for value in step.inputs}
        made = {value.buffer for value in step.outputs}
        # In-place operators share memory between the two, which says nothing then.
        count = len(step.inputs)
        self._fresh = [count + k for k, y in enumerate(step.outputs) if y.buffer not in read]
        self._kept = [k for k, x in enumerate(step.inputs) if x.buffer not in made]
        self._checked = False

    def __call__(self, *arrays: Any) -> None:
        if self._checked and not settings.stepwise:
            self._call(*arrays)
            return
        inputs = [arrays[k] for k in self._kept]  # numpy's are read-only
        kept = [(x, x.asnumpy()) for x in inputs if isinstance(x, NDArray)]
        poisoned = [(arrays[k], _poison(arrays[k])) for k in self._fresh]
        self._call(*arrays)
        for array, before in kept:
            if array.asnumpy().tobytes() != before.tobytes():
                array[:] = before
                raise refusal(self._node, "wrote to an input, which others read too")
        for array, pattern in poisoned:
            if _left(array, pattern):
                raise refusal(
                    self._node, "left a part of its output unwritten, or read it before writing it"
                )
        self._checked = True


def _poison(array: Any) -> np.ndarray | None:
    """Fills an array with its pattern and returns that, None where there is none to tell."""
    pattern = _pattern(tuple(array.shape), array.dtype)
    if pattern is not None:
        array[...] = pattern
    return pattern


def _pattern(shape: Sequence[int], dtype: Any) -> np.ndarray | None:
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
