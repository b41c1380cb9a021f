"""Formulas of optimizers on a small problem, in float64 and independent of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

STEPS = 10


# ---- a problem: Σ x·a² + Σ b⁴/4 + Σ c (d - c), with x drawn anew for each step ----


def starts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    sizes = ((3, 4), (5,), (), (2, 1, 3))
    return [rng.uniform(0.5, 1.5, s).astype(np.float32).astype(np.float64) for s in sizes]


def draw(step: int) -> np.ndarray:
    return np.random.default_rng(step).uniform(0.25, 1, (3, 4)).astype(np.float32)


def slopes(step: int, w: list[np.ndarray]) -> list[np.ndarray]:
    a, b, c, d = w
    return [2 * draw(step) * a, b**3, (d - 2 * c).sum(), np.full(d.shape, c)]


# ---- the rules in float64: generators that take a gradient and give the change over -lr ----


def sgd(momentum: float = 0, nesterov: bool = False, dampening: float = 0) -> Iterator:
    v, change = None, None
    while True:
        g = yield change
        v = g if v is None else momentum * v + (1 - dampening) * g
        change = g + momentum * v if nesterov else v


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Iterator:
    gs: list[np.ndarray] = []
    change = None
    while True:
        gs.insert(0, (yield change))
        means = []
        for beta, powers in ((beta1, gs), (beta2, [g * g for g in gs])):
            weights = beta ** np.arange(len(gs))
            means.append(sum(w * g for w, g in zip(weights, powers)) / weights.sum())
        change = means[0] / (means[1] ** 0.5 + eps)


def rmsprop(
    alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0, centered: bool = False
) -> Iterator:
    mean, square, change = 0, 0, 0
    while True:
        g = yield change
        square = alpha * square + (1 - alpha) * g**2
        mean = alpha * mean + (1 - alpha) * g
        change = momentum * change + g / (np.sqrt(square - centered * mean**2) + eps)


def adagrad(eps: float = 1e-10, initial: float = 0) -> Iterator:
    total, change = initial, None
    while True:
        g = yield change
        total = total + g * g
        change = g / (total**0.5 + eps)


def lion(beta1: float = 0.9, beta2: float = 0.99) -> Iterator:
    m, change = 0, None
    while True:
        g = yield change
        change = np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g


def follow(
    rule: Callable[..., Iterator], lr: Any, weight_decay: float = 0, decoupled: bool = False,
    slope: Callable = slopes, treat: Callable = lambda gs: gs, steps: int = STEPS, **options: Any,
) -> list[list[np.ndarray]]:  # fmt: skip
    """The values after each step; `treat` changes the gradients, lr may depend on the step."""
    w = starts()
    rules: list[Any] = [rule(**options) for _ in w]
    for one in rules:
        next(one)
    path = []
    for step in range(steps):
        rate = lr(step) if callable(lr) else lr
        l2, shrink = (0, rate * weight_decay) if decoupled else (weight_decay, 0)
        changes = [one.send(g + l2 * x) for one, x, g in zip(rules, w, treat(slope(step, w)))]
        w = [(1 - shrink) * x - rate * change for x, change in zip(w, changes)]
        path.append(w)
    return path


def norm(gs: list[np.ndarray]) -> float:
    return sum(float((g * g).sum()) for g in gs) ** 0.5
