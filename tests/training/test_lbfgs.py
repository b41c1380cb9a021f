"""optim.LBFGS: minima of known functions, beside scipy's L-BFGS-B; its line search; its state."""

from __future__ import annotations

import unittest

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.errors import DataError, DivergedError, GraphError
from dlsys.optim.wolfe import CURVATURE, DECREASE, Point, search
from support.devices import on_native_devices
from support.small_digits import needs


def rosenbrock(w):
    """100 (b - a²)² + (1 - a)², summed over neighbors, of a Parameter (n,)."""
    a, b = w[:-1], w[1:]
    return (100 * (b - a * a) ** 2 + (1 - a) ** 2).sum()


def separable() -> tuple[np.ndarray, np.ndarray]:
    """Points (200, 5) with labels that a plane tells apart but for noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5))
    return x, (x @ [1.0, -2, 0.5, 0, 3] + rng.normal(size=200) > 0).astype(np.int64)


class Minima(unittest.TestCase):
    def test_rosenbrock(self) -> None:
        for start in ([-1.2, 1.0], [0.0] * 10, [-1.2, 1.0] * 10):
            w = ad.Parameter(np.array(start))
            found = optim.LBFGS([w], iterations=200).solve(rosenbrock(w))
            np.testing.assert_allclose(w.asnumpy(), 1, atol=1e-6)
            self.assertLess(found.gradient, 1e-7)

    @needs("scipy", "photos")
    def test_rosenbrock_takes_about_as_many_evaluations_as_scipys(self) -> None:
        from scipy import optimize

        start = np.array([-1.2, 1.0] * 10)
        w = ad.Parameter(start)
        found = optim.LBFGS([w], iterations=500).solve(rosenbrock(w))
        theirs = optimize.minimize(
            optimize.rosen, start, jac=optimize.rosen_der, method="L-BFGS-B",
            options={"gtol": 1e-7, "ftol": 0, "maxcor": 10},
        )  # fmt: skip
        np.testing.assert_allclose(w.asnumpy(), theirs.x, atol=1e-6)
        self.assertLess(found.evaluations, 1.5 * theirs.nfev)

    @needs("scipy", "photos")
    def test_logistic_regression_is_scipys(self) -> None:
        from scipy import optimize

        x, labels = separable()
        signs = 2.0 * labels - 1

        def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
            margins = signs * (x @ w)
            grad = x.T @ (-signs / (1 + np.exp(margins))) / len(x) + 0.02 * w
            return np.logaddexp(0, -margins).mean() + 0.01 * w @ w, grad

        theirs = optimize.minimize(loss, np.zeros(5), jac=True, method="L-BFGS-B",
                                   options={"gtol": 1e-9, "ftol": 0})  # fmt: skip
        w = ad.Parameter(np.zeros(5))
        given, sign = ad.Variable("x"), ad.Variable("sign")
        mean = F.softplus(-sign * (given @ w)).mean() + 0.01 * (w * w).sum()
        optimizer = optim.LBFGS(w, iterations=100, gradient_tolerance=1e-9)
        found = optimizer.solve(mean, {given: x, sign: signs})
        self.assertAlmostEqual(found.loss, theirs.fun, places=12)
        np.testing.assert_allclose(w.asnumpy(), theirs.x, atol=1e-7)

    def test_a_quadratic_of_as_many_pairs_as_elements_is_solved_in_few_iterations(self) -> None:
        rng = np.random.default_rng(0)
        root = rng.normal(size=(6, 6))
        matrix, b = root @ root.T + np.eye(6), rng.normal(size=6)
        w = ad.Parameter(np.zeros(6))
        loss = 0.5 * (w * (ad.constant(matrix) @ w)).sum() - (w * ad.constant(b)).sum()
        found = optim.LBFGS(w, iterations=40).solve(loss)
        np.testing.assert_allclose(w.asnumpy(), np.linalg.solve(matrix, b), atol=1e-7)
        self.assertLess(found.iterations, 20)


class Tensors:
    ctx: object

    def test_a_network_by_closures_and_by_a_node(self) -> None:
        x, labels = (part[:60] for part in separable())
        x = x.astype(np.float32)
        losses = []
        for eager in (True, False):
            model = nn.MLP((5, 4, 2), seed=0)
            model.to(self.ctx)
            optimizer = optim.LBFGS(model.parameters(), iterations=15)
            if eager:
                device = self.ctx or "numpy"
                given, wanted = dl.tensor(x, device=device), dl.tensor(labels, device=device)

                def closure(model=model, given=given, wanted=wanted):
                    loss = F.cross_entropy(model(given), wanted)
                    loss.backward()
                    return loss

                found = optimizer.step(closure)
            else:
                node, label = ad.Variable("x", (60, 5)), ad.Variable("y", (60,), np.int64)
                mean = F.cross_entropy(model(node), label)
                found = optimizer.solve(mean, {node: x, label: labels})
            losses.append(found.loss)
        self.assertLess(losses[0], 0.25)
        # Rounding grows over iterations: both end in the same valley, not in the same bits.
        self.assertAlmostEqual(*losses, delta=0.02)


class NumpyTensors(Tensors, unittest.TestCase):
    ctx = None


CpuTensors, GpuTensors = on_native_devices(Tensors)


class Search(unittest.TestCase):
    def test_the_conditions_hold(self) -> None:
        functions = (
            (lambda a: (a - 5) ** 2, lambda a: 2 * (a - 5)),
            (lambda a: np.cos(a) + 0.05 * a, lambda a: 0.05 - np.sin(a)),
            (lambda a: -a / (a * a + 2), lambda a: (a * a - 2) / (a * a + 2) ** 2),
            (lambda a: np.log(4 - a) if a < 4 else np.nan, lambda a: -1 / (4 - a)),
            (lambda a: (a - 1) ** 2 if a < 2 else np.inf, lambda a: 2 * (a - 1)),
        )
        for k, (value, slope) in enumerate(functions):
            start = Point(0.0, value(0.1), slope(0.1), None)
            for first in (1e-3, 0.1, 1.0, 10.0, 100.0):
                evaluated = []

                def at(a: float, value=value, slope=slope, evaluated=evaluated) -> Point:
                    evaluated.append(a)
                    return Point(a, value(a + 0.1), slope(a + 0.1), None)

                with self.subTest(function=k, first=first), np.errstate(all="ignore"):
                    found = search(at, start, first, 40)
                    assert found is not None
                    self.assertLessEqual(len(evaluated), 40)
                    bound = start.loss + DECREASE * found.step * start.slope
                    self.assertLessEqual(found.loss, bound)
                    if k != 3:  # whose slope only gets steeper up to its end
                        self.assertLessEqual(abs(found.slope), -CURVATURE * start.slope)

    def test_none_where_nothing_is_lower(self) -> None:
        found = search(lambda a: Point(a, 1 + a, 1.0, None), Point(0.0, 1.0, -1e-9, None), 1.0, 9)
        self.assertIsNone(found)


class Faults(unittest.TestCase):
    def test_a_loss_that_is_nan_leaves_the_parameters(self) -> None:
        w = ad.Parameter(np.array([-1.0, 2.0]))
        with self.assertRaisesRegex(DivergedError, "the loss is nan where it begins"):
            with np.errstate(all="ignore"):
                optim.LBFGS(w).solve(F.log(w).sum())
        np.testing.assert_array_equal(w.asnumpy(), [-1, 2])

    def test_nan_on_the_way_is_too_far(self) -> None:
        w = ad.Parameter(np.array([1e-3]))
        with np.errstate(all="ignore"):
            optim.LBFGS(w, iterations=50).solve((w - F.log(w)).sum())
        np.testing.assert_allclose(w.asnumpy(), 1, atol=1e-6)

    def test_what_is_refused(self) -> None:
        w = ad.Parameter(np.zeros(2, np.float32))
        for options in (dict(lr=0), dict(iterations=0), dict(history=0), dict(change_tolerance=-1)):
            with self.assertRaisesRegex(GraphError, "LBFGS: expected Parameters, lr > 0"):
                optim.LBFGS(w, **options)
        with self.assertRaisesRegex(GraphError, "expected Parameters of floats"):
            optim.LBFGS([ad.Parameter(np.zeros(2, np.int64))])
        with self.assertRaisesRegex(GraphError, "the closure calls backward"):
            optim.LBFGS(w).step(lambda: dl.tensor(1.0))


class State(unittest.TestCase):
    def test_a_run_in_parts_goes_on_with_its_pairs(self) -> None:
        w, v = (ad.Parameter(np.array([-1.2, 1.0])) for _ in range(2))
        first = optim.LBFGS(w, iterations=7)
        first.solve(rosenbrock(w))
        v.set(w.asnumpy())
        second = optim.LBFGS(v, iterations=7)
        second.load_state_dict(first.state_dict())
        self.assertEqual(first.state_dict()["steps"].shape, (7, 2))
        for optimizer, p in ((first, w), (second, v)):
            optimizer.solve(rosenbrock(p))
        np.testing.assert_array_equal(w.asnumpy(), v.asnumpy())
        with self.assertRaisesRegex(DataError, r"expected steps and changes \(pairs, 3\)"):
            optim.LBFGS(ad.Parameter(np.zeros(3))).load_state_dict(first.state_dict())


if __name__ == "__main__":
    unittest.main()
