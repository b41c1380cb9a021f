"""The twelve kernels of the assignment as plain functions, on every native device."""

from __future__ import annotations

import itertools
import unittest

import numpy as np

from dlsys import gpu_op, ndarray
from dlsys.errors import KernelError, ShapeError
from dlsys.runtime.device import Context
from support.devices import EMULATED, on_native_devices, require

_SHAPES = [(500, 200), (130, 200, 30 if EMULATED else 300), (2000, 300 if EMULATED else 3000)]


def _positive(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(np.float32)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Kernels:
    ctx: Context

    def run_op(self, op, shape, *arguments):
        """What `op` writes into an output that starts out as NaN; arrays travel to the device."""
        out = ndarray.array(np.full(shape, np.nan, np.float32), ctx=self.ctx)
        moved = [
            ndarray.array(x, ctx=self.ctx) if isinstance(x, np.ndarray) else x for x in arguments
        ]
        op(*moved, out)
        return out.asnumpy()

    def close(self, actual, expected):
        self.assertEqual(actual.shape, expected.shape)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)

    def test_array_set(self):
        for shape in _SHAPES:
            arr = ndarray.empty(shape, ctx=self.ctx)
            gpu_op.array_set(arr, 1.5)
            self.close(arr.asnumpy(), np.full(shape, 1.5))
            gpu_op.array_set(arr, 0)
            self.close(arr.asnumpy(), np.zeros(shape))

    def test_broadcast_to(self):
        pairs = [((200, 300), (130, 200, 300)), ((3000,), (2000, 3000)), ((500, 1), (500, 200))]
        for small, large in pairs:
            x = _positive(*small)
            self.close(self.run_op(gpu_op.broadcast_to, large, x), np.broadcast_to(x, large))

    def test_reduce_sum_axis_zero(self):
        for shape in _SHAPES:
            x = _positive(*shape)
            expected = x.sum(axis=0, dtype=np.float64)
            self.close(self.run_op(gpu_op.reduce_sum_axis_zero, shape[1:], x), expected)

    def test_reduce_sum_of_a_vector_has_shape_one(self):
        x = _positive(1000)
        expected = x.sum(dtype=np.float64).reshape(1)
        self.close(self.run_op(gpu_op.reduce_sum_axis_zero, (1,), x), expected)

    def test_elementwise(self):
        for shape in _SHAPES:
            a, b = _positive(*shape), _positive(*shape, seed=1)
            cases = [
                (gpu_op.matrix_elementwise_add, (a, b), a + b),
                (gpu_op.matrix_elementwise_multiply, (a, b), a * b),
                (gpu_op.matrix_elementwise_add_by_const, (a, 2.5), a + np.float32(2.5)),
                (gpu_op.matrix_elementwise_multiply_by_const, (a, 2.5), a * np.float32(2.5)),
            ]
            for op, arguments, expected in cases:
                with self.subTest(op=op.__name__, shape=shape):
                    self.close(self.run_op(op, shape, *arguments), expected)

    def test_elementwise_in_place(self):
        a, b = _positive(70, 30), _positive(70, 30, seed=1)
        device_a, device_b = ndarray.array(a, ctx=self.ctx), ndarray.array(b, ctx=self.ctx)
        gpu_op.matrix_elementwise_add(device_a, device_b, device_a)
        self.close(device_a.asnumpy(), a + b)

    def test_matrix_multiply(self):
        a, b = _positive(500, 700), _positive(700, 1000, seed=1)
        expected = a.astype(np.float64) @ b
        for trans_a, trans_b in itertools.product((False, True), repeat=2):
            given_a = np.ascontiguousarray(a.T) if trans_a else a
            given_b = np.ascontiguousarray(b.T) if trans_b else b
            with self.subTest(trans_a=trans_a, trans_b=trans_b):
                arguments = (given_a, trans_a, given_b, trans_b)
                self.close(self.run_op(gpu_op.matrix_multiply, (500, 1000), *arguments), expected)

    def test_relu_and_its_gradient(self):
        for shape in _SHAPES:
            x = _positive(*shape) - np.float32(1)
            x.flat[0] = 0
            dy = _positive(*shape, seed=1)
            self.close(self.run_op(gpu_op.relu, shape, x), np.maximum(x, 0))
            self.close(self.run_op(gpu_op.relu_gradient, shape, x, dy), dy * (x > 0))

    def test_softmax(self):
        x = _positive(400, 1000)
        self.close(self.run_op(gpu_op.softmax, (400, 1000), x), _softmax(x.astype(np.float64)))

    def test_softmax_cross_entropy(self):
        x = _positive(400, 1000)
        labels = np.eye(1000, dtype=np.float32)[np.arange(400)]
        expected = -np.log(_softmax(x.astype(np.float64)))[np.arange(400), np.arange(400)].mean()
        self.close(self.run_op(gpu_op.softmax_cross_entropy, (1,), x, labels), expected.reshape(1))

    def test_empty_arrays_do_nothing(self):
        self.close(self.run_op(gpu_op.relu, (0, 5), np.ones((0, 5))), np.ones((0, 5)))
        product = self.run_op(
            gpu_op.matrix_multiply, (2, 3), np.ones((2, 0)), False, np.ones((0, 3)), False
        )
        self.close(product, np.zeros((2, 3)))


