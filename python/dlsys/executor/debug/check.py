"""Checks every step of a run against the same operator elsewhere and names the first to differ.

Each step is judged by its own inputs, so an error is found where it is made and not where it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...dtypes import ROUNDING, storage_dtype
from ...errors import KernelError
from ...graph.node import Node, Op
from ...graph.spec import Spec
from ...ndarray import NDArray, array, empty, launch
from ...runtime.device import Context, synchronize
from ...runtime.library import load
from ..plan.memory import Step
from ..run.runner import Runner
from ..run.tables import in_kernel_order


def checker(reference: Context | None) -> Callable[..., None]:
    """An observer that runs a step and compares what it wrote: with numpy in float64 for None, else
    with the kernel of another device.
    """

    def observe(step: Step, run: Callable[[], None], inputs: list, outputs: list) -> None:
        op = step.node.op
        given = [_host(x) for x in inputs]
        run()
        if op.kernel is None or op.random:
            return
        expected = _on_numpy(step, given) if reference is None else _on(reference, step, given)
        for k, (wanted, got) in enumerate(zip(expected, outputs)):
            if k not in op.discrete_outputs:
                _compare(step, _host(got), wanted, reference)

    return observe


def check_run(runner: Runner, feeds: list[Any], reference: Context | None) -> None:
    """Runs once with a checker, and leaves the state as it was."""
    states = [value.node.origin for value in runner.plan.states]
    before: list[tuple[Any, np.ndarray]] = [(state, state.asnumpy()) for state in states]  # type: ignore[attr-defined]
    try:
        runner.run_observed(feeds, checker(reference))
    finally:
        for state, value in before:
            state.set(value)


def _host(value: Any) -> np.ndarray:
    return value.asnumpy() if isinstance(value, NDArray) else np.array(value)


def _on_numpy(step: Step, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    node, op = step.node, step.node.op
    inputs = [_wide(x) for x in given]
    specs = [Spec(x.shape, x.dtype) for x in inputs]
    specs_out = [value.spec for value in step.outputs]
    made = [np.empty(s.shape, np.float64 if s.dtype.kind == "f" else s.dtype) for s in specs_out]
    outputs = made or [inputs[k] for k in op.writes]
    workspace = op.workspace(node, specs, [Spec(y.shape, y.dtype) for y in outputs])
    scratch = [np.empty(spec.shape, spec.dtype) for spec in workspace]
    with np.errstate(all="ignore"):
        op.numpy(node, *inputs, *scratch, *made)
    return outputs


def _on(ctx: Context, step: Step, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    inputs = [array(x, ctx, value.spec.dtype) for x, value in zip(given, step.inputs)]
    made = [empty(value.spec.shape, ctx, value.spec.dtype) for value in step.outputs]
    call_kernel(ctx, step, inputs, made)
    synchronize(ctx)
    return [y.asnumpy() for y in (made or [inputs[k] for k in step.node.op.writes])]


def call_kernel(
    ctx: Context, step: Step, inputs: Sequence[NDArray], made: Sequence[NDArray]
) -> None:
    """Runs the kernel of one step on arrays of any device, by its heuristic."""
    kernel = step.node.op.kernel
    assert kernel is not None
    node = step.node.derive(step.node.inputs, step.node.spec)
    node.attrs = {name: value for name, value in node.attrs.items() if name != "algorithm"}
    signature = load().signature[ctx.kernel_device, kernel].rstrip("s")
    launch(kernel, ctx, *in_kernel_order(node, signature, inputs, made))


def _tolerance(node: Node) -> float:
    """Relative to the largest magnitude: the operator's, or that of operands of 10 bits in tf32, or
    the roundings of 16 bits that stand behind a result.
    """
    of_operands = 3e-3 if node.attrs.get("precision") == "tf32" else 0.0
    specs = [*(x.spec for x in node.inputs), node.spec]
    dtypes = [s.dtype for spec in specs for s in ([spec] if isinstance(spec, Spec) else spec)]
    rounding = ROUNDING.get(storage_dtype(dtypes), 0.0)
    return max(node.op.tolerance, of_operands, rounding * node.op.roundings)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def _compare(step: Step, got: np.ndarray, wanted: np.ndarray, reference: Context | None) -> None:
    op: Op = step.node.op
    finite = np.isfinite(wanted)
    scale = float(np.max(np.abs(wanted), where=finite, initial=0.0)) if wanted.size else 0.0
    with np.errstate(all="ignore"):
        error = np.abs(np.subtract(got, wanted, dtype=np.float64))
        equal = (got == wanted) | ((got != got) & (wanted != wanted))
        error = np.where(equal, 0.0, np.where(np.isnan(error), np.inf, error))
    largest = float(error.max(initial=0.0))
    if largest <= _tolerance(step.node) * max(scale, float(np.finfo(np.float32).tiny)):
        return
    where = tuple(int(k) for k in np.unravel_index(int(error.argmax()), error.shape))
    shapes = ", ".join(f"{value.node.name} {value.spec.shape}" for value in step.inputs)
    raise KernelError(
        f"{step.node.name} ({op.name}) differs from {reference or 'numpy'}: largest error "
        f"{largest:.3g} at {where}, got {got[where]:.9g}, expected {wanted[where]:.9g}, tolerance "
        f"{_tolerance(step.node):g} of {scale:.3g}; inputs {shapes} [{step.node.where}]"
    )
