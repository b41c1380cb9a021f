"""Batch normalization with its surroundings in two kernels each way, on a GPU."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import KernelError
from dlsys.fusion.shared.rewrite import exchange
from dlsys.graph.node import Node
from dlsys.ndarray import array, empty, launch
from dlsys.ops import activation
from dlsys.runtime.device import gpu
from fusion.test_gemm_epilogue import feeds_of
from support import sample
from support.devices import native_contexts, require, slow
from support.fusion import GPU, fused, require_fusion, without
from support.graphs import evaluate, operators, simplified, variable

STATISTICS, MAP = "batch_statistics_single_pass", "batch_normalize_map"
MAP_BACK = ("batch_normalize_map_sums", "batch_normalize_map_gradient")
RELU_BACK = ("batch_normalize_relu_sums", "batch_normalize_gradient")
PLAIN_BACK = ("batch_normalize_sums_single_pass", "batch_normalize_gradient")


class Norm:
    """A normalization of x with parameters that are fed."""

    def __init__(self, x: Node, name: str = "", **options: Any) -> None:
        channels = x.spec.shape[1]
        self.scale, self.bias = (variable(name + part, channels) for part in ("scale", "bias"))
        self.y = ad.batch_normalization(x, self.scale, self.bias, **options)


def trained(y: Node, inputs: Sequence[Node]) -> list[Node]:
    """y, and the gradients of a sum over it with weights of both signs."""
    weights = variable("weights", *y.spec.shape)
    return [y, *ad.gradients(ad.sum_op(y * weights), list(inputs))]


def layer(shape: tuple[int, ...], act: Callable = ad.relu_op, **options: Any) -> list[Node]:
    x = variable("x", *shape)
    norm = Norm(x, **options)
    return trained(act(norm.y), [x, norm.scale, norm.bias])


def shortcut(shape: tuple[int, ...], first: bool, act: Callable = ad.relu_op) -> list[Node]:
    """act(norm + r), in either order."""
    x, r = variable("x", *shape), variable("r", *shape)
    norm = Norm(x)
    total = norm.y + r if first else r + norm.y
    return trained(act(total), [x, norm.scale, norm.bias, r])


def constant_shortcut(shape: tuple[int, ...]) -> list[Node]:
    """Nobody wants the gradient of what is added."""
    return shortcut(shape, True)[:4]


def two_norms(shape: tuple[int, ...]) -> list[Node]:
    """A block whose shortcut is normalized too."""
    x, z = variable("x", *shape), variable("z", *shape)
    a, b = Norm(x, "a"), Norm(z, "b")
    inputs = [x, z, a.scale, a.bias, b.scale, b.bias]
    return trained(ad.relu_op(a.y + b.y), inputs)


def residual(shape: tuple[int, ...]) -> list[Node]:
    """norm, relu, and a block around which its value goes: its gradient is a sum."""
    x = variable("x", *shape)
    a = Norm(x, "a")
    h = ad.relu_op(a.y)
    b = Norm(h * variable("w", *shape), "b")
    return trained(ad.relu_op(b.y + h), [x, a.scale, a.bias, b.scale, b.bias])


def evaluation(shape: tuple[int, ...]) -> list[Node]:
    x = variable("x", *shape)
    mean, scale, bias = (variable(name, shape[1]) for name in ("mean", "scale", "bias"))
    variance = ad.exp_op(variable("log_variance", shape[1]))
    y = ad.batch_normalization(x, scale, bias, mean, variance, training=False)
    return trained(ad.relu_op(y), [x, scale, bias])


def of_scale_only(shape: tuple[int, ...]) -> list[Node]:
    """x is data: its gradient is not wanted."""
    y, _, scale, _ = layer(shape)
    return [y, scale]


def summed_only(shape: tuple[int, ...]) -> list[Node]:
    """A norm and a shortcut without an activation."""
    return shortcut(shape, False, lambda x: x)


# Graphs nobody wrote the pass for, and what there is of normalization then.
FUSED: dict[str, tuple[Callable, list[str]]] = {
    "relu": (layer, [STATISTICS, MAP, *MAP_BACK]),
    "silu": (lambda s: layer(s, ad.silu_op), [STATISTICS, MAP, *MAP_BACK]),
    "softplus": (lambda s: layer(s, activation.softplus_op), [STATISTICS, MAP, *MAP_BACK]),
    "hard swish": (lambda s: layer(s, activation.hard_swish_op), [STATISTICS, MAP, *MAP_BACK]),
    "norm + r": (lambda s: shortcut(s, True), [STATISTICS, MAP, *RELU_BACK]),
    "r + norm": (lambda s: shortcut(s, False), [STATISTICS, MAP, *RELU_BACK]),
    "constant shortcut": (constant_shortcut, [STATISTICS, MAP, *RELU_BACK]),
    "two norms": (two_norms, [STATISTICS] * 2 + [MAP, *RELU_BACK, *PLAIN_BACK]),
    "residual": (residual, [STATISTICS, MAP, *RELU_BACK] * 2),
    "evaluation": (evaluation, [MAP, "batch_normalize_relu_sums"]),
    "of scale only": (of_scale_only, [STATISTICS, MAP, "batch_normalize_map_sums"]),
    "no activation": (summed_only, [STATISTICS, MAP, *PLAIN_BACK]),
}  # fmt: skip


def read_twice(shape: tuple[int, ...]) -> list[Node]:
    """Somebody else reads what relu is given."""
    x = variable("x", *shape)
    norm = Norm(x)
    return [ad.relu_op(norm.y), ad.tanh_op(norm.y)]


def fetched(shape: tuple[int, ...]) -> list[Node]:
    x = variable("x", *shape)
    norm = Norm(x)
    return [ad.relu_op(norm.y), norm.y]


def fetched_sum(shape: tuple[int, ...]) -> list[Node]:
    """The sum is fetched; it may be made with the norm, but not relu with it."""
    x, r = variable("x", *shape), variable("r", *shape)
    total = Norm(x).y + r
    return [ad.relu_op(total), total]


def broadcast(shape: tuple[int, ...]) -> list[Node]:
    x = variable("x", *shape)
    return [ad.relu_op(Norm(x).y + variable("r", *shape[1:]))]


def doubled(shape: tuple[int, ...]) -> list[Node]:
    norm = Norm(variable("x", *shape))
    return [ad.relu_op(norm.y + norm.y)]


LEFT = {
    "read twice": read_twice, "fetched": fetched, "fetched sum": fetched_sum,
    "broadcast": broadcast, "doubled": doubled,
}  # fmt: skip

# Units of 4 and of 1, tiles of one channel and of several, last tiles of fewer, runs longer than a
# block, many parts; x without positions.
SHAPES = (
    (6, 3, 4, 4), (5, 8, 7, 7), (3, 5, 3), (9, 6), (130, 40), (2, 130, 5, 2), (4, 3, 28, 28),
    (2, 7, 9, 11), (1, 2, 66, 67), (3, 4, 33, 33), (70, 16, 1, 3), (1, 1), (17, 260, 2), (600, 12),
    (40, 4, 32, 32),
)  # fmt: skip


def counted(names: Sequence[str]) -> Counter:
    return Counter(name for name in names if name.startswith("batch_"))


def unfused() -> AbstractContextManager:
    """Executors without the pass."""
    return without("batch_norm")


class Rewrites(unittest.TestCase):
    """The rewrite of graphs, with no device: numpy runs what it makes."""

    def assert_same(
        self, made: Sequence[Node], fetches: Sequence[Node], tolerance: float = 1e-5
    ) -> None:
        feeds = feeds_of(fetches)
        own = {x: variable(x.name, *x.spec.shape) for x in feeds_of(made)}
        named = {x.name: value for x, value in feeds.items()}
        again = evaluate(exchange(made, own), {x: named[x.name] for x in own.values()})
        for value, expected in zip(again, evaluate(fetches, feeds)):
            size = np.abs(expected).max(initial=1.0)
            np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance * size)

    def test_what_it_makes(self) -> None:
        for name, (build, wanted) in FUSED.items():
            with self.subTest(name):
                fetches = build((4, 3, 5, 2))
                made = fused(simplified(fetches), "batch_norm", target=GPU)
                self.assertEqual(counted(operators(made)), Counter(wanted))
                self.assert_same(made, fetches)

    def test_activations_and_their_gradients_are_gone(self) -> None:
        for name in ("relu", "silu", "softplus", "hard swish", "norm + r", "residual"):
            with self.subTest(name):
                made = operators(
                    fused(simplified(FUSED[name][0]((4, 3, 5, 2))), "batch_norm", target=GPU)
                )
                kernel = "relu" if name in ("norm + r", "residual") else name.replace(" ", "_")
                self.assertFalse({kernel, f"{kernel}_gradient", "add"} & set(made), made)

    def test_what_it_must_not_touch(self) -> None:
        for name, build in LEFT.items():
            with self.subTest(name):
                fetches = build((4, 3, 5, 2))
                made = fused(simplified(fetches), "batch_norm", target=GPU)
                self.assertIn("relu", operators(made))
                if name == "fetched sum":
                    self.assertIn(MAP, operators(made))
                else:
                    self.assertNotIn(MAP, operators(made))
                self.assert_same(made, fetches)

    def test_gradients_of_gradients(self) -> None:
        """Second gradients have such operators in other places."""
        x = variable("x", 3, 2, 4)
        norm = Norm(x)
        (first,) = ad.gradients(ad.sum_op(ad.relu_op(norm.y) ** 2), [x])
        fetches = [first, *ad.gradients(ad.sum_op(first * first), [x, norm.scale])]
        made = fused(simplified(fetches), "batch_norm", target=GPU)
        self.assertIn(MAP_BACK[0], operators(made))
        self.assert_same(made, fetches, tolerance=1e-4)

    @require_fusion("multi_tensor")
    def test_running_statistics_are_updated_together(self) -> None:
        """Those of as many values each: three of four layers, on native devices."""
        results = []
        for ctx in (None, *native_contexts()):
            layers = [nn.BatchNorm2d(channels) for channels in (3, 7, 300, 2)]
            shapes = [(4, 3, 5, 5), (4, 7, 5, 5), (100, 300, 1, 1), (5, 2, 3, 3)]
            inputs = [variable(f"x{k}", *shape) for k, shape in enumerate(shapes)]
            loss = sum(ad.sum_op(norm(x) ** 2) for norm, x in zip(layers, inputs))
            train = optim.SGD(0.1).minimize(loss, [p for norm in layers for p in norm.parameters()])
            executor = ad.Executor([train], ctx)
            rng = np.random.default_rng(5)
            feeds = {x: rng.standard_normal(x.spec.shape).astype(np.float32) for x in inputs}
            for _ in range(3):
                executor.run(feeds)
            plan = executor.plan({x: x.spec.shape for x in inputs})
            names = [step.node.op.name for step in plan.steps]
            self.assertEqual(names.count("running_update"), 4 if ctx is None else 2)
            results.append([b.asnumpy() for norm in layers for b in norm.buffers()])
        for other in results[1:]:
            for value, wanted in zip(other, results[0]):
                np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


@require(gpu(0))
class GpuNorms(unittest.TestCase):
    """What the kernels compute."""

    ctx = gpu(0)

    def run_both(self, build: Callable, shape: tuple[int, ...]) -> tuple[list, list, list]:
        """The values with the pass, without it, and of numpy in float64."""
        fetches = build(shape)
        feeds = feeds_of(fetches)
        executor = ad.Executor(fetches, self.ctx)
        runs = [executor.run(feeds, convert_to_numpy_ret_vals=True) for _ in range(3)]
        for again in runs[1:]:  # recorded and replayed
            self.assertEqual(*([x.tobytes() for x in run] for run in (runs[0], again)))
        with unfused():
            plain = ad.Executor(fetches, self.ctx).run(feeds, convert_to_numpy_ret_vals=True)
        wide = build_wide(build, shape)
        exact = ad.Executor(wide).run(
            {x: v.astype(np.float64) for x, v in zip(leaves(wide), feeds.values())}
        )
        return runs[0], plain, exact

    def test_values_are_those_of_the_graph_without_the_pass(self) -> None:
        """To the bit where chains of other kernels do not multiply and add; close to numpy."""
        for name, (build, _) in FUSED.items():
            all_shapes = name in ("relu", "norm + r", "residual")
            for shape in sample.of(SHAPES if all_shapes else SHAPES[:4], 6):
                with self.subTest(name, shape=shape):
                    fused, plain, exact = self.run_both(build, shape)
                    for k, (a, b, c) in enumerate(zip(fused, plain, exact)):
                        if name in ("relu", "norm + r", "r + norm", "two norms", "of scale only"):
                            np.testing.assert_array_equal(a, b, str(k))
                        # Where a channel's values nearly agree, dx is the rest of what cancels.
                        size = np.abs(c).max(initial=1.0) * (10 if shape[0] < 3 else 1)
                        np.testing.assert_allclose(a, c, rtol=0, atol=4e-5 * size)

    def test_statistics_keep_the_digits_of_any_mean(self) -> None:
        rng = np.random.default_rng(2)
        for shape in ((512, 4, 7, 7), (3, 2, 61, 64), (5000, 6)):
            for mean, deviation in ((1e4, 1.0), (-300.0, 1e-2), (0.0, 1e-3)):
                with self.subTest(shape=shape, mean=mean):
                    values = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
                    values[0, 0] = mean + 30 * deviation  # an outlier where a thread begins
                    x = variable("x", *shape)
                    y = ad.batch_normalization(
                        x, *(variable(name, shape[1]) for name in ("scale", "bias"))
                    )
                    found = evaluate([y.inputs[1], y.inputs[2]], {x: values}, self.ctx)
                    axes = (0, *range(2, len(shape)))
                    exact = values.astype(np.float64)
                    np.testing.assert_allclose(found[0], exact.mean(axes), rtol=1e-6, atol=1e-6)
                    np.testing.assert_allclose(found[1], exact.var(axes), rtol=2e-5)

    def test_nan_stays_in_its_channel(self) -> None:
        fetches = layer((6, 4, 5, 5))
        feeds = feeds_of(fetches)
        x = next(x for x in feeds if x.name == "x")
        feeds[x][2, 1, 3, 3] = np.nan
        y, dx, *_ = evaluate(fetches, feeds, self.ctx)
        for value in (y, dx):
            self.assertTrue(np.isnan(value[:, 1]).any())
            self.assertTrue(np.isfinite(value[:, [0, 2, 3]]).all())

    def test_no_elements(self) -> None:
        for shape in ((0, 3, 4), (3, 2, 0), (0, 4)):
            with self.subTest(shape=shape):
                fused, _, exact = self.run_both(layer, shape)
                for value, expected in zip(fused, exact):
                    np.testing.assert_array_equal(value, expected)

    @slow
    def test_a_training_step(self) -> None:
        """A residual network: the same losses, and the same running statistics to the bit."""
        results = []
        for off in (False, True):
            model, rounds = nn.ResNetMNIST(seed=3), sample.count(3, 2)
            x = variable("x", 6, 784)
            labels = variable("labels", 6, dtype=np.int64)
            loss = ad.softmax_cross_entropy(model(x), labels)
            train = optim.SGD(0.01).minimize(loss, model.parameters())
            feeds = feeds_of([loss])
            if off:
                with unfused():
                    executor = ad.Executor([loss, train], self.ctx)
                    losses = [float(executor.run(feeds)[0].asnumpy()) for _ in range(rounds)]
            else:
                executor = ad.Executor([loss, train], self.ctx)
                losses = [float(executor.run(feeds)[0].asnumpy()) for _ in range(rounds)]
                steps = executor.plan({f: v.shape for f, v in feeds.items()}).steps
                names = [step.node.op.name for step in steps]
                self.assertFalse({"relu", "relu_gradient", "pointwise"} & set(names), names)
                self.assertEqual(names.count(MAP), 7)
            results.append((losses, [b.asnumpy() for b in model.buffers()]))
        np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
        for a, b in zip(results[0][1], results[1][1]):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)

    def test_arrays_that_do_not_fit(self) -> None:
        x, one = array(np.ones((4, 3, 2), np.float32), self.ctx), empty((3,), self.ctx)
        few = empty((2,), self.ctx, np.dtype(np.int32))
        with self.assertRaisesRegex(KernelError, "expected arrival counters, 3 int32 zeros"):
            launch("batch_statistics_single_pass", self.ctx, x, few, one, one)
        with self.assertRaisesRegex(KernelError, "no epilogue 12, expected 0 to 9"):
            launch("batch_normalize_map", self.ctx, x, *[one] * 4, [], 1e-5, 12, x)
        with self.assertRaisesRegex(KernelError, "expected one addend or none"):
            launch("batch_normalize_map", self.ctx, x, *[one] * 4, [x, x], 1e-5, 1, x)


def leaves(fetches: Sequence[Node]) -> list[Node]:
    """The Variables in the order of `feeds_of`."""
    return list(feeds_of(fetches))


def build_wide(build: Callable, shape: tuple[int, ...]) -> list[Node]:
    """The same graph of float64 Variables."""
    module = globals()
    narrow = module["variable"]
    module["variable"] = lambda name, *s, dtype=np.float64: narrow(name, *s, dtype=dtype)
    try:
        return build(shape)
    finally:
        module["variable"] = narrow
