"""Scripts written for the course assignment: fed weights, updates in Python, own operators."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys import gpu_op, ndarray
from dlsys.errors import ShapeError
from dlsys.runtime.device import Context, cpu, gpu
from support.devices import require

BATCH, INPUTS, HIDDEN, CLASSES = 32, 20, 16, 5


def blobs(rows: int, seed: int = 0):
    """Points around one center a class, and their classes one-hot."""
    rng = np.random.RandomState(7)
    centers = rng.normal(scale=1.0, size=(CLASSES, INPUTS))
    rng = np.random.RandomState(seed)
    classes = rng.randint(0, CLASSES, rows)
    points = centers[classes] + 0.5 * rng.normal(size=(rows, INPUTS))
    return points, np.eye(CLASSES)[classes]


def sgd_update_gpu(param, grad_param, learning_rate):
    """param -= learning_rate * grad_param on a device; the gradient's array is scratch."""
    assert isinstance(param, ndarray.NDArray)
    assert isinstance(grad_param, ndarray.NDArray)
    gpu_op.matrix_elementwise_multiply_by_const(grad_param, -learning_rate, grad_param)
    gpu_op.matrix_elementwise_add(param, grad_param, param)


class Names(unittest.TestCase):
    def test_all_are_there(self):
        operators = """add_op mul_op add_byconst_op mul_byconst_op matmul_op placeholder_op
            oneslike_op zeroslike_op reducesumaxiszero_op broadcastto_op softmaxcrossentropy_op
            softmax_op relu_op relu_gradient_op"""
        for name in operators.split():
            self.assertIsInstance(getattr(ad, name), ad.Op, name)
        others = "Variable gradients Executor Node Op softmax_func find_topo_sort sum_node_list"
        for name in others.split():
            self.assertTrue(callable(getattr(ad, name)), name)
        for name in "cpu gpu is_gpu_ctx array empty NDArray".split():
            self.assertTrue(callable(getattr(ndarray, name)), name)
        kernels = """array_set broadcast_to reduce_sum_axis_zero matrix_elementwise_add
            matrix_elementwise_add_by_const matrix_elementwise_multiply
            matrix_elementwise_multiply_by_const matrix_multiply relu relu_gradient softmax
            softmax_cross_entropy"""
        for name in kernels.split():
            self.assertTrue(callable(getattr(gpu_op, name)), name)

    def test_helpers(self):
        x, y = ad.Variable(name="x"), ad.Variable(name="y")
        total = ad.sum_node_list([x, y, x])
        self.assertIs(ad.sum_node_list([x]), x)
        order = ad.find_topo_sort([total])
        self.assertEqual((order[-1], set(order) >= {x, y}), (total, True))
        logits = np.array([[1000.0, 1000.0], [0.0, np.log(3)]])
        np.testing.assert_allclose(ad.softmax_func(logits), [[0.5, 0.5], [0.25, 0.75]])


