"""Initializers: moments, bounds, orthogonality, fans, and the same numbers from the same seed."""

from __future__ import annotations

import math
import unittest
from functools import partial

import numpy as np

from dlsys import init
from dlsys.errors import GraphError, ShapeError

MATRIX, FILTER = (300, 200), (64, 32, 3, 3)  # fans (200, 300) and (288, 576)
SCALED = {  # name: variance · fan, as a function of (fan in, fan out)
    "xavier_uniform": lambda i, o: 2 / (i + o),
    "xavier_normal": lambda i, o: 2 / (i + o),
    "he_uniform": lambda i, o: 2 / i,
    "he_normal": lambda i, o: 2 / i,
    "lecun_uniform": lambda i, o: 1 / i,
    "lecun_normal": lambda i, o: 1 / i,
}


class Initializers(unittest.TestCase):
    def moments(self, values: np.ndarray, mean: float, variance: float) -> None:
        """Within five deviations of the estimates; the fourth moment is at most a normal's."""
        values, n = values.astype(np.float64), values.size
        self.assertLess(abs(values.mean() - mean), 5 * math.sqrt(variance / n))
        found = np.square(values - mean).mean()
        self.assertLess(abs(found - variance), 5 * variance * math.sqrt(2 / n))

    def test_variance_is_scaled_by_the_fans(self) -> None:
        for name, variance in SCALED.items():
            for shape, fans in ((MATRIX, (200, 300)), (FILTER, (288, 576))):
                with self.subTest(name=name, shape=shape):
                    values = getattr(init, name)(shape, 0)
                    self.assertEqual((values.shape, values.dtype), (shape, np.float32))
                    self.moments(values, 0, variance(*fans))

    def test_uniform_ones_fill_their_bounds(self) -> None:
        for name in ("xavier_uniform", "he_uniform", "lecun_uniform"):
            bound = math.sqrt(3 * SCALED[name](200, 300))
            largest = np.abs(getattr(init, name)(MATRIX, 1)).max()
            self.assertLessEqual(largest, np.float32(bound), name)
            self.assertGreater(largest, 0.999 * bound, name)

    def test_normal_ones_are_normal(self) -> None:
        for name in ("xavier_normal", "he_normal", "lecun_normal"):
            z = np.sort(getattr(init, name)(MATRIX, 2).reshape(-1))
            z = z / math.sqrt(SCALED[name](200, 300))
            for value in (-2, -1, 0, 0.5, 1.5):
                below = np.searchsorted(z, value) / z.size
                expected = 0.5 * math.erfc(-value / math.sqrt(2))
                self.assertAlmostEqual(below, expected, delta=0.01, msg=name)

    def test_fan_modes_and_gain(self) -> None:
        for draw in (init.he_normal, init.he_uniform):
            for fan, count in (("in", 288), ("out", 576), ("average", 432)):
                self.moments(draw(FILTER, 3, fan=fan, gain=3.0), 0, 9 / count)
            with self.assertRaisesRegex(GraphError, "fan must be in, out or average, got 'fan_in'"):
                draw(FILTER, fan="fan_in")
        self.moments(init.xavier_normal(FILTER, 3, gain=0.5), 0, 0.25 / 432)

    def test_fans(self) -> None:
        self.assertEqual(init.fans((300, 200)), (200, 300))
        self.assertEqual(init.fans((64, 32, 3, 5)), (480, 960))
        self.assertEqual(init.fans((8, 1, 3, 3))[0], 9)  # a depthwise filter
        for shape in ((), (5,)):
            with self.assertRaisesRegex(ShapeError, "has no fans"):
                init.he_normal(shape)

    def test_gains_keep_the_deviation(self) -> None:
        z = np.random.default_rng(0).standard_normal(1_000_000)
        for name, function in (
            ("relu", lambda v: np.maximum(v, 0)),
            ("leaky_relu", lambda v: np.where(v > 0, v, 0.01 * v)),
            ("linear", lambda v: v),
        ):
            power = np.square(function(init.gain(name) * z)).mean()
            self.assertAlmostEqual(power, 1, delta=0.01, msg=name)
        slope = init.gain("leaky_relu", 0.5)
        self.assertAlmostEqual(slope, math.sqrt(2 / 1.25))
        self.assertEqual((init.gain("tanh"), init.gain("selu")), (5 / 3, 0.75))
        with self.assertRaisesRegex(GraphError, "'gelu'"):
            init.gain("gelu")

    def test_truncated_normal(self) -> None:
        values = init.truncated_normal((100_000,), 4, mean=1, deviation=0.5)
        self.assertLessEqual(np.abs(values - 1).max(), 1)
        self.assertGreater(np.abs(values - 1).max(), 0.999)
        self.moments(values, 1, (0.5 * 0.8796256610342398) ** 2)
        one_sided = init.truncated_normal((100_000,), 5, low=0, high=math.inf)
        self.assertGreaterEqual(one_sided.min(), 0)
        self.moments(one_sided, math.sqrt(2 / math.pi), 1 - 2 / math.pi)
        far = init.truncated_normal((1000,), 6, low=9, high=math.inf)
        near = init.truncated_normal((1000,), 6, low=-math.inf, high=-9)
        np.testing.assert_array_equal(far, -near)
        self.assertAlmostEqual(far.mean(), 9 + 1 / 9, delta=0.02)  # the tail is exponential there
        for wrong in ({"low": 2.0}, {"deviation": -1.0}, {"high": -3.0}):
            with self.assertRaises(GraphError):
                init.truncated_normal((2,), **wrong)

    def test_orthogonal(self) -> None:
        for shape in ((20, 30), (30, 20), (16, 16), (8, 3, 3, 3), (40, 2, 3, 3)):
            with self.subTest(shape=shape):
                w = init.orthogonal(shape, 6, gain=2.0)
                self.assertEqual((w.shape, w.dtype), (shape, np.float32))
                m = w.reshape(shape[0], -1).astype(np.float64)
                product = m @ m.T if m.shape[0] <= m.shape[1] else m.T @ m
                np.testing.assert_allclose(product, 4 * np.eye(len(product)), atol=1e-6)

    def test_orthogonal_favors_no_direction(self) -> None:
        """The first entries of many rotations of a plane are as often negative as positive."""
        rng = np.random.default_rng(7)
        corners = np.array([init.orthogonal((2, 2), rng)[0, 0] for _ in range(2000)])
        self.assertLess(abs((corners > 0).mean() - 0.5), 0.06)
        self.assertLess(abs(np.square(corners).mean() - 0.5), 0.06)

    def test_constants(self) -> None:
        for draw, value in (
            (init.zeros, 0),
            (init.ones, 1),
            (partial(init.constant, value=-2.5), -2.5),
        ):
            made = draw((2, 3), np.random.default_rng(0))
            np.testing.assert_array_equal(made, np.full((2, 3), value, np.float32))
            self.assertEqual(made.dtype, np.float32)

    def test_plain_distributions(self) -> None:
        self.moments(init.normal((50_000,), 8, mean=3, deviation=2), 3, 4)
        values = init.uniform((50_000,), 9, low=2, high=5)
        self.moments(values, 3.5, 0.75)
        self.assertTrue(2 <= values.min() < 2.01 and 4.99 < values.max() <= 5)
        for wrong in (partial(init.normal, deviation=-1.0), partial(init.uniform, low=2.0)):
            with self.assertRaises(GraphError):
                wrong((2,))


