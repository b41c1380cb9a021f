"""Small convolutions with relu and max-pool as one kernel forward and two backward."""

from __future__ import annotations

import unittest
from contextlib import nullcontext
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import KernelError
from dlsys.executor.debug.check import call_kernel
from dlsys.fusion.shared.conv_pool_operators import CUT, ConvPoolOp
from dlsys.runtime.device import Context, cpu, gpu
from support.devices import native_contexts, on_native_devices, require
from support.fusion import require_fusion, without

FORWARD, BACKWARD = "conv2d_pool", ("conv2d_pool_data_gradient", "conv2d_pool_filter_gradient")


class Layer:
    """x (n, c, h, w) → conv → [relu →] pool [→ relu], its loss and all gradients."""

    def __init__(
        self, channels, filters, size, padding=0, pool=2, relu="before", bias=True, seed=0, **attrs
    ):
        rng = np.random.default_rng(seed)
        self.x = ad.Variable("x")
        size = (size, size) if isinstance(size, int) else size
        shape = (filters, channels, *size)
        self.f, self.b = ad.Variable("f"), ad.Variable("b")
        self.values = {
            self.f: 0.3 * rng.standard_normal(shape).astype(np.float32),
            self.b: 0.3 * rng.standard_normal(filters).astype(np.float32),
        }
        if not bias:
            del self.values[self.b]
        self.conv = ad.conv2d(self.x, self.f, self.b if bias else None, padding=padding, **attrs)
        self.inner = ad.relu_op(self.conv) if relu == "before" else self.conv
        self.y = ad.max_pool2d(self.inner, pool)
        if relu == "after":
            self.y = ad.relu_op(self.y)
        self.weights = ad.Variable("weights")
        self.loss = ad.sum_op(self.y * self.weights)
        self.wanted = [self.x, self.f, *([self.b] if bias else [])]
        self.gradients = ad.gradients(self.loss, self.wanted)
        self.fetches = [self.y, *self.gradients]

    def feeds(self, shape, seed=1):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(shape).astype(np.float32)
        feeds = {self.x: x, **self.values}
        y = ad.Executor([self.y]).run(feeds)[0]
        return {**feeds, self.weights: rng.standard_normal(y.shape).astype(np.float32)}

    def names(self, feeds, ctx, fetches=None):
        """The operators of the plan."""
        executor = ad.Executor(self.fetches if fetches is None else fetches, ctx)
        used = {x: array.shape for x, array in feeds.items() if x in set(executor.topo_order)}
        return [step.node.op.name for step in executor.plan(used).steps]


def run(fetches, feeds, ctx, fused=True):
    """The values, with the pass or without."""
    executor = ad.Executor(fetches, ctx)
    used = {x: array for x, array in feeds.items() if x in set(executor.topo_order)}
    if fused:
        return executor.run(used, convert_to_numpy_ret_vals=True)
    with without("conv_pool"):
        return executor.run(used, convert_to_numpy_ret_vals=True)


# Layers nobody wrote the pass for: (shape of x, arguments of Layer).
LAYERS = {
    "lenet": ((4, 1, 28, 28), dict(channels=1, filters=6, size=5, padding=2)),
    "lenet's second": ((4, 6, 14, 14), dict(channels=6, filters=16, size=5)),
    "7 channels": ((937, 1, 12, 12), dict(channels=1, filters=7, size=5, padding=2)),
    "19 channels": ((3, 7, 14, 14), dict(channels=7, filters=19, size=5)),
    "14 channels, of more columns than a vector": (
        (3, 14, 11, 19), dict(channels=14, filters=5, size=3, padding=1)
    ),
    "23 channels": ((2, 23, 9, 10), dict(channels=23, filters=4, size=(4, 3))),
    "few columns": ((2, 7, 6, 6), dict(channels=7, filters=3, size=3)),
    "one image": ((1, 3, 9, 11), dict(channels=3, filters=5, size=3, padding=1)),
    "no images": ((0, 3, 9, 11), dict(channels=3, filters=5, size=3)),
    "pool 3": ((5, 2, 13, 17), dict(channels=2, filters=9, size=3, padding=1, pool=3)),
    "no relu": ((5, 4, 10, 9), dict(channels=4, filters=6, size=3, relu="")),
    "no bias": ((5, 4, 10, 9), dict(channels=4, filters=6, size=3, bias=False)),
    "pool, then relu": ((5, 4, 10, 9), dict(channels=4, filters=6, size=3, relu="after")),
    "7 x 7": ((2, 3, 15, 14), dict(channels=3, filters=4, size=7, padding=3)),
    "2 x 4": ((2, 3, 8, 10), dict(channels=3, filters=4, size=(2, 4), padding=((1, 0), (0, 3)))),
    "1 x 1": ((3, 5, 6, 7), dict(channels=5, filters=3, size=1)),
    "same": ((3, 3, 11, 9), dict(channels=3, filters=8, size=4, padding="same", pool=3)),
    "more filters": ((2, 3, 12, 12), dict(channels=3, filters=37, size=3, padding=1)),
    "64 filters": ((2, 3, 8, 8), dict(channels=3, filters=64, size=3, padding=1)),
    "9 channels of many images": ((300, 9, 8, 7), dict(channels=9, filters=17, size=3, padding=1)),
    "one filter of many offsets": ((2, 40, 6, 6), dict(channels=40, filters=1, size=5)),
}  # fmt: skip

