"""backend: what an executor asks of a native device: programs, and the arena that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import DeviceError
from ..graph.node import Node
from ..graph.spec import Spec
from ..runtime.device import Block, Context, unavailable
from ..runtime.target import target_of
from ..settings import settings
from .plan.memory import Plan
from .run.native import Program

_BESIDE = 16  # steps: few networks have more work side by side


class NativeBackend:
    """Memory and programs on one native device."""

    def __init__(self, ctx: Context) -> None:
        reason = unavailable(ctx)
        if reason is not None:
            raise DeviceError(reason)
        self._ctx = ctx
        self.target = target_of(ctx)
        self._arena: Block | None = None

    @property
    def beside(self) -> int:
        """How many steps apart two may be that run at the same time."""
        alone = not self.target.capture or not settings.capture or settings.streams == 1
        return 0 if alone else _BESIDE

    @staticmethod
    def workspace(node: Node) -> Sequence[Spec]:
        """Native kernels take no scratch from the arena."""
        return ()

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
