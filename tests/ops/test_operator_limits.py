"""Limits that the table in samples.py cannot state: bad labels, dtypes of mixed use, the largest
arrays.
"""

from __future__ import annotations

import os
import unittest
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim
from dlsys.errors import DlsysError
from dlsys.runtime.device import Context
from support.devices import not_emulated, on_native_devices, require

LABEL_DTYPES = ("int32", "int64", "uint8")
PAST_2_GIB = 2**29 + 3  # elements of float32


class Limits:
    ctx: Context | None = None

    def run_nodes(self, nodes: list[ad.Node], feeds: dict[ad.Node, Any]) -> list[np.ndarray]:
        return ad.Executor(nodes, self.ctx).run(feeds, convert_to_numpy_ret_vals=True)

    def test_relu_at_zero_and_nan(self) -> None:
        x = ad.Variable("x")
        y = ad.relu_op(x)
        values = np.array([np.nan, 0, -0.0, -1, 2, np.inf, -np.inf], np.float32)
        output, gradient = self.run_nodes([y, *ad.gradients(y, [x])], {x: values})
        np.testing.assert_array_equal(output, [np.nan, 0, 0, 0, 2, np.inf, 0])
        np.testing.assert_array_equal(gradient[1:], [0, 0, 0, 1, 1, 0])

    def test_losses_of_extreme_logits_are_finite(self) -> None:
        logits = np.array([[1e4, -1e4, 0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]], np.float32)
        x, labels = ad.Variable("x"), ad.Variable("labels", dtype="int32")
        dense = ad.Variable("dense")
        losses = [
            ad.softmax_cross_entropy(x, labels),
            ad.softmax_cross_entropy(x, dense),
            ad.softmaxcrossentropy_op(x, dense),
        ]
        nodes = [ad.softmax_op(x), ad.log_softmax_op(x), *losses]
        nodes += [ad.gradients(loss, [x])[0] for loss in losses]
        feeds = {x: logits, labels: np.array([1, 0, 2], np.int32), dense: np.eye(3)[[1, 0, 2]]}
        results = self.run_nodes(nodes, feeds)
        self.assertTrue(all(np.isfinite(result).all() for result in results))
        np.testing.assert_allclose(results[2], (2e4 + 2 * np.log(3)) / 3, rtol=1e-6)

    def test_integer_labels_of_every_dtype(self) -> None:
        rng = np.random.default_rng(1)
        logits = rng.normal(size=(6, 5)).astype(np.float32)
        classes = np.array([4, 0, 1, 2, 3, 4])
        x, dense = ad.Variable("x"), ad.Variable("dense")
        loss = ad.softmax_cross_entropy(x, dense)
        expected = self.run_nodes(
            [loss, *ad.gradients(loss, [x])], {x: logits, dense: np.eye(5)[classes]}
        )
        for dtype in LABEL_DTYPES:
            with self.subTest(dtype=dtype):
                labels = ad.Variable("labels", dtype=dtype)
                loss = ad.softmax_cross_entropy(x, labels)
                feeds = {x: logits, labels: classes.astype(dtype)}
                results = self.run_nodes([loss, *ad.gradients(loss, [x])], feeds)
                for result, wanted in zip(results, expected):
                    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-7)

    def test_labels_out_of_range(self) -> None:
        for dtype in LABEL_DTYPES:
            for bad in (5, 255) if dtype == "uint8" else (5, -1, 2**31 - 1):
                with self.subTest(dtype=dtype, label=bad):
                    self.train_with_a_bad_label(dtype, bad)

    def train_with_a_bad_label(self, dtype: str, bad: int) -> None:
        """A step that fails changes no Parameter; the next one works."""
        w = ad.Parameter(np.ones((3, 5), np.float32), name="w")
        x, labels = ad.Variable("x"), ad.Variable("labels", dtype=dtype)
        loss = ad.softmax_cross_entropy(ad.matmul_op(x, w), labels)
        step = ad.Executor([loss, optim.SGD(lr=0.1, momentum=0.9).minimize(loss, [w])], self.ctx)
        good = np.array([0, 1, 4, 2], dtype)
        wrong = good.copy()
        wrong[2] = bad
        batch = np.arange(12, dtype=np.float32).reshape(4, 3)
        step.run({x: batch, labels: good})
        before = w.asnumpy()
        with self.assertRaisesRegex(DlsysError, rf"label {bad} .*(there are|one of the) 5\b"):
            step.run({x: batch, labels: wrong})
        np.testing.assert_array_equal(w.asnumpy(), before)
        step.run({x: batch, labels: good})
        self.assertTrue((w.asnumpy() != before).any())

    def test_arithmetic_keeps_values_that_the_dtype_cannot_hold(self) -> None:
        """On numpy; native devices compute in float32."""
        small = np.array([1, 2, 200], np.uint8)
        truth = np.array([True, False, True])
        x, y = ad.Variable("x", dtype="uint8"), ad.Variable("y", dtype="bool")
        nodes = [x - 1, x + 300, x**-1, ad.exp_op(x) / ad.exp_op(x), y + y, -y, y * 3]
        results = ad.Executor(nodes).run({x: small, y: truth})
        wide = small.astype(np.int64)
        ones = truth.astype(np.int64)
        expected = [wide - 1, wide + 300, 1 / wide, np.ones(3), 2 * ones, -ones, ones * 3]
        for result, wanted in zip(results, expected):
            np.testing.assert_array_equal(result, wanted)

    def test_gradients_stop_at_integers(self) -> None:
        x = ad.Variable("x", (3,), np.float32)
        y = x * 2 + ad.cast_op(ad.cast_op(x, "int32"), "float32") * 100
        [gradient] = self.run_nodes(
            ad.gradients(y, [x]), {x: np.array([0.5, 1.5, -2.5], np.float32)}
        )
        np.testing.assert_array_equal(gradient, [2, 2, 2])

    def test_a_constant_that_is_set_later_counts_from_the_next_run(self) -> None:
        x = ad.Variable("x")
        shifted = x + 0  # which a plan leaves out
        executor = ad.Executor([ad.exp_op(shifted * 2)], self.ctx)
        feeds = {x: np.zeros(2, np.float32)}
        for constant in (0, 1, -1):
            shifted.const_attr = constant
            result = executor.run(feeds, convert_to_numpy_ret_vals=True)[0]
            np.testing.assert_allclose(result, np.exp([2.0 * constant] * 2), rtol=1e-6)

    def test_a_constant_of_another_graph_leaves_the_plans(self) -> None:
        x = ad.Variable("x")
        executor = ad.Executor([x + 1], self.ctx)
        executor.run({x: np.zeros(2, np.float32)})
        (ad.Variable("other") + 1).const_attr = 2
        with mock.patch.object(executor, "_make_plan", side_effect=AssertionError("planned anew")):
            executor.run({x: np.zeros(2, np.float32)})


