"""Normalization beyond its rows: running statistics, what training keeps, accuracy, attributes."""

from __future__ import annotations

import tracemalloc
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim
from dlsys.errors import GraphError, KernelError, ShapeError
from support.devices import on_native_devices, require


def parameters(channels: int) -> list[ad.Parameter]:
    return [
        ad.Parameter(np.full(channels, value, np.float32), name)
        for value, name in ((1, "scale"), (0, "bias"))
    ]


def running(channels: int) -> list[ad.Parameter]:
    return [
        ad.Parameter(np.full(channels, value, np.float32), name, trainable=False)
        for value, name in ((0, "mean"), (1, "variance"))
    ]


class BatchNormalization(unittest.TestCase):
    ctx = None

    def test_a_training_step_updates_the_running_statistics(self) -> None:
        rng = np.random.default_rng(0)
        scale, bias = parameters(3)
        mean, variance = running(3)
        x = ad.Variable("x")
        loss = ad.sum_op(ad.batch_normalization(x, scale, bias, mean, variance, momentum=0.25))
        train = optim.SGD(0.0).minimize(loss, [scale, bias])
        step = ad.Executor([loss, train], self.ctx)
        wanted = [np.zeros(3), np.ones(3)]
        for batch in (4, 7):
            values = rng.normal(2, 3, (batch, 3, 5, 2)).astype(np.float32)
            step.run({x: values})
            exact = values.astype(np.float64)
            new = exact.mean((0, 2, 3)), exact.var((0, 2, 3), ddof=1)
            wanted = [0.75 * old + 0.25 * value for old, value in zip(wanted, new)]
            for state, value in zip((mean, variance), wanted):
                np.testing.assert_allclose(state.asnumpy(), value, rtol=1e-6)

    def test_evaluation_uses_the_running_statistics_and_changes_nothing(self) -> None:
        scale, bias = parameters(2)
        mean, variance = running(2)
        mean.set([1, 2])
        variance.set([4, 9])
        x = ad.Variable("x")
        y = ad.batch_normalization(x, scale, bias, mean, variance, eps=1e-12, training=False)
        self.assertEqual(y.effects, ())
        values = np.arange(6, dtype=np.float32).reshape(3, 2)
        result = ad.Executor([y], self.ctx).run({x: values}, convert_to_numpy_ret_vals=True)[0]
        np.testing.assert_allclose(result, (values - [1, 2]) / [2, 3], rtol=1e-6)
        np.testing.assert_array_equal(mean.asnumpy(), [1, 2])

    def test_a_graph_without_a_training_step_changes_nothing(self) -> None:
        scale, bias = parameters(2)
        x = ad.Variable("x")
        y = ad.batch_normalization_op(x, scale, bias)
        ad.Executor([y], self.ctx).run({x: np.ones((3, 2), np.float32)})
        np.testing.assert_array_equal(y.running_mean.asnumpy(), [0, 0])
        np.testing.assert_array_equal(y.running_variance.asnumpy(), [1, 1])

    def test_the_variance_of_large_numbers_keeps_its_digits(self) -> None:
        rng = np.random.default_rng(1)
        x = ad.Variable("x")
        for shape in ((4000, 2), (3, 2, 70, 71)):
            values = (1e4 + rng.normal(size=shape)).astype(np.float32)
            variance = ad.batch_normalization(x, *parameters(2)).inputs[2]
            result = ad.Executor([variance], self.ctx).run({x: values}, True)[0]
            axes = (0, *range(2, len(shape)))
            np.testing.assert_allclose(result, values.astype(np.float64).var(axes), rtol=1e-4)

    def test_the_variance_of_a_channel_that_begins_far_from_the_rest(self) -> None:
        rng = np.random.default_rng(2)
        x = ad.Variable("x")
        for shape in ((4000, 8), (4000, 3), (3, 2, 70, 71), (40, 8, 7, 7)):
            values = rng.normal(size=shape).astype(np.float32)
            values[0] = 1e6  # sums of deviations from it cancel
            variance = ad.batch_normalization(x, *parameters(shape[1])).inputs[2]
            result = ad.Executor([variance], self.ctx).run({x: values}, True)[0]
            axes = (0, *range(2, len(shape)))
            np.testing.assert_allclose(result, values.astype(np.float64).var(axes), rtol=1e-4)

    def test_one_value_a_channel(self) -> None:
        scale, bias = parameters(3)
        mean, variance = running(3)
        x = ad.Variable("x")
        loss = ad.sum_op(ad.batch_normalization(x, scale, bias, mean, variance))
        train = optim.SGD(0.1).minimize(loss, [scale, bias])
        ad.Executor([loss, train], self.ctx).run({x: np.full((1, 3), 7, np.float32)})
        np.testing.assert_allclose(mean.asnumpy(), 0.7, rtol=1e-6)
        np.testing.assert_array_equal(variance.asnumpy(), 1)  # as of a sample it is 0 / 0

    def test_an_empty_batch_changes_nothing(self) -> None:
        for shape in ((0, 3), (0, 3, 4, 4), (2, 3, 0)):
            scale, bias = parameters(3)
            mean, variance = running(3)
            x = ad.Variable("x")
            loss = ad.sum_op(ad.batch_normalization(x, scale, bias, mean, variance))
            train = optim.SGD(0.1).minimize(loss, [scale, bias])
            executor = ad.Executor([loss, train], self.ctx)
            before = [p.asnumpy() for p in (scale, bias, mean, variance)]
            for _ in range(3):
                executor.run({x: np.empty(shape, np.float32)})
            for p, value in zip((scale, bias, mean, variance), before):
                np.testing.assert_array_equal(p.asnumpy(), value)
            executor.run({x: np.full((2, 3, 1), 5, np.float32)})
            np.testing.assert_allclose(mean.asnumpy(), 0.5, rtol=1e-6)

    def test_deriving_attributes_that_do_not_fit(self) -> None:
        scale, bias = parameters(3)
        mean, _ = running(3)
        x = ad.Variable("x", (4, 3), np.float32)
        for attrs, message in (
            (dict(running_mean=mean), "expected running_mean and running_variance"),
            (dict(training=False), "expected running_mean and running_variance"),
            (dict(eps=0), "eps must be a finite number above 0"),
            (dict(momentum=2), "momentum must be a number from 0 to 1"),
        ):
            with self.subTest(**attrs), self.assertRaisesRegex(GraphError, message):
                ad.batch_normalization(x, scale, bias, **attrs)
        with self.assertRaisesRegex(ShapeError, r"expected 3 channels .* got \(5,\)"):
            ad.batch_normalization(x, *parameters(5))
        with self.assertRaisesRegex(GraphError, "groups must be a positive integer, got 0"):
            ad.group_normalization(x, scale, bias, 0)
        with self.assertRaisesRegex(
            GraphError, "layer_normalization: eps must be a finite number above 0"
        ):
            ad.layer_normalization(x, scale, bias, -1)

    def test_no_activation_lives_for_the_statistics(self) -> None:
        """Between forward and backward the plan keeps x and the rectified output, nothing else."""
        x = ad.Variable("x")
        scale, bias = parameters(8)
        y = ad.relu_op(ad.batch_normalization(ad.exp_op(x), scale, bias))
        gradient = ad.gradients(ad.sum_op(y * y), [x])[0]
        plan = ad.Executor([gradient]).plan({x: (64, 8, 32, 32)})
        nbytes = 4 * 64 * 8 * 32 * 32
        self.assertLess(plan.live_nbytes, 5.2 * nbytes)
        self.assertLessEqual(plan.arena_nbytes, 1.1 * plan.live_nbytes)

    def test_numpy_makes_no_hidden_arrays(self) -> None:
        x = ad.Variable("x")
        values = np.ones((64, 8, 32, 32), np.float32)
        for y in (
            ad.batch_normalization(x, *parameters(8)),
            ad.layer_normalization(x, *parameters(32)),
            ad.group_normalization(x, *parameters(8), 2),
        ):
            total = ad.sum_op(y * y)
            executor = ad.Executor([total, ad.gradients(total, [x])[0]])
            executor.run({x: values})
            tracemalloc.start()
            executor.run({x: values})
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.assertLess(peak, 1.5 * values.nbytes, y.op.name)  # the fetched gradient itself


class RowLayouts:
    """Lengths of rows as a caller of the kernels may give them."""

    ctx: Any = None

    def test_lengths_whose_product_is_no_number_are_refused(self) -> None:
        x, y = (ndarray.array(np.ones((4, 4), np.float32), self.ctx) for _ in range(2))
        scale, bias = (ndarray.array(np.ones(4, np.float32), self.ctx) for _ in range(2))
        for length, inner in ((4, 2**62 + 1), (4, 2**62), (2**63 - 1, 2**63 - 1), (4, -1)):
            with self.assertRaisesRegex(KernelError, "row_normalize: rows of"):
                ndarray.launch("row_normalize", self.ctx, x, scale, bias, length, inner, 1, 1e-5, y)


CpuRowLayouts, GpuRowLayouts = on_native_devices(RowLayouts)


@require(ndarray.cpu(0))
class CpuBatchNormalization(BatchNormalization):
    ctx = ndarray.cpu(0)


@require(ndarray.gpu(0))
class GpuBatchNormalization(BatchNormalization):
    ctx = ndarray.gpu(0)
