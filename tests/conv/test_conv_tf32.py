"""Convolutions under the tf32 policy: what tensor cores compute, and where they are not used."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.executor.tune import autotune as tune
from dlsys.passes.precision import set_precision
from dlsys.rungs import Algorithm
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.runtime.library import load
from support import sample
from support.devices import fewer, require, slow
from support.table.families.conv import convolved, data_gradient, filter_gradient

FACTOR_EPS = 2.0**-10  # of a product of two factors that are each rounded to 10 bits
SUM_EPS = 2.0**-23

# x, f and attributes: what is neither a multiple of any tile nor square, and every attribute.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((3, 32, 14, 14), (64, 32, 3, 3), dict(padding=1)),
    ((9, 64, 7, 7), (130, 64, 3, 3), dict(padding=1)),
    ((3, 21, 13, 11), (37, 21, 3, 2), dict(padding=2)),
    ((5, 24, 17, 19), (40, 24, 3, 3), dict(stride=2, padding=1)),
    ((2, 16, 23, 21), (33, 16, 5, 5), dict(stride=3, padding=3, dilation=2)),
    (
        (4, 12, 9, 12),
        (20, 12, 4, 2),
        dict(stride=(1, 2), padding=((0, 2), (1, 0)), dilation=(2, 1)),
    ),
    ((2, 3, 20, 20), (64, 3, 7, 7), dict(stride=2, padding=3)),
    ((7, 100, 9, 9), (72, 100, 1, 1), dict()),
    ((70, 64, 1, 1), (64, 64, 1, 1), dict()),
    ((5, 64, 8, 8), (48, 16, 3, 3), dict(padding=1, groups=4)),
    ((2, 16, 12, 12), (24, 16, 9, 9), dict(padding=4)),
    ((1, 1, 28, 28), (32, 1, 3, 3), dict(padding=1)),
    ((1, 9, 3, 150), (10, 9, 1, 3), dict(padding=(0, 1))),
]
# Fewer filters and channels than a tile has rows and columns.
SHAPES += [
    ((4, 6, 9, 9), (6, 6, 3, 3), dict(padding=1)),
    ((3, 16, 8, 8), (16, 4, 3, 3), dict(groups=4)),
    ((2, 2, 9, 7), (3, 2, 1, 1), dict()),
]


def three(x: Any, f: Any, dy: Any, attrs: dict, ctx: Context, precision: str) -> list[np.ndarray]:
    """A convolution and its gradients for the data and filter, at dy; on a GPU by implicit GEMM,
    at tf32 on tensor cores, however small.
    """
    feeds = {ad.Variable("x"): x, ad.Variable("f"): f}
    weights = ad.Variable("dy")
    on_gpu = ctx is not None and ctx.name == "gpu"
    y = ad.conv2d(*feeds, **attrs, algo="implicit" if on_gpu else "auto")
    gradients = ad.gradients(ad.sum_op(y * weights), list(feeds))
    default = tensor_cores if precision == "tf32" else tune._default
    with mock.patch.object(tune, "_default", default):
        executor = ad.Executor([y, *gradients], ctx, precision)
        return executor.run({**feeds, weights: dy}, convert_to_numpy_ret_vals=True)


def tensor_cores(node: ad.Node, ctx: Context) -> Algorithm:
    """That part of the rung `implicit`."""
    names = load().algorithms(ctx.kernel_device, node.op.kernel)
    return Algorithm(names.index("implicit mma") + 1, "implicit mma")


def exact(x: np.ndarray, f: np.ndarray, dy: np.ndarray, attrs: dict) -> list[np.ndarray]:
    """The same window by window, in float64."""
    x, f, dy = (a.astype(np.float64) for a in (x, f, dy))
    return [
        convolved(x, f, **attrs),
        data_gradient(f, dy, x, **attrs),
        filter_gradient(x, dy, f, **attrs),
    ]


def inputs(x: Any, f: Any, attrs: dict, draw: Any) -> tuple[np.ndarray, ...]:
    y = convolved(np.zeros(x), np.zeros(f), **attrs)
    return tuple(draw(shape).astype(np.float32) for shape in (x, f, y.shape))


class Marks(unittest.TestCase):
    def test_the_policy_reaches_the_family(self) -> None:
        """The precision is the last number that each kernel of the family gets."""
        x, f = ad.Variable("x", shape=(2, 16, 8, 8)), ad.Variable("f", shape=(16, 16, 3, 3))
        y = ad.conv2d(x, f)
        for precision, number in (("fp32", 0), ("tf32", 1)):
            set_precision([y], precision)
            self.assertEqual(y.op.scalars(y)[-1], number)

    def test_the_cpu_computes_float32(self) -> None:
        """Under both policies the bits are the same."""
        random = np.random.default_rng(0).standard_normal
        x, f, attrs = SHAPES[2]
        given = inputs(x, f, attrs, random)
        for ctx in (None, cpu(0)):
            with self.subTest(ctx=ctx):
                results = (three(*given, attrs, ctx, p) for p in ("fp32", "tf32"))  # type: ignore[arg-type]
                for fp32, tf32 in zip(*results):
                    np.testing.assert_array_equal(fp32, tf32)


@require(gpu(0))
class TensorCores(unittest.TestCase):
    ctx = gpu(0)

    @slow
    def test_whole_numbers_are_exact(self) -> None:
        """Factors that 10 bits hold, and sums that float32 holds: nothing is rounded."""
        rng = np.random.default_rng(1)
        for x, f, attrs in sample.of(SHAPES, 5):
            given = inputs(x, f, attrs, lambda shape: rng.integers(-8, 9, shape))
            with self.subTest(x=x, f=f, **attrs):
                for got, wanted in zip(
                    three(*given, attrs, self.ctx, "tf32"), exact(*given, attrs)
                ):
                    np.testing.assert_array_equal(got, wanted)

    @slow
    def test_accuracy(self) -> None:
        """tf32 is within its bound of float64 and outside that of float32, which fp32 keeps."""
        random = np.random.default_rng(2).standard_normal
        for x, f, attrs in sample.of(SHAPES, 5):
            given = inputs(x, f, attrs, random)
            wanted = exact(*given, attrs)
            sizes = exact(*map(np.abs, given), attrs)
            terms = given[1][0].size, given[1][:, 0].size, given[2][:, 0].size
            tf32, fp32 = (three(*given, attrs, self.ctx, p) for p in ("tf32", "fp32"))
            with self.subTest(x=x, f=f, **attrs):
                for k, count in enumerate(terms):
                    strict = np.sqrt(count) * SUM_EPS * sizes[k] + 1e-30
                    bound = (1.01 * FACTOR_EPS + count * SUM_EPS) * sizes[k] + 1e-30
                    self.assertTrue((np.abs(tf32[k] - wanted[k]) <= bound).all())
                    self.assertTrue((np.abs(fp32[k] - wanted[k]) <= strict).all())
                    if k == 0:
                        self.assertTrue((np.abs(tf32[k] - wanted[k]) > strict).any())

    def test_rounding_is_to_nearest(self) -> None:
        """1 + 3/4 of the last of 10 bits counts as 1 + that bit; truncation would drop it."""
        x = np.full((1, 16, 8, 8), 1 + 0.75 * 2.0**-10, np.float32)
        f = np.eye(16, dtype=np.float32)[:, :, None, None]
        y = three(x, f, x, {}, self.ctx, "tf32")[0]
        np.testing.assert_array_equal(y, np.float32(1 + 2.0**-10))

    @slow
    def test_what_is_not_finite(self) -> None:
        """NaN and infinity reach the windows that see them and no others."""
        random = np.random.default_rng(3).standard_normal
        for x, f, attrs in sample.of(SHAPES, 5):
            given = inputs(x, f, attrs, random)
            given[0][0, 0, 0, -1] = np.inf
            given[0][-1, -1, -1, 0] = np.nan
            given[2][-1, 0, 0, -1] = np.inf
            with self.subTest(x=x, f=f, **attrs):
                results = (three(*given, attrs, self.ctx, p) for p in ("fp32", "tf32"))
                for fp32, tf32 in zip(*results):
                    np.testing.assert_array_equal(np.isnan(fp32), np.isnan(tf32))
                    np.testing.assert_array_equal(np.isinf(fp32), np.isinf(tf32))

    def test_runs_are_equal(self) -> None:
        """The order of additions is fixed."""
        random = np.random.default_rng(4).standard_normal
        for x, f, attrs in (SHAPES[0], SHAPES[3]):
            given = inputs((fewer(40), *x[1:]), f, attrs, random)
            first, second = (three(*given, attrs, self.ctx, "tf32") for _ in range(2))
            for a, b in zip(first, second):
                np.testing.assert_array_equal(a, b)

    def test_bias(self) -> None:
        """The bias is added in float32."""
        x, f, attrs = SHAPES[1]
        bias = np.random.default_rng(6).standard_normal(f[0]).astype(np.float32)
        nodes = [ad.Variable(name) for name in ("x", "f", "bias")]
        feeds = dict(zip(nodes, (np.zeros(x, np.float32), np.ones(f, np.float32), bias)))
        executor = ad.Executor([ad.conv2d(*nodes, **attrs)], self.ctx, "tf32")
        y = executor.run(feeds, convert_to_numpy_ret_vals=True)[0]
        np.testing.assert_array_equal(y, np.broadcast_to(bias[:, None, None], y.shape))
