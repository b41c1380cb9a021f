"""Gradients as graphs: known values, orders, shapes, and what has none."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import GraphError
from dlsys.runtime.device import Context
from support.devices import on_native_devices
from support.graphs import evaluate, here, two_fold


class Gradients:
    """Gradients whose values are known by hand, on one device."""

    ctx: Context | None

    def check(self, fetches, feeds, expected):
        values = evaluate(fetches, feeds, self.ctx)
        for value, wanted in zip(values, expected, strict=True):
            self.assertEqual(value.shape, np.shape(wanted))
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)

    def setUp(self):
        self.x = ad.Variable("x")
        self.host = np.array([0.5, -1.0, 2.0], np.float32)

    def test_a_node_used_many_times(self):
        x = self.x
        y = x * x + x * 3 + x
        self.check(ad.gradients(y, [x]), {x: self.host}, [2 * self.host + 4])

    def test_diamonds_do_not_count_paths_twice(self):
        y = self.x
        for _ in range(20):
            y = y * 0.5 + y * 0.5
        self.check(ad.gradients(y, [self.x]), {self.x: self.host}, [np.ones(3)])

    def test_an_unrelated_node_gets_zeros_of_its_shape(self):
        other = ad.Variable("other")
        w = ad.Parameter(np.ones((2, 4), np.float32))
        grads = ad.gradients(self.x * 2, [other, self.x, w])
        feeds = {self.x: self.host, other: np.ones((3, 2), np.float32)}
        self.check(grads, feeds, [np.zeros((3, 2)), np.full(3, 2), np.zeros((2, 4))])

    def test_with_respect_to_itself_and_to_intermediate_nodes(self):
        x = self.x
        h = x * 3
        y = h * h
        host = self.host
        grads = ad.gradients(y, [y, h, x, h])
        self.check(grads, {x: host}, [np.ones(3), 6 * host, 18 * host, 6 * host])

    def test_third_derivative_of_a_cube(self):
        x = self.x
        (first,) = ad.gradients(x**3, [x])
        (second,) = ad.gradients(first, [x])
        (third,) = ad.gradients(second, [x])
        (fourth,) = ad.gradients(third, [x])
        host = self.host
        wanted = [3 * host**2, 6 * host, np.full(3, 6), np.zeros(3)]
        self.check([first, second, third, fourth], {x: host}, wanted)

    def test_second_derivative_through_transcendentals(self):
        x, host = self.x, self.host
        (first,) = ad.gradients(ad.tanh_op(x) * ad.exp_op(x), [x])
        (second,) = ad.gradients(first, [x])
        t, e = np.tanh(host), np.exp(host)
        s = 1 - t * t
        self.check([first, second], {x: host}, [e * (s + t), e * (2 * s + t - 2 * t * s)])

    def test_hessian_vector_product(self):
        x, v = self.x, ad.Variable("v")
        (grad,) = ad.gradients(ad.sum_op(x * x * x), [x])
        (product,) = ad.gradients(ad.sum_op(grad * v), [x])
        direction = np.array([1.0, 2.0, 3.0], np.float32)
        self.check([product], {x: self.host, v: direction}, [6 * self.host * direction])

    def test_broadcasting_is_undone(self):
        shapes = [((3,), (2, 3)), ((2, 1), (2, 3)), ((1, 3), (2, 1)), ((), (2, 3)), ((2, 3), ())]
        for left, right in shapes:
            a, b = ad.Variable("a"), ad.Variable("b")
            rng = np.random.default_rng(0)
            host_a, host_b = rng.random(left, np.float32), rng.random(right, np.float32)
            ones = np.ones(np.broadcast_shapes(left, right), np.float32)
            with self.subTest(left=left, right=right):
                wanted = [_unbroadcast(ones * host_b, left), _unbroadcast(ones * host_a, right)]
                self.check(ad.gradients(a * b, [a, b]), {a: host_a, b: host_b}, wanted)

    def test_every_transpose_of_a_product(self):
        rng = np.random.default_rng(0)
        for trans_A in (False, True):
            for trans_B in (False, True):
                a, b, dy = ad.Variable("a"), ad.Variable("b"), ad.Variable("dy")
                host_a, host_b = rng.random((2, 3), np.float32), rng.random((3, 4), np.float32)
                host_dy = rng.random((2, 4), np.float32)
                y = ad.matmul_op(a, b, trans_A=trans_A, trans_B=trans_B)
                da, db = host_dy @ host_b.T, host_a.T @ host_dy
                feeds = {
                    a: host_a.T if trans_A else host_a,
                    b: host_b.T if trans_B else host_b,
                    dy: host_dy,
                }
                wanted = [da.T if trans_A else da, db.T if trans_B else db]
                with self.subTest(trans_A=trans_A, trans_B=trans_B):
                    self.check(ad.gradients(ad.sum_op(y * dy), [a, b]), feeds, wanted)

    def test_several_outputs(self):
        x, host = self.x, self.host
        double, square = two_fold(x)
        grads = [
            *ad.gradients(double * square, [x]),
            *ad.gradients(square, [x]),
            *ad.gradients(double, [x, square]),
            *ad.gradients(square + square * x, [square]),
        ]
        wanted = [6 * host**2, 2 * host, np.full(3, 2), np.zeros(3), 1 + host]
        self.check([double, square, *grads], {x: host}, [2 * host, host**2, *wanted])

    def test_second_order_through_several_outputs(self):
        x = self.x
        _, square = two_fold(x * 2)
        (first,) = ad.gradients(square, [x])
        (second,) = ad.gradients(first, [x])
        self.check([first, second], {x: self.host}, [8 * self.host, np.full(3, 8)])

    def test_relu_at_zero_has_no_slope(self):
        y = ad.relu_op(self.x)
        feeds = {self.x: np.array([-1, 0, 1], np.float32)}
        self.check(ad.gradients(y, [self.x]), feeds, [[0, 0, 1]])


class NumpyGradients(Gradients, unittest.TestCase):
    ctx = None


CpuGradients, GpuGradients = on_native_devices(Gradients)


def _unbroadcast(array, shape):
    lead = array.ndim - len(shape)
    array = array.sum(axis=tuple(range(lead)))
    axes = tuple(k for k, extent in enumerate(shape) if extent == 1)
    return array.sum(axis=axes, keepdims=True)


class GradientErrors(unittest.TestCase):
    def test_an_operator_without_a_gradient(self):
        class HardOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

        x = ad.Variable("x")
        y, line = HardOp()(x), here()
        with self.assertRaises(GraphError) as caught:
            ad.gradients(y * 2, [x])
        self.assertEqual(str(caught.exception), f"operator hard has no gradient [{line}]")
        self.assertEqual(len(ad.gradients(y * 2, [y])), 1)

    def test_an_operator_off_the_way_needs_no_gradient(self):
        class HardOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

            def compute(self, node, input_vals, output_val, use_numpy=True):
                output_val[:] = np.sign(input_vals[0])

        x, z = ad.Variable("x"), ad.Variable("z")
        grads = ad.gradients(x * HardOp()(z), [x])
        feeds = {x: np.ones(2), z: np.array([-3.0, 5.0])}
        np.testing.assert_array_equal(evaluate(grads, feeds)[0], [-1, 1])

    def test_wrong_returns_of_a_gradient_are_refused(self):
        x = ad.Variable("x")
        for returned in ([], [x, x], [3.0], x, None):

            class WrongOp(ad.Op):
                value = returned

                def infer_shape(self, node, input_shapes):
                    return input_shapes[0]

                def gradient(self, node, output_grad):
                    return self.value

            with self.subTest(returned=returned), self.assertRaisesRegex(GraphError, "wrong"):
                ad.gradients(WrongOp()(x), [x])

    def test_arguments_that_are_no_values(self):
        x = ad.Variable("x", shape=(2,), dtype=np.float32)
        pair = two_fold(x)
        p = ad.Parameter(np.zeros(2, np.float32))
        group = ad.group_op(ad.assign_op(p, p + 1))
        cases = [(pair, [x]), (pair[0], [pair]), (3, [x]), (x, ["x"]), (group, [p]), (x, [group])]
        for output, wrt in cases:
            with self.subTest(output=output, wrt=wrt), self.assertRaises(GraphError):
                ad.gradients(output, wrt)
