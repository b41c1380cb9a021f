"""Learning rates as functions of the number of updates made.

A schedule is one formula with two readers: `schedule(step)` computes it on the host in float64,
`schedule.node(step)` builds it as a graph of scalars over the step that lives on the device, so
that a step replayed as one launch follows it. These are float64 on numpy, and float32 on native
devices, where steps are exact up to 2^24.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from ..describe import described
from ..errors import GraphError
from ..graph.node import Node
from ..ops.comparison import greater_equal_op, less_op, maximum_op, where_op
from ..ops.elementwise import cast_op, clip_op, cos_op, exp_op
from ..ops.leaf import Parameter, constant_op
from ..ops.reduce import max_op, sum_op

_MOST_STEPS = 1 << 31


class _Host:
    """The functions of a formula, on Python floats."""

    cos = staticmethod(math.cos)
    floor = staticmethod(math.floor)

    @staticmethod
    def clip(x: float, low: float, high: float) -> float:
        return min(max(x, low), high)

    @staticmethod
    def positive(x: float) -> float:
        return max(x, 0)

    @staticmethod
    def power(base: float, exponent: float) -> float:
        return base**exponent

    @staticmethod
    def before(x: float, limit: float, then: float, otherwise: float) -> float:
        return then if x < limit else otherwise

    @staticmethod
    def passed(x: float, limits: Sequence[int]) -> int:
        return bisect.bisect_right(limits, x)

    @staticmethod
    def last(x: float, values: Sequence[int]) -> int:
        return values[bisect.bisect_right(values, x) - 1]

    @staticmethod
    def stored(parameter: Parameter) -> float:
        return float(parameter.asnumpy())


class _Graph:
    """The functions of a formula, on scalar nodes: float64 on numpy, float32 natively."""

    cos = staticmethod(cos_op)
    clip = staticmethod(clip_op)

    @staticmethod
    def floor(x: Node) -> Node:
        return cast_op(cast_op(x, np.int64), np.float64)

    @staticmethod
    def positive(x: Node) -> Node:
        return maximum_op(x, 0.0)

    @staticmethod
    def power(base: float, exponent: Node) -> Node:
        return exp_op(exponent * math.log(base))  # base itself would be rounded before the power

    @staticmethod
    def before(x: Node, limit: float, then: Node, otherwise: Node) -> Node:
        return where_op(less_op(x, float(limit)), then, otherwise)

    @staticmethod
    def passed(x: Node, limits: Sequence[int]) -> Node:
        known = constant_op(np.array(limits, np.float64))
        return sum_op(cast_op(greater_equal_op(x, known), np.float64))

    @staticmethod
    def last(x: Node, values: Sequence[int]) -> Node:
        known = constant_op(np.array(values, np.float64))
        return max_op(where_op(greater_equal_op(x, known), known, float(values[0])))

    @staticmethod
    def stored(parameter: Parameter) -> Node:
        return parameter


class Schedule:
    """A learning rate that depends on the step, the number of updates made before.

    A subclass states its formula in `rate(f, t)`: where t and the result are floats or nodes and f
    has the functions of either. f has cos, floor, clip and the like of either.

    >>> rate = optim.Step(1.0, size=10, gamma=0.5)
    >>> [rate(step) for step in (0, 10, 20)]
    [1.0, 0.5, 0.25]
    """

    __repr__ = described

    def __call__(self, step: int) -> float:
        """The rate of the update that follows `step` updates."""
        return float(self.rate(_Host, step))

    def node(self, step: Node) -> Node:
        """The rate as a scalar node; `step` is an int64 scalar node."""
        return self.rate(_Graph, cast_op(step, np.float64))

    def rate(self, f: Any, t: Any) -> Any:
        """The formula.

        f: the functions of floats or of nodes. t: the step, a float or a node.
        """
        raise NotImplementedError

    def first(self, f: Any) -> Any:
        """The rate of step 0, as a number unless it is state.

        f: as of `rate`.
        """
        return self(0)

    def named_state(self) -> Iterator[tuple[str, Parameter]]:
        """The state that a checkpoint keeps of it, apart from the step."""
        return iter(())


class Constant(Schedule):
    """lr at every step.

    >>> rate = optim.Constant(0.1)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [0.1, 0.1, 0.1]
    """

    def __init__(self, lr: float) -> None:
        self.lr = _checked(self, lr >= 0, "lr >= 0", lr=lr)

    def rate(self, f: Any, t: Any) -> Any:
        return self.lr

    def node(self, step: Node) -> Node:
        return constant_op(np.array(self.lr, np.float64))


class Step(Schedule):
    """lr · gamma^⌊t / size⌋: times gamma every `size` steps.

    >>> rate = optim.Step(1.0, size=5)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [1.0, 0.1, 0.1]
    """

    def __init__(self, lr: float, size: int, gamma: float = 0.1) -> None:
        self.lr = _checked(
            self, lr >= 0 and size > 0 < gamma, "lr >= 0, size > 0 and gamma > 0",
            lr=lr, size=size, gamma=gamma,
        )  # fmt: skip
        self.size, self.gamma = size, gamma

    def rate(self, f: Any, t: Any) -> Any:
        return self.lr * f.power(self.gamma, f.floor(t / self.size))


class MultiStep(Schedule):
    """lr times gamma from each milestone on.

    milestones: steps, increasing.

    >>> rate = optim.MultiStep(1.0, [5, 8])
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [1.0, 0.1, 0.01]
    """

    def __init__(self, lr: float, milestones: Sequence[int], gamma: float = 0.1) -> None:
        self.lr = _checked(self, lr >= 0 and gamma > 0, "lr >= 0 and gamma > 0", lr=lr, gamma=gamma)
        self.milestones, self.gamma = sorted(milestones), gamma

    def rate(self, f: Any, t: Any) -> Any:
        return self.lr * f.power(self.gamma, f.passed(t, self.milestones))


class Exponential(Schedule):
    """lr · gamma^t.

    >>> rate = optim.Exponential(1.0, 0.9)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [1.0, 0.5905, 0.3874]
    """

    def __init__(self, lr: float, gamma: float) -> None:
        self.lr = _checked(self, lr >= 0 and gamma > 0, "lr >= 0 and gamma > 0", lr=lr, gamma=gamma)
        self.gamma = gamma

    def rate(self, f: Any, t: Any) -> Any:
        return self.lr * f.power(self.gamma, t)


class Polynomial(Schedule):
    """From lr to `end` in `steps` steps as end + (lr - end) · (1 - t / steps)^power, then `end`.

    >>> rate = optim.Polynomial(1.0, 10)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [1.0, 0.5, 0.1]
    """

    def __init__(self, lr: float, steps: int, power: float = 1.0, end: float = 0.0) -> None:
        self.lr = _checked(
            self, lr >= 0 and steps > 0 < power, "lr >= 0, steps > 0 and power > 0",
            lr=lr, steps=steps, power=power,
        )  # fmt: skip
        self.steps, self.power, self.end = steps, power, end

    def rate(self, f: Any, t: Any) -> Any:
        left = (self.steps - f.clip(t, 0, self.steps)) / self.steps
        return self.end + (self.lr - self.end) * left**self.power


class Cosine(Schedule):
    """From lr to `end` in `steps` steps along half a cosine, then `end` (Loshchilov and Hutter,
    2017, without restarts).

    >>> rate = optim.Cosine(1.0, 10)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [1.0, 0.5, 0.0245]
    """

    def __init__(self, lr: float, steps: int, end: float = 0.0) -> None:
        self.lr = _checked(self, lr >= 0 and steps > 0, "lr >= 0 and steps > 0", lr=lr, steps=steps)
        self.steps, self.end = steps, end

    def rate(self, f: Any, t: Any) -> Any:
        return _cosine(f, self.lr, self.end, f.clip(t, 0, self.steps) / self.steps)


class WarmRestarts(Schedule):
    """Cosines from lr to `end` one after the other: the first takes `steps` steps, each later one
    `factor` times as many as the one before (SGDR of Loshchilov and Hutter, 2017).

    >>> rate = optim.WarmRestarts(1.0, 10)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [1.0, 0.5, 0.0245]
    """

    def __init__(self, lr: float, steps: int, factor: int = 1, end: float = 0.0) -> None:
        self.lr = _checked(
            self, lr >= 0 and steps > 0 and factor >= 1, "lr >= 0, steps > 0 and factor >= 1",
            lr=lr, steps=steps, factor=factor,
        )  # fmt: skip
        self.steps, self.factor, self.end = steps, factor, end
        self.starts = [0]
        while factor > 1 and self.starts[-1] < _MOST_STEPS:
            self.starts.append(self.starts[-1] * factor + steps)

    def rate(self, f: Any, t: Any) -> Any:
        if self.factor == 1:
            start = f.floor(t / self.steps) * self.steps  # exact, which t / steps is not
            return _cosine(f, self.lr, self.end, (t - start) / self.steps)
        start = f.last(t, self.starts)
        length = start * (self.factor - 1) + self.steps
        return _cosine(f, self.lr, self.end, (t - start) / length)


class Warmup(Schedule):
    """A straight line from `start` times the first rate of `after` up to that rate in `steps`
    steps; then `after` from its beginning.

    >>> rate = optim.Warmup(optim.Constant(1.0), 5)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [0.1, 1.0, 1.0]
    """

    def __init__(self, after: Schedule, steps: int, start: float = 0.1) -> None:
        _checked(
            self, steps > 0 <= start <= 1, "steps > 0 and 0 <= start <= 1", steps=steps, start=start
        )
        self.after, self.steps, self.start = after, steps, start

    def rate(self, f: Any, t: Any) -> Any:
        grown = self.start + t * ((1 - self.start) / self.steps)
        after = self.after.rate(f, f.positive(t - self.steps))
        return f.before(t, self.steps, grown * self.after.first(f), after)

    def first(self, f: Any) -> Any:
        return self.after.first(f) * self.start

    def named_state(self) -> Iterator[tuple[str, Parameter]]:
        return self.after.named_state()


class OneCycle(Schedule):
    """From peak / initial up to the peak in the first part `warm` of the steps, then down to peak /
    (initial · final), along half cosines or straight lines (Smith and Topin, 2018, as in PyTorch's
    two-phase form); the momentum stays as it is.

    shape: "cosine" or "linear".

    >>> rate = optim.OneCycle(1.0, 10)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [0.04, 0.6113, 0.0]
    """

    def __init__(
        self,
        peak: float,
        steps: int,
        warm: float = 0.3,
        initial: float = 25.0,
        final: float = 1e4,
        shape: Literal["cosine", "linear"] = "cosine",
    ) -> None:
        self.peak = _checked(
            self, peak >= 0 and 0 < warm < 1 and warm * steps > 1 and initial > 0 < final,
            "peak >= 0, 0 < warm < 1, warm · steps > 1, initial > 0 and final > 0",
            peak=peak, steps=steps, warm=warm, initial=initial, final=final,
        )  # fmt: skip
        if shape not in ("cosine", "linear"):
            raise GraphError(f"OneCycle: shape must be cosine or linear, got {shape!r}")
        self.line: Callable = _cosine if shape == "cosine" else _straight
        self.start, self.end = peak / initial, peak / initial / final
        self.top, self.last = warm * steps - 1, steps - 1

    def rate(self, f: Any, t: Any) -> Any:
        t = f.clip(t, 0, self.last)
        up = self.line(f, self.start, self.peak, t / self.top)
        down = self.line(f, self.peak, self.end, (t - self.top) / (self.last - self.top))
        return f.before(t, self.top, up, down)


class ReduceOnPlateau(Schedule):
    """A rate on the device that `report` multiplies by `factor` when the reported value has not
    improved for more than `patience` reports.

    To improve is to fall below the best value by the share `threshold` of it (mode "min"), or to
    rise above it by that ("max"). After a reduction `cooldown` reports are not counted. No
    reduction goes below `lowest`. lr: the rate at first.

    >>> rate = optim.ReduceOnPlateau(0.1)
    >>> [round(rate(step), 4) for step in (0, 5, 9)]
    [0.1, 0.1, 0.1]
    """

    def __init__(
        self,
        lr: float,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        mode: Literal["min", "max"] = "min",
        cooldown: int = 0,
        lowest: float = 0.0,
    ) -> None:
        _checked(
            self, lr >= 0 and 0 < factor < 1, "lr >= 0 and 0 < factor < 1", lr=lr, factor=factor
        )
        if mode not in ("min", "max"):
            raise GraphError(f"ReduceOnPlateau: mode must be min or max, got {mode!r}")
        self.factor, self.patience, self.threshold = factor, patience, threshold
        self.sign, self.cooldown, self.lowest = (1 if mode == "min" else -1), cooldown, lowest
        self.current = Parameter(np.float64(lr), "rate", trainable=False)
        # The best value, reports since then, and reports that are not to be counted: for the host.
        self.memory = Parameter(np.array([self.sign * np.inf, 0, 0]), "memory", trainable=False)

    def report(self, value: float) -> bool:
        """Tells the newest value of what should improve; returns whether the rate was reduced."""
        best, waited, resting = map(float, self.memory.asnumpy())
        margin = self.threshold * abs(best) if math.isfinite(best) else 0.0
        improved = self.sign * (best - value) > margin
        best, waited = (value, 0) if improved else (best, waited + 1)
        if resting > 0:
            resting, waited = resting - 1, 0
        before = self(0)
        if waited > self.patience:
            self.current.set(min(before, max(before * self.factor, self.lowest)))
            resting, waited = self.cooldown, 0
        self.memory.set(np.array([best, waited, resting]))
        return self(0) < before

    def rate(self, f: Any, t: Any) -> Any:
        return f.stored(self.current)

    def first(self, f: Any) -> Any:
        return f.stored(self.current)

    def named_state(self) -> Iterator[tuple[str, Parameter]]:
        yield "rate", self.current
        yield "memory", self.memory


def _cosine(f: Any, start: float, end: float, fraction: Any) -> Any:
    return end + (start - end) / 2 * (1 + f.cos(fraction * math.pi))


def _straight(f: Any, start: float, end: float, fraction: Any) -> Any:
    return start + (end - start) * fraction


def _checked(schedule: Schedule, fits: bool, wanted: str, **given: float) -> float:
    """The first of the numbers, if they fit."""
    if not fits:
        got = ", ".join(f"{name}={value}" for name, value in given.items())
        raise GraphError(f"{type(schedule).__name__}: expected {wanted}, got {got}")
    return next(iter(given.values()))