class Seeds(unittest.TestCase):
    names = (*SCALED, "orthogonal", "truncated_normal", "normal", "uniform")

    def test_the_same_seed_gives_the_same_numbers(self) -> None:
        for name in self.names:
            draw = getattr(init, name)
            with self.subTest(name=name):
                first = draw((6, 5), 11)
                np.testing.assert_array_equal(draw((6, 5), np.random.default_rng(11)), first)
                self.assertTrue((draw((6, 5), 12) != first).any())

    def test_one_generator_goes_on(self) -> None:
        rng = np.random.default_rng(0)
        self.assertTrue((init.normal((4,), rng) != init.normal((4,), rng)).all())

    def test_the_common_generator(self) -> None:
        self.addCleanup(init.seed, 0)
        init.seed(5)
        first, second = init.normal((4,)), init.normal((4,))
        self.assertTrue((first != second).all())
        init.seed(5)
        np.testing.assert_array_equal(init.normal((4,)), first)
        np.testing.assert_array_equal(init.normal((4,), 5), first)

    def test_numbers_are_those_of_the_day_they_were_written(self) -> None:
        """So that a recorded seed still names the same weights."""
        found = init.he_normal((2, 2), 0).reshape(-1)
        np.testing.assert_allclose(
            found, [0.12573022, -0.13210486, 0.64042264, 0.10490012], rtol=1e-6
        )
