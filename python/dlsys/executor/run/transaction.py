"""whole: a run that updates Parameters happens as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...interrupts import Interrupts
from ...runtime.target import Target
from ..plan.memory import Plan, Step


class Whole:
    """`with whole:` around one run of a plan.

    Ctrl-C takes effect when the run is complete or taken back, where Python is between its steps
    and could be stopped between two updates. A step that fails after an update (most run before
    all updates, see schedule.py) leaves the Parameters as they were before the run; on a GPU, and
    for want of memory on the CPU, that is undo.py's work.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        python = any(map(_runs_python, plan.steps))
        changed = written(plan.steps)
        self._held = bool(changed)
        self._undone = [] if target.streams else _undone(plan.steps)
        self._undone_if_judged = [] if target.streams else changed
        # Whether a run needs it that is not watched step by step.
        self.needed = self._held and (not target.native or python) or bool(self._undone)
        self.judged = False  # whether the next runs are debugged, which may stop them at any step
        self._keys = Interrupts()
        self._before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        undone = self._undone_if_judged if self.judged else self._undone
        self._before = [(parameter, parameter.asnumpy()) for parameter in undone]
        if self._held:
            self._keys.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        before, self._before = self._before, []
        try:
            if kind is not None:
                for parameter, value in before:
                    parameter.set(value)
        finally:
            if self._held:  # until here: a run is taken back as a whole, too
                self._keys.__exit__()
        if kind is None and self._keys.pressed:
            raise KeyboardInterrupt


def _runs_python(step: Step) -> bool:
    return step.node.op.kernel is None


def _undone(steps: Sequence[Step]) -> list[Any]:
    """The Parameters that are written before the last step that may fail."""
    last = 0
    for k, step in enumerate(steps):
        if _runs_python(step) or step.node.op.fallible:
            last = k
    return written(steps[:last])


def written(steps: Sequence[Step]) -> list[Any]:
    """The Parameters that steps write."""
    nodes = (step.inputs[k].node for step in steps for k in step.node.op.writes)
    return list(dict.fromkeys(node.origin for node in nodes))