class Errors:
    ctx: Context

    def arr(self, *shape, dtype=np.float32):
        return ndarray.array(np.ones(shape), ctx=self.ctx, dtype=dtype)

    def refused(self, text, op, *arguments, error=ShapeError):
        """`op` refuses with `text` in its message, leaves the output alone, and others work."""
        out = next((x for x in reversed(arguments) if isinstance(x, ndarray.NDArray)), None)
        before = None if out is None else out.asnumpy()
        with self.assertRaises(error) as caught:
            op(*arguments)
        self.assertIn(text, str(caught.exception))
        if out is not None:
            np.testing.assert_array_equal(out.asnumpy(), before)
        again = self.arr(2, 2)
        gpu_op.matrix_elementwise_add(self.arr(2, 2), self.arr(2, 2), again)
        np.testing.assert_array_equal(again.asnumpy(), np.full((2, 2), 2))

    def test_shapes(self):
        add, multiply = gpu_op.matrix_elementwise_add, gpu_op.matrix_multiply
        a, b = self.arr(2, 3), self.arr(4, 3)
        self.refused("second input has shape (4, 3), expected (2, 3)", add, a, b, self.arr(2, 3))
        self.refused("output has shape (4, 3), expected (2, 3)", add, a, self.arr(2, 3), b)
        self.refused(
            "inner dimensions differ: A (2, 3) and B (4, 3); did you mean trans_B=True?",
            *(multiply, a, False, b, False, self.arr(2, 3)),
        )
        self.refused("output has shape (4, 2)", multiply, a, False, b, True, self.arr(4, 2))
        self.refused(
            "expected two matrices", multiply, a, False, self.arr(3), False, self.arr(2, 1)
        )
        self.refused("does not broadcast", gpu_op.broadcast_to, a, self.arr(5, 3))
        self.refused("expected (3,)", gpu_op.reduce_sum_axis_zero, a, self.arr(2))
        self.refused("at least one axis", gpu_op.softmax, self.arr(), self.arr())
        self.refused("expected (1,)", gpu_op.softmax_cross_entropy, a, self.arr(2, 3), self.arr(2))

    def test_an_output_that_is_an_input(self):
        a = self.arr(3, 3)
        self.refused(
            "the output is also an input",
            gpu_op.matrix_multiply,
            a,
            False,
            self.arr(3, 3),
            False,
            a,
        )

    def test_types_and_dtypes(self):
        host = np.ones((2, 3), np.float32)
        a = self.arr(2, 3)
        self.refused("got ndarray", gpu_op.relu, host, a, error=TypeError)
        self.refused("expected float32, got int32", gpu_op.relu, self.arr(2, 3, dtype=np.int32), a)

    def test_a_kernel_error_names_the_call_and_its_source(self):
        with self.assertRaises(KernelError) as caught:
            ndarray.launch("add", self.ctx, self.arr(2, 3), self.arr(4, 3), self.arr(2, 3))
        text = str(caught.exception)
        self.assertTrue(text.startswith("add: "), text)
        self.assertIn("float32 (2, 3), float32 (4, 3)", text)
        self.assertRegex(text, r"source: \S+:\d+")


CpuKernels, GpuKernels = on_native_devices(Kernels)


@require(ndarray.cpu(0))
class CpuErrors(Errors, unittest.TestCase):
    ctx = ndarray.cpu(0)


@require(ndarray.gpu(0))
class GpuErrors(Errors, unittest.TestCase):
    ctx = ndarray.gpu(0)

    def test_arrays_on_two_devices(self):
        on_cpu = ndarray.array(np.ones((2, 3)))
        self.refused("on two devices: cpu(0) and gpu(0)", gpu_op.relu, on_cpu, self.arr(2, 3))