class Accumulation:
    """Products and running sums are carried in double."""

    ctx: Context | None = None

    def products(self, x: np.ndarray, axis: int) -> list[np.ndarray]:
        """The products of x over an axis, and their gradient."""
        variable = ad.Variable("x")
        y = ad.prod_op(variable, axis=axis)
        executor = ad.Executor([y, *ad.gradients(y, [variable])], self.ctx)
        return executor.run({variable: x}, convert_to_numpy_ret_vals=True)

    def test_many_factors_do_not_drift(self) -> None:
        rng = np.random.default_rng(5)
        for shape, axis in (((1, 100_000), 1), ((100_000, 3), 0), ((4, 30), 1), ((300, 70), 0)):
            with self.subTest(shape=shape, axis=axis):
                x = (1 + 1e-2 * rng.standard_normal(shape)).astype(np.float32)
                exact = np.prod(x.astype(np.float64), axis=axis, keepdims=True)
                product, gradient = self.products(x, axis)
                np.testing.assert_allclose(product, exact.squeeze(axis), rtol=1.2e-7)
                np.testing.assert_allclose(gradient, exact / x, rtol=4e-7)

    def test_running_sums_do_not_drift(self) -> None:
        x = np.random.default_rng(6).random((100_000, 3), np.float32)
        variable = ad.Variable("x")
        executor = ad.Executor([ad.cumsum_op(variable, axis=0)], self.ctx)
        result = executor.run({variable: x}, convert_to_numpy_ret_vals=True)[0]
        np.testing.assert_allclose(result, np.cumsum(x, axis=0, dtype=np.float64), rtol=1.2e-7)

    def test_what_overflows_on_the_way_may_come_back(self) -> None:
        for factors in ([1e30, 1e30, 1e-30, 1e-30], [1e-30, 1e-30, 1e30, 1e30], [-1e30, 1e30, 0]):
            for copies in (1, 100):
                with self.subTest(factors=factors, copies=copies):
                    ones = np.ones((copies, 2), np.float32)
                    x = np.concatenate([np.array([factors] * 2, np.float32).T, ones])
                    exact = [
                        np.prod(np.delete(x, k, 0).astype(np.float64), 0) for k in range(len(x))
                    ]
                    product, gradient = self.products(x, 0)
                    np.testing.assert_allclose(product, exact[0] * x[0], rtol=1.2e-7)
                    with np.errstate(over="ignore"):
                        np.testing.assert_allclose(gradient, np.float32(exact), rtol=2.4e-7)


