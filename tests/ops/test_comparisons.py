"""Nodes compare as arrays do: `==` and `<` make nodes, whose truth is known after a run only."""

from __future__ import annotations

import copy
import unittest
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import DlsysError, GraphError
from dlsys.graph.node import Node, same_nodes
from support.devices import each_context
from support.graphs import Training, evaluate

HOST = np.float32([-1, 0, 2, np.nan])
OTHER = np.float32([-1, 1, 1, 0])


class ComparisonNodeTests(unittest.TestCase):
    def test_signs_make_nodes_on_every_device(self):
        x, y = ad.Variable("x"), ad.Variable("y")
        rows = [
            (x == 0, HOST == 0),
            (x != 0, HOST != 0),
            (x < y, HOST < OTHER),
            (x <= y, HOST <= OTHER),
            (x > y, HOST > OTHER),
            (x >= 0, HOST >= 0),
            (0 < x, HOST > 0),
            (2.0 >= x, HOST <= 2),
            (OTHER == x, HOST == OTHER),
            (OTHER < x, HOST > OTHER),
            (x == [0, 0, 2, 2], HOST == [0, 0, 2, 2]),
            ((x > 0) & (y > 0), (HOST > 0) & (OTHER > 0)),
            ((x > 0) | (y > 0), (HOST > 0) | (OTHER > 0)),
            ((x > 0) ^ (y > 0), (HOST > 0) ^ (OTHER > 0)),
            (~(x > 0), ~(HOST > 0)),
            ((OTHER > 0) & (x > 0), (OTHER > 0) & (HOST > 0)),
            ((x > 0) | (OTHER > 0), (HOST > 0) | (OTHER > 0)),
        ]
        for ctx in each_context():
            values = evaluate([node for node, _ in rows], {x: HOST, y: OTHER}, ctx)
            for (node, wanted), value in zip(rows, values):
                self.assertEqual(value.dtype, bool)
                np.testing.assert_array_equal(value, wanted, repr(node))

    def test_a_condition_chooses(self):
        x = ad.Variable("x")
        (value,) = evaluate([ad.where_op(x == 0, 9, x)], {x: np.float32([0, 1, 0])})
        np.testing.assert_array_equal(value, [9, 1, 9])

    def test_a_node_has_no_truth_value(self):
        x = ad.Variable("x")
        message = (
            r"^x has no truth value before a run: choose by ad\.where_op\(condition, a, b\), join "
            r"conditions by & \| ~, find the same node by `is` or in a set, or run it first "
            r"\[test_comparisons\.py:\d+\]$"
        )
        for use in (
            lambda: bool(x), lambda: not x, lambda: x or 1, lambda: 1 if x else 2, lambda: all([x]),
        ):  # fmt: skip
            with self.assertRaisesRegex(GraphError, message):
                use()
        for ask in (lambda: x in [ad.Variable()], lambda: 0 < x < 1, lambda: max(x, x + 1)):
            with self.assertRaisesRegex(GraphError, "has no truth value before a run"):
                ask()

    def test_nodes_are_keys_by_identity(self):
        x, y = ad.Variable("x"), ad.Variable("x")
        self.assertEqual(len({x, y, x}), 2)
        self.assertEqual({x: 1, y: 2}[y], 2)
        self.assertIn((x, 1), {(x, 1): None})
        self.assertIs(copy.copy({x: 1}).__iter__().__next__(), x)
        self.assertIn(x, [x])

    def test_other_things_are_not_equal(self):
        x = ad.Variable("x")
        self.assertIs(x == None, False)  # noqa: E711 (what is tested)
        self.assertIs(x != "x", True)
        with self.assertRaises(TypeError):
            x < None  # noqa: B015 (what is tested)

    def test_the_very_same_nodes(self):
        x, y = ad.Variable(), ad.Variable()
        self.assertTrue(same_nodes([x, y], (x, y)))
        for other in ([y, x], [x], [x, y, y], []):
            self.assertFalse(same_nodes([x, y], other))

    def test_the_engine_asks_for_nodes_by_identity(self):
        """Building, differentiating, rewriting, planning and running compare no node by value."""
        rng = np.random.default_rng(0)
        host = rng.normal(size=(8, 6)).astype(np.float32)

        def refuse(node, other):
            raise AssertionError("a node by ==")

        with mock.patch.multiple(Node, __eq__=refuse, __ne__=refuse):
            for ctx in each_context():
                net = Training((6, 5, 4, 3), momentum=0.9)
                labels = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 8)]
                executor = ad.Executor([net.loss, net.train], ctx)
                for _ in range(3):
                    loss, _ = executor.run({net.x: host, net.labels: labels}, True)
                self.assertTrue(np.isfinite(loss))

    def test_no_python_bool_in_a_nodes_place(self):
        x = ad.Variable("x")
        with self.assertRaisesRegex(GraphError, "^where: condition is the Python bool False"):
            ad.where_op(x is None, 9, x)
        for use in (
            lambda: (x > 0) & True,
            lambda: ad.logical_and_op(x, True),
            lambda: False | (x > 0),
        ):
            with self.assertRaisesRegex(GraphError, "is (bool|the Python bool).*; compare nodes"):
                use()

    def test_bits_are_not_truth(self):
        x = ad.Variable("x", (3,), np.int32)
        with self.assertRaisesRegex(DlsysError, r"^&: expected truth values, got x of int32"):
            x & (x > 0)
        free = ad.Variable("free")
        with self.assertRaisesRegex(DlsysError, r"^~: expected truth values, got free of float32"):
            evaluate([~free], {free: np.float32([1])})
