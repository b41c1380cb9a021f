"""The rung `cudnn` of activations, pooling and batch normalization: values and gradients against
float64, what stands in a plan, and what is refused.

Where there is a GPU with cuDNN these tests run there. On the emulated GPU they run in a process of
its own with a stand-in for the library (fake_cudnn.c), which knows the definitions alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.dist.group import Alone
from dlsys.dtypes import ROUNDING, bfloat16, is_narrow, rounded
from dlsys.errors import DeviceError, GraphError, NotApplicableError
from dlsys.graph.node import find_topo_sort
from dlsys.inference import fold
from dlsys.inference.form import inference_form
from dlsys.ndarray import empty, launch
from dlsys.runtime.device import Context, cpu, gpu, unavailable
from dlsys.settings import settings
from support.devices import emulated_gpu, require

HERE = Path(__file__).resolve().parent
FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
UNIT = 2.0**-24  # of float32, rounded to nearest
STANDS_IN = "DLSYS_EMULATED_LIBRARIES" in os.environ
CHANNELS = 6
EPS = 1e-5

Array = np.ndarray
Build = Callable[..., ad.Node]  # of nodes and algo

ACTIVATIONS = {name: getattr(F, name) for name in ("relu", "sigmoid", "tanh")}
# Windows (size, stride, padding) over images.
WINDOWS = [
    ((9, 8), 2, None, 0), ((9, 8), 3, 2, 1), ((7, 11), (3, 2), (2, 1), (1, 0)), ((5, 5), 5, 1, 0),
    ((6, 7), (6, 7), 1, (3, 3)), ((8, 8), 3, 1, 1), ((1, 1), 1, 1, 0),
]  # fmt: skip


def max_pool(*how: Any) -> Build:
    return lambda x, algo: F.max_pool2d(x, *how, algo=algo)


def mean_pool(counted: bool, *how: Any) -> Build:
    return lambda x, algo: F.avg_pool2d(x, *how, count_include_pad=counted, algo=algo)


def batch_norm(x: Any, scale: Any, bias: Any, algo: str) -> Any:
    return F.batch_norm(x, weight=scale, bias=bias, training=True, eps=EPS, algo=algo)


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(x: Array, dtype: Any) -> Array:
    """The values as a device holds them."""
    return rounded(x, dtype) if is_narrow(dtype) else x


def run(
    build: Build,
    arrays: Sequence[Array],
    dtype: Any,
    algo: str,
    ctx: Context | None,
    drawn_in: Any = None,
) -> list[Array]:
    """y, and the gradients for all inputs where that of y is drawn, in a dtype; x and y are of
    `dtype`.
    """
    inputs = [
        ad.Variable(f"x{k}", a.shape, FLOAT32 if k and is_narrow(dtype) else dtype)
        for k, a in enumerate(arrays)
    ]
    y = build(*inputs, algo=algo)
    dy = ad.Variable("dy", y.shape, dtype)
    of_y = stored(draw(*y.shape, seed=1), drawn_in or dtype)
    feeds = dict(zip((*inputs, dy), (*arrays, of_y)))
    executor = ad.Executor([y, *ad.gradients(y, inputs, dy)], ctx)
    if dtype == np.float64:
        feeds = {node: value.astype(np.float64) for node, value in feeds.items()}
    return [np.asarray(x, np.float64) for x in executor.run(feeds, convert_to_numpy_ret_vals=True)]


def exact(build: Build, arrays: Sequence[Array], dtype: Any) -> list[Array]:
    """The same in float64 by numpy, of arrays as a device holds them in a dtype."""
    arrays = [stored(a, dtype) if k == 0 else a for k, a in enumerate(arrays)]
    return run(build, arrays, np.dtype(np.float64), "auto", None, dtype)


def of_magnitudes(build: Build, x: Array, dtype: Any) -> tuple[Array, Array]:
    """What a pooling makes of |x|, and its gradient of |dy|: sums of the magnitudes of terms."""
    node = ad.Variable("x", x.shape, np.float64)
    y = build(node, algo="auto")
    dy = ad.Variable("dy", y.shape, np.float64)
    executor = ad.Executor([y, *ad.gradients(y, [node], dy)])
    of_dy = np.abs(stored(draw(*y.shape, seed=1), dtype)).astype(np.float64)
    forward = executor.run({node: np.abs(x).astype(np.float64), dy: of_dy})[0]
    return forward, executor.run({node: x.astype(np.float64), dy: of_dy})[1]


def kernels(executor: ad.Executor, feeds: dict[Any, Any]) -> list[str]:
    """The operators of a plan that are cuDNN's, and those for which they would stand."""
    steps = executor.plan({node: np.shape(value) for node, value in feeds.items()}).steps
    names = [step.node.op.name for step in steps]
    words = ("relu", "sigmoid", "tanh", "pool", "batch_norm", "pointwise")
    return [name for name in names if any(word in name for word in words)]