class Scripts:
    """The assignment's scripts on one device."""

    ctx: Context | None

    def array(self, value):
        return value if self.ctx is None else ndarray.array(value, ctx=self.ctx)

    def numpy(self, value):
        return value if isinstance(value, np.ndarray) else value.asnumpy()

    # ---- graphs of one operator, as the assignment's own tests have them ----
    def test_sums_and_products(self):
        x2, x3 = ad.Variable(name="x2"), ad.Variable(name="x3")
        y = x2 * x2 + x2 * x3 + 5 + x3 * 3
        grad_x2, grad_x3 = ad.gradients(y, [x2, x3])
        executor = ad.Executor([y, grad_x2, grad_x3], ctx=self.ctx)
        x2_val, x3_val = 2 * np.ones(3), 3 * np.ones(3)
        values = executor.run(feed_dict={x2: x2_val, x3: x3_val})
        self.assertIsInstance(y, ad.Node)
        wanted = [x2_val**2 + x2_val * x3_val + 5 + x3_val * 3, 2 * x2_val + x3_val, x2_val + 3]
        for value, expected in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(self.numpy(value), expected)

    def test_identity_and_unused(self):
        x = ad.Variable(name="x")
        (grad,) = ad.gradients(x, [x])
        value, dx = ad.Executor([x, grad], ctx=self.ctx).run({x: 2 * np.ones(3)})
        np.testing.assert_array_equal(self.numpy(value), 2 * np.ones(3))
        np.testing.assert_array_equal(self.numpy(dx), np.ones(3))

    def test_matmul_in_two_variables(self):
        x2, x3 = ad.Variable(name="x2"), ad.Variable(name="x3")
        y = ad.matmul_op(x2, x3)
        grad_x2, grad_x3 = ad.gradients(y, [x2, x3])
        executor = ad.Executor([y, grad_x2, grad_x3], ctx=self.ctx)
        x2_val = np.array([[1, 2], [3, 4], [5, 6]])  # integers are fed too
        x3_val = np.array([[7, 8, 9], [10, 11, 12]])
        values = executor.run(feed_dict={x2: x2_val, x3: x3_val})
        ones = np.ones((3, 3))
        wanted = [x2_val @ x3_val, ones @ x3_val.T, x2_val.T @ ones]
        for value, expected in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(self.numpy(value), expected)

    def test_shapes_of_the_old_operators(self):
        x, y = ad.Variable(name="x"), ad.Variable(name="y")
        labels, host = np.eye(3)[[0, 2]], np.array([[1.0, -2.0, 3.0], [4.0, 0.0, -6.0]])
        fetches = [
            ad.reducesumaxiszero_op(x),
            ad.reducesumaxiszero_op(ad.reducesumaxiszero_op(x)),
            ad.broadcastto_op(ad.reducesumaxiszero_op(x), x),
            ad.softmaxcrossentropy_op(x, y),
            ad.softmax_op(x),
            ad.relu_op(x),
            ad.relu_gradient_op(x, y),
            ad.oneslike_op(x),
            ad.zeroslike_op(x),
            ad.add_byconst_op(x, 2),
            ad.mul_byconst_op(x, -2),
        ]
        values = ad.Executor(fetches, ctx=self.ctx).run({x: host, y: labels}, True)
        p = ad.softmax_func(host)
        total = host.sum(0)
        wanted = [total, total.sum(keepdims=True), np.tile(total, (2, 1))]
        wanted.append(np.mean(-np.log((p * labels).sum(1)), keepdims=True))
        wanted += [p, np.maximum(host, 0), np.where(host > 0, labels, 0)]
        wanted += [np.ones((2, 3)), np.zeros((2, 3)), host + 2, host * -2]
        for node, value, expected in zip(fetches, values, wanted, strict=True):
            self.assertEqual(value.shape, expected.shape, node)
            np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=repr(node))

    def test_the_old_loss_keeps_its_gradient_without_the_batch(self):
        y, y_ = ad.Variable(name="y"), ad.Variable(name="y_")
        (grad,) = ad.gradients(ad.softmaxcrossentropy_op(y, y_), [y])
        host, labels = np.array([[1.0, 2.0], [3.0, -1.0]]), np.eye(2)
        value = ad.Executor([grad], ctx=self.ctx).run({y: host, y_: labels}, True)[0]
        np.testing.assert_allclose(value, ad.softmax_func(host) - labels, rtol=1e-5)

    # ---- training ----
    def train(self, build, weights, learning_rate, epochs):
        """The assignment's loop: weights are fed, gradients fetched, the update is Python's."""
        x, y_ = ad.Variable(name="X"), ad.Variable(name="y_")
        names = [ad.Variable(name=f"W{k}") for k in range(len(weights))]
        y, loss = build(x, y_, names)
        executor = ad.Executor([loss, y, *ad.gradients(loss, names)], ctx=self.ctx)
        x_val = self.array(np.empty((BATCH, INPUTS), np.float32))
        y_val = self.array(np.empty((BATCH, CLASSES), np.float32))
        weights = [self.array(value) for value in weights]
        points, labels = blobs(10 * BATCH)
        losses = []
        for _ in range(epochs):
            for start in range(0, len(points), BATCH):
                x_val[:] = points[start : start + BATCH]
                y_val[:] = labels[start : start + BATCH]
                feeds = {x: x_val, y_: y_val, **dict(zip(names, weights))}
                loss_val, _, *grads = executor.run(feed_dict=feeds)
                if self.ctx is None:
                    weights = [w - learning_rate * g for w, g in zip(weights, grads)]
                else:
                    for w, g in zip(weights, grads):
                        sgd_update_gpu(w, g, learning_rate)
            losses.append(float(self.numpy(loss_val)[0]))
        test_points, test_labels = blobs(77, seed=1)
        feeds = {x: test_points, y_: test_labels, **dict(zip(names, weights))}
        predicted = executor.run(feed_dict=feeds, convert_to_numpy_ret_vals=True)[1]
        self.assertIsInstance(predicted, np.ndarray)
        accuracy = np.mean(predicted.argmax(1) == test_labels.argmax(1))
        return losses, accuracy, [self.numpy(w) for w in weights]

    def test_logistic_regression(self):
        def build(x, y_, names):
            z = ad.matmul_op(x, names[0])
            y = z + ad.broadcastto_op(names[1], z)
            return y, ad.softmaxcrossentropy_op(y, y_)

        weights = [np.zeros((INPUTS, CLASSES)), np.zeros(CLASSES)]
        losses, accuracy, _ = self.train(build, weights, 1e-3, epochs=5)
        self.assertEqual(losses, sorted(losses, reverse=True))
        self.assertGreater(accuracy, 0.9)

    def mlp(self):
        def build(x, y_, names):
            w1, w2, b1, b2 = names
            z1 = ad.matmul_op(x, w1)
            a1 = ad.relu_op(z1 + ad.broadcastto_op(b1, z1))
            z2 = ad.matmul_op(a1, w2)
            y = z2 + ad.broadcastto_op(b2, z2)
            return y, ad.softmaxcrossentropy_op(y, y_)

        rng = np.random.RandomState(seed=123)
        shapes = [(INPUTS, HIDDEN), (HIDDEN, CLASSES), (HIDDEN,), (CLASSES,)]
        weights = [rng.normal(scale=0.1, size=shape) for shape in shapes]
        return self.train(build, weights, 3e-3, epochs=8)

    def test_mlp(self):
        losses, accuracy, _ = self.mlp()
        self.assertLess(losses[-1], losses[0] / 5)
        self.assertGreater(accuracy, 0.9)

    def test_float32_and_float64_feeds_mix(self):
        x, w = ad.Variable(name="x"), ad.Variable(name="w")
        y = ad.matmul_op(x, w)
        host = np.arange(6, dtype=np.float32).reshape(2, 3)
        value = ad.Executor([y], ctx=self.ctx).run({x: host, w: np.ones((3, 2))})[0]
        np.testing.assert_array_equal(self.numpy(value), host @ np.ones((3, 2)))
        wanted = np.float64 if self.ctx is None else np.float32
        self.assertEqual(value.dtype, wanted)

    # ---- own operators ----
    def test_own_operators(self):
        x, w = ad.Variable(name="x"), ad.Variable(name="w")
        y = scaled_sum_op(ad.matmul_op(x, w), x * 0.5, 3.0)
        grad_x, grad_w = ad.gradients(y, [x, w])
        executor = ad.Executor([y, grad_x, grad_w], ctx=self.ctx)
        rng = np.random.RandomState(0)
        host, weights = rng.normal(size=(4, 4)), rng.normal(size=(4, 4))
        values = executor.run({x: host, w: weights}, convert_to_numpy_ret_vals=True)
        ones = np.full((4, 4), 3.0)
        wanted = [3 * (host @ weights + host * 0.5), ones @ weights.T + 1.5, host.T @ ones]
        for value, expected in zip(values, wanted, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)

    def test_own_operator_on_a_feed_that_is_fetched(self):
        x = ad.Variable(name="x")
        y = scaled_sum_op(x, x, 0.5)
        z = scaled_sum_op(y, x, 2)
        values = ad.Executor([z, y, x], ctx=self.ctx).run({x: np.ones((2, 2))}, True)
        for value, wanted in zip(values, (4, 1, 1), strict=True):
            np.testing.assert_array_equal(value, np.full((2, 2), wanted))

    def test_attributes_set_on_a_node_reach_compute(self):
        x = ad.Variable(name="x")
        nodes = [clip_op(x, 0.5), clip_op(x, 2.0)]
        host = np.array([-3.0, 0.25, 1.0, 9.0])
        values = ad.Executor(nodes, ctx=self.ctx).run({x: host}, True)
        for value, limit in zip(values, (0.5, 2.0), strict=True):
            np.testing.assert_array_equal(value, np.clip(host, -limit, limit))

    # ---- what scripts look at ----
    def test_views_of_the_executor(self):
        x, w, y_ = (ad.Variable(name=name) for name in ("x", "w", "y_"))
        z = ad.matmul_op(x, w)
        own = scaled_sum_op(z, z, 1.0)
        loss = ad.softmaxcrossentropy_op(own, y_)
        executor = ad.Executor([loss], ctx=self.ctx)
        self.assertEqual(executor.topo_order, ad.find_topo_sort([loss]))
        feed_shapes = {x: (6, 3), w: (3, 2), y_: (6, 2)}
        executor.infer_shape(feed_shapes)
        shapes = executor.node_to_shape_map
        self.assertEqual({node: shapes[node] for node in feed_shapes}, feed_shapes)
        self.assertEqual((shapes[z], shapes[own], shapes[loss]), ((6, 2), (6, 2), (1,)))
        executor.memory_plan(feed_shapes)
        arrays = executor.node_to_arr_map
        self.assertEqual(set(arrays), {z, own, loss})
        for node, array in arrays.items():
            self.assertEqual(tuple(array.shape), shapes[node])
            kind = np.ndarray if self.ctx is None else ndarray.NDArray
            self.assertIsInstance(array, kind)
        self.assertIs(executor.node_to_arr_map[z], arrays[z])
        executor.infer_shape({x: (8, 3), w: (3, 2), y_: (8, 2)})
        self.assertEqual(executor.node_to_shape_map[z], (8, 2))
        self.assertEqual(tuple(executor.node_to_arr_map[z].shape), (8, 2))

    def test_a_run_fills_the_views(self):
        x, w = ad.Variable(name="x"), ad.Variable(name="w")
        z = ad.relu_op(ad.matmul_op(x, w))
        executor = ad.Executor([z], ctx=self.ctx)
        self.assertIsNone(executor.node_to_shape_map)
        self.assertEqual(executor.node_to_arr_map, {})
        for rows in (4, 4, 6):
            executor.run({x: np.ones((rows, 3)), w: np.ones((3, 2))})
            wanted = {x: (rows, 3), w: (3, 2), z.inputs[0]: (rows, 2), z: (rows, 2)}
            self.assertEqual(executor.node_to_shape_map, wanted)
            self.assertEqual(tuple(executor.node_to_arr_map[z].shape), (rows, 2))
        self.assertIs(executor.node_to_shape_map, executor.node_to_shape_map)
        executor.infer_shape({x: (8, 3), w: (3, 2)})
        self.assertEqual(executor.node_to_shape_map[z], (8, 2))
        with self.assertRaises(ShapeError):
            executor.run({x: np.ones((5, 2)), w: np.ones((3, 2))})
        self.assertEqual(executor.node_to_shape_map[z], (8, 2))

    def test_infer_shape_of_one_operator(self):
        x, y = ad.Variable(name="x"), ad.Variable(name="y")
        node = ad.matmul_op(x, y, trans_A=True)
        self.assertEqual(tuple(node.op.infer_shape(node, [(3, 4), (3, 5)])), (4, 5))
        node = ad.add_op(x, y)
        self.assertEqual(tuple(node.op.infer_shape(node, [(3, 4), (4,)])), (3, 4))
        with self.assertRaises(ValueError):
            node.op.infer_shape(node, [(3, 4), (3,)])

    def test_compute_of_one_operator(self):
        x, y = ad.Variable(name="x"), ad.Variable(name="y")
        host = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
        for node, wanted in (
            (ad.add_op(x, y), host + host),
            (ad.matmul_op(x, y, trans_B=True), host @ host.T),
            (ad.relu_op(x), np.maximum(host, 0)),
            (ad.softmax_op(x), ad.softmax_func(host)),
            (ad.add_byconst_op(x, 2), host + 2),
        ):
            inputs = [self.array(host) for _ in node.inputs]
            output = self.array(np.zeros((2, 2), np.float32))
            node.op.compute(node, inputs, output, self.ctx is None)
            np.testing.assert_allclose(self.numpy(output), wanted, rtol=1e-6)


