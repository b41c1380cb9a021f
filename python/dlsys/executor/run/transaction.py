"""Transactions: a run that updates Parameters commits or is rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...interrupts import Interrupts
from ...runtime.target import Target
from ..plan.memory import Plan, Step


class Transaction:
    """`with transaction:` around one run of a plan.

    SIGINT is deferred until the run has committed or rolled back. A step that fails after an update
    (most fallible steps run before all updates, see plan/schedule.py) rolls the Parameters back to
    their values before the run; on a GPU rollback.py does that.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        kernels = [target.has(step.node.op.kernel, step.dtype) for step in plan.steps]
        changed = written(plan.steps)
        self._updates = bool(changed)
        self._saved = [] if target.streams else _written_before_failure(plan.steps, target)
        self._saved_if_observed = [] if target.streams else changed
        # True when a run that is not observed needs it.
        self.needed = self._updates and not all(kernels) or bool(self._saved)
        self.observed = False  # the next runs are debugged, which may stop them at any step
        self._interrupts = Interrupts()
        self._snapshot: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        saved = self._saved_if_observed if self.observed else self._saved
        self._snapshot = [(parameter, parameter.asnumpy()) for parameter in saved]
        if self._updates:
            self._interrupts.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        snapshot, self._snapshot = self._snapshot, []
        try:
            if kind is not None:
                for parameter, value in snapshot:
                    parameter.set(value)
        finally:
            if self._updates:  # until here: the rollback is not interrupted either
                self._interrupts.__exit__()
        if kind is None and self._interrupts.pressed:
            raise KeyboardInterrupt


def _written_before_failure(steps: Sequence[Step], target: Target) -> list[Any]:
    """The Parameters that are written before the last step that may fail: one that refuses values,
    a user's own compute, or an operator that a native target has no kernel for.
    """
    last = 0
    for k, step in enumerate(steps):
        op = step.node.op
        on_host = target.native and not target.has(op.kernel, step.dtype)
        if op.kernel is None or op.fallible or on_host:
            last = k
    return written(steps[:last])


def written(steps: Sequence[Step]) -> list[Any]:
    """The Parameters that steps write."""
    nodes = (step.inputs[k].node for step in steps for k in step.node.op.writes)
    return list(dict.fromkeys(node.origin for node in nodes))
