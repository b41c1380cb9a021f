"""Ties and NaN go to one element on every device, in values and in gradients."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import GraphError
from support.devices import on_native_devices

NAN, INF = np.nan, np.inf
ROWS = (
    [NAN, 1, NAN], [1, NAN, INF], [INF, INF, 1], [-INF, -INF, -INF], [1, 1, 1], [-INF, 1, INF],
    [1e4, -1e4, 1e4], [NAN, -INF, INF], [0.0, -0.0, 0.0],
)  # fmt: skip


class TiesAndNan:
    ctx: Any = None

    def run_nodes(self, nodes: list, feeds: dict) -> list[np.ndarray]:
        return ad.Executor(nodes, self.ctx).run(feeds, convert_to_numpy_ret_vals=True)

    def columns(self) -> list[np.ndarray]:
        """Each row as a vector, as columns side by side, few and many, and as the middle of three
        axes; and the same again and again.
        """
        rows = [np.array(row, np.float32) for row in ROWS]
        rows += [np.tile(row, 700) for row in rows]
        few = [np.stack([row, row[::-1], row], 1) for row in rows]
        wide = [np.repeat(row[:, None], 40, 1) for row in rows[: len(ROWS)]]
        all_rows = np.array(ROWS, np.float32)
        return [*rows, *few, *wide, np.stack(wide), all_rows, np.tile(all_rows, (1, 40))]

    def test_extremes_and_their_positions(self) -> None:
        x = ad.Variable("x")
        for array in self.columns():
            axis = 1 if array.ndim == 3 or len(array) == len(ROWS) else 0
            nodes = [f(x, axis=axis) for f in (ad.max_op, ad.min_op, ad.argmax_op, ad.argmin_op)]
            results = self.run_nodes(nodes, {x: array})
            for function, result in zip((np.max, np.min, np.argmax, np.argmin), results):
                np.testing.assert_array_equal(result, function(array, axis=axis))

    def test_the_gradient_goes_to_the_first_extreme(self) -> None:
        x = ad.Variable("x")
        for array in self.columns():
            axis = 1 if array.ndim == 3 or len(array) == len(ROWS) else 0
            for op, position in ((ad.max_op, np.argmax), (ad.min_op, np.argmin)):
                (gradient,) = ad.gradients(op(x, axis=axis), [x])
                expected = np.zeros_like(array)
                first = np.expand_dims(position(array, axis=axis), axis)
                np.put_along_axis(expected, first, 1, axis)
                result = self.run_nodes([gradient], {x: array})[0]
                np.testing.assert_array_equal(result, expected)

    def test_the_first_of_several_axes_is_the_first_in_memory(self) -> None:
        x = ad.Variable("x")
        array = np.zeros((3, 4, 5), np.float32)
        array[1, :, 4] = array[2, :, 0] = 7
        nodes = [ad.argmax_op(x, axis=(0, 2)), ad.gradients(ad.max_op(x, axis=(0, 2)), [x])[0]]
        index, gradient = self.run_nodes(nodes, {x: array})
        np.testing.assert_array_equal(index, [1 * 5 + 4] * 4)
        expected = np.zeros_like(array)
        expected[1, :, 4] = 1
        np.testing.assert_array_equal(gradient, expected)

    def test_the_largest_of_a_wide_window_is_the_first(self) -> None:
        rng = np.random.default_rng(4)
        x = ad.Variable("x")
        for plane, window in (((37, 45), None), ((30, 80), (29, 70)), ((1, 63), (1, 17))):
            array = rng.integers(-9, 9, (2, 6, *plane)).astype(np.float32)
            flat = array.reshape(12, -1)
            flat[1] = -INF
            flat[2, [3, -1]] = flat[3, -1] = INF
            flat[4, len(flat[4]) // 2] = flat[5, -1] = flat[6, [0, -2]] = NAN
            pooled = ad.max_pool2d(x, window or plane, stride=1)
            gradient = ad.gradients(ad.sum_op(pooled), [x])[0]
            found = self.run_nodes([pooled, gradient], {x: array})
            views = np.lib.stride_tricks.sliding_window_view(array, window or plane, (2, 3))
            first = views.reshape(*views.shape[:4], -1).argmax(-1)  # NaN counts as the largest
            expected, counts = np.empty(first.shape, np.float32), np.zeros_like(array)
            for n, c, i, j in np.ndindex(first.shape):
                down, across = np.unravel_index(first[n, c, i, j], window or plane)
                expected[n, c, i, j] = array[n, c, i + down, j + across]
                counts[n, c, i + down, j + across] += 1
            np.testing.assert_array_equal(found[0], expected)
            np.testing.assert_array_equal(found[1], counts)

    def test_logsumexp_is_stable(self) -> None:
        x = ad.Variable("x")
        for array in self.columns():
            axis = 1 if array.ndim == 3 or len(array) == len(ROWS) else 0
            with np.errstate(invalid="ignore"):
                expected = np.logaddexp.reduce(array.astype(np.float64), axis=axis)
            result = self.run_nodes([ad.logsumexp_op(x, axis=axis)], {x: array})[0]
            np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)

    def test_minimum_and_maximum_give_ties_to_the_first(self) -> None:
        a, b = ad.Variable("a"), ad.Variable("b")
        left = np.array([1, 1, NAN, 1, NAN, INF], np.float32)
        right = np.array([1, 2, 1, NAN, NAN, INF], np.float32)
        for op, function in ((ad.maximum_op, np.maximum), (ad.minimum_op, np.minimum)):
            y = op(a, b)
            results = self.run_nodes([y, *ad.gradients(y, [a, b])], {a: left, b: right})
            wins = left >= right if op is ad.maximum_op else left <= right
            np.testing.assert_array_equal(results[0], function(left, right))
            np.testing.assert_array_equal(results[1], wins)
            np.testing.assert_array_equal(results[2], ~wins)

    def test_where_keeps_nan_out_of_the_other_gradient(self) -> None:
        x = ad.Variable("x")
        y = ad.where_op(ad.greater_op(x, 0), ad.log_op(ad.maximum_op(x, 1e-3)), 0.0)
        array = np.array([-1, 0, 2, NAN], np.float32)
        value, gradient = self.run_nodes([y, *ad.gradients(y, [x])], {x: array})
        np.testing.assert_allclose(value, [0, 0, np.log(2), 0], rtol=1e-6)
        np.testing.assert_allclose(gradient, [0, 0, 0.5, 0], rtol=1e-6)

    def test_numbers_take_the_dtype_of_their_partner(self) -> None:
        x = ad.Variable("x")
        array = np.array([-1, 0.5, 3], np.float32)
        nodes = [ad.less_op(x, 0.5), ad.maximum_op(0.25, x), ad.where_op(ad.less_op(0, x), 1, x)]
        less, largest, chosen = self.run_nodes(nodes, {x: array})
        np.testing.assert_array_equal(less, [True, False, False])
        np.testing.assert_array_equal(largest, np.float32([0.25, 0.5, 3]))
        np.testing.assert_array_equal(chosen, np.float32([-1, 1, 1]))
        self.assertEqual((less.dtype, largest.dtype), (np.bool_, np.float32))  # type: ignore[attr-defined]


class NumpyTiesAndNan(TiesAndNan, unittest.TestCase):
    def test_two_numbers_are_refused(self) -> None:
        with self.assertRaisesRegex(GraphError, "less: expected at least one node, got 1 and 2"):
            ad.less_op(1, 2)
        with self.assertRaisesRegex(
            GraphError, r"clip: attribute 'high' is missing; clip\(x, low, high\)"
        ):
            ad.clip_op(ad.Variable("x"), 1)


CpuTiesAndNan, GpuTiesAndNan = on_native_devices(TiesAndNan)