def missing() -> str | None:
    """Why cuDNN cannot be used on the GPU; None where it can."""
    if unavailable(gpu(0)) is not None:
        return unavailable(gpu(0))
    try:
        launch("cudnn_relu", gpu(0), empty((0,), gpu(0)), empty((0,), gpu(0)))
    except DeviceError as error:
        return str(error)
    return None


@require(gpu(0))
class TestCudnn(unittest.TestCase):
    ctx = gpu(0)

    @classmethod
    def setUpClass(cls) -> None:
        if lacks := missing():
            raise unittest.SkipTest(f"not here: cuDNN; {lacks}")
        if STANDS_IN:  # it computes at once, which no captured graph repeats
            cls.enterClassContext(mock.patch.object(settings, "capture", False))

    def each_dtype(self) -> list[Any]:
        return [FLOAT32, bfloat16] if STANDS_IN else [FLOAT32, bfloat16, FLOAT16]

    def check(
        self, build: Build, arrays: Sequence[Array], dtype: Any, bounds: Sequence[Any]
    ) -> list[Array]:
        """Compares y and the gradients with float64; `bounds` are those of float32."""
        arrays = [stored(a, dtype) if k == 0 else a for k, a in enumerate(arrays)]
        got, wanted = run(build, arrays, dtype, "cudnn", self.ctx), exact(build, arrays, dtype)
        for k, (result, value, bound) in enumerate(zip(got, wanted, bounds, strict=True)):
            of_storage = ROUNDING[dtype] * np.abs(value) if is_narrow(dtype) and k < 2 else 0
            excess = np.abs(result - value) - bound - 1.01 * of_storage
            self.assertLessEqual(excess.max(initial=-np.inf), 0, f"value {k}")
        return got

    # ---- values ----

    def test_activations(self) -> None:
        """Functions as accurate as the own ones, to 4 units; a gradient is of the rounded y."""
        for (name, build), shape, dtype in itertools.product(
            ACTIVATIONS.items(),
            ((7,), (3, 5), (2, 3, 4, 5), (2, 1, 3, 2, 4), (1,)),
            self.each_dtype(),
        ):
            with self.subTest(name=name, shape=shape, dtype=dtype):
                x = 3 * draw(*shape)
                y, dy = exact(build, [x], dtype)[0], np.abs(draw(*shape, seed=1))
                units = 0 if name == "relu" else 4 * UNIT
                of_y = ROUNDING[dtype] if is_narrow(dtype) and units else units
                bounds = units * np.abs(y), 2.02 * (of_y + 4 * units) * dy
                self.check(build, [x], dtype, bounds)

    def test_pooling(self) -> None:
        """Maxima are exact; sums of any order are within Higham's gamma of their magnitudes."""
        for (image, *how), dtype in itertools.product(WINDOWS, self.each_dtype()):
            terms = np.prod(np.broadcast_to(how[0], 2)) + 2
            pools = {"max": max_pool(*how), "mean": mean_pool(True, *how)}
            for name, build in (pools | {"without": mean_pool(False, *how)}).items():
                with self.subTest(name=name, image=image, how=how, dtype=dtype):
                    x = draw(2, 3, *image)
                    sums = of_magnitudes(build, stored(x, dtype), dtype)
                    of_y = 0 if name == "max" else terms * UNIT
                    self.check(build, [x], dtype, (of_y * sums[0], terms * UNIT * sums[1]))

    def test_a_tie_goes_to_the_first(self) -> None:
        for how in ((2,), (3, 2, 1), (3, 1, 1)):
            x = np.random.default_rng(0).integers(0, 3, (2, 3, 9, 8)).astype(np.float32)
            with self.subTest(how=how):
                sums = of_magnitudes(max_pool(*how), x, FLOAT32)
                self.check(max_pool(*how), [x], FLOAT32, (0, 11 * UNIT * sums[1]))

    def test_nan_and_infinity(self) -> None:
        """NaN is the largest, as here; of -inf alone it makes the least number, and no gradient."""
        nan, inf, least = np.nan, np.inf, float(np.finfo(np.float32).min)
        x = np.array(
            [[1, nan, -inf, -inf], [2, 3, -inf, -inf], [inf, 1, nan, nan], [inf, 2, nan, 4]]
        )
        x = x.astype(np.float32).reshape(1, 1, 4, 4)
        y, dx = run(max_pool(2), [x], FLOAT32, "cudnn", self.ctx)
        np.testing.assert_array_equal(y[0, 0], [[nan, least], [inf, nan]])
        dy = draw(1, 1, 2, 2, seed=1)[0, 0]
        wanted = np.zeros((4, 4))
        wanted[0, 1], wanted[2, 0], wanted[2, 2] = dy[0, 0], dy[1, 0], dy[1, 1]
        np.testing.assert_array_equal(dx[0, 0], wanted)
        for build in ACTIVATIONS.values():
            for got, own in zip(
                run(build, [x], FLOAT32, "cudnn", self.ctx), run(build, [x], FLOAT32, "auto", None)
            ):
                np.testing.assert_allclose(got, own, atol=1e-6)

    def test_batch_norm(self) -> None:
        """Sums over the count are within Higham's gamma of their magnitudes."""
        for shape, dtype in itertools.product(
            ((8, CHANNELS), (4, CHANNELS, 9), (3, CHANNELS, 5, 7), (2, CHANNELS, 3, 2, 4)),
            self.each_dtype(),
        ):
            with self.subTest(shape=shape, dtype=dtype):
                arrays = [draw(*shape), draw(CHANNELS, seed=2), draw(CHANNELS, seed=3)]
                self.check(batch_norm, arrays, dtype, batch_norm_bounds(arrays, dtype))

    def test_inference(self) -> None:
        x, mean, bias = draw(3, CHANNELS, 5, 7), draw(CHANNELS, seed=1), draw(CHANNELS, seed=2)
        variance, scale = np.abs(draw(2, CHANNELS, seed=3)) + np.float32(0.1)

        def build(*nodes: Any, algo: str) -> Any:
            return F.batch_norm(nodes[0], *nodes[1:], eps=EPS, algo=algo)

        nodes = [ad.Variable(name) for name in ("x", "mean", "variance", "scale", "bias")]
        arrays = x, mean, variance, scale, bias
        feeds = dict(zip(nodes, arrays))
        executor = ad.Executor([build(*nodes, algo="cudnn")], self.ctx)
        (got,) = executor.run(feeds, convert_to_numpy_ret_vals=True)
        x_, m, v, s, b = (a.astype(float) for a in arrays)
        m, v, s, b = (a[:, None, None] for a in (m, v, s, b))
        wanted = (x_ - m) / np.sqrt(v + EPS) * s + b
        limit = 8 * UNIT * ((np.abs(x_) + np.abs(m)) / np.sqrt(v) * np.abs(s) + np.abs(b))
        self.assertTrue((np.abs(got - wanted) <= limit).all())
        self.assertEqual(kernels(executor, feeds), ["cudnn_batch_normalize"])
        (back,) = ad.gradients(ad.sum_op(build(*nodes, algo="cudnn") ** 2), [nodes[3]])
        executor = ad.Executor([back], self.ctx)
        (got,) = executor.run(feeds, convert_to_numpy_ret_vals=True)
        normalized = (x_ - m) / np.sqrt(v + EPS)
        exact_sums = 2 * (wanted * normalized).sum(axis=(0, 2, 3))
        np.testing.assert_allclose(got, exact_sums, rtol=200 * UNIT)
        self.assertIn("batch_normalize_sums", " ".join(kernels(executor, feeds)))

    def test_running_statistics(self) -> None:
        """The variance comes back from 1 / sqrt(variance + eps), and is that of a sample."""
        x = 3 * draw(4, CHANNELS, 5, 7) + 2
        layer = nn.BatchNorm2d(CHANNELS, momentum=1.0, algo="cudnn")
        node = ad.Variable("x")
        loss = ad.sum_op(layer(node) * layer.weight.reshape((-1, 1, 1)))
        step = optim.SGD(0.1).minimize(loss, [*layer.parameters()])
        ad.Executor([step], self.ctx).run({node: x})
        wanted = x.astype(float).var(axis=(0, 2, 3), ddof=1)
        np.testing.assert_allclose(layer.running_var.asnumpy(), wanted, rtol=150 * UNIT)
        mean = x.astype(float).mean(axis=(0, 2, 3))
        np.testing.assert_allclose(layer.running_mean.asnumpy(), mean, atol=600 * UNIT)

    def test_second_derivatives(self) -> None:
        """They are of the same rung: of sums of squares of gradients."""
        builds = {
            **ACTIVATIONS, "mean pool": mean_pool(True, 3, 2, 1),
            "batch norm": lambda x, algo: F.batch_norm(x, training=True, algo=algo),
        }  # fmt: skip
        for name, build in builds.items():
            with self.subTest(name=name):
                found = []
                for algo, ctx in (("auto", None), ("cudnn", self.ctx)):
                    x = ad.Variable("x", (2, CHANNELS, 6, 5))
                    y = build(x, algo=algo)
                    (once,) = ad.gradients(ad.sum_op(y * y * y), [x])
                    executor = ad.Executor(ad.gradients(ad.sum_op(once * once), [x]), ctx)
                    found += executor.run({x: draw(*x.shape)}, convert_to_numpy_ret_vals=True)
                error = np.abs(found[1] - found[0]).max() / np.abs(found[0]).max()
                self.assertLess(error, 5e-6)  # at most 1.2e-6 on an H200, by tanh

    def test_bits_repeat(self) -> None:
        arrays = [draw(64, CHANNELS, 14, 14), draw(CHANNELS, seed=2), draw(CHANNELS, seed=3)]
        for build, inputs in (
            (batch_norm, arrays), (max_pool(3, 2, 1), arrays[:1]), (max_pool(3, 1), arrays[:1]),
            (mean_pool(True, 3, 2, 1), arrays[:1]),
        ):  # fmt: skip
            first, second = (run(build, inputs, FLOAT32, "cudnn", self.ctx) for _ in range(2))
            for a, b in zip(first, second):
                np.testing.assert_array_equal(a, b)

    # ---- what runs ----

    def test_no_fusion_takes_what_names_the_rung(self) -> None:
        x, f = ad.Variable("x", (2, 3, 12, 12)), ad.Variable("f", (4, 3, 3, 3))
        for algo, expected in (
            ("cudnn", ["cudnn_batch_normalize_training", "cudnn_relu", "cudnn_max_pool2d",
                       "cudnn_max_pool2d_gradient", "cudnn_relu_gradient",
                       "cudnn_batch_normalize_gradient"]),
            ("auto", None),
        ):  # fmt: skip
            y = F.batch_norm(ad.conv2d(x, f), training=True, algo=algo)
            y = F.max_pool2d(F.relu(y, algo=algo), 2, algo=algo)
            (back,) = ad.gradients(ad.sum_op(y * y), [f])
            executor = ad.Executor([y, back], self.ctx)
            found = kernels(executor, {x: draw(*x.shape), f: draw(*f.shape)})
            found = [name for name in found if name != "pointwise"]
            with self.subTest(algo=algo):
                if expected is None:
                    self.assertFalse([name for name in found if name.startswith("cudnn")])
                else:
                    self.assertEqual(found, expected)

    def test_settings_name_the_rung(self) -> None:
        x = ad.Variable("x", (2, 3, 12, 12))
        feeds = {x: draw(*x.shape)}

        def fetches() -> list[ad.Node]:
            y = F.avg_pool2d(F.max_pool2d(F.sigmoid(F.batch_norm(x, training=True)), 2), 2)
            y = y + F.max_pool2d(F.tanh(F.relu(x, algo="auto")), 4)
            return [y, *ad.gradients(ad.sum_op(y * y), [x])]

        own = ad.Executor(fetches()).run(feeds)
        with mock.patch.multiple(settings, activation="cudnn", pool="cudnn", batch_norm="cudnn"):
            executor = ad.Executor(fetches(), self.ctx)
            found = executor.run(feeds, convert_to_numpy_ret_vals=True)
            names = kernels(executor, feeds)
        for name in ("sigmoid", "tanh", "max_pool2d", "avg_pool2d", "batch_normalize"):
            self.assertIn(f"cudnn_{name}_gradient", names)
        self.assertNotIn("cudnn_relu", names)
        for got, wanted in zip(found, own):
            np.testing.assert_allclose(got, wanted, atol=2e-6 * np.abs(wanted).max())

    def test_a_network_learns_the_same(self) -> None:
        """Five steps of SGD by the rung and by numpy in float32: losses agree."""
        images, labels = draw(8, 1, 12, 12), np.arange(8) % 3
        losses = {}
        for algo, ctx in (("auto", None), ("cudnn", self.ctx)):
            rng = np.random.default_rng(0)
            model = nn.Sequential(
                nn.Conv2d(1, 4, 3, rng=rng), nn.BatchNorm2d(4, algo=algo), nn.ReLU(algo=algo),
                nn.MaxPool2d(2, algo=algo), nn.Conv2d(4, 4, 3, rng=rng), nn.Tanh(algo=algo),
                nn.AvgPool2d(3, algo=algo), nn.Flatten(), nn.Linear(4, 3, rng=rng),
                nn.Sigmoid(algo=algo),
            )  # fmt: skip
            x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
            loss = F.cross_entropy(model(x), y)
            step = optim.SGD(0.5, momentum=0.9).minimize(loss, [*model.parameters()])
            executor = ad.Executor([loss, step], ctx)
            feeds = {x: images, y: labels}
            losses[algo] = [float(np.asarray(executor.run(feeds)[0])) for _ in range(5)]
        self.assertLess(losses["auto"][-1], losses["auto"][0])
        np.testing.assert_allclose(losses["cudnn"], losses["auto"], rtol=1e-5)

    def test_the_policy_of_16_bits_reaches_it(self) -> None:
        x, w = ad.Variable("x", (4, 8)), ad.Parameter(draw(8, CHANNELS), "w")
        y = F.relu(F.batch_norm(x @ w, training=True, algo="cudnn"), algo="cudnn")
        (back,) = ad.gradients(ad.sum_op(y * y), [w])
        executor = ad.Executor([back], self.ctx, precision="bf16")
        plan = executor.plan({x: x.shape})
        mapped = [s for s in plan.steps if s.node.op.name.startswith("cudnn")]
        self.assertEqual(len(mapped), 4)
        for step in mapped:
            self.assertIs(step.outputs[0].spec.dtype, bfloat16)
        executor.run({x: draw(4, 8)})

    def test_numpy_checks_every_step(self) -> None:
        quiet = contextlib.redirect_stdout(io.StringIO())
        with mock.patch.object(settings, "debug", 4), quiet:
            run(max_pool(3, 2, 1), [draw(2, 3, 9, 8)], FLOAT32, "cudnn", self.ctx)
            arrays = [draw(4, CHANNELS, 5), draw(CHANNELS, seed=2), draw(CHANNELS, seed=3)]
            run(batch_norm, arrays, FLOAT32, "cudnn", self.ctx)
            run(F.tanh, [draw(4, 5)], FLOAT32, "cudnn", self.ctx)

    def test_an_empty_batch(self) -> None:
        for build in (*ACTIVATIONS.values(), max_pool(2), mean_pool(True, 2)):
            y, dx = run(build, [draw(0, 3, 4, 4)], FLOAT32, "cudnn", self.ctx)
            self.assertEqual((len(y), len(dx)), (0, 0))

    # ---- what is refused ----

    def refused(self, node: ad.Node, message: str, *more: ad.Node) -> None:
        with self.subTest(message=message), self.assertRaisesRegex(NotApplicableError, message):
            ad.Executor([node, *more], self.ctx).run({X: draw(2, 3, 8, 8)})

    def test_what_cudnn_has_otherwise(self) -> None:
        cut, dilated = "no window that is cut; use auto", "windows are not dilated; use auto"
        self.refused(F.max_pool2d(X, 3, 2, ceil_mode=True, algo="cudnn"), cut)
        self.refused(F.avg_pool2d(X, 3, 2, ((0, 1), (0, 1)), algo="cudnn"), cut)
        self.refused(F.max_pool2d(X, 2, dilation=2, algo="cudnn"), dilated)
        indices = F.max_pool2d(X, 2, return_indices=True, algo="cudnn")
        self.refused(indices[0], "max_pool2d: cuDNN .* no indices, which cast.* reads", indices[1])
        y = F.max_pool2d(X, 2, algo="cudnn")
        (once,) = ad.gradients(ad.sum_op(y * y * y), [X])
        (twice,) = ad.gradients(ad.sum_op(once * once), [X])
        self.refused(twice, "no indices, which max_pool2d_read.* reads; use auto")
        self.refused(
            F.batch_norm(X[:0], training=True, algo="cudnn"), "an array is empty; use auto"
        )
        narrow = ad.cast_op(X, bfloat16)
        scale = ad.cast_op(ad.Parameter(np.ones(3, np.float32)), bfloat16)
        y = F.batch_norm(narrow, weight=scale, training=True, algo="cudnn")
        self.refused(y, "scale and bias are float32; use auto")

    def test_integers_and_float16(self) -> None:
        integers = ad.cast_op(X, np.int64)
        self.refused(F.relu(integers, algo="cudnn"), "rungs are for floats")
        if STANDS_IN:
            halves = F.relu(ad.cast_op(X, np.float16), algo="cudnn")
            self.refused(halves, "cudnn_relu: cudnn does not do this")


