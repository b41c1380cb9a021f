"""Nodes, topological order, text, and chains too long for recursion."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import GraphError, ShapeError
from support import sample
from support.devices import slow
from support.graphs import Training, evaluate, here, two_fold

CHAIN = sample.count(100_000, 30_000)


class NodeTests(unittest.TestCase):
    def test_numbers_grow_and_names_default_to_the_operator(self):
        x = ad.Variable("x")
        first, second = ad.exp_op(x), ad.exp_op(x, name="second")
        self.assertLess(first.number, second.number)
        self.assertEqual(first.name, f"exp.{first.number}")
        self.assertEqual(second.name, "second")

    def test_source_line_is_the_users(self):
        x = ad.Variable("x")
        y, line = x * 2 + x, here()
        self.assertEqual((y.where, y.inputs[0].where), (line, line))

    def test_gradient_nodes_come_from_the_line_of_their_forward_node(self):
        x = ad.Variable("x")
        y, line = ad.tanh_op(x), here()
        (dx,) = ad.gradients(y, [x])
        self.assertEqual(dx.where, line)

    def test_operators_of_python(self):
        x, feeds = ad.Variable("x"), np.array([1.0, 2.0, 4.0])
        array = np.array([3.0, 5.0, 7.0])
        rows = [
            (x + 1, feeds + 1),
            (1 + x, 1 + feeds),
            (x - 1, feeds - 1),
            (1 - x, 1 - feeds),
            (x * 3, feeds * 3),
            (3 * x, feeds * 3),
            (x / 4, feeds / 4),
            (4 / x, 4 / feeds),
            (x**3, feeds**3),
            (3**x, 3**feeds),
            (-x, -feeds),
            (x**x, feeds**feeds),
            (array + x, array + feeds),
            (array - x, array - feeds),
            (x * array, feeds * array),
            (array / x, array / feeds),
            (np.float64(2) * x, 2 * feeds),
        ]
        values = evaluate([node for node, _ in rows], {x: feeds})
        for (node, expected), value in zip(rows, values):
            np.testing.assert_allclose(value, expected, rtol=1e-12, err_msg=repr(node))

    def test_products_with_arrays(self):
        x, host = ad.Variable("x"), np.arange(4.0).reshape(2, 2)
        values = evaluate([x @ host.T, host.T @ x], {x: host})
        np.testing.assert_array_equal(values, [host @ host.T, host.T @ host])

    def test_spec_is_known_when_the_inputs_are(self):
        w = ad.Parameter(np.zeros((3, 4), np.float32))
        x = ad.Variable("x", shape=(2, 3), dtype=np.float32)
        y = ad.matmul_op(x, w)
        self.assertEqual((y.spec.shape, y.spec.dtype), ((2, 4), np.float32))
        self.assertIsNone(ad.exp_op(ad.Variable("free")).spec)

    def test_mismatch_is_refused_when_the_node_is_made(self):
        w = ad.Parameter(np.zeros((10, 784), np.float32), "w")
        x = ad.Variable("x", shape=(64, 784))
        with self.assertRaises(ShapeError) as caught:
            ad.matmul_op(x, w)
        self.assertRegex(
            str(caught.exception),
            r"^matmul: inner dimensions differ: x \(64, 784\) and w \(10, 784\); "
            r"did you mean trans_B=True\? \[test_graph.py:\d+\]$",
        )

    def test_an_input_that_is_no_node(self):
        with self.assertRaisesRegex(GraphError, "exp: an input is list, expected a node"):
            ad.exp_op([1, 2])

    def test_const_attr(self):
        node = ad.Variable("x") + 5
        self.assertEqual(node.const_attr, 5)
        self.assertIsNone(ad.exp_op(node).const_attr)

    def test_one_value_is_not_unpacked(self):
        x = ad.Variable("x")
        with self.assertRaises(TypeError):
            a, b = x

    def test_outputs_are_reached_by_index_and_are_the_same_node_each_time(self):
        pair = two_fold(ad.Variable("x"))
        double, square = pair
        self.assertIs(pair[0], double)
        self.assertIs(pair[1], square)
        with self.assertRaisesRegex(GraphError, r"no \[2\]"):
            pair[2]

    def test_a_node_of_several_values_is_no_input(self):
        with self.assertRaises(GraphError):
            evaluate([two_fold(ad.Variable("x", shape=(2,), dtype=np.float32)) + 1])

    def test_constants_are_copies_and_numbers_only(self):
        array = np.ones(3)
        node = ad.constant(array)
        array[:] = 7
        np.testing.assert_array_equal(evaluate([node])[0], np.ones(3))
        for value in ("text", 1j, None, [object()]):
            with self.assertRaises(ShapeError):
                ad.constant(value)


class OrderTests(unittest.TestCase):
    def test_inputs_come_before_users_and_nothing_twice(self):
        x, y = ad.Variable("x"), ad.Variable("y")
        z = (x * y + x) * (x * y)
        order = ad.find_topo_sort([z, y, z])
        self.assertEqual(len(order), len(set(order)))
        place = {node: k for k, node in enumerate(order)}
        for node in order:
            for source in node.inputs:
                self.assertLess(place[source], place[node])

    def test_a_cycle_is_named(self):
        x = ad.Variable("x")
        a = ad.exp_op(x, name="a")
        b = ad.log_op(a, name="b")
        c = ad.tanh_op(b, name="c")
        a.inputs = [c]
        for use in (ad.find_topo_sort, ad.Executor, lambda nodes: ad.gradients(nodes[0], [x])):
            with self.assertRaisesRegex(GraphError, "cycle: c → a → b → c"):
                use([c])

    def test_a_node_that_is_its_own_input(self):
        a = ad.exp_op(ad.Variable("x"), name="a")
        a.inputs = [a]
        with self.assertRaisesRegex(GraphError, "cycle: a → a"):
            ad.find_topo_sort([a])

    def test_a_long_cycle_has_a_short_message(self):
        first = node = ad.exp_op(ad.Variable("x"), name="first")
        for k in range(50):
            node = ad.exp_op(node, name=f"n{k}")
        first.inputs = [node]
        with self.assertRaisesRegex(GraphError, "…") as caught:
            ad.find_topo_sort([node])
        self.assertLess(len(str(caught.exception)), 200)


class TextTests(unittest.TestCase):
    def test_repr(self):
        x = ad.Variable("x")
        w = ad.Parameter(np.zeros((3, 2), np.float32), "w")
        self.assertEqual(
            repr(ad.matmul_op(x, w, trans_A=True, name="y")),
            "y = matmul(x, w, trans_A=True, trans_B=False)",
        )
        self.assertEqual(repr(w), "w = Parameter() : float32 (3, 2)")

    def test_text_has_a_line_a_node_with_shape_and_source(self):
        x = ad.Variable("x", shape=(5, 3), dtype=np.float32)
        w = ad.Parameter(np.zeros((3, 2), np.float32), "w")
        y, line = ad.matmul_op(x, w, name="y"), here()
        lines = ad.text(y).splitlines()
        self.assertEqual([text.split(" ")[0] for text in lines], ["x", "w", "y"])
        self.assertIn("matmul(x, w, trans_A=False, trans_B=False)", lines[2])
        self.assertIn("float32 (5, 2)", lines[2])
        self.assertTrue(lines[2].endswith(line))

    def test_text_of_a_training_graph_names_every_node(self):
        net = Training((4, 3, 2))
        shown = ad.text([net.loss, net.train])
        nodes = ad.find_topo_sort([net.loss, net.train])
        self.assertEqual(len(shown.splitlines()), len(nodes))
        for node in nodes:
            self.assertIn(node.name, shown)

    def test_text_of_several_outputs(self):
        shown = ad.text(list(two_fold(ad.Variable("x", shape=(2,), dtype=np.float32))))
        self.assertIn("float32 (2,); float32 (2,)", shown)


class Chains(unittest.TestCase):
    @slow
    def test_a_very_long_chain(self):
        x = ad.Variable("x")
        y = x
        for k in range(CHAIN // 2):
            y = -y + 1 if k % 2 else -(y * 1.0)
        y = y * x
        (dx,) = ad.gradients(y, [x])
        self.assertGreater(len(ad.find_topo_sort([dx])), CHAIN)
        executor = ad.Executor([y, dx])
        host = np.array([3.0, 0.5])
        chain = host.copy()
        for k in range(CHAIN // 2):
            chain = 1 - chain if k % 2 else -chain
        value, slope = executor.run({x: host})
        np.testing.assert_allclose(value, chain * host)
        np.testing.assert_allclose(slope, chain + host)
