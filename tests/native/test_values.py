"""Arrays of devices read like numpy's: conversion, formatting, comparison, arithmetic, text."""

from __future__ import annotations

import operator
import pickle
import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.dtypes import bfloat16
from dlsys.errors import ShapeError
from dlsys.values import text_of
from support.devices import on_native_devices


class Values:
    ctx: ndarray.Context

    def array(self, values, dtype=None):
        return ndarray.array(np.asarray(values), self.ctx, dtype)

    def test_one_element_is_a_number(self):
        for shape in ((), (1,), (1, 1)):
            x = self.array(np.full(shape, 2.75, np.float32))
            self.assertEqual((float(x), int(x), bool(x), x.item()), (2.75, 2, True, 2.75))
            self.assertIs(type(x.item()), float)
        self.assertFalse(self.array(0.0))
        self.assertIs(type(self.array(np.int64(3)).item()), int)
        self.assertEqual("abcd"[self.array(np.int64(2))], "c")
        self.assertRaises(TypeError, operator.index, self.array(2.0))

    def test_several_elements_are_no_number(self):
        x = self.array([1.0, 2.0])
        for convert in (float, int, bool, operator.index, lambda x: x.item()):
            with self.assertRaisesRegex(ShapeError, r"expected an array of one element.*\(2,\)"):
                convert(x)
        self.assertRaises(ShapeError, bool, self.array(np.zeros((0,), np.float32)))

    def test_lists_rows_and_lengths(self):
        x = self.array(np.arange(6).reshape(3, 2))
        self.assertEqual(x.tolist(), [[0, 1], [2, 3], [4, 5]])
        self.assertEqual([row.tolist() for row in x], x.tolist())
        self.assertEqual((len(x), x[1].tolist(), x[2, 1]), (3, [2, 3], 5))
        self.assertEqual(self.array(1.5).tolist(), 1.5)
        self.assertRaises(TypeError, len, self.array(1.5))
        self.assertRaises(TypeError, iter, self.array(1.5))

    def test_what_is_read_by_an_index_is_not_written_to(self):
        x = self.array([[1.0, 2.0]])
        with self.assertRaisesRegex(ValueError, "read-only"):
            x[0][1] = 5
        self.assertEqual(x.tolist(), [[1.0, 2.0]])

    def test_formats(self):
        self.assertEqual(f"{self.array(0.12345):.3f}", "0.123")
        self.assertEqual(f"{self.array([0.5]):.0%}", "50%")
        self.assertEqual(f"{self.array([0.12345, 2.0]):.2f}", "[0.12 2.00]")
        self.assertEqual(f"{self.array(np.int64(7)):03d}", "007")
        self.assertEqual(f"{self.array(0.25)}", "0.25")

    def test_comparisons_are_by_value(self):
        a, b = np.array([1.0, 2.0, 3.0], np.float32), np.array([3.0, 2.0, 1.0], np.float32)
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            compare = getattr(operator, name)
            for other in (b, self.array(b), b.tolist(), 2.0):
                host = compare(a, np.asarray(other))
                found = compare(self.array(a), other)
                self.assertIs(type(found), np.ndarray)
                self.assertEqual(found.dtype, bool)
                np.testing.assert_array_equal(found, host, name)
        np.testing.assert_array_equal(a == self.array(b), a == b)
        np.testing.assert_array_equal(2 > self.array(a), a < 2)

    def test_arithmetic_is_that_of_numpy(self):
        a, b = np.array([1.5, 2.0], np.float32), np.array([4.0, 0.5], np.float32)
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
            compute = getattr(operator, name)
            wanted = compute(a, b)
            for left, right in ((self.array(a), b), (a, self.array(b)), (self.array(a),) * 2):
                host = compute(a, a) if left is right else wanted
                np.testing.assert_array_equal(compute(left, right), host, name)
        np.testing.assert_array_equal(1 - self.array(a), 1 - a)
        np.testing.assert_array_equal(np.float32(2) * self.array(a), 2 * a)
        np.testing.assert_array_equal(abs(-self.array(a)), a)

    def test_sums_of_fetches(self):
        x = ad.Variable("x")
        executor = ad.Executor([ad.sum_op(x)], ctx=self.ctx)
        total = 0.0
        for k in range(3):
            (loss,) = executor.run({x: np.full(4, float(k))})
            total += loss
        self.assertEqual(total, 12.0)

    def test_with_a_node_it_is_a_constant(self):
        x = ad.Variable("x")
        node = self.array([1.0, 2.0]) * x
        self.assertIsInstance(node, ad.Node)
        (value,) = ad.Executor([node], ctx=self.ctx).run({x: np.full(2, 3.0)})
        self.assertEqual(value.tolist(), [3.0, 6.0])

    def test_identity_in_sets_and_pickles(self):
        x, y = self.array([1.0]), self.array([1.0])
        self.assertEqual(len({x, y}), 2)
        self.assertEqual({x: "x", y: "y"}[y], "y")
        self.assertEqual(pickle.loads(pickle.dumps(x)).tolist(), [1.0])

    def test_text(self):
        self.assertEqual(str(self.array([1.0, 2.5])), "[1.  2.5]")
        ctx = self.ctx
        wanted = f"NDArray([1. , 2.5], shape=(2,), dtype=float32, ctx={ctx})"
        self.assertEqual(repr(self.array([1.0, 2.5])), wanted)
        narrow = ndarray.array(np.ones(2, np.float32), ctx, bfloat16)
        self.assertIn("shape=(2,), dtype=bfloat16", repr(narrow))
        lines = repr(self.array([[1, 2], [3, 4]])).splitlines()
        facts = f"        shape=(2, 2), dtype=int64, ctx={ctx})"
        self.assertEqual(lines, ["NDArray([[1, 2],", "         [3, 4]],", facts])


CpuValues, GpuValues = on_native_devices(Values)


class Texts(unittest.TestCase):
    def test_a_text_has_few_lines_at_any_shape(self):
        for shape in (
            (100, 1),
            (50, 2),
            (1000, 1000),
            (64, 3, 28, 28),
            (2,) * 8,
            (0, 3),
            (9, 9, 9),
        ):
            with self.subTest(shape=shape):
                text = text_of(np.zeros(shape))
                self.assertLessEqual(len(text.splitlines()), 13)

    def test_small_arrays_are_whole(self):
        self.assertNotIn("...", text_of(np.arange(100.0).reshape(10, 10)))
        self.assertIn("...", text_of(np.arange(101.0)))

    def test_numpy_is_asked_for_the_digits(self):
        with np.printoptions(precision=2):
            self.assertEqual(text_of(np.array([1 / 3])), "[0.33]")
