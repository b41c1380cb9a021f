"""Optimizers at the ends of what float32 holds: decay rates of 0 and nearly 0, gradients from 1e-30
to 1e30, on every device, beside PyTorch where it is here.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.runtime.device import Context
from support.devices import needs_torch, on_native_devices, slow

torch: Any = import_module("torch") if find_spec("torch") else None

SIZES = 10.0 ** np.arange(-30, 31, 4)
BETAS = (0.0, 1e-8, 0.5, 0.999)


def gradients(steps: int = 6) -> list[np.ndarray]:
    """Each element of another history: every size is followed and led by every other. Factors
    keep what is added from cancelling to its rounding.
    """
    rng = np.random.default_rng(0)
    draws = [rng.permutation(np.repeat(SIZES, 4)) for _ in range(steps)]
    factors = [rng.uniform(1, 3, d.shape) * rng.choice([-1, 1], d.shape) for d in draws]
    return [(draw * factor).astype(np.float32) for draw, factor in zip(draws, factors)]


def one_burst() -> list[np.ndarray]:
    """Ordinary gradients, one whose square is no float32, and ordinary ones again."""
    return [np.array([g, -g], np.float32) for g in (0.5, 1e30, 0.5, 0.25, -0.5)]


def path(
    optimizer: optim.Optimizer, fed: list[np.ndarray], ctx: Context | None, dtype: Any = np.float32
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The weights after each step from 1 on, and the optimizer's states at the end."""
    w = ad.Parameter(np.ones(fed[0].shape, dtype), "w")
    x = ad.Variable("x")
    train = optimizer.minimize(ad.sum_op(x * w), [w])
    executor = ad.Executor([train], ctx)
    values = []
    for g in fed:
        executor.run({x: g.astype(dtype)})
        values.append(w.asnumpy())
    return values, [slot.asnumpy() for slots in optimizer.slots.values() for slot in slots.values()]


def torch_path(make: Callable, fed: list[np.ndarray]) -> list[np.ndarray]:
    w = torch.nn.Parameter(torch.ones(len(fed[0])))
    optimizer = make([w])
    values = []
    for g in fed:
        w.grad = torch.from_numpy(g)
        optimizer.step()
        values.append(w.detach().numpy().copy())
    return values


CASES: list[tuple[str, Callable, Callable]] = [
    *(
        (
            f"Adam beta1={beta1} beta2={beta}",
            lambda beta=beta, beta1=beta1: optim.Adam(0.01, beta1=beta1, beta2=beta),
            lambda ps, beta=beta, beta1=beta1: torch.optim.Adam(ps, 0.01, betas=(beta1, beta)),
        )
        for beta in BETAS
        for beta1 in (0.0, 0.9)
    ),
    *(
        (
            f"RMSprop alpha={beta} momentum={momentum}",
            lambda beta=beta, momentum=momentum: optim.RMSprop(0.01, alpha=beta, momentum=momentum),
            lambda ps, beta=beta, momentum=momentum: torch.optim.RMSprop(
                ps, 0.01, alpha=beta, momentum=momentum
            ),
        )
        for beta in BETAS
        for momentum in (0.0, 0.5)
    ),
    (
        "RMSprop centered",
        lambda: optim.RMSprop(0.01, eps=1e-3, centered=True),
        lambda ps: torch.optim.RMSprop(ps, 0.01, eps=1e-3, centered=True),
    ),
    ("Adagrad", lambda: optim.Adagrad(0.01), lambda ps: torch.optim.Adagrad(ps, 0.01)),
]  # fmt: skip
LIONS = [lambda b=b: optim.Lion(0.01, beta1=b, beta2=b) for b in BETAS]


