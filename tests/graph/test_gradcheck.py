"""The gradient checker, on gradients that are right and on gradients that are wrong."""

from __future__ import annotations

import unittest
from collections.abc import Sequence

import numpy as np

from dlsys import autodiff as ad
from support.gradcheck import check_gradients


def product(point: Sequence[np.ndarray]) -> float:
    """The sum of the squares of A Bᵀ."""
    a, b = point
    return float(((a @ b.T) ** 2).sum())


class GradientChecker(unittest.TestCase):
    def setUp(self) -> None:
        self.rng = np.random.default_rng(7)
        self.point = [self.rng.uniform(-2, 2, (3, 5)), self.rng.uniform(-2, 2, (4, 5))]
        a, b = self.point
        dy = 2 * a @ b.T
        self.right = [dy @ b, dy.T @ a]

    def check(self, gradients: Sequence[np.ndarray], factor: float = 1.0) -> None:
        check_gradients(product, gradients, self.point, self.rng, factor)

    def test_accepts_the_right_gradients(self) -> None:
        self.check(self.right)

    def test_refuses_a_factor_that_is_not_declared(self) -> None:
        scaled = [3 * self.right[0], 3 * self.right[1]]
        self.check(scaled, factor=3)
        with self.assertRaisesRegex(AssertionError, "input 0 of shape"):
            self.check(scaled)

    def test_refuses_a_wrong_sign(self) -> None:
        with self.assertRaisesRegex(AssertionError, "input 1 of shape"):
            self.check([self.right[0], -self.right[1]])

    def test_refuses_one_wrong_element(self) -> None:
        wrong = self.right[1].copy()
        wrong[2, 3] *= 1.001
        with self.assertRaisesRegex(AssertionError, "input 1 of shape"):
            self.check([self.right[0], wrong])

    def test_refuses_nan_and_infinity(self) -> None:
        for value in (np.nan, np.inf):
            wrong = self.right[0].copy()
            wrong[0, 0] = value
            with self.assertRaises(AssertionError):
                self.check([wrong, self.right[1]])

    def test_refuses_another_shape(self) -> None:
        with self.assertRaisesRegex(AssertionError, r"shape \(4, 5\) and its gradient \(5, 4\)"):
            self.check([self.right[0], self.right[1].T])

    def test_refuses_gradients_where_there_is_none(self) -> None:
        x = [self.rng.uniform(-2, 2, 6)]
        check_gradients(lambda point: 1.0, [np.zeros(6)], x, self.rng)
        with self.assertRaises(AssertionError):
            check_gradients(lambda point: 1.0, [np.full(6, 1e-3)], x, self.rng)

    def test_takes_the_rounding_of_terms_that_cancel(self) -> None:
        x = self.rng.uniform(-1, 1, 6)

        def cancelling(point: Sequence[np.ndarray]) -> float:
            return float((1e4 + 1e-7 * point[0].sum()) - 1e4)

        with self.assertRaises(AssertionError):
            check_gradients(cancelling, [np.full(6, 1e-7)], [x], self.rng)
        check_gradients(cancelling, [np.full(6, 1e-7)], [x], self.rng, magnitude=2e4)
        with self.assertRaises(AssertionError):
            check_gradients(cancelling, [np.full(6, 1e-5)], [x], self.rng, magnitude=2e4)

    def test_accepts_empty_inputs(self) -> None:
        check_gradients(lambda point: 0.0, [np.zeros((0, 3))], [np.zeros((0, 3))], self.rng)

    def test_finds_a_wrong_gradient_in_a_graph(self) -> None:
        class WrongCubeOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

            def compute(self, node, input_vals, output_val, use_numpy=True):
                output_val[:] = input_vals[0] ** 3

            def gradient(self, node, output_grad):
                return [output_grad * node.inputs[0] ** 2]  # it lacks the 3

        x = ad.Variable("x")
        y = ad.sum_op(WrongCubeOp()(x))
        values = ad.Executor([y])
        point = [self.rng.uniform(1, 2, (2, 3))]
        gradients = ad.Executor(ad.gradients(y, [x])).run({x: point[0]})
        with self.assertRaises(AssertionError):
            check_gradients(lambda p: values.run({x: p[0]})[0], gradients, point, self.rng)
