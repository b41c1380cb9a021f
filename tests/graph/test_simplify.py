"""The simplify pass: what it merges, folds and drops, and that it changes no meaning."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.graph.infer import infer
from dlsys.passes.simplify import simplify
from dlsys.runtime.target import NUMPY
from support.graphs import NATIVE, Training, evaluate


def simplified(fetches, native=False):
    """The fetches after the pass; every Variable in them has a declared shape."""
    order = ad.find_topo_sort(fetches)
    specs = infer(order, {n: n.spec for n in order if n.op.leaf == "feed"}, native)
    return simplify(specs, fetches, NATIVE if native else NUMPY)


def operators(fetches):
    """The operators of a graph by name, sorted, without leaves."""
    return sorted(node.op.name for node in ad.find_topo_sort(fetches) if not node.op.leaf)


class Simplify(unittest.TestCase):
    def setUp(self):
        self.x = ad.Variable("x", shape=(2, 3), dtype=np.float32)

    def test_equal_nodes_are_merged(self):
        x = self.x
        y = ad.exp_op(x * 2) + ad.exp_op(x * 2)
        self.assertEqual(operators(simplified([y])), ["add", "exp", "mul_const"])

    def test_nodes_that_only_look_equal_are_not(self):
        x = self.x
        pairs = [
            (x / 0.0, x / -0.0),
            (ad.sum_op(x, axis=0), ad.sum_op(x, axis=1)),
            (ad.sum_op(x, axis=0), ad.mean_op(x, axis=0)),
            (x + 1, x + 2),
            (x - self.x * 2, x * 2 - self.x),
        ]
        for a, b in pairs:
            with self.subTest(a=a, b=b):
                first, second = simplified([a, b])
                self.assertIsNot(first, second)
        host = np.ones((2, 3), np.float32)
        plus, minus = evaluate([x / 0.0, x / -0.0], {x: host})
        np.testing.assert_array_equal([plus, minus], [host * np.inf, host * -np.inf])

    def test_softmax_over_any_axis(self):
        x = ad.Variable("x", shape=(2, 3, 4, 1), dtype=np.float32)
        for axis, found in [
            (-1, ["softmax"]), (3, ["softmax"]), (1, ["reshape", "reshape", "softmax_columns"]),
            (-2, ["reshape", "reshape", "softmax"]),
        ]:  # fmt: skip
            self.assertEqual(operators(simplified([ad.softmax_op(x, axis=axis)])), found, axis)
        same = [ad.log_softmax_op(x, axis=1), ad.log_softmax_op(x, axis=-3)]
        first, second = simplified(same)
        self.assertIs(first.inputs[0], second.inputs[0])

    def test_negative_log_likelihood_meets_one_element_a_row(self):
        """Nothing of it runs over all classes but the gradient, which is written once."""
        x = ad.Variable("x", shape=(5, 1000), dtype=np.float32)
        labels = ad.Variable("labels", shape=(5,), dtype=np.int64)
        loss = ad.negative_log_likelihood(x, labels, weights=np.ones(1000), ignore_index=-1)
        new = simplified([loss, *ad.gradients(loss, [x])], True)
        nodes = [node for node in ad.find_topo_sort(new) if not node.op.leaf]
        whole = [node.op.name for node in nodes if node.spec.size == 5000]
        self.assertEqual(whole, ["negative_log_likelihood_gradient"])
        readers = [node.op.name for node in nodes if x.name in [y.name for y in node.inputs]]
        self.assertEqual(readers, ["negative_log_likelihood"])

    def test_attributes_given_in_another_order_keep_their_names(self):
        class PairOp(ad.Op):
            kernel = "pair"

            def infer(self, node, *specs):
                return specs[0]

        op = PairOp()
        first, second = simplified([op(self.x, a=1, b=2), op(self.x, b=1, a=2)])
        self.assertIsNot(first, second)
        same, again = simplified([op(self.x, a=1, b=2), op(self.x, b=2, a=1)])
        self.assertIs(same, again)

    def test_operators_of_users_are_never_merged(self):
        calls = []

        class CountOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

            def compute(self, node, input_vals, output_val, use_numpy=True):
                calls.append(node)
                output_val[:] = input_vals[0]

        op = CountOp()
        a, b = op(self.x), op(self.x)
        evaluate([a + b], {self.x: np.ones((2, 3), np.float32)})
        self.assertEqual(calls, [a, b])

    def test_parameters_of_equal_value_are_not_merged(self):
        p, q = (ad.Parameter(np.zeros(3, np.float32)) for _ in range(2))
        first, second = simplified([p + 1, q + 1])
        self.assertIsNot(first, second)

    def test_identities_are_dropped(self):
        x = self.x
        same = [
            x + 0,
            x * 1,
            x / 1,
            x**1,
            x - 0,
            ad.reshape_op(x, (2, 3)),
            ad.reshape_op(ad.reshape_op(x, (6,)), (2, 3)),
            ad.transpose_op(ad.transpose_op(x)),
            ad.broadcast_to_op(x, (2, 3)),
            ad.cast_op(x, np.float32),
            ad.sum_to_like_op(x, x),
        ]
        for node in same:
            with self.subTest(node=node):
                self.assertEqual(simplified([node])[0].op.name, "Variable")

    def test_what_changes_the_dtype_is_no_identity(self):
        x = ad.Variable("x", shape=(2,), dtype=np.int32)
        for node in (x * 1.0, x / 1, x + 0.0):
            self.assertEqual(evaluate([node], {x: np.int32([1, 2])})[0].dtype, np.float64)

    def test_constants_are_folded(self):
        x = self.x
        like = ad.oneslike_op(x)
        y = ad.exp_op(like * 2 - 2) + ad.zeroslike_op(x)
        (full,) = simplified([y])
        self.assertEqual((full.op.name, full.attrs["value"]), ("full", 1.0))
        (z,) = simplified([x * (like + 1)])
        self.assertEqual((z.op.name, z.attrs["const"]), ("mul_const", 2.0))

    def test_folding_computes_in_the_nodes_dtype(self):
        half = ad.full_op((2,), 0.1, np.float32)
        wanted = np.float32(0.1) * np.float32(0.1) + np.float32(0.7)
        value = evaluate([half * half + np.float32(0.7)])[0]
        np.testing.assert_allclose(value, wanted, rtol=1e-7)

    def test_transposes_go_into_products(self):
        x = self.x
        y = ad.matmul_op(ad.transpose_op(x), x, trans_B=False)
        (product,) = simplified([y])
        self.assertEqual(operators([product]), ["matmul"])
        self.assertTrue(product.attrs["trans_A"])

    def test_shape_only_inputs_are_not_computed(self):
        x = self.x
        heavy = ad.exp_op(ad.matmul_op(x, x, trans_B=True))
        self.assertEqual(operators(simplified([ad.zeroslike_op(heavy)])), ["full"])

    def test_the_users_graph_is_left_alone(self):
        x = self.x
        y = ad.sum_to_like_op(ad.transpose_op(ad.transpose_op(x)) * 1 + 0, x)
        before = ad.text(y)
        simplified([y])
        evaluate([y], {x: np.ones((2, 3), np.float32)})
        self.assertEqual(ad.text(y), before)

    def test_native_form_casts_what_kernels_do_not_take(self):
        x = ad.Variable("x", shape=(3,), dtype=np.int32)
        y = ad.Variable("y", shape=(3,), dtype=np.float32)
        for native in (False, True):
            self.assertEqual(operators(simplified([x * y], native)), ["cast", "mul"])
        exp = ad.exp_op(ad.cast_op(x, np.int64))
        self.assertEqual(operators(simplified([exp], native=True)), ["cast", "cast", "exp"])

    def test_shapes_and_dtypes_stay(self):
        unary = [
            lambda a: a + 1,
            lambda a: a * 1.0,
            lambda a: a * 0,
            lambda a: a / 1,
            lambda a: 1 - a,
            lambda a: a**1,
            lambda a: -a,
            ad.relu_op,
            ad.sum_op,
            ad.mean_op,
            ad.softmax_op,
            ad.reducesumaxiszero_op,
        ]
        binary = [
            ad.add_op,
            ad.sub_op,
            ad.mul_op,
            ad.div_op,
            ad.relu_gradient_op,
            ad.sum_to_like_op,
        ]
        dtypes = (np.float32, np.int64, np.uint8, np.bool_)
        for first in dtypes:
            for second in dtypes:
                a = ad.Variable("a", shape=(2, 3), dtype=first)
                b = ad.Variable("b", shape=(1, 3), dtype=second)
                filled = [
                    ad.oneslike_op(b),
                    ad.full_op((1, 3), 2, second),
                    ad.full_op((2, 3), 1, second),
                ]
                nodes = [make(x) for make in unary for x in (a, *filled)]
                nodes += [
                    make(x, y)
                    for make in binary
                    for x in (a, ad.oneslike_op(a))
                    for y in (b, *filled)
                ]
                feeds = {a: np.ones((2, 3), first), b: np.ones((1, 3), second)}
                with self.subTest(first=np.dtype(first).name, second=np.dtype(second).name):
                    self.check_specs(nodes, feeds)

    def check_specs(self, nodes, feeds):
        specs = infer(ad.find_topo_sort(nodes), {x: x.spec for x in feeds})
        wrong = [
            (node, specs[node][:2], value.shape, value.dtype)
            for node, value in zip(nodes, evaluate(nodes, feeds), strict=True)
            if (value.shape, value.dtype) != specs[node][:2]
        ]
        self.assertEqual(wrong, [])

    def test_a_training_graph_computes_the_same_as_step_by_step(self):
        net = Training((5, 4, 3))
        feeds = net.batch(7)
        grads = ad.gradients(net.loss, net.parameters)
        values = evaluate([net.loss, *grads], feeds)
        one_by_one = _compute_each([net.loss, *grads], feeds)
        for value, wanted in zip(values, one_by_one, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=1e-7)


def _compute_each(fetches, feeds):
    """Runs the unsimplified graph with one executor a node, each fed with its inputs' values."""
    values = dict(feeds)
    for node in ad.find_topo_sort(fetches):
        if node.op.leaf == "state":
            values[node] = node.asnumpy()
        elif not node.op.leaf:
            inputs = [ad.Variable(x.name) for x in node.inputs]
            alone = ad.Node(node.op, inputs, node.attrs)
            fed = dict(zip(inputs, (values[x] for x in node.inputs)))
            values[node] = evaluate([alone], fed)[0]
    return [values[node] for node in fetches]
