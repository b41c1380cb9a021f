"""Convolution and pooling beyond their rows: random attributes, ties and NaN, memory, PyTorch."""

from __future__ import annotations

import tracemalloc
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.ops.conv.im2col import CHUNK_NBYTES
from dlsys.ops.conv.pooling import max_pool_op
from support.devices import EMULATED, needs_torch, require, slow
from support.seeds import SEED
from support.table.families.conv import convolved, data_gradient, filter_gradient
from support.table.families.pooling import first_indices, max_pooled, spread

IMAGES = 16 if EMULATED else 64  # of large layers


class Random:
    """Convolutions with random sizes and attributes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pair(self, low: int, high: int) -> tuple[int, int]:
        return tuple(int(n) for n in self.rng.integers(low, high, 2))  # type: ignore[return-value]

    def convolution(self) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        groups = int(self.rng.choice([1, 1, 2, 3, 5]))
        depthwise = self.rng.random() < 0.2
        channels = groups * (1 if depthwise else int(self.rng.integers(1, 20)))
        filters = groups * int(self.rng.integers(1, 20))
        size, dilation = self.pair(1, 5), self.pair(1, 4)
        padding = (self.pair(0, 4), self.pair(0, 4))
        extents = ((k - 1) * d + 1 for k, d in zip(size, dilation))
        image = [
            max(1, e - sum(p)) + int(self.rng.integers(0, 9)) for e, p in zip(extents, padding)
        ]
        x = self.values(int(self.rng.integers(1, 5)), channels, *image)
        f = self.values(filters, channels // groups, *size)
        attrs = dict(stride=self.pair(1, 5), padding=padding, dilation=dilation, groups=groups)
        return x, f, attrs

    def values(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)


def run(nodes: list[Any], feeds: dict, ctx: Any) -> list[np.ndarray]:
    return ad.Executor(nodes, ctx).run(feeds, convert_to_numpy_ret_vals=True)


def three(x: np.ndarray, f: np.ndarray, attrs: dict, rng: Random, ctx: Any) -> tuple[Any, ...]:
    """A convolution, its two gradients, and the dy that they are of."""
    feeds = {ad.Variable("x"): x, ad.Variable("f"): f}
    y = ad.conv2d(*feeds, **attrs)
    value = run([y], feeds, ctx)[0]
    dy = rng.values(*value.shape)
    weights = ad.Variable("weights")
    gradients = ad.gradients(ad.sum_op(y * weights), list(feeds))
    return (value, *run(gradients, {**feeds, weights: dy}, ctx)), dy


class Convolution:
    ctx: Any = None

    def test_random_attributes(self) -> None:
        """Values and gradients are those of the formula, window by window in float64."""
        for seed in range(SEED, SEED + 40):
            rng = Random(seed)
            x, f, attrs = rng.convolution()
            with self.subTest(seed=seed, x=x.shape, f=f.shape, **attrs):  # DLSYS_TEST_SEED=seed
                results, dy = three(x, f, attrs, rng, self.ctx)
                exact = [a.astype(np.float64) for a in (x, f, dy)]
                self.compare(results, exact, attrs)

    def compare(self, results: Any, exact: list[np.ndarray], attrs: dict) -> None:
        x, f, dy = exact
        formulas = (convolved, (x, f)), (data_gradient, (f, dy, x)), (filter_gradient, (x, dy, f))
        terms = f[0].size, f[:, 0].size, dy[:, 0].size
        for result, (formula, arrays), count in zip(results, formulas, terms):
            sizes = formula(*map(np.abs, arrays), **attrs)
            allowed = np.sqrt(count) * np.finfo(np.float32).eps * sizes + 1e-30
            error = np.abs(result - formula(*arrays, **attrs))
            self.assertTrue((error <= allowed).all(), formula.__name__)  # type: ignore[attr-defined]

    def test_ties_and_nan(self) -> None:
        """The first of equal maxima wins, and NaN over every number; gradients follow."""
        x = np.random.default_rng(3).integers(0, 2, (3, 4, 9, 8)).astype(np.float32)
        x[0] = -np.inf
        x[1, 1, 4, 3] = x[1, 1, 4, 4] = np.nan
        x[2] = 0
        attrs = dict(window=3, stride=2, padding=1)
        node = ad.Variable("x")
        pooled = max_pool_op(node, **attrs)
        dx = ad.gradients(ad.sum_op(pooled[0] * 3), [node])[0]
        y, indices, dx = run([pooled[0], pooled[1], dx], {node: x}, self.ctx)
        np.testing.assert_array_equal(y, max_pooled(x, **attrs))
        np.testing.assert_array_equal(indices, first_indices(x, **attrs))
        self.assertEqual(indices.dtype, np.int32)
        np.testing.assert_array_equal(dx, spread(np.full(y.shape, 3.0), indices, (9, 8)))

    @slow
    @needs_torch
    def test_against_pytorch(self) -> None:
        """A grid of strides, paddings, dilations and groups against PyTorch on the CPU."""
        import torch

        grid = [(s, p, d) for s in (1, 2, 3) for p in (0, 1, (2, 1)) for d in (1, 2)]
        for channels, filters, groups in [
            (1, 1, 1),
            (6, 9, 3),
            (64, 33, 1),
            (513, 2, 1),
            (7, 14, 7),
        ]:
            rng = Random(channels)
            x, f = rng.values(2, channels, 9, 7), rng.values(filters, channels // groups, 3, 3)
            for stride, padding, dilation in grid:
                attrs = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
                with self.subTest(channels=channels, **attrs):
                    results, dy = three(x, f, attrs, rng, self.ctx)
                    tensors = [torch.tensor(a, requires_grad=True) for a in (x, f)]
                    y = torch.nn.functional.conv2d(*tensors, **attrs)
                    y.backward(torch.tensor(dy))
                    expected = (y.detach(), *(t.grad for t in tensors))
                    for result, wanted in zip(results, expected):
                        error = np.abs(result - wanted.numpy()).max()
                        self.assertLessEqual(error, 2e-5 * np.abs(wanted.numpy()).max())


class NumpyConvolution(Convolution, unittest.TestCase):
    def test_memory_is_bounded(self) -> None:
        """The columns of many images take a few megabytes, and nothing is allocated in a run."""
        x = ad.Parameter(np.ones((200, 8, 28, 28), np.float32))
        f = ad.Parameter(np.ones((8, 8, 3, 3), np.float32))
        y = ad.conv2d(x, f, padding=1)
        pooled = ad.max_pool2d(y, 2)
        executor = ad.Executor([ad.sum_op(pooled), *ad.gradients(pooled, [f])])
        executor.run({})
        image_nbytes = 200 * 8 * 28 * 28 * 4
        plan = executor.plan({})
        self.assertLess(plan.arena_nbytes, 4 * image_nbytes + 3 * CHUNK_NBYTES)
        self.assertLessEqual(plan.arena_nbytes, 1.1 * plan.live_nbytes)
        tracemalloc.start()
        executor.run({})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.assertLess(peak, 1 << 18)

    def test_both_forms_of_older_names(self) -> None:
        """(filter, dy, padding, stride) and (filter, dy, x, padding, stride) are one gradient."""
        rng = Random(1)
        x, f, dy = rng.values(2, 3, 8, 8), rng.values(4, 3, 3, 3), rng.values(2, 4, 4, 4)
        nodes = dict(zip((ad.Variable("x"), ad.Variable("f"), ad.Variable("dy")), (x, f, dy)))
        data, filters, gradient = nodes
        short = ad.conv2d_gradient_of_data_op(filters, gradient, 1, 2)
        long = ad.conv2d_gradient_of_data_op(filters, gradient, data, 1, 2)
        of_filter = ad.conv2d_gradient_of_filter_op(data, gradient, filters, padding=1, stride=2)
        a, b, df = run([short, long, of_filter], nodes, None)
        self.assertEqual((a.shape, b.shape, df.shape), ((2, 3, 7, 7), x.shape, f.shape))
        np.testing.assert_allclose(a, b[:, :, :7, :7], atol=1e-5)
        np.testing.assert_allclose(b, data_gradient(f, dy, x, padding=1, stride=2), atol=1e-4)


@require(ndarray.cpu(0))
class CpuConvolution(Convolution, unittest.TestCase):
    ctx = ndarray.cpu(0)


@require(ndarray.gpu(0))
class GpuConvolution(Convolution, unittest.TestCase):
    ctx = ndarray.gpu(0)

    @slow
    def test_large_layers(self) -> None:
        """Every kind of tile, more layers than its table holds, several blocks and parts."""
        for channels, filters, image in [
            (1, 6, 28),
            (6, 16, 14),
            (32, 64, 28),
            (64, 128, 14),
            (160, 130, 7),
        ]:
            rng = Random(image)
            x, f = rng.values(IMAGES, channels, image, image), rng.values(filters, channels, 3, 3)
            with self.subTest(channels=channels, filters=filters, image=image):
                results, dy = three(x, f, dict(padding=1), rng, self.ctx)
                self.compare(results, [a.astype(np.float64) for a in (x, f, dy)], dict(padding=1))
