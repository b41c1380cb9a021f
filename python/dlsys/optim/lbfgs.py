"""L-BFGS: a quasi-Newton method for losses that are the same at each evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..eager.step import drop_gradients
from ..errors import DataError, DivergedError, GraphError
from ..executor.executor import Executor
from ..graph.gradients import gradients
from ..graph.node import Node
from ..ops.leaf import Parameter, common_home
from .wolfe import Point, search

Vector = np.ndarray[Any, Any]  # all Parameters, float64 (n,)
Evaluate = Callable[[Vector], tuple[float, Vector]]

_LEAST_CURVATURE = 1e-10  # of s · y to y · y, below which a pair says nothing


class Minimum(NamedTuple):
    """Where a call of `LBFGS` ended.

    loss: there. gradient: its largest element in size. iterations: directions that were searched.
    evaluations: of the loss and its gradient, in all. reason: why it ended.

    >>> w = ad.Parameter(np.ones(2))
    >>> optim.LBFGS(w).solve((w * w).sum()).loss < 1e-12
    True
    """

    loss: float
    gradient: float
    iterations: int
    evaluations: int
    reason: str


class LBFGS:
    """L-BFGS of Liu and Nocedal (1989): directions by the two-loop recursion over the last
    `history` pairs of steps and changes of the gradient, and a line search for the strong Wolfe
    conditions (Nocedal and Wright, 2006, algorithms 7.4, 7.5 and 3.5).

    A method for smooth losses that each evaluation computes alike: of all samples, without dropout.
    An update evaluates loss and gradient as often as the line search asks for, so that it is no
    part of a graph: `step` takes a function that computes a Tensor, `solve` a node. The vectors of
    the method are float64 on the host, to which each evaluation copies the gradient.

    params: Parameters of floats. lr: the first step along each direction, 1 as for Newton's method;
    before there is a pair it is divided by the sum of the gradient's sizes where that is above 1.
    iterations: directions a call searches at most. evaluations: in a line search at most.
    gradient_tolerance, change_tolerance: a call ends where the largest element of the gradient, or
    the largest change of an element, is at most this. history: pairs that are remembered, from
    call to call. GraphError for params that are no Parameters and for numbers out of range.

    >>> w = ad.Parameter(np.zeros(2, np.float32))
    >>> optimizer = optim.LBFGS([w])
    >>> def closure():
    ...     loss = ((w * dl.tensor([1.0, 3.0]) - 3) ** 2).sum()
    ...     loss.backward()
    ...     return loss
    >>> optimizer.step(closure).iterations < 20
    True
    >>> w.asnumpy().round(4)
    array([3., 1.], dtype=float32)
    """

    def __init__(
        self,
        params: Parameter | Sequence[Parameter],
        lr: float = 1.0,
        *,
        iterations: int = 20,
        evaluations: int = 25,
        gradient_tolerance: float = 1e-7,
        change_tolerance: float = 1e-9,
        history: int = 10,
    ) -> None:
        self.params = [params] if isinstance(params, Parameter) else list(params)
        for parameter in self.params:
            if not isinstance(parameter, Parameter) or parameter.dtype.kind != "f":
                raise GraphError(f"LBFGS: expected Parameters of floats, got {parameter!r}")
        counts = iterations, evaluations, history
        bounds = gradient_tolerance, change_tolerance
        if not lr > 0 or min(counts) < 1 or not min(bounds) >= 0 or not self.params:
            raise GraphError(
                "LBFGS: expected Parameters, lr > 0, iterations, evaluations and history >= 1 and "
                f"tolerances >= 0, got {len(self.params)} of them, lr {lr}, {counts} and {bounds}"
            )
        self.lr, self.iterations, self.evaluations, self.history = lr, *counts
        self.gradient_tolerance, self.change_tolerance = bounds
        self._pairs: list[tuple[Vector, Vector]] = []

    def __repr__(self) -> str:
        return f"LBFGS({len(self.params)} Parameters, lr={self.lr:g}, history={self.history})"

    # ---- what it minimizes ----
    def step(self, closure: Callable[[], Any]) -> Minimum:
        """Searches up to `iterations` directions and leaves the Parameters at the lowest loss that
        was found.

        closure: computes the loss, calls `backward()` of it and returns it. Gradients are dropped
        before each call and at the end, where the last one need not be that of the minimum.
        DivergedError, with the Parameters as they were, where the first loss is NaN or infinite;
        GraphError where no Parameter gets a gradient.
        """

        def evaluate(x: Vector) -> tuple[float, Vector]:
            self._set(x)
            drop_gradients(self.params)
            loss = closure()
            grads = [parameter.grad for parameter in self.params]
            if all(grad is None for grad in grads):
                raise GraphError(
                    "LBFGS.step: no Parameter has a gradient; the closure calls backward() of the "
                    "loss before it returns it"
                )
            given = [
                p.asnumpy() * 0 if g is None else g.numpy() for p, g in zip(self.params, grads)
            ]
            return float(loss), _flat(given)

        found = self._run(evaluate)
        drop_gradients(self.params)
        return found

    def solve(
        self, loss: Node, feeds: Mapping[Node, Any] | None = None, *, ctx: Any = None
    ) -> Minimum:
        """Does what `step` does with a loss that is a node, computed by one Executor.

        feeds: values of its Variables, the same in each evaluation. ctx: where it runs, by default
        where the Parameters are.

        >>> w = ad.Parameter(np.zeros(2, np.float32))
        >>> found = optim.LBFGS([w]).solve(((w - 3) ** 2).sum())
        >>> found.loss, found.reason
        (0.0, 'the gradient is within its tolerance')
        """
        ctx = common_home(self.params) if ctx is None else ctx
        executor = Executor([loss, *gradients(loss, self.params)], ctx=ctx)

        def evaluate(x: Vector) -> tuple[float, Vector]:
            self._set(x)
            value, *grads = executor.run(feeds or {}, convert_to_numpy_ret_vals=True)
            return float(value), _flat(grads)

        return self._run(evaluate)

    # ---- the method ----
    def _run(self, evaluate: Evaluate) -> Minimum:
        x = _flat([parameter.asnumpy() for parameter in self.params])
        counted = 0

        def at(x: Vector) -> tuple[float, Vector]:
            nonlocal counted
            counted += 1
            return evaluate(x)

        loss, gradient = at(x)
        if not np.isfinite(loss):
            self._set(x)
            raise DivergedError(f"LBFGS: the loss is {loss} where it begins: begin elsewhere")
        reason, done = f"{self.iterations} iterations are done", 0
        for done in range(self.iterations + 1):
            if np.abs(gradient).max() <= self.gradient_tolerance:
                reason = "the gradient is within its tolerance"
                break
            if done == self.iterations:
                break
            found, direction = self._searched(at, x, loss, gradient)
            if found is None:
                reason = "no step along the direction lowers the loss"
                break
            change = found.step * direction
            self._remember(change, found.gradient - gradient)
            x, loss, gradient = x + change, found.loss, found.gradient
            if np.abs(change).max() <= self.change_tolerance:
                reason, done = "the change is within its tolerance", done + 1
                break
        self._set(x)
        return Minimum(loss, float(np.abs(gradient).max()), done, counted, reason)

    def _searched(
        self, at: Evaluate, x: Vector, loss: float, gradient: Vector
    ) -> tuple[Point | None, Vector]:
        """The point that the line search finds, and the direction; where it finds none along that
        of the pairs, they are forgotten and the gradient's own is searched.
        """
        while True:
            direction = -self._times_inverse(gradient)
            start = Point(0.0, loss, float(gradient @ direction), gradient)

            def point(step: float, direction: Vector = direction) -> Point:
                value, grad = at(x + step * direction)
                return Point(step, value, float(grad @ direction), grad)

            step = self.lr if self._pairs else self.lr / max(1.0, float(np.abs(gradient).sum()))
            found = search(point, start, step, self.evaluations) if start.slope < 0 else None
            if found is not None or not self._pairs:
                return found, direction
            self._pairs.clear()

    def _times_inverse(self, gradient: Vector) -> Vector:
        """The inverse Hessian of the pairs times the gradient: the two-loop recursion, begun at the
        identity times s · y / y · y of the last pair.
        """
        made, shares = gradient.copy(), []
        for s, y in reversed(self._pairs):
            shares.append((s @ made) / (s @ y))
            made -= shares[-1] * y
        if self._pairs:
            s, y = self._pairs[-1]
            made *= (s @ y) / (y @ y)
        for (s, y), share in zip(self._pairs, reversed(shares)):
            made += (share - (y @ made) / (s @ y)) * s
        return made

    def _remember(self, s: Vector, y: Vector) -> None:
        if s @ y > _LEAST_CURVATURE * (y @ y):
            self._pairs = [*self._pairs, (s, y)][-self.history :]

    def _set(self, x: Vector) -> None:
        at = 0
        for parameter in self.params:
            shape = parameter.shape
            size = int(np.prod(shape))
            parameter.set(x[at : at + size].reshape(shape).astype(parameter.dtype))
            at += size

    # ---- state ----
    def state_dict(self) -> dict[str, np.ndarray]:
        """The pairs that are remembered: steps and changes of the gradient, (pairs, n) float64."""
        size = sum(int(np.prod(parameter.shape)) for parameter in self.params)
        steps, changes = ([pair[k] for pair in self._pairs] for k in (0, 1))
        return {
            "steps": np.reshape(steps, (-1, size)),
            "changes": np.reshape(changes, (-1, size)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave. DataError where it does not fit the Parameters."""
        own = self.state_dict()["steps"].shape[1]
        shapes = [np.shape(state.get(name, ())) for name in ("steps", "changes")]
        if set(state) != {"steps", "changes"} or shapes[0] != shapes[1] or shapes[0][1:] != (own,):
            raise DataError(
                f"LBFGS: this state does not fit, expected steps and changes (pairs, {own}), got "
                f"{', '.join(map(str, state))} of {shapes}"
            )
        pairs = zip(*(np.asarray(state[name], np.float64) for name in ("steps", "changes")))
        self._pairs = list(pairs)[-self.history :]


def _flat(arrays: Sequence[Any]) -> Vector:
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
