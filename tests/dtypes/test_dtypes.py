"""The dtypes of computations, on numpy and on native devices."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.dtypes import bfloat16
from dlsys.errors import GraphError, ShapeError
from dlsys.runtime.device import Context, cpu, gpu
from support.devices import require
from support.graphs import evaluate


class Dtypes(unittest.TestCase):
    """The dtypes of `ctx=None`."""

    def dtype(self, node, feeds):
        return evaluate([node], feeds)[0].dtype

    def test_undeclared_floats_promote_as_in_numpy(self):
        x, y = ad.Variable("x"), ad.Variable("y")
        feeds = {x: np.ones(2, np.float32), y: np.ones(2)}
        for node in (x + y, y - x, x * y, x / y):
            self.assertEqual(self.dtype(node, feeds), np.float64)
        matrices = {x: np.ones((2, 2), np.float32), y: np.ones((2, 2))}
        self.assertEqual(self.dtype(ad.matmul_op(x, y), matrices), np.float64)

    def test_declared_and_other_float_is_refused_naming_both(self):
        x, y = ad.Variable("x"), ad.Variable("y", dtype=np.float32)
        with self.assertRaisesRegex(ShapeError, "mul: x is float64 and y is float32"):
            evaluate([x * y], {x: np.ones(2), y: np.ones(2, np.float32)})
        z = ad.Variable("z", dtype=np.float64)
        with self.assertRaisesRegex(ShapeError, "add: x is float32 and z is float64"):
            evaluate([x + z], {x: np.ones(2, np.float32), z: np.ones(2)})

    def test_float64_parameter_without_a_declaration_stays_float64(self):
        x, w = ad.Variable("x"), ad.Parameter(np.ones(2))
        self.assertEqual(self.dtype(x * w, {x: np.ones(2)}), np.float64)
        self.assertEqual(self.dtype(x * w, {x: np.ones(2, np.float32)}), np.float64)

    def test_python_numbers_are_weak(self):
        x = ad.Variable("x")
        for dtype in (np.float32, np.float64):
            feeds = {x: np.ones(2, dtype)}
            for node in (x + 2.5, 2 - x, x * 3, x / 2, x**2, 2.0**x, x * np.float64(2)):
                self.assertEqual(self.dtype(node, feeds), dtype, repr(node))

    def test_integers_stay_integers_until_a_float_comes(self):
        x, y = ad.Variable("x"), ad.Variable("y")
        host = np.array([1, 2, 3])
        for dtype in (np.int32, np.int64, np.uint8):
            feeds = {x: host.astype(dtype)}
            for node in (x + 2, x * 3, x + x, x * x):
                self.assertEqual(self.dtype(node, feeds), dtype, repr(node))
            for node in (x + 0.5, x / 2, ad.exp_op(x), ad.mean_op(x)):
                self.assertEqual(self.dtype(node, feeds), np.float64, repr(node))
            self.assertEqual(self.dtype(ad.sum_op(x), feeds), np.int64)
            mixed = {**feeds, y: np.ones(3, np.float32)}
            self.assertEqual(self.dtype(x * y, mixed), np.float32)

    def test_a_number_that_an_integer_dtype_cannot_hold_widens_it(self):
        x = ad.Variable("x")
        host = np.array([0, 2, 250], np.uint8)
        wide = host.astype(np.int16)
        for node, wanted in ((x - 1, wide - 1), (x + 300, wide + 300), (1 - x, host * 255 + 1)):
            np.testing.assert_array_equal(evaluate([node], {x: host})[0], wanted, repr(node))

    def test_bools_compute_or_are_refused_with_the_operator(self):
        x = ad.Variable("x")
        host = np.array([True, False])
        nodes = (x + 1, x * 2, 1 - x, x * 0.5, -x, x - x, x + x, ad.relu_op(x), ad.sum_op(x))
        for node in nodes:
            with self.subTest(node=node):
                try:
                    value = evaluate([node], {x: host})[0]
                except ShapeError as error:
                    self.assertIn(node.op.name, str(error))
                else:
                    self.assertEqual(value.shape, () if node.op is ad.sum_op else (2,))

    def test_cast(self):
        x = ad.Variable("x")
        value = evaluate([ad.cast_op(x, np.int32)], {x: np.array([1.7, -1.7])})[0]
        self.assertEqual((value.dtype, value.tolist()), (np.int32, [1, -1]))

    def test_a_float_feed_takes_the_dtype_of_what_is_trained(self):
        x, w = ad.Variable("x"), ad.Parameter(np.ones(2, np.float64), "w")
        rate = ad.Parameter(np.float32(0.5), "rate", trainable=False)
        half, double = np.float32([0.5, 1.5]), np.float64([0.1, 0.2])
        self.assertEqual(evaluate([x * w, rate * 2], {x: double})[0].dtype, np.float64)
        self.assertEqual(self.dtype(x + 1, {x: double}), np.float64)  # nothing is trained here
        fetched = evaluate([x + 0, x * w], {x: half})
        self.assertEqual([value.dtype for value in fetched], [np.float64] * 2)
        other = ad.Parameter(np.ones(2, np.float32), "other")
        self.assertEqual(evaluate([x + 0, w, other], {x: double})[0].dtype, np.float64)

    def test_lists_and_numbers_take_the_declared_dtype_or_float32(self):
        w = ad.Parameter(np.float32([1, 2]))
        for x in (ad.Variable("x"), ad.Variable("x", dtype=np.float32)):
            for value in ([3.0, 4.0], 2.0):
                self.assertEqual(self.dtype(x * w, {x: value}), np.float32)
        labels = ad.Variable("labels", dtype=np.int32)
        self.assertEqual(self.dtype(labels * 1, {labels: [1, 2]}), np.int32)


class Feeds:
    """Facts of feeds on every device."""

    ctx: Context | None = None

    def test_float64_feeds_of_a_float32_model_are_cast(self):
        x, w = ad.Variable("x"), ad.Parameter(np.ones(2, np.float32), "w")
        executor = ad.Executor([x * w, x + 1], self.ctx)
        host = np.array([0.1, 1 / 3])
        for fed in (host, host.astype(">f8"), host.astype(np.float32), host.tolist()):
            values = executor.run({x: fed}, True)
            self.assertEqual([value.dtype for value in values], [np.float32] * 2)
            np.testing.assert_array_equal(values[0], host.astype(np.float32))

    def test_declared_dtype_is_checked(self):
        x, w = ad.Variable("x", dtype=np.float32), ad.Parameter(np.ones(2, np.float32), "w")
        for node in (x + 1, x * w):
            with self.assertRaisesRegex(ShapeError, "x is fed float64, declared float32"):
                evaluate([node], {x: np.ones(2)}, self.ctx)


class NumpyFeeds(Feeds, unittest.TestCase):
    pass


class NativeDtypes(Feeds):
    """Native devices compute in float32."""

    ctx: Context

    def value(self, node, feeds):
        return evaluate([node], feeds, self.ctx)[0]

    def test_float64_feeds_are_cast(self):
        x, y = ad.Variable("x"), ad.Variable("y", dtype=np.float32)
        feeds = {x: np.array([1.0, 2.0]), y: np.ones(2, np.float32)}
        value = self.value(x + y, feeds)
        self.assertEqual((value.dtype, value.tolist()), (np.float32, [2, 3]))

    def test_float64_parameters_become_float32_unless_declared(self):
        x = ad.Variable("x")
        p = ad.Parameter(np.ones(2), "p")
        self.assertEqual(self.value(x * p, {x: np.ones(2)}).dtype, np.float32)
        self.assertEqual(p.asnumpy().dtype, np.float32)
        declared = ad.Parameter(np.ones(2), "declared", dtype=np.float64)
        with self.assertRaisesRegex(ShapeError, "declared float64.*float32"):
            self.value(x * declared, {x: np.ones(2)})
        with self.assertRaisesRegex(ShapeError, "z is declared float64"):
            z = ad.Variable("z", dtype=np.float64)
            self.value(z * 2, {z: np.ones(2)})

    def test_float64_constants_become_float32(self):
        x = ad.Variable("x")
        value = self.value(x + ad.constant([0.5, 1.5]), {x: np.ones(2)})
        self.assertEqual((value.dtype, value.tolist()), (np.float32, [1.5, 2.5]))

    def test_undeclared_integers_and_bools_are_cast(self):
        x = ad.Variable("x")
        for dtype in (np.int64, np.int32, np.uint8, np.int8, np.bool_):
            host = np.array([0, 1, 1]).astype(dtype)
            for node in (x + x, x + 1, x - 1, -x, x * 0.5, x / 2, ad.exp_op(x), ad.sum_op(x)):
                with self.subTest(dtype=np.dtype(dtype).name, node=node.op.name):
                    wanted = evaluate([node], {x: host.astype(np.float64)})[0]
                    value = self.value(node, {x: host})
                    self.assertEqual(value.dtype, np.float32)
                    np.testing.assert_allclose(value, wanted, rtol=1e-6)

    def test_declared_integers_keep_their_dtype(self):
        x = ad.Variable("x", dtype=np.int64)
        feeds = {x: np.array([2**40 + 1, -3])}
        np.testing.assert_array_equal(self.value(ad.reshape_op(x, (2, 1)), feeds).T, [feeds[x]])
        np.testing.assert_array_equal(self.value(x + x, feeds), [2**41 + 2, -6])

    def test_integers_are_moved_and_compared_bit_by_bit(self):
        for dtype, large in ((np.int64, 2**53 + 1), (np.int32, 2**24 + 1), (np.uint8, 255)):
            host = np.array([[1, large, 3], [large - 1, 5, 0]], dtype)
            x = ad.Variable("x", host.shape, dtype)
            rows = [
                (ad.pad_op(x, [1, (0, 2)]), np.pad(host, [(1, 1), (0, 2)])),
                (ad.pad_op(x, [1, 0], constant_values=large),
                 np.pad(host, [(1, 1), (0, 0)], constant_values=large)),
                (ad.pad_op(x, [1, 1], "edge"), np.pad(host, 1, "edge")),
                (ad.pad_op(x, [1, 1], "reflect"), np.pad(host, 1, "reflect")),
                (ad.concat([x, x], 1), np.concatenate([host, host], 1)),
                (ad.tile(x, (2, 2)), np.tile(host, (2, 2))),
                (ad.gather_op(x, ad.constant([1, 1, 0])), host[[1, 1, 0]]),
                (x[::-1, ::2], host[::-1, ::2]),
                (ad.transpose_op(x), host.T),
                (ad.broadcast_to_op(x, (2, 2, 3)), np.broadcast_to(host, (2, 2, 3))),
                (ad.where_op(x > 2, x, large - 1), np.where(host > 2, host, large - 1)),
                (x == large, host == large),
                (x < large, host < large),
                (ad.argmax_op(x, 0), host.argmax(0)),
            ]  # fmt: skip
            values = evaluate([node for node, _ in rows], {x: host}, self.ctx)
            for (node, wanted), value in zip(rows, values):
                with self.subTest(node=node.op.name, dtype=np.dtype(dtype).name):
                    self.assertEqual(value.dtype, wanted.dtype)
                    np.testing.assert_array_equal(value, wanted)

    def test_large_integers_are_filled_exactly_or_refused(self):
        try:
            value = self.value(ad.full_op((2,), 2**24 + 1, np.int64), {})
        except (GraphError, ShapeError) as error:
            self.assertIn("full", str(error))
        else:
            self.assertEqual(value.tolist(), [2**24 + 1] * 2)

    def test_reductions_and_losses_of_16_bits_run_without_casts(self):
        x = ad.Variable("x", (4, 6, 5), bfloat16)
        labels = ad.Variable("labels", (4, 6), np.int64)
        loss = ad.softmax_cross_entropy(x, labels)
        fetches = [
            *(reduce(x, axis=1) for reduce in (ad.sum_op, ad.max_op, ad.logsumexp_op)),
            ad.argmax_op(x, axis=1), ad.cumsum_op(x, axis=1), ad.softmax_op(x, axis=1), loss,
            *ad.gradients(loss, [x]),
        ]  # fmt: skip
        plan = ad.Executor(fetches, self.ctx).plan({x: (4, 6, 5), labels: (4, 6)})
        self.assertNotIn("cast", [step.node.op.name for step in plan.steps])

    def test_division_by_a_number(self):
        x = ad.Variable("x")
        host = np.array([1.0, 10.0, -3.0], np.float32)
        np.testing.assert_allclose(self.value(x / 3, {x: host}), host / np.float32(3), rtol=2e-7)


@require(cpu(0))
class CpuDtypes(NativeDtypes, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuDtypes(NativeDtypes, unittest.TestCase):
    ctx = gpu(0)
