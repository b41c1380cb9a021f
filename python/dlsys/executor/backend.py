"""Backends: what an executor asks of numpy or a native device, runners and their common arena."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DeviceError
from ..graph.node import Node
from ..graph.spec import Spec
from ..runtime.device import Block, Context, unavailable
from ..runtime.target import NUMPY, Target, target_of
from ..settings import settings
from .capture.hazards import InOrder, lifetimes_of
from .capture.program import CapturingProgram
from .plan.memory import Lifetimes, Plan, Step
from .run.native import Program
from .run.numpy import NumpyRunner
from .run.parameters import aligned_bytes
from .run.python_step import Guard
from .run.runner import Runner
from .run.tables import workspace_nbytes

_BYTES = np.dtype(np.uint8)


class Backend(ABC):
    """Memory and runners of one device, for executors that take turns: they share its arena."""

    target: Target

    def __init__(self) -> None:
        self._arena: Any = None
        self._bound: weakref.WeakSet[Runner] = weakref.WeakSet()  # to the arena

    @abstractmethod
    def workspace(self, step: Step) -> Sequence[Spec]:
        """The scratch arrays that a step takes from the arena."""

    @abstractmethod
    def runner(self, plan: Plan, guard: Guard | None = None) -> Runner:
        """A runner for the plan, whose own computes are guarded; `reserve` gives it memory."""

    @abstractmethod
    def _allocated(self, nbytes: int) -> Any:
        """An arena."""

    def lifetimes(self, order: Sequence[Node]) -> Lifetimes | None:
        """The lifetimes of buffers of a plan for parallel steps; None where none are parallel."""
        return None

    def reserve(self, runner: Runner) -> None:
        """Binds a runner to the one arena, which grows to the largest plan; the others that live
        are then bound anew.
        """
        if self._arena is None or runner.arena_nbytes > self._arena.nbytes:
            self._arena = self._allocated(runner.arena_nbytes)
            for other in self._bound:
                other.bind(self._arena)
        runner.bind(self._arena)
        self._bound.add(runner)


class NumpyBackend(Backend):
    """Memory and runners on numpy."""

    target = NUMPY

    def workspace(self, step: Step) -> Sequence[Spec]:
        node = step.node
        inputs = [x.spec for x in node.inputs]
        outputs = [node.spec] if node.op.outputs == 1 else list(node.spec)
        return node.op.workspace(node, inputs, outputs) if node.op.kernel is not None else ()

    def runner(self, plan: Plan, guard: Guard | None = None) -> NumpyRunner:
        return NumpyRunner(plan, guard)

    def _allocated(self, nbytes: int) -> np.ndarray:
        return aligned_bytes(nbytes)


class NativeBackend(Backend):
    """Memory and programs on one native device. Raises DeviceError where it cannot be used."""

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        reason = unavailable(ctx)
        if reason is not None:
            raise DeviceError(reason)
        self._ctx = ctx
        self.target = target_of(ctx)

    def workspace(self, step: Step) -> Sequence[Spec]:
        nbytes = workspace_nbytes(step, self._ctx)
        return (Spec((nbytes,), _BYTES),) if nbytes else ()

    def runner(self, plan: Plan, guard: Guard | None = None) -> Program:
        kind = CapturingProgram if self.target.capture else Program
        return kind(plan, self._ctx, self.target, guard)

    def lifetimes(self, order: Sequence[Node]) -> Lifetimes | None:
        parallel = self.target.capture and settings.capture and settings.streams > 1
        return lifetimes_of(order) if parallel else InOrder()

    def _allocated(self, nbytes: int) -> Block:
        return Block(self._ctx, nbytes)


def backend_of(ctx: Context | None) -> Backend:
    """The backend of a device, of numpy for None. Raises DeviceError where it cannot be used."""
    return NumpyBackend() if ctx is None else NativeBackend(ctx)
