"""Nodes, topological order, text, gradients, dtype rules and the simplify pass."""

from __future__ import annotations

import unittest

import numpy as np

from devices import require
from dlsys import autodiff as ad
from dlsys.errors import GraphError, ShapeError
from dlsys.graph.shapes import infer
from dlsys.passes.simplify import simplify
from dlsys.runtime.device import Context, cpu, gpu
from graphs import Training, evaluate, here

CHAIN = 100_000


class TwoFold(ad.Op):
    """2x and x² from one operator; has no native kernel."""

    name = "two_fold"
    outputs = 2

    def infer_shape(self, node, input_shapes):
        return input_shapes[0], input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        x = input_vals[0] if use_numpy else input_vals[0].asnumpy()
        output_val[0][:] = 2 * x
        output_val[1][:] = x * x

    def gradient(self, node, output_grad):
        x = node.inputs[0]
        double, square = output_grad
        pieces = [] if double is None else [2 * double]
        pieces += [] if square is None else [2 * x * square]
        return [ad.sum_node_list(pieces)]


two_fold = TwoFold()


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

    def test_one_value_is_neither_indexed_nor_unpacked(self):
        x = ad.Variable("x")
        with self.assertRaisesRegex(GraphError, "1 output"):
            x[0]
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


class Gradients:
    """Gradients whose values are known by hand, on one device."""

    ctx: Context | None

    def check(self, fetches, feeds, expected):
        values = evaluate(fetches, feeds, self.ctx)
        for value, wanted in zip(values, expected, strict=True):
            self.assertEqual(value.shape, np.shape(wanted))
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)

    def setUp(self):
        self.x = ad.Variable("x")
        self.host = np.array([0.5, -1.0, 2.0], np.float32)

    def test_a_node_used_many_times(self):
        x = self.x
        y = x * x + x * 3 + x
        self.check(ad.gradients(y, [x]), {x: self.host}, [2 * self.host + 4])

    def test_diamonds_do_not_count_paths_twice(self):
        y = self.x
        for _ in range(20):
            y = y * 0.5 + y * 0.5
        self.check(ad.gradients(y, [self.x]), {self.x: self.host}, [np.ones(3)])

    def test_an_unrelated_node_gets_zeros_of_its_shape(self):
        other = ad.Variable("other")
        w = ad.Parameter(np.ones((2, 4), np.float32))
        grads = ad.gradients(self.x * 2, [other, self.x, w])
        feeds = {self.x: self.host, other: np.ones((3, 2), np.float32)}
        self.check(grads, feeds, [np.zeros((3, 2)), np.full(3, 2), np.zeros((2, 4))])

    def test_with_respect_to_itself_and_to_intermediate_nodes(self):
        x = self.x
        h = x * 3
        y = h * h
        host = self.host
        grads = ad.gradients(y, [y, h, x, h])
        self.check(grads, {x: host}, [np.ones(3), 6 * host, 18 * host, 6 * host])

    def test_third_derivative_of_a_cube(self):
        x = self.x
        (first,) = ad.gradients(x**3, [x])
        (second,) = ad.gradients(first, [x])
        (third,) = ad.gradients(second, [x])
        (fourth,) = ad.gradients(third, [x])
        host = self.host
        wanted = [3 * host**2, 6 * host, np.full(3, 6), np.zeros(3)]
        self.check([first, second, third, fourth], {x: host}, wanted)

    def test_second_derivative_through_transcendentals(self):
        x, host = self.x, self.host
        (first,) = ad.gradients(ad.tanh_op(x) * ad.exp_op(x), [x])
        (second,) = ad.gradients(first, [x])
        t, e = np.tanh(host), np.exp(host)
        s = 1 - t * t
        self.check([first, second], {x: host}, [e * (s + t), e * (2 * s + t - 2 * t * s)])

    def test_hessian_vector_product(self):
        x, v = self.x, ad.Variable("v")
        (grad,) = ad.gradients(ad.sum_op(x * x * x), [x])
        (product,) = ad.gradients(ad.sum_op(grad * v), [x])
        direction = np.array([1.0, 2.0, 3.0], np.float32)
        self.check([product], {x: self.host, v: direction}, [6 * self.host * direction])

    def test_broadcasting_is_undone(self):
        shapes = [((3,), (2, 3)), ((2, 1), (2, 3)), ((1, 3), (2, 1)), ((), (2, 3)), ((2, 3), ())]
        for left, right in shapes:
            a, b = ad.Variable("a"), ad.Variable("b")
            rng = np.random.default_rng(0)
            host_a, host_b = rng.random(left, np.float32), rng.random(right, np.float32)
            ones = np.ones(np.broadcast_shapes(left, right), np.float32)
            with self.subTest(left=left, right=right):
                wanted = [_unbroadcast(ones * host_b, left), _unbroadcast(ones * host_a, right)]
                self.check(ad.gradients(a * b, [a, b]), {a: host_a, b: host_b}, wanted)

    def test_every_transpose_of_a_product(self):
        rng = np.random.default_rng(0)
        for trans_A in (False, True):
            for trans_B in (False, True):
                a, b, dy = ad.Variable("a"), ad.Variable("b"), ad.Variable("dy")
                host_a, host_b = rng.random((2, 3), np.float32), rng.random((3, 4), np.float32)
                host_dy = rng.random((2, 4), np.float32)
                y = ad.matmul_op(a, b, trans_A=trans_A, trans_B=trans_B)
                da, db = host_dy @ host_b.T, host_a.T @ host_dy
                feeds = {
                    a: host_a.T if trans_A else host_a,
                    b: host_b.T if trans_B else host_b,
                    dy: host_dy,
                }
                wanted = [da.T if trans_A else da, db.T if trans_B else db]
                with self.subTest(trans_A=trans_A, trans_B=trans_B):
                    self.check(ad.gradients(ad.sum_op(y * dy), [a, b]), feeds, wanted)

    def test_several_outputs(self):
        x, host = self.x, self.host
        double, square = two_fold(x)
        grads = [
            *ad.gradients(double * square, [x]),
            *ad.gradients(square, [x]),
            *ad.gradients(double, [x, square]),
            *ad.gradients(square + square * x, [square]),
        ]
        wanted = [6 * host**2, 2 * host, np.full(3, 2), np.zeros(3), 1 + host]
        self.check([double, square, *grads], {x: host}, [2 * host, host**2, *wanted])

    def test_second_order_through_several_outputs(self):
        x = self.x
        _, square = two_fold(x * 2)
        (first,) = ad.gradients(square, [x])
        (second,) = ad.gradients(first, [x])
        self.check([first, second], {x: self.host}, [8 * self.host, np.full(3, 8)])

    def test_relu_at_zero_has_no_slope(self):
        y = ad.relu_op(self.x)
        feeds = {self.x: np.array([-1, 0, 1], np.float32)}
        self.check(ad.gradients(y, [self.x]), feeds, [[0, 0, 1]])