X = ad.Variable("x", (2, 3, 8, 8))


def batch_norm_bounds(arrays: Sequence[Array], dtype: Any) -> list[Array]:
    """The most that y and the gradients for x, scale and bias may be off in float32."""
    x, scale, bias = (a.astype(np.float64) for a in arrays)
    x = stored(arrays[0], dtype).astype(np.float64)
    axes = tuple(k for k in range(x.ndim) if k != 1)
    column = (-1, *[1] * (x.ndim - 2))
    count = x.size // CHANNELS
    gamma = (2 * count + 16) * UNIT
    dy = np.abs(stored(draw(*x.shape, seed=1), dtype)).astype(np.float64)

    def mean(values: Array) -> Array:
        return values.mean(axis=axes).reshape(column)

    r = 1 / np.sqrt(mean((x - mean(x)) ** 2) + EPS)
    reach = (np.abs(x - mean(x)) + mean(np.abs(x))) * r  # |x̂| and the error of the mean
    s, b = np.abs(scale).reshape(column), np.abs(bias).reshape(column)
    of_dx = s * r * (dy + mean(dy) + reach * mean(dy * reach))
    return [
        gamma * (s * reach + b), gamma * 2 * of_dx,
        gamma * (dy * reach).sum(axis=axes) * 2, gamma * dy.sum(axis=axes),
    ]  # fmt: skip


