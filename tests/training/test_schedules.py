"""Learning-rate schedules: host formulas against others, graphs against the host, PyTorch."""

from __future__ import annotations

import math
import unittest
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.errors import GraphError
from dlsys.runtime.device import Context
from support.devices import needs_torch, on_native_devices

torch: Any = import_module("torch") if find_spec("torch") else None

SCHEDULES = {
    "constant": optim.Constant(0.25),
    "step": optim.Step(0.5, 7, 0.3),
    "multi-step": optim.MultiStep(0.5, [40, 9, 21], 0.2),
    "exponential": optim.Exponential(0.5, 0.97),
    "polynomial": optim.Polynomial(0.5, 60, power=2.0, end=0.01),
    "linear": optim.Polynomial(0.5, 60),
    "cosine": optim.Cosine(0.5, 60, end=0.02),
    "restarts": optim.WarmRestarts(0.5, 13, end=0.01),
    "longer restarts": optim.WarmRestarts(0.5, 5, factor=2, end=0.01),
    "thrice as long": optim.WarmRestarts(0.5, 3, factor=3),
    "warm-up": optim.Warmup(optim.Cosine(0.5, 50), 10),
    "warm-up from 0": optim.Warmup(optim.Step(0.5, 20), 16, start=0.0),
    "one-cycle": optim.OneCycle(0.5, 80),
    "one-cycle of lines": optim.OneCycle(0.5, 80, warm=0.4, initial=10, final=50, shape="linear"),
}
STEPS = 130


class Host(unittest.TestCase):
    """Rates against formulas written down another way."""

    def follow(self, schedule: optim.Schedule, formula: Any, steps: int = STEPS) -> None:
        got = [schedule(t) for t in range(steps)]
        np.testing.assert_allclose(got, [formula(t) for t in range(steps)], rtol=1e-12, atol=1e-15)

    def test_steps(self) -> None:
        rate, rates = 0.5, []
        for t in range(STEPS):
            rate = rate * 0.3 if t and t % 7 == 0 else rate
            rates.append(rate)
        self.follow(SCHEDULES["step"], rates.__getitem__)
        self.follow(SCHEDULES["constant"], lambda t: 0.25)

    def test_milestones(self) -> None:
        formula = lambda t: 0.5 * 0.2 ** ((t >= 9) + (t >= 21) + (t >= 40))  # noqa: E731
        self.follow(SCHEDULES["multi-step"], formula)

    def test_exponential(self) -> None:
        self.follow(SCHEDULES["exponential"], lambda t: 0.5 * math.exp(t * math.log(0.97)))

    def test_polynomial(self) -> None:
        self.follow(SCHEDULES["polynomial"], lambda t: 0.01 + 0.49 * max(1 - t / 60, 0) ** 2)
        self.follow(SCHEDULES["linear"], lambda t: np.interp(t, [0, 60], [0.5, 0]))

    def test_cosine(self) -> None:
        formula = lambda t: 0.02 + 0.48 * math.cos(math.pi * min(t, 60) / 120) ** 2  # noqa: E731
        self.follow(SCHEDULES["cosine"], formula)

    def test_restarts(self) -> None:
        half = lambda part: 0.01 + 0.49 * math.cos(math.pi / 2 * part) ** 2  # noqa: E731
        self.follow(SCHEDULES["restarts"], lambda t: half(t % 13 / 13))
        rates: list[float] = []
        for length in (5, 10, 20, 40, 80):
            rates += [half(t / length) for t in range(length)]
        self.follow(SCHEDULES["longer restarts"], rates.__getitem__)

    def test_late_restarts_are_where_they_should_be(self) -> None:
        schedule = SCHEDULES["longer restarts"]
        for n in (10, 20, 28):
            start = 5 * (2**n - 1)
            self.assertEqual(schedule(start), 0.5)
            self.assertAlmostEqual(schedule(start - 1), 0.01, 5)

    def test_warm_up(self) -> None:
        after = optim.Cosine(0.5, 50)
        ramp = np.linspace(0.05, 0.5, 11)
        self.follow(SCHEDULES["warm-up"], lambda t: ramp[t] if t < 10 else after(t - 10))
        self.follow(
            SCHEDULES["warm-up from 0"],
            lambda t: t / 32 if t < 16 else optim.Step(0.5, 20)(t - 16),
        )

    def test_one_cycle(self) -> None:
        ends = [(0, 0.02), (23, 0.5), (79, 2e-6)]

        def cosine(t: int) -> float:
            (a, low), (b, high) = ends[:2] if t < 23 else ends[1:]
            share = math.sin(math.pi / 2 * min((t - a) / (b - a), 1)) ** 2
            return low + (high - low) * share

        self.follow(SCHEDULES["one-cycle"], cosine)
        points = [0, 31, 79], [0.05, 0.5, 0.001]
        self.follow(SCHEDULES["one-cycle of lines"], lambda t: np.interp(t, *points))

    def test_a_warm_up_in_a_warm_up_starts_where_the_inner_one_does(self) -> None:
        schedule = optim.Warmup(optim.Warmup(optim.Constant(1.0), 10, 0.5), 4, 0.5)
        got = [schedule(t) for t in (0, 2, 4, 14, 99)]
        np.testing.assert_allclose(got, [0.25, 0.375, 0.5, 1, 1])

    def test_options_out_of_range(self) -> None:
        for make, message in (
            (lambda: optim.Step(0.1, 0), r"Step: expected lr >= 0, size > 0 .*, got .*size=0"),
            (lambda: optim.Cosine(-1, 10), "Cosine: expected lr >= 0"),
            (lambda: optim.OneCycle(0.1, 3), r"OneCycle: expected .*warm · steps > 1"),
            (
                lambda: optim.OneCycle(0.1, 30, shape="round"),
                "must be cosine or linear, got 'round'",
            ),  # type: ignore[arg-type]
            (lambda: optim.Warmup(optim.Constant(1.0), 5, 1.5), "Warmup: expected .*start=1.5"),
            (lambda: optim.ReduceOnPlateau(0.1, factor=1.0), "ReduceOnPlateau: expected"),
            (lambda: optim.ReduceOnPlateau(0.1, mode="up"), "mode must be min or max, got 'up'"),  # type: ignore[arg-type]
        ):
            with self.subTest(message=message), self.assertRaisesRegex(GraphError, message):
                make()


