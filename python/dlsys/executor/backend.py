"""backend: what an executor asks of a native device: programs, and the arena that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import DeviceError
from ..graph.node import Spec
from ..runtime.device import Block, Context, unavailable
from ..runtime.library import DL_CPU
from ..settings import settings
from .plan.memory import Plan, Step
from .run.native import Program
from .run.tables import workspace_nbytes

_BYTES = np.dtype(np.uint8)
_BESIDE = 16  # steps: few networks have more work side by side


class NativeBackend:
    """Memory and programs on one native device."""

    def __init__(self, ctx: Context) -> None:
        reason = unavailable(ctx)
        if reason is not None:
            raise DeviceError(reason)
        self._ctx = ctx
        self._arena: Block | None = None

    @property
    def beside(self) -> int:
        """How many steps apart two may be that run at the same time."""
        alone = self._ctx.device_type == DL_CPU or not settings.capture or settings.lanes == 1
        return 0 if alone else _BESIDE

    def workspace(self, step: Step) -> Sequence[Spec]:
        """The scratch that a step's kernel takes, as bytes."""
        nbytes = workspace_nbytes(step, self._ctx)
        return (Spec((nbytes,), _BYTES),) if nbytes else ()

    def runner(self, plan: Plan) -> Program:
        """A program for the plan; give it memory with `reserve`."""
        return Program(plan, self._ctx)

    def reserve(self, runner: Program, others: Iterable[Program]) -> None:
        """Binds a program to the one arena, which grows to the largest plan and is then bound
        anew.
        """
        if self._arena is None or runner.arena_nbytes > self._arena.nbytes:
            self._arena = Block(self._ctx, runner.arena_nbytes)
            for other in others:
                other.bind(self._arena)
        runner.bind(self._arena)