# And those that must stay as they are.
LEFT = {
    "stride": ((2, 3, 13, 13), dict(channels=3, filters=4, size=3, stride=2)),
    "dilation": ((2, 3, 13, 13), dict(channels=3, filters=4, size=3, dilation=2)),
    "groups": ((2, 4, 12, 12), dict(channels=2, filters=4, size=3, groups=2)),
    "pool 4": ((2, 3, 13, 13), dict(channels=3, filters=4, size=3, pool=4)),
    "pool 2 x 3": ((2, 3, 13, 13), dict(channels=3, filters=4, size=3, pool=(2, 3))),
    "9 offsets": ((2, 3, 13, 13), dict(channels=3, filters=4, size=9)),
    "padding as wide as the filter": (
        (2, 3, 9, 9), dict(channels=3, filters=4, size=3, padding=3)
    ),
    "many channels": ((2, 65, 14, 14), dict(channels=65, filters=64, size=3)),
}  # fmt: skip
# These do not fit into the shared memory of a GPU; the CPU takes them.
LARGE = {
    "channels": ((2, 64, 14, 14), dict(channels=64, filters=64, size=3)),
    "planes": ((1, 3, 224, 224), dict(channels=3, filters=4, size=3)),
}


@require_fusion("conv_pool")
@require(cpu(0))
class Rewrites(unittest.TestCase):
    """What the pass does to graphs; it is the same for every native device."""

    ctx = cpu(0)

    def test_a_layer_is_three_kernels(self):
        for name, (shape, attrs) in LAYERS.items():
            with self.subTest(name):
                layer = Layer(**attrs)
                names = layer.names(layer.feeds(shape), self.ctx)
                self.assertEqual(
                    sorted(n for n in names if "pool" in n), sorted((FORWARD, *BACKWARD))
                )
                for gone in ("relu", "conv2d", "conv2d_bias", "relu_gradient"):
                    self.assertNotIn(gone, names)
                self.assertFalse([n for n in names if n.startswith("sum")], names)

    def test_what_it_must_not_touch(self):
        for name, (shape, attrs) in LEFT.items():
            with self.subTest(name):
                layer = Layer(**attrs)
                self.assert_unfused(layer.names(layer.feeds(shape), self.ctx))

    def test_what_only_the_cpu_holds(self):
        for name, (shape, attrs) in LARGE.items():
            with self.subTest(name):
                layer = Layer(**attrs)
                feeds = layer.feeds(shape)
                names = layer.names(feeds, self.ctx)
                self.assertEqual(len({FORWARD, *BACKWARD} & set(names)), 3, names)
                fused, apart = (run(layer.fetches, feeds, self.ctx, f) for f in (True, False))
                for a, b in zip(fused, apart, strict=True):
                    scale = float(np.abs(b).max())
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(scale, 1.0))

    def assert_unfused(self, names):
        self.assertFalse({FORWARD, *BACKWARD} & set(names), names)

    def test_overlapping_or_padded_windows_are_left(self):
        x = ad.Variable("x", shape=(2, 1, 9, 9), dtype=np.float32)
        f = ad.Variable("f", shape=(2, 1, 2, 2), dtype=np.float32)
        for attrs in (
            dict(stride=1), dict(padding=1), dict(ceil_mode=True), dict(stride=3), dict(dilation=2)
        ):  # fmt: skip
            with self.subTest(**attrs):
                conv = ad.conv2d(x, f, padding=((1, 0), (0, 0)))  # 9 x 8
                y = ad.max_pool2d(conv, 2, **attrs)
                steps = ad.Executor([y], self.ctx).plan({x: x.spec.shape, f: f.spec.shape}).steps
                self.assertEqual([s.node.op.name for s in steps], ["conv2d", "max_pool2d"])

    def test_what_is_read_elsewhere_is_still_stored(self):
        layer = Layer(3, 4, 3)
        feeds = layer.feeds((2, 3, 8, 8))
        unpooled = layer.gradients[0].inputs[1]
        for extra in (layer.conv, layer.inner, layer.inner * 2, ad.mean_op(layer.conv), unpooled):
            with self.subTest(extra=extra.name):
                fetches = [*layer.fetches, extra]
                self.assert_unfused(layer.names(feeds, self.ctx, fetches))
                for a, b in zip(run(fetches, feeds, None), run(fetches, feeds, self.ctx)):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_a_pool_in_a_group_is_left(self):
        layer = Layer(3, 4, 3)
        feeds = layer.feeds((2, 3, 8, 8))
        pooled = ad.max_pool_op(ad.relu_op(layer.conv), window=2)
        self.assert_unfused(layer.names(feeds, self.ctx, [pooled[0], ad.group_op(pooled)]))

    def test_forward_alone(self):
        layer = Layer(3, 4, 3)
        feeds = layer.feeds((2, 3, 8, 8))
        self.assertEqual(layer.names(feeds, self.ctx, [layer.y]), [FORWARD])

    def test_frozen_filters_are_left(self):
        layer = Layer(3, 4, 3)
        feeds = layer.feeds((2, 3, 8, 8))
        self.assert_unfused(layer.names(feeds, self.ctx, [layer.y, layer.gradients[0]]))

    def test_the_node_says_what_it_replaced(self):
        layer = Layer(3, 4, 3)
        feeds = layer.feeds((2, 3, 8, 8))
        executor = ad.Executor([layer.y], self.ctx)
        shapes = {x: feeds[x].shape for x in (layer.x, layer.f, layer.b)}
        node = executor.plan(shapes).steps[0].node
        body = str(node.attrs["body"])
        self.assertIn("max_pool2d(relu(conv2d_bias(x, f, b)))", body)