class ScaledSumOp(ad.Op):
    """const * (A + B), written as the assignment writes its operators."""

    def __call__(self, node_A, node_B, const_val):
        new_node = ad.Op.__call__(self)
        new_node.const_attr = const_val
        new_node.inputs = [node_A, node_B]
        new_node.name = f"({node_A.name}+{node_B.name})*{const_val}"
        return new_node

    def compute(self, node, input_vals, output_val, use_numpy=True):
        assert len(input_vals) == 2
        if use_numpy:
            output_val[:] = node.const_attr * (input_vals[0] + input_vals[1])
        else:
            gpu_op.matrix_elementwise_add(input_vals[0], input_vals[1], output_val)
            gpu_op.matrix_elementwise_multiply_by_const(output_val, node.const_attr, output_val)

    def gradient(self, node, output_grad):
        return [node.const_attr * output_grad, node.const_attr * output_grad]

    def infer_shape(self, node, input_shapes):
        assert input_shapes[0] == input_shapes[1]
        return input_shapes[0]


class ClipOp(ad.Op):
    """Keeps its limit in an attribute of the node that only it knows."""

    def __call__(self, node_A, limit):
        new_node = ad.Op.__call__(self)
        new_node.inputs = [node_A]
        new_node.clip_attr_limit = limit
        return new_node

    def compute(self, node, input_vals, output_val, use_numpy=True):
        limit = node.clip_attr_limit
        value = input_vals[0] if use_numpy else input_vals[0].asnumpy()
        output_val[:] = np.clip(value, -limit, limit)

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]


scaled_sum_op = ScaledSumOp()
clip_op = ClipOp()


class NumpyScripts(Scripts, unittest.TestCase):
    ctx = None


class NativeScripts(Scripts):
    """Native devices follow numpy."""

    def test_mlp_follows_numpy(self):
        losses, _, weights = self.mlp()
        reference = NumpyScripts("mlp")
        wanted, _, wanted_weights = reference.mlp()
        np.testing.assert_allclose(losses, wanted, atol=1e-4)
        for value, expected in zip(weights, wanted_weights, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)


@require(cpu(0))
class CpuScripts(NativeScripts, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuScripts(NativeScripts, unittest.TestCase):
    ctx = gpu(0)