class Elsewhere(unittest.TestCase):
    """On what has no cuDNN the rung is refused by name, and settings leave integers alone."""

    def refused(self, ctx: Context | None, name: str) -> None:
        mean, variance = ad.Parameter(np.zeros(3)), ad.Parameter(np.ones(3))
        for node, op in (
            (F.relu(X, algo="cudnn"), "relu"), (F.sigmoid(X, algo="cudnn"), "sigmoid"),
            (F.max_pool2d(X, 2, algo="cudnn"), "max_pool2d"),
            (F.avg_pool2d(X, 2, algo="cudnn"), "avg_pool2d"),
            (F.batch_norm(X, mean, variance, algo="cudnn"), "batch_normalize"),
        ):  # fmt: skip
            message = f"^{op}: algo='cudnn': device {name} has no such rung; use auto "
            with self.subTest(op=op), self.assertRaisesRegex(NotApplicableError, message):
                ad.Executor([node], ctx).run({X: draw(2, 3, 8, 8)})

    def test_numpy(self) -> None:
        self.refused(None, "numpy")

    @require(cpu(0))
    def test_cpu(self) -> None:
        self.refused(cpu(0), "cpu")

    def test_a_setting_is_named(self) -> None:
        with mock.patch.object(settings, "pool", "cudnn"):
            with self.assertRaisesRegex(NotApplicableError, "DLSYS_POOL=cudnn: device numpy"):
                ad.Executor([F.max_pool2d(X, 2)]).run({X: draw(2, 3, 8, 8)})
        with mock.patch.object(settings, "activation", "cudnn"):
            ad.Executor([F.relu(ad.constant(np.arange(3)))]).run({})

    def test_auto_and_no_word_build_the_same_gradients(self) -> None:
        for function in ACTIVATIONS.values():
            texts = []
            for more in ({}, {"algo": "auto"}):
                x = ad.Variable("x", (2, 3))
                (back,) = ad.gradients(function(x, **more), [x])
                texts.append(ad.Executor([back]).run({x: draw(2, 3)})[0])
            np.testing.assert_array_equal(*texts)

    def test_only_words_of_the_ladder(self) -> None:
        for build in (F.relu, lambda x, algo: F.max_pool2d(x, 2, algo=algo)):
            with self.assertRaisesRegex(GraphError, "algo must be auto or cudnn, got 'naive'"):
                build(X, algo="naive")

    def test_of_several_ranks_as_one_batch_there_is_none(self) -> None:
        with self.assertRaisesRegex(GraphError, "BatchNorm2d: algo='cudnn' takes the statistics"):
            nn.BatchNorm2d(3, group=Alone(), algo="cudnn")

    def test_inference_keeps_the_rung(self) -> None:
        """A normalization that names it is not folded into the convolution before it."""
        for algo, folded in ((None, True), ("cudnn", False)):
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, algo=algo))
            made = fold.folded(inference_form([model(X)]))
            found = [n for n in find_topo_sort(made) if n.op.kernel == "batch_normalize"]
            self.assertEqual([n.attrs["algo"] for n in found], [] if folded else ["cudnn"])

    @require(gpu(0))
    def test_without_the_library_the_error_says_so(self) -> None:
        if missing() is None:
            self.skipTest("not here: a GPU without cuDNN")
        with self.assertRaisesRegex(DeviceError, "cuDNN cannot be used .* install nvidia-cudnn"):
            ad.Executor([F.relu(X, algo="cudnn")], gpu(0)).run({X: draw(2, 3, 8, 8)})


@emulated_gpu
@unittest.skipIf(STANDS_IN, "this is the process with the stand-in")
class StandIn(unittest.TestCase):
    def test_all_with_a_stand_in_for_the_library(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path, source = Path(folder) / "libcudnn.so.9", HERE.parents[1] / "src"
            compiler = ["gcc", "-O1", "-shared", "-fPIC", f"-I{source}", "-o", path]
            subprocess.run([*compiler, HERE / "fake_cudnn.c", "-lm"], check=True)
            given = dict(DLSYS_EMULATED_LIBRARIES=folder, DLSYS_LIBRARY=str(settings.library))
            paths = os.pathsep.join(path for path in sys.path if path)
            code = "import unittest; unittest.main('native.test_cudnn', argv=['', 'TestCudnn'])"
            done = subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, **given, "PYTHONPATH": paths},
                capture_output=True, text=True,
            )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("skipped", done.stderr)


if __name__ == "__main__":
    unittest.main()