class LargeArrays:
    """More than 2**31 bytes: an offset or a size in 32 bits would miss elements or fault."""

    ctx: Context

    def test_elementwise_and_sum_past_2_gib(self) -> None:
        host = np.resize(np.arange(251, dtype=np.float32), PAST_2_GIB)
        x = ad.Variable("x")
        y = x + 0.5
        fed = ndarray.array(host, self.ctx)
        output, total = ad.Executor([y, ad.sum_op(y)], self.ctx).run({x: fed})
        expected = host.sum(dtype=np.float64) + 0.5 * host.size
        self.assertLess(abs(float(total) - expected), 1e-5 * expected)
        result = output.asnumpy()
        result -= host
        self.assertEqual((result.min(), result.max()), (0.5, 0.5))

    def test_fill_past_2_31_elements(self) -> None:
        [filled] = ad.Executor([ad.full_op((2**31 + 5,), 7, "uint8")], self.ctx).run()
        result = filled.asnumpy()
        self.assertEqual((result.min(), result.max()), (7, 7))


class NumpyLimits(Limits, unittest.TestCase):
    pass


@require(ndarray.cpu(0))
class CpuLimits(Limits, unittest.TestCase):
    ctx = ndarray.cpu(0)


@require(ndarray.gpu(0))
class GpuLimits(Limits, unittest.TestCase):
    ctx = ndarray.gpu(0)

    def train_with_a_bad_label(self, dtype: str, bad: int) -> None:
        """Kernels do not stop for a label: it is told later, and its row alone becomes NaN."""
        x, labels = ad.Variable("x"), ad.Variable("labels", dtype=dtype)
        rows = ad.softmax_cross_entropy(x, labels, reduction="none")
        logits = np.arange(20, dtype=np.float32).reshape(4, 5)
        feeds = {x: logits, labels: np.array([0, 1, bad, 2]).astype(dtype)}
        made = ad.Executor([rows, *ad.gradients(rows, [x])], self.ctx).run(feeds)
        with self.assertRaisesRegex(DlsysError, rf"label {bad} at position 2 .*there are 5\b"):
            made[0].asnumpy()
        loss, gradient = (array.asnumpy() for array in made)
        np.testing.assert_array_equal(np.isnan(loss), [False, False, True, False])
        np.testing.assert_array_equal(np.isnan(gradient).all(axis=1), [False, False, True, False])
        np.testing.assert_array_equal(np.isnan(gradient).any(axis=1), [False, False, True, False])


class NumpyAccumulation(Accumulation, unittest.TestCase):
    pass


CpuAccumulation, GpuAccumulation = on_native_devices(Accumulation)


@unittest.skipUnless(os.environ.get("DLSYS_TEST_LARGE") == "1", "DLSYS_TEST_LARGE=1 runs it, 10 GB")
@require(ndarray.cpu(0))
class CpuLargeArrays(LargeArrays, unittest.TestCase):
    ctx = ndarray.cpu(0)


@not_emulated
@require(ndarray.gpu(0))
class GpuLargeArrays(LargeArrays, unittest.TestCase):
    ctx = ndarray.gpu(0)
