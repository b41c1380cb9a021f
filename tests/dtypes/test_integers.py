"""Arithmetic on integers is numpy's on every device, in kernels of int64 or on the host; and what
`//`, `%`, roundings and sorts make of special values of floats.
"""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.graph.node import Node
from dlsys.runtime.device import Context
from support.devices import require
from support.graphs import evaluate

DTYPES = (np.int32, np.int64, np.uint8)
EDGES = {
    np.int32: [-(2**31), -7, -1, 0, 1, 2, 7, 2**24 + 1, 2**31 - 1],
    np.int64: [-(2**63), -7, -1, 0, 1, 2, 2**24 + 1, 2**53 + 1, 2**63 - 1],
    np.uint8: [0, 1, 2, 7, 100, 127, 128, 254, 255],
}


def variable(name: str, array: np.ndarray) -> Node:
    return ad.Variable(name, array.shape, array.dtype)


class Integers:
    ctx: Context | None = None

    def same(self, node: Node, feeds: dict[Node, np.ndarray], wanted: Any) -> None:
        """Values and dtype; numpy's integers wrap around without a warning here."""
        (value,) = evaluate([node], feeds, self.ctx)
        self.assertEqual(value.dtype, wanted.dtype, node)
        np.testing.assert_array_equal(value, wanted, str(node))

    def each_pair(self):
        for dtype in DTYPES:
            edges = np.array(EDGES[dtype], dtype)
            a, b = edges[:, None], edges
            x, y = variable("x", a), variable("y", b)
            with np.errstate(all="ignore"), self.subTest(dtype=np.dtype(dtype).name):
                yield x, y, a, b, {x: a, y: b}

    def test_two_arrays_that_broadcast(self):
        for x, y, a, b, feeds in self.each_pair():
            self.same(x + y, feeds, a + b)
            self.same(x - y, feeds, a - b)
            self.same(x * y, feeds, a * b)
            self.same(x // y, feeds, a // b)
            self.same(x % y, feeds, a % b)
            self.same(ad.fmod_op(x, y), feeds, np.fmod(a, b))
            self.same(ad.minimum_op(x, y), feeds, np.minimum(a, b))
            self.same(ad.maximum_op(x, y), feeds, np.maximum(a, b))
            self.same(x < y, feeds, a < b)

    def test_one_array_and_numbers(self):
        for _, y, _, b, feeds in self.each_pair():
            feeds = {y: b}
            for number in (1, 3, 7):
                self.same(y + number, feeds, b + number)
                self.same(y * number, feeds, b * number)
                self.same(y // number, feeds, b // number)
                self.same(number % y, feeds, number % b)
                self.same(number - y, feeds, (number - b))
                self.same(y**number, feeds, b**number)
            for op, form in ((ad.neg_op, np.negative), (ad.abs_op, np.abs), (ad.sign_op, np.sign)):
                self.same(op(y), feeds, form(b))
            for op in (ad.floor_op, ad.ceil_op, ad.round_op, ad.trunc_op):
                self.same(op(y), feeds, b)
            self.same(ad.clip_op(y, 1, 7), feeds, np.clip(b, 1, 7))

    def test_large_numbers_are_exact(self):
        x = ad.Variable("x", (2,), np.int64)
        feeds = {x: np.array([2**53, 5])}
        self.same(x + (2**53 + 1), feeds, feeds[x] + (2**53 + 1))
        self.same(ad.where_op(x > 2**52, x * 3 - 1, 0), feeds, np.array([3 * 2**53 - 1, 0]))

    def test_reductions_and_scans(self):
        for dtype in (*DTYPES, np.bool_):
            a = np.random.default_rng(1).integers(0, 100, (5, 300, 3)).astype(dtype)
            x = variable("x", a)
            wide = a.astype(np.int64)
            with self.subTest(dtype=np.dtype(dtype).name):
                for axis in (None, 0, 1, 2, (0, 2)):
                    self.same(ad.sum_op(x, axis=axis), {x: a}, wide.sum(axis=axis, keepdims=False))
                    self.same(ad.max_op(x, axis=axis), {x: a}, a.max(axis=axis))
                    self.same(ad.min_op(x, axis=axis), {x: a}, a.min(axis=axis))
                self.same(ad.prod_op(x, axis=1), {x: a}, wide.prod(axis=1))
                for axis in (0, 1, 2):
                    self.same(ad.cumsum_op(x, axis), {x: a}, wide.cumsum(axis))
                    self.same(ad.cumprod_op(x, axis), {x: a}, wide.cumprod(axis))

    def test_products(self):
        a = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
        x = variable("x", a)
        self.same(x @ ad.constant(a[0].T), {x: a}, a @ a[0].T)

    def test_bools_add_up_as_integers(self):
        a, b = np.array([True, False, True]), np.array([True, True, False])
        x, y = variable("x", a), variable("y", b)
        self.same(x + y, {x: a, y: b}, a.astype(np.int64) + b)
        self.same(x * 3, {x: a}, a * np.int64(3))

    def test_sums_pass_gradients_of_floats_only(self):
        x, w = ad.Variable("x", (3,), np.int64), ad.Parameter(np.ones(3, np.float32), "w")
        (grad,) = ad.gradients(ad.sum_op(w * (x % 2)), [w])
        self.same(grad, {x: np.array([1, 2, 3])}, np.array([1, 0, 1], np.float32))

    def test_float_quotients_follow_numpy(self):
        edges = np.array(
            [np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.1, -0.1, 3, -7.5, 1e30, -1e-30],
            np.float32,
        )  # fmt: skip
        a, b = edges[:, None], edges
        x, y = variable("x", a), variable("y", b)
        with np.errstate(all="ignore"):
            for node, wanted in (
                (x // y, a // b), (x % y, a % b), (ad.fmod_op(x, y), np.fmod(a, b)),
                (y // 0.3, b // np.float32(0.3)), (1 % y, np.float32(1) % b),
                (ad.atan2_op(x, y), np.arctan2(a, b)),
            ):  # fmt: skip
                feeds = {x: a, y: b} if wanted.ndim == 2 else {y: b}
                (value,) = evaluate([node], feeds, self.ctx)
                np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=str(node))
                told = ~np.isnan(wanted)  # IEEE 754 leaves the sign of a NaN open
                signs = np.signbit(value)[told], np.signbit(wanted)[told]
                np.testing.assert_array_equal(*signs, str(node))

    def test_rounding_goes_to_even(self):
        a = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 2**23 + 0.5], np.float32)
        x = variable("x", a)
        self.same(ad.round_op(x), {x: a}, np.round(a))

    def test_sorts_put_nan_last_and_are_stable(self):
        a = np.array([2, np.nan, -0.0, 0.0, -np.inf, -np.nan, 2, np.inf], np.float32)
        x = variable("x", a)
        for descending, wanted in (
            (False, [4, 2, 3, 0, 6, 7, 1, 5]),
            (True, [1, 5, 7, 0, 6, 2, 3, 4]),
        ):
            values, indices = ad.sort_op(x, descending=descending)
            self.same(indices, {x: a}, np.array(wanted))
            self.same(values, {x: a}, a[wanted])


class NumpyIntegers(Integers, unittest.TestCase):
    pass


@require(ndarray.cpu(0))
class CpuIntegers(Integers, unittest.TestCase):
    ctx = ndarray.cpu(0)

    def test_arithmetic_is_native_and_the_rest_is_reported(self):
        x = ad.Variable("x", (4,), np.int32)
        feeds = {x: np.arange(4, dtype=np.int32)}
        executor = ad.Executor([ad.sum_op(x * x % 3 - 1), ad.cumsum_op(x)], self.ctx)
        executor.run(feeds)
        self.assertNotIn("falls back", str(executor.report()))
        executor = ad.Executor([x @ x], self.ctx)
        executor.run(feeds)
        report = "has no kernel matmul of int32; matmul falls back to numpy on the host"
        self.assertIn(report, str(executor.report()))


@require(ndarray.gpu(0))
class GpuIntegers(Integers, unittest.TestCase):
    ctx = ndarray.gpu(0)


if __name__ == "__main__":
    unittest.main()
