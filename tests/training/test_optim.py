"""Optimizers against formulas in float64 and against PyTorch, and what they keep."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.errors import DataError, GraphError, ShapeError
from dlsys.runtime.device import Context
from support.devices import each_context, needs_torch, on_native_devices
from support.table.formulas.optim import (
    STEPS,
    adagrad,
    adam,
    draw,
    follow,
    lion,
    norm,
    rmsprop,
    sgd,
    slopes,
    starts,
)

torch: Any = import_module("torch") if find_spec("torch") else None


class Problem:
    """The problem as a graph over Parameters that begin at `starts`."""

    def __init__(self, names: Any = "abcd") -> None:
        self.x = ad.Variable("x")
        values = [w.astype(np.float32) for w in starts()]
        self.parameters = [ad.Parameter(w, name) for w, name in zip(values, names)]
        a, b, c, d = self.parameters
        self.loss = ad.sum_op(self.x * a * a) + ad.sum_op(b**4) * 0.25 + ad.sum_op(c * (d - c))

    def train(self, nodes: list[Any], ctx: Context | None, steps: Any = STEPS) -> list[Any]:
        executor = ad.Executor(nodes, ctx)
        steps = range(steps) if isinstance(steps, int) else steps
        return [executor.run({self.x: draw(k)}, convert_to_numpy_ret_vals=True) for k in steps]

    def values(self) -> list[np.ndarray]:
        return [p.asnumpy() for p in self.parameters]


ALGORITHMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, sgd, dict(lr=0.05)),
    "momentum": (optim.SGD, sgd, dict(lr=0.05, momentum=0.9)),
    "Nesterov": (optim.SGD, sgd, dict(lr=0.05, momentum=0.9, nesterov=True)),
    "dampening": (optim.SGD, sgd, dict(lr=0.05, momentum=0.8, dampening=0.25)),
    "Adam": (optim.Adam, adam, dict(lr=0.02)),
    "Adam of other betas": (optim.Adam, adam, dict(lr=0.02, beta1=0.5, beta2=0.75, eps=1e-3)),
    "RMSprop": (optim.RMSprop, rmsprop, dict(lr=0.01)),
    "RMSprop centered": (optim.RMSprop, rmsprop, dict(lr=0.01, alpha=0.9, eps=1e-3, centered=True)),
    "RMSprop momentum": (optim.RMSprop, rmsprop, dict(lr=0.01, alpha=0.9, momentum=0.5)),
    "RMSprop all": (
        optim.RMSprop, rmsprop, dict(lr=0.01, alpha=0.9, eps=1e-3, momentum=0.5, centered=True)
    ),
    "Adagrad": (optim.Adagrad, adagrad, dict(lr=0.05)),
    "Adagrad from 0.5": (optim.Adagrad, adagrad, dict(lr=0.05, initial=0.5)),
    "Lion": (optim.Lion, lion, dict(lr=0.01, decoupled=False)),
}  # fmt: skip


class Optimizers:
    """Ten steps on one device."""

    ctx: Context | None = None

    def close(self, got: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 1e-6):
        for ours, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)

    def run_with(self, optimizer: optim.Optimizer, steps: int = STEPS) -> Problem:
        problem = Problem()
        problem.train([optimizer.minimize(problem.loss, problem.parameters)], self.ctx, steps)
        return problem

    def check(self, optimizer: optim.Optimizer, path: list[list[np.ndarray]]) -> None:
        self.close(self.run_with(optimizer).values(), path[-1])

    def test_follow_their_formulas(self) -> None:
        for name, (make, rule, options) in ALGORITHMS.items():
            for decay in ({}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": True}):
                with self.subTest(name, **decay):
                    given = {**options, **decay}
                    self.check(make(**given), follow(rule, **given))

    def test_decoupled_decay_is_what_adamw_and_lion_mean(self) -> None:
        for make, rule in ((optim.AdamW, adam), (optim.Lion, lion)):
            options = dict(lr=0.05, weight_decay=0.2)
            self.check(make(**options), follow(rule, decoupled=True, **options))

    def test_tiny_decoupled_decay_is_not_lost(self) -> None:
        problem = Problem()
        optimizer = optim.SGD(1e-3, weight_decay=1e-5, decoupled=True)
        still = ad.sum_op(problem.x) + 0 * ad.sum_op(problem.parameters[0])
        problem.parameters[0].set(np.full((3, 4), 1e-30))  # 1 - 1e-8 is 1 in float32
        before = problem.parameters[0].asnumpy().astype(np.float64)
        train = optimizer.minimize(still, problem.parameters[:1])
        problem.train([train], self.ctx, 100)
        lost = 1 - problem.parameters[0].asnumpy().astype(np.float64) / before
        self.assertTrue((lost < 1e-5).all())

    def test_schedules_are_followed(self) -> None:
        schedule = optim.Warmup(optim.Cosine(0.05, 8), 3)
        optimizer = optim.SGD(schedule, momentum=0.9)
        problem = Problem()
        train = optimizer.minimize(problem.loss, problem.parameters)
        rates = [optimizer.learning_rate()]
        for k in range(STEPS):
            [[lr, _]] = problem.train([optimizer.lr, train], self.ctx, [k])
            self.assertAlmostEqual(float(lr), rates[-1], 7)
            rates.append(optimizer.learning_rate())
        self.assertEqual(rates, [schedule(k) for k in range(STEPS + 1)])
        self.close(problem.values(), follow(sgd, schedule, momentum=0.9)[-1])

    # ---- clipping ----
    def test_clipping_by_value(self) -> None:
        cut = lambda gs: [np.clip(g, -0.5, 0.5) for g in gs]  # noqa: E731
        options = dict(lr=0.05, momentum=0.9)
        self.check(optim.SGD(clip_value=0.5, **options), follow(sgd, treat=cut, **options))

    def test_clipping_by_the_norm_of_all_gradients(self) -> None:
        for limit in (0.7, 10.5, 1e9):  # always, sometimes, never
            with self.subTest(limit=limit):
                seen = []

                def scaled(gs: list[np.ndarray], limit: float = limit, seen: list = seen) -> list:
                    seen.append(norm(gs) > limit)
                    return [g * min(1, limit / (norm(gs) + 1e-6)) for g in gs]

                path = follow(adagrad, 0.05, treat=scaled)
                self.assertIn(sum(seen), {0.7: [10], 10.5: range(2, 9), 1e9: [0]}[limit])
                self.check(optim.Adagrad(0.05, clip_norm=limit), path)

    def test_both_and_decay(self) -> None:
        def treat(gs: list[np.ndarray]) -> list[np.ndarray]:
            return [np.clip(g * min(1, 2 / (norm(gs) + 1e-6)), -0.6, 0.6) for g in gs]

        optimizer = optim.SGD(0.05, clip_norm=2, clip_value=0.6, weight_decay=0.1)
        self.check(optimizer, follow(sgd, 0.05, weight_decay=0.1, treat=treat))

    # ---- accumulation ----
    def accumulated(self, make: Callable, rule: Callable, treat: Callable, **options: Any) -> None:
        def mean(step: int, w: list[np.ndarray]) -> list[np.ndarray]:
            runs = [slopes(3 * step + k, w) for k in range(3)]
            return [sum(gs) / 3 for gs in zip(*runs)]

        lr = optim.Exponential(0.05, 0.9)
        path = follow(rule, lr, slope=mean, treat=treat, steps=4)
        problem, optimizer = Problem(), make(lr, accumulate=3, **options)
        train = optimizer.minimize(problem.loss, problem.parameters)
        executor = ad.Executor([train], self.ctx)
        for k in range(12):
            executor.run({problem.x: draw(k)})
            made = (k + 1) // 3
            self.assertEqual(int(optimizer.steps.asnumpy()), made)
            self.close(problem.values(), path[made - 1] if made else starts())

    def test_accumulation_averages_runs(self) -> None:
        self.accumulated(optim.SGD, sgd, lambda gs: gs)
        self.accumulated(optim.Adam, adam, lambda gs: gs)

    def test_accumulation_clips_the_mean(self) -> None:
        treat = lambda gs: [g * min(1, 1.5 / (norm(gs) + 1e-6)) for g in gs]  # noqa: E731
        self.accumulated(optim.Adam, adam, treat, clip_norm=1.5)

    def test_a_bad_round_does_not_spoil_the_next(self) -> None:
        problem, optimizer = Problem(), optim.SGD(0.0, accumulate=2)
        train = optimizer.minimize(problem.loss, problem.parameters)
        executor = ad.Executor([train], self.ctx)
        executor.run({problem.x: np.full((3, 4), np.inf, np.float32)})
        total = optimizer.slots[problem.parameters[0]]["gradient"]
        self.assertTrue(np.isinf(total.asnumpy()).all())
        problem = self.run_with(optimizer, 0)
        optimizer = optim.SGD(0.1, accumulate=2)
        problem = self.run_with(optimizer, 4)
        self.assertTrue(all(np.isfinite(w).all() for w in problem.values()))

    # ---- averages ----
    def test_the_average_has_seen_every_update_and_not_the_start(self) -> None:
        path = follow(adam, 0.05)
        problem, optimizer = Problem(), optim.Adam(0.05, ema=0.8)
        train = optimizer.minimize(problem.loss, problem.parameters)
        for k in range(STEPS):
            problem.train([train], self.ctx, [k])
            weights = 0.8 ** np.arange(k, -1, -1)
            assert optimizer.ema is not None
            averages = [optimizer.ema.averages[p].asnumpy() for p in problem.parameters]
            for average, values in zip(averages, zip(*path), strict=True):
                wanted = np.tensordot(weights, np.stack(values[: k + 1]), 1) / weights.sum()
                np.testing.assert_allclose(average, wanted, rtol=1e-6, atol=1e-6)

    def test_averages_of_accumulated_updates(self) -> None:
        problem, optimizer = Problem(), optim.SGD(0.05, accumulate=2, ema=optim.EMA(0.5))
        train = optimizer.minimize(problem.loss, problem.parameters)
        seen = []
        for k in range(4):
            problem.train([train], self.ctx, [k])
            seen.append(problem.values()[0].astype(np.float64))
        assert optimizer.ema is not None
        average = optimizer.ema.averages[problem.parameters[0]].asnumpy()
        np.testing.assert_allclose(average, (seen[1] + 2 * seen[3]) / 3, rtol=1e-6)

    def test_averages_are_applied_for_a_while(self) -> None:
        problem, optimizer = Problem(), optim.SGD(0.05, ema=0.5)
        train = optimizer.minimize(problem.loss, problem.parameters)
        problem.train([train], self.ctx)
        score = ad.Executor([problem.loss], self.ctx)
        feeds = {problem.x: draw(0)}
        own, before = problem.values(), float(score.run(feeds)[0])
        assert optimizer.ema is not None
        with self.assertRaises(RuntimeError), optimizer.ema.applied():
            averages = [optimizer.ema.averages[p].asnumpy() for p in problem.parameters]
            for value, wanted in zip(problem.values(), averages, strict=True):
                np.testing.assert_array_equal(value, wanted)
            self.assertNotEqual(float(score.run(feeds)[0]), before)
            raise RuntimeError
        for value, wanted in zip(problem.values(), own, strict=True):
            np.testing.assert_array_equal(value, wanted)
        self.assertEqual(float(score.run(feeds)[0]), before)

    def test_averages_of_no_update_are_not_applied(self) -> None:
        problem, optimizer = Problem(), optim.SGD(0.05, ema=0.5)
        optimizer.minimize(problem.loss, problem.parameters)
        problem.parameters[0].set(np.full((3, 4), 7.0))  # weights that are loaded later
        assert optimizer.ema is not None
        with optimizer.ema.applied():
            np.testing.assert_array_equal(problem.values()[0], 7)

    # ---- groups ----
    def test_groups_have_rates_and_options_of_their_own(self) -> None:
        problem, optimizer = Problem(), optim.SGD(0.05, momentum=0.9, weight_decay=0.1)
        a, b, c, d = problem.parameters
        groups = [
            {"params": [a, d]},
            {"params": [b], "lr": 0.02, "weight_decay": 0.0},
            {"params": (c,), "lr": optim.Exponential(0.04, 0.5), "momentum": 0.0},
        ]
        problem.train([optimizer.minimize(problem.loss, groups)], self.ctx)
        w, v = starts(), [0 * x for x in starts()]
        for k in range(STEPS):
            gs = [g + decay * x for g, x, decay in zip(slopes(k, w), w, (0.1, 0, 0.1, 0.1))]
            v = [m * x + g for m, x, g in zip((0.9, 0.9, 0, 0.9), v, gs)]
            w = [x - r * y for r, x, y in zip((0.05, 0.02, 0.04 * 0.5**k, 0.05), w, v)]
        self.close(problem.values(), w)
        names = [name for name, _ in optimizer.named_state()]
        wanted = ["step", "lr", "lr.1", "a.velocity", "d.velocity", "b.velocity"]
        self.assertEqual(names, wanted)

    # ---- state ----
    def test_a_training_goes_on_from_its_state_bit_by_bit(self) -> None:
        def make() -> optim.Optimizer:
            lr = optim.Warmup(optim.ReduceOnPlateau(0.05), 3)
            return optim.Adam(lr, accumulate=2, clip_norm=2.0, ema=0.9, weight_decay=0.1)

        whole, first, second = make(), make(), make()
        straight = self.run_with(whole, 9)
        half = self.run_with(first, 5)
        saved = first.state_dict()
        rest = Problem()
        for parameter, value in zip(rest.parameters, half.values()):
            parameter.set(value)
        train = second.minimize(rest.loss, rest.parameters)
        second.load_state_dict(saved)
        rest.train([train], self.ctx, range(5, 9))
        for value, wanted in zip(rest.values(), straight.values(), strict=True):
            np.testing.assert_array_equal(value, wanted)
        ours, theirs = second.state_dict(), whole.state_dict()
        self.assertEqual(list(ours), list(theirs))
        for name, value in ours.items():
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)

    def test_a_state_that_does_not_fit_changes_nothing(self) -> None:
        problem, optimizer = Problem(), optim.Adam(0.05)
        problem.train([optimizer.minimize(problem.loss, problem.parameters)], self.ctx, 2)
        saved = optimizer.state_dict()
        missing = {name: value for name, value in saved.items() if name != "b.mean"}
        for state, error, message in (
            (missing, DataError, "Adam: this state does not fit, missing b.mean; call minimize"),
            ({**saved, "e.mean": 1}, DataError, "unknown e.mean"),
            ({**saved, "d.square": np.zeros(3)}, ShapeError, r"got float64 \(3,\)"),
        ):
            changed = {name: value + 1 for name, value in state.items()}
            with self.assertRaisesRegex(error, message):
                optimizer.load_state_dict(changed)
            for name, value in optimizer.state_dict().items():
                np.testing.assert_array_equal(value, saved[name])

    def test_effects_of_the_loss_are_made_and_the_step_counted(self) -> None:
        generator = ad.Generator(1)
        problem, optimizer = Problem(), optim.SGD(0.05)
        loss = problem.loss + ad.sum_op(ad.dropout(problem.parameters[0], 0.5, generator))
        loss = loss + ad.sum_op(ad.dropout(problem.parameters[1], 0.5))
        problem.train([optimizer.minimize(loss, problem.parameters)], self.ctx, 3)
        self.assertEqual(int(generator.step.asnumpy()), 3)
        self.assertEqual(int(optimizer.steps.asnumpy()), 3)
        problem.train([loss], self.ctx, 3)
        self.assertEqual(int(generator.step.asnumpy()), 3)

    def test_the_global_norm_neither_overflows_nor_stops_counting(self) -> None:
        x, y = ad.Variable("x"), ad.Variable("y")
        executor = ad.Executor([ad.global_norm_op(x, y)], self.ctx)
        for value, count in ((3e25, 4), (1e-30, 9), (1.0, 2**24 + 2**20)):
            feeds = {x: np.full(count, value, np.float32), y: np.zeros((0, 2), np.float32)}
            got = float(executor.run(feeds, convert_to_numpy_ret_vals=True)[0])
            np.testing.assert_allclose(got, float(np.float32(value)) * count**0.5, rtol=1e-7)


class NumpyOptimizers(Optimizers, unittest.TestCase):
    pass


CpuOptimizers, GpuOptimizers = on_native_devices(Optimizers)


class Use(unittest.TestCase):
    """Names, groups, refusals and earlier spellings."""

    def test_the_earlier_spelling_of_centered_works_with_a_warning(self) -> None:
        with self.assertWarnsRegex(DeprecationWarning, "centred is spelled centered now"):
            optimizer = optim.RMSprop(0.1, centred=True)
        self.assertTrue(optimizer.options["centered"])
        problem, plain = Problem(), optim.RMSprop(0.1)
        with self.assertWarns(DeprecationWarning):
            group = {"params": problem.parameters, "centred": True}
            plain.minimize(problem.loss, [group])
        self.assertEqual(len(next(iter(plain.slots.values()))), 2)  # the mean and the mean square

    def test_names_come_from_names_or_else_from_positions(self) -> None:
        named, unnamed = Problem(["w", "w", None, "b"]), optim.SGD(0.1, momentum=0.5)
        unnamed.minimize(named.loss, named.parameters)
        names = ["step", "lr", "w.velocity", "1.velocity", "2.velocity", "b.velocity"]
        self.assertEqual([name for name, _ in unnamed.named_state()], names)

    def test_made_up_names_avoid_those_there_are(self) -> None:
        problem, optimizer = Problem(["1", None, "4", "1"]), optim.SGD(0.1, momentum=0.5)
        optimizer.minimize(problem.loss, problem.parameters)
        names = ["step", "lr", "1.velocity", "2.velocity", "4.velocity", "3.velocity"]
        self.assertEqual([name for name, _ in optimizer.named_state()], names)

    def test_a_rate_of_its_own_makes_a_group_independent(self) -> None:
        lr, problem = 0.125, Problem()
        optimizer = optim.SGD(lr)
        groups = [{"params": p, "lr": lr} for p in problem.parameters[:2]]
        groups.append({"params": problem.parameters[2:]})
        train = optimizer.minimize(problem.loss, groups)
        names = ["step", "lr", "lr.1", "lr.2"]
        self.assertEqual([name for name, _ in optimizer.named_state()], names)
        optimizer.lr.set(0)
        problem.train([train], None, 1)
        for value, start, own in zip(problem.values(), starts(), (True, True, False, False)):
            self.assertEqual(bool((value != start.astype(np.float32)).any()), own)

    def test_groups_share_a_schedule(self) -> None:
        plateau, problem = optim.ReduceOnPlateau(0.1), Problem()
        optimizer = optim.SGD(0.1)
        groups = [{"params": p, "lr": plateau} for p in problem.parameters]
        optimizer.minimize(problem.loss, groups)
        names = ["step", "lr", "schedule.1.rate", "schedule.1.memory"]
        self.assertEqual([name for name, _ in optimizer.named_state()], names)

    def test_one_parameter_needs_no_list(self) -> None:
        problem = Problem()
        problem.train([optim.SGD(0.1).minimize(problem.loss, problem.parameters[0])], None, 1)
        changed = [(v != s.astype(np.float32)).any() for v, s in zip(problem.values(), starts())]
        self.assertEqual(changed, [True, False, False, False])

    def test_an_average_belongs_to_one_optimizer(self) -> None:
        problem, shared = Problem(), optim.EMA(0.5)
        first, second = optim.SGD(0.1, ema=shared), optim.SGD(0.1, ema=shared)
        first.minimize(problem.loss, problem.parameters[:2])
        with self.assertRaisesRegex(GraphError, "its EMA is another optimizer's"):
            second.minimize(problem.loss, problem.parameters[2:])

    def test_the_rate_is_a_parameter_that_can_be_set(self) -> None:
        sgd = optim.SGD(0.5)
        self.assertEqual(sgd.learning_rate(), 0.5)
        sgd.lr.set(0.25)
        self.assertEqual(sgd.learning_rate(), 0.25)
        schedule = optim.Step(1.0, 2)
        sgd = optim.SGD(schedule)
        sgd.steps.set(np.int64(5))
        self.assertEqual(sgd.learning_rate(), schedule(5))

    def test_two_graphs_share_rates_and_slots(self) -> None:
        problem, optimizer = Problem(), optim.Adam(0.1, accumulate=2, ema=0.5)
        groups = [{"params": problem.parameters[:2], "lr": 0.5}, {"params": problem.parameters[2]}]
        optimizer.minimize(problem.loss, groups)
        before = dict(optimizer.named_state())
        optimizer.minimize(problem.loss * 2, groups)
        self.assertEqual(dict(optimizer.named_state()), before)

    def test_options_out_of_range(self) -> None:
        p = ad.Parameter(np.ones(2, np.float32), "p")
        loss = ad.sum_op(p)
        counts = ad.Parameter(np.ones(2, np.int64), "counts")
        frozen = ad.Parameter(np.ones(2, np.float32), "frozen", trainable=False)
        for make, message in (
            (lambda: optim.SGD([p]), r"SGD: the rate is .*, got list; Parameters go to minimize"),
            (lambda: optim.SGD(0.1).minimize(loss, [counts]), "SGD: counts is int64; leave it out"),
            (lambda: optim.SGD(0.1).minimize(loss, [frozen]), "frozen is not trainable"),
            (lambda: optim.SGD(-1), r"SGD: expected lr >= 0, .*, got lr=-1"),
            (lambda: optim.SGD(0.1, dampening=1), "0 <= dampening < 1.* got .*dampening=1"),
            (lambda: optim.Adam(beta2=1.0), r"Adam: expected .*0 <= beta2 < 1, .*beta2=1.0"),
            (lambda: optim.AdamW(weight_decay=-1), "AdamW: expected .*weight_decay >= 0"),
            (lambda: optim.RMSprop(eps=float("nan")), "RMSprop: expected .*eps >= 0"),
            (lambda: optim.SGD(0.1, clip_norm=0), "expected clip_norm > 0 or None, got 0"),
            (lambda: optim.SGD(0.1, accumulate=0), "expected accumulate >= 1, got 0"),
            (lambda: optim.SGD(0.1, ema=1.0), "EMA: expected 0 <= decay < 1, got 1.0"),
            (
                lambda: optim.SGD(0.1, nesterov=True).minimize(loss, [p]),
                "nesterov wants a momentum",
            ),
            (lambda: optim.SGD(0.1).minimize(loss, [p, p]), "SGD: p is given twice"),
            (lambda: optim.SGD(0.1).minimize(loss, [loss]), "SGD: expected Parameters, got"),
            (lambda: optim.SGD(0.1).minimize(loss, [p, {"params": [p]}]), "a group is a dict"),
            (
                lambda: optim.SGD(0.1).minimize(loss, [{"params": [p], "beta1": 0.5}]),
                "SGD: a group is a dict with params and any of lr, momentum.* got params, beta1",
            ),
            (
                lambda: optim.SGD(0.1).minimize(loss, [{"params": [p], "lr": -2.0}]),
                "SGD: expected lr >= 0.*got lr=-2.0",
            ),
        ):
            with self.subTest(message), self.assertRaisesRegex(GraphError, message):
                make()

    def test_a_rule_names_what_it_wants(self) -> None:
        p = ad.Parameter(np.ones(2, np.float32), "p")
        lr = ad.constant(0.1)
        with self.assertRaisesRegex(
            GraphError, r"adam_update: takes 6 to 8 inputs \(.*rate, step.*, got 5"
        ):
            ad.adam_update_op(p, p, p, p, lr, beta1=0.9, beta2=0.9, eps=0.0)
        with self.assertRaisesRegex(ShapeError, "expected a count of one int64, got float32"):
            ad.sgd_update_op(p, p, lr, count=lr, every=2)


@needs_torch
class AgainstTorch(unittest.TestCase):
    """Ten steps by PyTorch in float64 and on every device that is here."""

    def theirs(self, make: Callable, treat: Callable = lambda ws: None) -> list[np.ndarray]:
        w = [torch.tensor(x, requires_grad=True) for x in starts()]
        optimizer = make(w)
        for step in range(STEPS):
            x, (a, b, c, d) = torch.tensor(draw(step)).double(), w
            loss = (x * a * a).sum() + (b**4).sum() * 0.25 + (c * (d - c)).sum()
            optimizer.zero_grad()
            loss.backward()
            treat(w)
            optimizer.step()
        return [x.detach().numpy() for x in w]

    def compare(self, make: Callable, wanted: list[np.ndarray]) -> None:
        for ctx in each_context():
            problem = Problem()
            train = make().minimize(problem.loss, problem.parameters)
            problem.train([train], ctx)
            for ours, theirs in zip(problem.values(), wanted, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6, err_msg=str(ctx))

    def test_optimizers(self) -> None:
        there = torch.optim
        makers = {
            "SGD": lambda w, **o: there.SGD(w, **o),
            "Adam": lambda w, beta1=0.9, beta2=0.999, **o: there.Adam(w, betas=(beta1, beta2), **o),
            "RMSprop": lambda w, centered=False, **o: there.RMSprop(w, centered=centered, **o),
            "Adagrad": lambda w, initial=0.0, **o: there.Adagrad(
                w, initial_accumulator_value=initial, **o
            ),
        }
        for name, (ours, _, options) in ALGORITHMS.items():
            for decay in (0.0, 0.1):
                if ours is not optim.Lion:
                    with self.subTest(name, decay=decay):
                        given = {**options, "weight_decay": decay}
                        wanted = self.theirs(lambda w: makers[ours.__name__](w, **given))  # noqa: B023
                        self.compare(lambda: ours(**given), wanted)  # noqa: B023

    def test_adamw(self) -> None:
        wanted = self.theirs(lambda w: torch.optim.AdamW(w, lr=0.05, weight_decay=0.3))
        self.compare(lambda: optim.AdamW(0.05, weight_decay=0.3), wanted)

    def test_clipping(self) -> None:
        clips = torch.nn.utils
        for limit in (0.7, 10.5):
            wanted = self.theirs(
                lambda w: torch.optim.SGD(w, lr=0.05),
                lambda w: clips.clip_grad_norm_(w, limit),  # noqa: B023
            )
            self.compare(lambda: optim.SGD(0.05, clip_norm=limit), wanted)  # noqa: B023
        wanted = self.theirs(
            lambda w: torch.optim.SGD(w, lr=0.05), lambda w: clips.clip_grad_value_(w, 0.5)
        )
        self.compare(lambda: optim.SGD(0.05, clip_value=0.5), wanted)