class NumpyGradients(Gradients, unittest.TestCase):
    ctx = None


@require(cpu(0))
class CpuGradients(Gradients, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuGradients(Gradients, unittest.TestCase):
    ctx = gpu(0)


def _unbroadcast(array, shape):
    lead = array.ndim - len(shape)
    array = array.sum(axis=tuple(range(lead)))
    axes = tuple(k for k, extent in enumerate(shape) if extent == 1)
    return array.sum(axis=axes, keepdims=True)


class GradientErrors(unittest.TestCase):
    def test_an_operator_without_a_gradient(self):
        class HardOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

        x = ad.Variable("x")
        y, line = HardOp()(x), here()
        with self.assertRaises(GraphError) as caught:
            ad.gradients(y * 2, [x])
        self.assertEqual(str(caught.exception), f"operator hard has no gradient [{line}]")
        self.assertEqual(len(ad.gradients(y * 2, [y])), 1)

    def test_an_operator_off_the_way_needs_no_gradient(self):
        class HardOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

            def compute(self, node, input_vals, output_val, use_numpy=True):
                output_val[:] = np.sign(input_vals[0])

        x, z = ad.Variable("x"), ad.Variable("z")
        grads = ad.gradients(x * HardOp()(z), [x])
        feeds = {x: np.ones(2), z: np.array([-3.0, 5.0])}
        np.testing.assert_array_equal(evaluate(grads, feeds)[0], [-1, 1])

    def test_wrong_returns_of_a_gradient_are_refused(self):
        x = ad.Variable("x")
        for returned in ([], [x, x], [3.0], x, None):

            class WrongOp(ad.Op):
                value = returned

                def infer_shape(self, node, input_shapes):
                    return input_shapes[0]

                def gradient(self, node, output_grad):
                    return self.value

            with self.subTest(returned=returned), self.assertRaisesRegex(GraphError, "wrong"):
                ad.gradients(WrongOp()(x), [x])

    def test_arguments_that_are_no_values(self):
        x = ad.Variable("x", shape=(2,), dtype=np.float32)
        pair = two_fold(x)
        p = ad.Parameter(np.zeros(2, np.float32))
        group = ad.group_op(ad.assign_op(p, p + 1))
        cases = [(pair, [x]), (pair[0], [pair]), (3, [x]), (x, ["x"]), (group, [p]), (x, [group])]
        for output, wrt in cases:
            with self.subTest(output=output, wrt=wrt), self.assertRaises(GraphError):
                ad.gradients(output, wrt)


class Chains(unittest.TestCase):
    def test_a_hundred_thousand_nodes(self):
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


class Dtypes(unittest.TestCase):
    """What `ctx=None` computes in."""

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
        x, w = ad.Variable("x"), ad.Parameter(np.ones(2, np.float32), "w")
        with self.assertRaisesRegex(ShapeError, "mul: x is float64 and w is float32"):
            evaluate([x * w], {x: np.ones(2)})
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

    def test_declared_dtype_is_checked(self):
        x = ad.Variable("x", dtype=np.float32)
        with self.assertRaisesRegex(ShapeError, "x is fed float64, declared float32"):
            evaluate([x + 1], {x: np.ones(2)})

    def test_lists_and_numbers_take_the_declared_dtype_or_float32(self):
        w = ad.Parameter(np.float32([1, 2]))
        for x in (ad.Variable("x"), ad.Variable("x", dtype=np.float32)):
            for value in ([3.0, 4.0], 2.0):
                self.assertEqual(self.dtype(x * w, {x: value}), np.float32)
        labels = ad.Variable("labels", dtype=np.int32)
        self.assertEqual(self.dtype(labels * 1, {labels: [1, 2]}), np.int32)


class NativeDtypes:
    """What native devices compute in: float32."""

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

    def test_declared_integers_keep_their_dtype_and_refuse_arithmetic(self):
        x = ad.Variable("x", dtype=np.int64)
        feeds = {x: np.array([2**40 + 1, -3])}
        np.testing.assert_array_equal(self.value(ad.reshape_op(x, (2, 1)), feeds).T, [feeds[x]])
        with self.assertRaisesRegex(GraphError, "add: int64 arithmetic runs on numpy only"):
            self.value(x + x, feeds)

    def test_large_integers_are_filled_exactly_or_refused(self):
        try:
            value = self.value(ad.full_op((2,), 2**24 + 1, np.int64), {})
        except (GraphError, ShapeError) as error:
            self.assertIn("full", str(error))
        else:
            self.assertEqual(value.tolist(), [2**24 + 1] * 2)

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


def simplified(fetches, native=False):
    """The fetches after the pass; every Variable in them has a declared shape."""
    order = ad.find_topo_sort(fetches)
    specs = infer(order, {n: n.spec for n in order if n.op.leaf == "feed"}, native)
    return simplify(order, specs, fetches, native)


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
                self.check_specs(nodes, feeds)

    def check_specs(self, nodes, feeds):
        order = ad.find_topo_sort(nodes)
        specs = infer(order, {node: node.spec for node in feeds})
        for node in nodes:
            with self.subTest(node=node):
                value = evaluate(
                    [node], {x: v for x, v in feeds.items() if x in ad.find_topo_sort([node])}
                )[0]
                self.assertEqual((value.shape, value.dtype), specs[node][:2])

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


if __name__ == "__main__":
    unittest.main()