class Values:
    """Equal results with the pass and without, and on numpy."""

    ctx: Context

    def test_values_and_gradients(self):
        for name, (shape, attrs) in LAYERS.items():
            with self.subTest(name):
                layer = Layer(**attrs)
                feeds = layer.feeds(shape)
                fused = run(layer.fetches, feeds, self.ctx)
                for reference in (
                    run(layer.fetches, feeds, self.ctx, fused=False),
                    run(layer.fetches, feeds, None),
                ):
                    for got, wanted in zip(fused, reference):
                        self.assertEqual(got.shape, wanted.shape)
                        scale = np.abs(wanted).max(initial=1e-3)
                        self.assertLessEqual(np.abs(got - wanted).max(initial=0), 2e-5 * scale)

    def test_two_runs_give_the_same_bits(self):
        layer = Layer(6, 16, 5)
        feeds = layer.feeds((300, 6, 14, 14))
        executor = ad.Executor(layer.fetches, self.ctx)
        runs = [executor.run(feeds, convert_to_numpy_ret_vals=True) for _ in range(4)]
        for again in runs[1:]:
            for a, b in zip(runs[0], again):
                self.assertEqual(a.tobytes(), b.tobytes())

    def test_ties_go_to_the_first_and_relu_stops_at_zero(self):
        x = ad.Variable("x", shape=(1, 1, 4, 4), dtype=np.float32)
        f = ad.Variable("f", shape=(1, 1, 1, 1), dtype=np.float32)
        one = np.ones((1, 1, 1, 1), np.float32)
        data = np.array([[1, 1, 0, 0], [1, 1, 0, -1], [-1, -2, 2, 3], [-3, -1, 3, 3]], np.float32)
        expected = {
            True: [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]],
            False: [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]],
        }
        for relu, wanted in expected.items():
            conv = ad.conv2d(x, f)
            y = ad.max_pool2d(ad.relu_op(conv) if relu else conv, 2)
            fetches = [y, *ad.gradients(ad.sum_op(y), [x, f])]
            value, dx, _ = run(fetches, {x: data[None, None], f: one}, self.ctx)
            np.testing.assert_array_equal(dx[0, 0], np.float32(wanted))
            np.testing.assert_array_equal(value[0, 0], [[1, 0], [0 if relu else -1, 3]])

    def test_nan_is_the_largest_and_relu_lets_no_gradient_through_it(self):
        x = ad.Variable("x", shape=(1, 1, 2, 2), dtype=np.float32)
        f = ad.Variable("f", shape=(1, 1, 1, 1), dtype=np.float32)
        one = np.ones((1, 1, 1, 1), np.float32)
        data = np.array([[5, np.nan], [9, 1]], np.float32)[None, None]
        for relu in (True, False):
            conv = ad.conv2d(x, f)
            y = ad.max_pool2d(ad.relu_op(conv) if relu else conv, 2)
            fetches = [y, *ad.gradients(ad.sum_op(y), [x, f])]
            fused = run(fetches, {x: data, f: one}, self.ctx)
            unfused = run(fetches, {x: data, f: one}, self.ctx, fused=False)
            np.testing.assert_array_equal(fused[0], [[[[np.nan]]]])
            np.testing.assert_array_equal(fused[1], unfused[1])

    @require_fusion("conv_pool")
    def test_check_compares_with_the_body(self):
        for relu in ("before", "after", ""):
            layer = Layer(3, 5, 3, relu=relu)
            feeds = layer.feeds((2, 3, 9, 8))
            executor = ad.Executor(layer.fetches, self.ctx)
            executor.check(feeds)
        right = ConvPoolOp.scalars
        wrong = lambda node: (*right(node.op, node)[:2], 0, 0)  # noqa: E731  (there is no relu)
        with mock.patch.object(ConvPoolOp, "scalars", staticmethod(wrong)):
            layer = Layer(3, 5, 3)
            executor = ad.Executor(layer.fetches, self.ctx)
            with self.assertRaisesRegex(KernelError, r"\(conv2d_pool\) differs from numpy"):
                executor.check(layer.feeds((2, 3, 9, 8)))

    def test_training_two_layers_gives_equal_losses(self):
        losses = [self.train(fused) for fused in (True, False)]
        np.testing.assert_allclose(*losses, rtol=1e-4)
        self.assertLess(losses[0][-1], 0.9 * losses[0][0])

    def train(self, fused):
        rng = np.random.default_rng(3)
        x = ad.Variable("x", shape=(None, 1, 14, 14), dtype=np.float32)
        labels = ad.Variable("labels", shape=(None,), dtype=np.int64)
        shapes = [(4, 1, 3, 3), (4,), (8, 4, 3, 3), (8,), (32, 3)]
        p = [ad.Parameter(0.3 * rng.standard_normal(s).astype(np.float32)) for s in shapes]
        y = ad.max_pool2d(ad.relu_op(ad.conv2d(x, p[0], p[1], padding=1)), 2)
        y = ad.max_pool2d(ad.relu_op(ad.conv2d(y, p[2], p[3])), 2)
        loss = ad.softmax_cross_entropy(ad.matmul_op(ad.flatten_op(y), p[4]), labels)
        updates = [
            ad.assign_op(q, q - 0.1 * dq) for q, dq in zip(p, ad.gradients(loss, p), strict=True)
        ]
        images = rng.standard_normal((50, 1, 14, 14)).astype(np.float32)
        feeds = {x: images, labels: rng.integers(0, 3, 50)}
        fetches = [loss, *updates]
        executor = ad.Executor(fetches, self.ctx)
        with nullcontext() if fused else without("conv_pool"):
            runs = [executor.run(feeds, convert_to_numpy_ret_vals=True) for _ in range(8)]
        return [float(values[0]) for values in runs]