class Plateau(unittest.TestCase):
    VALUES = [1.0, 0.9, 0.95, 0.9, 0.89999, 0.91, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, math.nan]

    def test_the_rate_falls_when_nothing_improves(self) -> None:
        schedule = optim.ReduceOnPlateau(1.0, factor=0.5, patience=2, threshold=1e-3)
        reduced = [schedule.report(value) for value in self.VALUES]
        self.assertEqual([k for k, one in enumerate(reduced) if one], [4, 9, 12])
        self.assertEqual(schedule(0), 0.125)

    def test_larger_may_be_better(self) -> None:
        schedule = optim.ReduceOnPlateau(1.0, patience=0, mode="max", lowest=0.05)
        self.assertEqual([schedule.report(v) for v in (0.1, 0.2, 0.2, 0.3)], [0, 0, 1, 0])
        for _ in range(5):
            schedule.report(0.1)
        self.assertAlmostEqual(schedule(0), 0.05)

    def test_rests_after_a_reduction(self) -> None:
        schedule = optim.ReduceOnPlateau(1.0, factor=0.5, patience=0, cooldown=2)
        reduced = [schedule.report(1.0) for _ in range(8)]
        self.assertEqual(reduced, [False, True, False, False, True, False, False, True])

    def test_a_rate_at_the_lowest_is_neither_raised_nor_called_reduced(self) -> None:
        for lr in (1e-3, 1e-5):
            schedule = optim.ReduceOnPlateau(lr, patience=0, lowest=1e-3)
            self.assertEqual([schedule.report(1.0) for _ in range(3)], [False] * 3)
            self.assertEqual(schedule(0), lr)

    def test_goes_on_from_its_state(self) -> None:
        first, second = (optim.ReduceOnPlateau(1.0, patience=2) for _ in range(2))
        for value in self.VALUES[:9]:
            first.report(value)
        for (_, ours), (_, theirs) in zip(first.named_state(), second.named_state(), strict=True):
            theirs.set(ours.asnumpy())
        for value in self.VALUES[9:]:
            self.assertEqual(second.report(value), first.report(value))
            self.assertEqual(second(0), first(0))


