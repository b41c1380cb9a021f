"""The checks of arrays that the functions of gpu_op share, made before anything is written, and
the launch of elementwise kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..errors import NotApplicableError, ShapeError
from ..graph.node import Op
from ..graph.spec import FLOAT32
from ..ndarray import NDArray, launch
from ..ops.leaf import Variable
from ..rungs import AUTO, Ladder, rungs_among
from ..runtime.device import Context
from ..runtime.library import load
from ..settings import settings


def check_arrays(op: str, *arrays: Any) -> None:
    """Float32 NDArrays of one device, or TypeError or ShapeError."""
    for arr in arrays:
        if not isinstance(arr, NDArray):
            raise TypeError(f"{op}: expected an NDArray, got {type(arr).__name__}")
        if arr.dtype != FLOAT32:
            raise ShapeError(f"{op}: expected float32, got {arr.dtype}")
        if arr.ctx is not arrays[0].ctx:
            raise ShapeError(f"{op}: arrays on two devices: {arrays[0].ctx} and {arr.ctx}")


def check_shape(op: str, what: str, arr: NDArray, expected: tuple[int, ...]) -> None:
    """The array has this shape, or ShapeError."""
    if arr.shape != expected:
        raise ShapeError(f"{op}: {what} has shape {arr.shape}, expected {expected}")


def check_separate(op: str, out: NDArray, *inputs: NDArray) -> None:
    """The output is none of the inputs, or ShapeError: only elementwise kernels work in place, the
    others would read what they have already written.
    """
    if any(out.size and out.data_address == arr.data_address for arr in inputs):
        raise ShapeError(f"{op}: the output is also an input; give it an array of its own")


def elementwise(
    op: str, kernel: str, inputs: tuple[NDArray, ...], out: NDArray, *scalars: Any
) -> None:
    """Runs a kernel on arrays of one shape; the output may be an input."""
    check_arrays(op, *inputs, out)
    for arr in inputs[1:]:
        check_shape(op, "the second input", arr, inputs[0].shape)
    check_shape(op, "the output", out, inputs[0].shape)
    launch(kernel, out.ctx, *inputs, *scalars, out)


def checked(op: Op, inputs: Sequence[NDArray], *outputs: NDArray, **attrs: Any) -> tuple[Any, ...]:
    """The plain arguments of an operator's kernel, or ShapeError where the arrays do not fit."""
    check_arrays(op.name, *inputs, *outputs)
    given = tuple((name, _frozen(value)) for name, value in attrs.items())
    shapes, count, scalars = _rules(op, tuple(x.shape for x in inputs), given)
    for out, shape in zip(outputs, shapes):
        check_separate(op.name, out, *inputs[:count])
        check_shape(op.name, "the output", out, shape)
    return scalars


@lru_cache
def _rules(op: Op, given: tuple[tuple[int, ...], ...], attrs: tuple[tuple[str, Any], ...]) -> Any:
    """The shapes of an operator's outputs by its own rules, the number of inputs that its kernel
    reads, and the plain arguments. An operator without a kernel becomes one that has it, without
    the last input, which counts by its shape alone.
    """
    signature = op.signature
    assert signature is not None
    nodes = [Variable(name, shape, FLOAT32) for name, shape in zip(signature.inputs, given)]
    node = op(*nodes, **dict(attrs))
    if op.kernel is None:
        simpler = op.simplify(node)
        assert simpler is not None
        node = simpler
    specs = node.spec if node.op.outputs > 1 else (node.spec,)
    return [spec.shape for spec in specs], len(node.inputs), node.op.scalars(node)


def algorithm_of_rung(kernel: str, ctx: Context, ladder: Ladder, rung: str) -> int:
    """The number of the algorithm that stands for a rung; 0 for auto. NotApplicableError where the
    kernel has no such rung.
    """
    rung = settings.rung(ladder, rung)
    if rung == AUTO:
        return 0
    names = load().algorithms(ctx.kernel_device, kernel)
    if rung not in names:
        known = ", ".join((AUTO, *rungs_among(names)))
        raise NotApplicableError(f"{kernel}: no rung {rung!r} on {ctx}; use {known}")
    return names.index(rung) + 1


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if type(value) in (list, tuple) else value