class Extremes:
    ctx: Context | None = None

    def close(self, got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
        """Finite, and within a few roundings of the largest that each weight has been."""
        self.assertTrue(np.isfinite(got).all())
        largest = np.maximum.accumulate(np.abs(wanted))
        self.assertLessEqual((np.abs(np.subtract(got, wanted)) / (largest + 1)).max(), 1e-6)

    @slow
    @needs_torch
    def test_steps_are_those_of_pytorch(self) -> None:
        for name, ours, theirs in CASES:
            with self.subTest(name):
                got, _ = path(ours(), gradients(), self.ctx)
                wanted = torch_path(theirs, gradients())
                # PyTorch keeps 0 · inf and inf - inf as NaN.
                self.close(got, [np.where(np.isfinite(b), b, a) for a, b in zip(got, wanted)])

    def test_devices_agree(self) -> None:
        made = [(name, ours) for name, ours, _ in CASES] + [("Lion", lion) for lion in LIONS]
        for name, make in made:
            with self.subTest(name):
                got, states = path(make(), gradients(), self.ctx)
                wanted, numpys = path(make(), gradients(), None)
                self.close(got, wanted)
                for a, b in zip(states, numpys, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-4)  # where two digits cancel

    def test_a_square_that_overflows_stops_the_element_and_is_no_nan(self) -> None:
        for name, make, _ in CASES:
            with self.subTest(name):
                values, states = path(make(), one_burst(), self.ctx)
                self.assertTrue(all(np.isfinite(v).all() for v in values))
                self.assertFalse(any(np.isnan(s).any() for s in states))
                if "momentum=0.5" not in name:  # a velocity goes on for a while
                    np.testing.assert_array_equal(values[1], values[0])

    def test_without_memory_the_step_after_is_an_ordinary_one(self) -> None:
        for make in (
            lambda: optim.Adam(0.01, beta1=0.0, beta2=0.0),
            lambda: optim.RMSprop(0.01, alpha=0.0),
        ):
            values, _ = path(make(), one_burst(), self.ctx)
            steps = np.diff(np.stack([np.ones(2), *values]), axis=0)
            signs = np.array([[-1, 1], [0, 0], [-1, 1], [-1, 1], [1, -1]])
            np.testing.assert_allclose(steps, 0.01 * signs, rtol=1e-4, atol=0)

    def test_averages_forget_what_has_no_weight_and_are_not_biased(self) -> None:
        w = ad.Parameter(np.array([np.nan, np.inf, 3e38], np.float32), "w")
        x = ad.Variable("x")
        average = optim.EMA(0.999)
        train = ad.group_op(*average.updates({w: x}))
        executor = ad.Executor([train], self.ctx)
        for _ in range(300):
            executor.run({x: np.array([1.1, -3e38, -0.7], np.float32)})
        seen = average.averages[w].asnumpy()
        np.testing.assert_allclose(seen, np.float32([1.1, -3e38, -0.7]), rtol=1e-6)


class NumpyExtremes(Extremes, unittest.TestCase):
    def test_float64_keeps_its_digits(self) -> None:
        for beta in BETAS:
            fed = [g.astype(np.float64) for g in gradients()]
            values, _ = path(optim.Adam(0.01, beta2=beta), fed, None, np.float64)
            m, v, w = 0.0, 0.0, 1.0
            for k, (g, value) in enumerate(zip(fed, values, strict=True)):
                m, v = 0.9 * m + 0.1 * g, beta * v + (1 - beta) * g * g
                root = np.sqrt(v / (1 - beta ** (k + 1)))
                w = w - 0.01 * (m / (1 - 0.9 ** (k + 1))) / (root + 1e-8)
                np.testing.assert_allclose(value, w, rtol=1e-13)

    def test_float64_follows_schedules_and_shares_in_float64(self) -> None:
        schedule = optim.Warmup(optim.Cosine(0.1, 40), 3)
        optimizer = optim.SGD(schedule, momentum=0.9, accumulate=3)
        fed = [np.array([0.1 * (k + 1)]) for k in range(12)]
        values, _ = path(optimizer, fed, None, np.float64)
        w, v = 1.0, 0.0
        for k in range(4):
            v = 0.9 * v + sum(g.item() for g in fed[3 * k : 3 * k + 3]) / 3
            w -= schedule(k) * v
            np.testing.assert_allclose(values[3 * k + 2], w, rtol=1e-14)


CpuExtremes, GpuExtremes = on_native_devices(Extremes)