class Graph:
    """Every schedule as a graph over the step on one device."""

    ctx: Context | None = None
    dtype: Any = np.float32
    rtol, atol = 2e-6, 2e-7

    def rates(self, schedule: optim.Schedule, steps: Any) -> list[float]:
        step = ad.Parameter(np.int64(0), "step")
        executor = ad.Executor([schedule.node(step)], self.ctx)
        rates = []
        for t in steps:
            step.set(np.int64(t))
            [rate] = executor.run(convert_to_numpy_ret_vals=True)
            self.assertEqual((rate.shape, rate.dtype), ((), self.dtype))
            rates.append(float(rate))
        return rates

    def test_follows_the_host(self) -> None:
        for name, schedule in SCHEDULES.items():
            with self.subTest(name):
                wanted = [schedule(t) for t in range(STEPS)]
                got = self.rates(schedule, range(STEPS))
                np.testing.assert_allclose(got, wanted, self.rtol, self.atol * max(wanted))

    def test_late_steps(self) -> None:
        late = [2**24 - 3, 2**24 - 2, 2**24 - 1, 11_184_810, 11_184_811]
        for schedule in (
            optim.Step(1.0, 3, 1 - 1e-7),
            optim.WarmRestarts(1.0, 2, factor=2),
            optim.WarmRestarts(1.0, 7),
            optim.Exponential(1.0, 1 - 1e-7),
            optim.Cosine(1.0, 2**24),
        ):
            with self.subTest(type(schedule).__name__):
                wanted = [schedule(t) for t in late]
                np.testing.assert_allclose(self.rates(schedule, late), wanted, self.rtol, self.atol)

    def test_a_reported_plateau_takes_effect_at_the_next_run(self) -> None:
        for wrap in (lambda s: s, lambda s: optim.Warmup(s, 2, start=0.5)):
            plateau = optim.ReduceOnPlateau(1.0, factor=0.5, patience=0)
            schedule = wrap(plateau)
            step = ad.Parameter(np.int64(0), "step")
            executor = ad.Executor([schedule.node(step)], self.ctx)
            for t in (0, 2):
                step.set(np.int64(t))
                for _ in range(3):
                    plateau.report(1.0)
                    self.assertEqual(float(executor.run()[0]), schedule(t))
        self.assertLess(schedule(2), 0.1)


class NumpyGraph(Graph, unittest.TestCase):
    dtype = np.float64
    rtol, atol = 1e-14, 1e-14


CpuGraph, GpuGraph = on_native_devices(Graph)


@needs_torch
class AgainstTorch(unittest.TestCase):
    def follow(self, schedule: optim.Schedule, make: Any, lr: float = 0.5) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        theirs = make(optimizer)
        for t in range(60):
            wanted = optimizer.param_groups[0]["lr"]
            self.assertAlmostEqual(schedule(t), wanted, delta=1e-9, msg=f"step {t}")
            optimizer.step()
            theirs.step()

    def test_schedules(self) -> None:
        lr = torch.optim.lr_scheduler
        for name, make in {
            "step": lambda o: lr.StepLR(o, 7, 0.3),
            "multi-step": lambda o: lr.MultiStepLR(o, [9, 21, 40], 0.2),
            "exponential": lambda o: lr.ExponentialLR(o, 0.97),
            "linear": lambda o: lr.PolynomialLR(o, 60),
            "cosine": lambda o: lr.CosineAnnealingLR(o, 60, 0.02),
            "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 13, eta_min=0.01),
            "longer restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 5, 2, 0.01),
            "one-cycle": lambda o: lr.OneCycleLR(o, 0.5, 80, cycle_momentum=False),
            "one-cycle of lines": lambda o: lr.OneCycleLR(
                o, 0.5, 80, pct_start=0.4, anneal_strategy="linear", cycle_momentum=False,
                div_factor=10, final_div_factor=50,
            ),
            "warm-up": lambda o: lr.SequentialLR(
                o, [lr.LinearLR(o, 0.1, 1, 10), lr.CosineAnnealingLR(o, 50)], [10]
            ),
        }.items():  # fmt: skip
            with self.subTest(name):
                self.follow(SCHEDULES[name], make)

    def test_plateau(self) -> None:
        options = dict(factor=0.5, patience=2, threshold=1e-3, cooldown=1)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        ours = optim.ReduceOnPlateau(1.0, **options)  # type: ignore[arg-type]
        for value in Plateau.VALUES * 3:
            theirs.step(value)
            ours.report(value)
            self.assertAlmostEqual(ours(0), optimizer.param_groups[0]["lr"])