CpuValues, GpuValues = on_native_devices(Values)


@require_fusion("conv_pool")
@require(gpu(0))
class TensorCores(unittest.TestCase):
    """The kernels of tf32, which multiply factors of 10 bits of mantissa."""

    def run_at(self, layer, feeds, precision="tf32"):
        executor = ad.Executor(layer.fetches, gpu(0), precision)
        return executor.run(feeds, convert_to_numpy_ret_vals=True)

    def assert_close(self, found, wanted, bound):
        for got, right in zip(found, wanted, strict=True):
            self.assertEqual(got.shape, right.shape)
            scale = np.abs(right).max(initial=1e-3)
            self.assertLessEqual(np.abs(got - right).max(initial=0), bound * scale)

    def test_factors_of_ten_bits_give_float32s_results(self):
        """Products of such numbers are exact; worst of the largest element: 6e-7."""
        for name, (shape, attrs) in LAYERS.items():
            with self.subTest(name):
                layer = Layer(**attrs)
                feeds = {x: cut_to_tf32(array) for x, array in layer.feeds(shape).items()}
                wanted = run(layer.fetches, feeds, None)
                self.assert_close(self.run_at(layer, feeds), wanted, 1e-5)

    def test_other_factors_are_rounded(self):
        """Worst of the largest element: 6e-4."""
        layer = Layer(6, 16, 5)
        feeds = layer.feeds((9, 6, 14, 14))
        wanted = run(layer.fetches, feeds, None)
        found = self.run_at(layer, feeds)
        self.assert_close(found, wanted, 3e-3)
        for got, exact in zip(found[:-1], self.run_at(layer, feeds, "fp32")[:-1], strict=True):
            self.assertNotEqual(got.tobytes(), exact.tobytes())

    def test_two_runs_give_the_same_bits(self):
        layer = Layer(6, 16, 5)
        feeds = layer.feeds((300, 6, 14, 14))
        runs = [self.run_at(layer, feeds) for _ in range(3)]
        for again in runs[1:]:
            for a, b in zip(runs[0], again, strict=True):
                self.assertEqual(a.tobytes(), b.tobytes())

    def test_check_compares_with_the_body(self):
        for attrs in (dict(size=3), dict(size=5, padding=2)):
            layer = Layer(3, 5, **attrs)
            ad.Executor(layer.fetches, gpu(0), "tf32").check(layer.feeds((2, 3, 9, 8)))


def cut_to_tf32(array):
    """The array without the bits that tensor cores leave out."""
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@require_fusion("conv_pool")
@require(gpu(0))
class GpuLimits(unittest.TestCase):
    """The layers that fit into the shared memory of a GPU."""

    def fused(self, layer, shape, fetches=None):
        return {FORWARD, *BACKWARD} & set(layer.names(layer.feeds(shape), gpu(0), fetches))

    def test_what_only_the_cpu_holds(self):
        for name, (shape, attrs) in LARGE.items():
            with self.subTest(name):
                self.assertFalse(self.fused(Layer(**attrs), shape))

    def test_first_layer_needs_no_gradient_for_its_data(self):
        layer = Layer(1, 32, 3)  # whose dy would not fit
        names = self.fused(layer, (2, 1, 28, 28), [layer.y, *layer.gradients[1:]])
        self.assertEqual(names, {FORWARD, BACKWARD[1]})
        self.assertFalse(self.fused(layer, (2, 1, 28, 28)))


@require_fusion("conv_pool")
class Codes(unittest.TestCase):
    """The codes themselves, by every device's kernel and by numpy."""

    def test_codes(self):
        layer = Layer(1, 1, 1, bias=False)
        x = np.array([[3, 1, -1, -2], [0, 2, -3, -4]], np.float32)[None, None]
        for ctx in native_contexts():
            shapes = {layer.x: x.shape, layer.f: (1, 1, 1, 1)}
            step = ad.Executor([layer.y], ctx).plan(shapes).steps[0]
            for sign, wanted in ((1.0, [[0, CUT]]), (-1.0, [[CUT, 3]])):
                inputs = [x, np.full((1, 1, 1, 1), sign, np.float32)]
                y, code = np.empty((1, 1, 1, 2), np.float32), np.empty((1, 1, 1, 2), np.uint8)
                step.node.op.numpy(step.node, *inputs, y, code)
                np.testing.assert_array_equal(code[0, 0], wanted)
                made = [ndarray.empty(a.shape, ctx, a.dtype) for a in (y, code)]
                call_kernel(ctx, step, [ndarray.array(a, ctx) for a in inputs], made)
                np.testing.assert_array_equal(made[0].asnumpy(), y)
                np.testing.assert_array_equal(made[1].asnumpy(), code)
