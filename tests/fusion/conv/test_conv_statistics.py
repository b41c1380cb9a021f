"""Batch norm inside the convolutions around it, on the GPU: statistics where a result is stored,
relu by bits, and relu's gradient with its sums where a data gradient is stored.
"""

from __future__ import annotations

import itertools
import unittest
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn
from dlsys.dtypes import FLOAT16, FLOAT32, ROUNDING, bfloat16, rounded
from dlsys.errors import NotApplicableError
from dlsys.fusion.conv.channels_last import LAST
from dlsys.fusion.norm.gradient_sums import gradient_sums_ops
from dlsys.fusion.shared.image_operators import filter_gradient_channels_last_op
from dlsys.graph.node import Node
from dlsys.ndarray import array, empty, launch
from dlsys.ops.conv.convolution import convolution_op
from dlsys.runtime.device import gpu
from dlsys.runtime.library import load
from fusion.conv.test_channels_last import (
    DENSE,
    DEPTHWISE,
    HALO,
    OF_GROUPS,
    POINTWISE,
    directions,
    drawn,
    fed,
)
from support import sample
from support.devices import require
from support.fusion import require_fusion, without

Array = np.ndarray
FUSIONS = ("conv_statistics", "relu_bits", "gradient_sums")
SUMS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (  # (n, c, h, w, o, kernel), attributes
    ((2, 64, 9, 10, 72, 3), dict(padding=1)),
    ((3, 128, 14, 13, 136, 1), {}),
    ((1, 320, 11, 10, 16, 3), dict(padding=1)),
    ((3, 64, 16, 24, 64, 3), dict(padding=1)),
    ((2, 40, 7, 7, 64, 1), {}),  # those below have no kernel of their own
    ((2, 64, 9, 10, 264, 3), dict(stride=2, padding=1)),
    ((1, 64, 8, 8, 128, 3), dict(padding=1, groups=2)),
)


def placed(values: Array, dtype: Any) -> Any:
    return array(fed(values, dtype), gpu(0), dtype)


def holes(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    """Arrays of NaN, so that what is not written is seen."""
    made = [empty(shape, gpu(0), dtype) for shape in shapes]
    for one in made:
        one[:] = np.nan
    return made


def windows_of(x: Array, f: Array, attrs: dict[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """The kernels' argument, and the shape of results (N, H, W, O)."""
    node = convolution_op(ad.Variable("x", x.shape), ad.Variable("f", f.shape), **attrs)
    windows = convolution_op.windows(node, *(one.spec for one in node.inputs)).argument
    return windows, tuple(node.spec.shape[k] for k in LAST)


@require(gpu(0))
class Kernels(unittest.TestCase):
    def statistics(
        self, number: int, x: Array, f: Array, attrs: dict[str, Any], dtype: Any
    ) -> None:
        windows, shape = windows_of(x, f, attrs)
        images, filters = placed(x.transpose(LAST), dtype), placed(f, dtype)
        (y,), (plain,) = holes(shape, dtype=dtype), holes(shape, dtype=dtype)
        mean, variance = holes((len(f),), (len(f),))
        name, rest = "conv2d_channels_last", (windows, attrs.get("groups", 1), number)
        launch(f"{name}_statistics", gpu(0), images, filters, y, mean, variance, *rest)
        launch(name, gpu(0), images, filters, plain, *rest)
        made, alone = (one.asnumpy().astype(np.float64) for one in (y, plain))
        axes, size = (0, 1, 2), np.abs(made).max()
        # Tiles may be cut along K in other places, and tensor cores cut off what a sum of float32
        # does not hold: on an H200 a sum near zero of 9,216 products was off by 1.3e-6 of `size`.
        rounding = ROUNDING.get(dtype, 0)
        np.testing.assert_allclose(made, alone, rtol=2 * rounding, atol=4e-6 * size)
        np.testing.assert_allclose(mean.asnumpy(), made.mean(axes), rtol=0, atol=1e-6 * size)
        np.testing.assert_allclose(variance.asnumpy(), made.var(axes), rtol=2e-5, atol=1e-12)

    def test_statistics_are_those_of_what_is_stored(self) -> None:
        for number, name in enumerate(load().algorithms("cuda", "conv2d_channels_last"), 1):
            for k, (sizes, attrs) in enumerate(sample.of(DENSE[:3] + POINTWISE[:1], 2)):
                n, c, h, w, o, kernel = sizes
                rng = np.random.default_rng(sum(sizes))
                dtype = (bfloat16, FLOAT16)[k % 2]
                x, f = drawn(rng, (n, c, h, w), dtype), drawn(rng, (o, c, kernel, kernel), dtype)
                with self.subTest(name=name, sizes=sizes):
                    try:
                        self.statistics(number, x, f, attrs, dtype)
                    except NotApplicableError:
                        # Products as they lie, and tilings of float32 alone.
                        others = "implicit gemm", "implicit mma ", "implicit halo", *OF_GROUPS
                        self.assertTrue(name.startswith(others))

    def test_statistics_of_float32(self) -> None:
        """At tf32, by each tile; what has no kernel of its own is summed behind the convolution."""
        names = load().algorithms("cuda", "conv2d_channels_last")
        tiles = [k for k, name in enumerate(names, 1) if name.startswith("implicit wgmma ")]
        for k, (sizes, attrs) in enumerate(DENSE[:3] + POINTWISE[:1]):
            n, c, h, w, o, kernel = sizes
            rng = np.random.default_rng(sum(sizes))
            x, f = drawn(rng, (n, c, h, w), FLOAT32), drawn(rng, (o, c, kernel, kernel), FLOAT32)
            for number in (0, tiles[k % len(tiles)]):
                with self.subTest(sizes=sizes, number=number):
                    self.statistics(number, x, f, attrs, FLOAT32)
        x, f = drawn(rng, (2, 6, 9, 8), FLOAT32), drawn(rng, (10, 6, 3, 3), FLOAT32)
        self.statistics(0, x, f, {}, FLOAT32)

    def test_statistics_of_blocks_of_positions(self) -> None:
        for k, (sizes, attrs, _) in enumerate(HALO[:3]):
            n, c, h, w, o, kernel = sizes
            rng = np.random.default_rng(sum(sizes))
            dtype = (bfloat16, FLOAT16)[k % 2]
            x, f = drawn(rng, (n, c, h, w), dtype), drawn(rng, (o, c, kernel, kernel), dtype)
            with self.subTest(sizes=sizes):
                self.statistics(0, x, f, attrs, dtype)

    def test_statistics_of_one_channel_a_group(self) -> None:
        cases = itertools.product(DEPTHWISE, (FLOAT32, bfloat16, FLOAT16))
        for k, ((sizes, attrs), dtype) in enumerate(cases):
            n, c, h, w, o, kernel = sizes
            rng = np.random.default_rng(k)
            x, f = drawn(rng, (n, c, h, w), dtype), drawn(rng, (o, 1, kernel, kernel), dtype)
            with self.subTest(sizes=sizes, dtype=dtype):
                self.statistics(0, x, f, attrs, dtype)
        x = 1 + 2.0**-7 * rng.integers(0, 3, (3, 8, 13, 9))
        self.statistics(0, x, np.full((8, 1, 3, 3), 512.0), dict(groups=8), FLOAT32)

    def test_statistics_keep_the_digits_of_any_mean(self) -> None:
        """Results of about 4,000 that are apart by units of 16 bits."""
        rng = np.random.default_rng(3)
        x = rounded(1 + 2.0**-7 * rng.integers(0, 3, (3, 64, 13, 9)), bfloat16).astype(np.float64)
        self.statistics(0, x, np.full((72, 64, 1, 1), 64.0), {}, bfloat16)

    def test_tiles_that_are_summed_in_parts(self) -> None:
        """So few tiles, so long sums, that several blocks share a tile."""
        rng = np.random.default_rng(4)
        for sizes in ((1, 1024, 10, 9, 64, 3), *sample.rest([(1, 2048, 12, 12, 264, 1)])):
            n, c, h, w, o, kernel = sizes
            x, f = drawn(rng, (n, c, h, w), bfloat16), drawn(rng, (o, c, kernel, kernel), bfloat16)
            self.statistics(0, x, f, dict(padding=kernel // 2), bfloat16)

    def test_so_many_rows_that_a_cluster_combines_them(self) -> None:
        rng = np.random.default_rng(5)
        x, f = drawn(rng, (1, 8, 182, 182), bfloat16), drawn(rng, (64, 8, 1, 1), bfloat16)
        self.statistics(0, x, f, {}, bfloat16)
        self.sums((1, 64, 182, 182, 8, 1), {}, bfloat16, 1, False)

    def test_sums_of_relu_s_gradient(self) -> None:
        for k, (sizes, attrs) in enumerate(SUMS):
            for addends, over in ((0, False), (1, False), (1, True)):
                with self.subTest(sizes=sizes, addends=addends, over=over):
                    self.sums(sizes, attrs, (bfloat16, FLOAT16)[k % 2], addends, over)

    def test_sums_of_relu_s_gradient_in_float32(self) -> None:
        """At tf32, tiles of each width."""
        wide = ((1, 256, 33, 32, 64, 1), {}), ((2, 64, 32, 33, 256, 1), {})
        for sizes, attrs in (*SUMS, *wide):
            for addends, over in ((0, False), (1, False), (1, True)):
                with self.subTest(sizes=sizes, addends=addends, over=over):
                    self.sums(sizes, attrs, FLOAT32, addends, over)

    def sums(
        self, sizes: tuple[int, ...], attrs: dict[str, Any], dtype: Any, addends: int, over: bool
    ) -> None:
        """Of the data gradient and as many addends; `over` one, the result takes its memory."""
        n, c, h, w, o, kernel = sizes
        attrs = dict(stride=1, padding=0, dilation=1, groups=1) | attrs
        rng = np.random.default_rng(sum(sizes))
        x, f = (
            drawn(rng, (n, c, h, w), dtype),
            drawn(rng, (o, c // attrs["groups"], kernel, kernel), dtype),
        )
        windows, shape = windows_of(x, f, attrs)
        dy, more = drawn(rng, shape, dtype), addends * drawn(rng, (n, h, w, c), dtype)
        mean = rng.standard_normal(c).astype(np.float32)
        variance = rng.uniform(0.5, 2, c).astype(np.float32)
        on = rng.random((n, h, w, c)) < 0.5
        added = [placed(more, dtype)] * addends
        (dz,) = added if over else holes((n, h, w, c), dtype=dtype)
        dscale, dbias = holes((c,), (c,))
        moved = x.transpose(LAST)
        launch(
            "conv2d_data_gradient_channels_last_sums", gpu(0), placed(f, dtype), placed(dy, dtype),
            array(np.packbits(on, bitorder="little"), gpu(0), np.uint8), placed(moved, dtype),
            array(mean, gpu(0)), array(variance, gpu(0)), added, 1e-3,
            dz, dscale, dbias, windows, attrs["groups"],
        )  # fmt: skip
        images = dy.transpose(0, 3, 1, 2)
        dx = directions(x, f, images, **attrs)[1].transpose(LAST)
        terms = directions(abs(x), abs(f), abs(images), **attrs)[1].transpose(LAST)
        got, wanted = dz.asnumpy().astype(np.float64), np.where(on, dx + more, 0)
        # Without a kernel of its own, dx is rounded before the sum.
        rounding = ROUNDING.get(dtype, 2.0**-24)
        limit = rounding * (abs(dx) + abs(wanted)) + 2.0**-20 * terms + 2.0**-25
        self.assertTrue((abs(got - wanted) <= limit).all())
        of_channel = got.reshape(-1, c), moved.reshape(-1, c) - mean
        # There, too, the sums are of dz before it is rounded.
        as_stored = c % 64 == 0 and attrs["stride"] == attrs["groups"] == 1
        off = 1e-6 if as_stored else max(1e-6, rounding)
        for value, factor in ((dscale, of_channel[1] / np.sqrt(variance + 1e-3)), (dbias, 1.0)):
            parts = of_channel[0] * factor
            np.testing.assert_array_less(
                abs(value.asnumpy() - parts.sum(0)), off * abs(parts).sum(0) + 1e-9
            )


def bottleneck() -> tuple[Node, list[Node]]:
    """Two residual blocks, one whose shortcut is normalized too: an image and the gradients of a
    loss, for the weights and the image.
    """
    x = ad.Variable("x", (2, 64, 9, 7))
    layers = [nn.Conv2d(64, 64, k, padding=k // 2, bias=False, rng=k) for k in (3, 1, 1, 1, 3)]
    norms = [nn.BatchNorm2d(64) for _ in layers]
    of = [lambda v, k=k: norms[k](layers[k](v)) for k in range(5)]
    y = F.relu(of[1](F.relu(of[0](x))) + of[2](x))
    y = F.relu(of[4](F.relu(of[3](y))) + y)
    weights = ad.constant(np.linspace(-1, 1, 2 * 64 * 63, dtype=np.float32))
    loss = F.sum(y * F.reshape(weights, (2, 64, 9, 7)))
    parameters = [p for one in (*layers, *norms) for p in one.parameters()]
    return x, [loss, *ad.gradients(loss, [x, *parameters])]


@require(gpu(0))
class Network(unittest.TestCase):
    def values(self, names: Sequence[str], precision: str = "bf16") -> tuple[list[Array], Counter]:
        """The loss and its gradients without these fusions, and the kernels."""
        x, fetches = bottleneck()
        image = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
        with without(*names):
            executor = ad.Executor(fetches, ctx=gpu(0), precision=precision)
            found = executor.run({x: image})
            steps = executor.plan({x: x.shape}).steps
        return [v.asnumpy().astype(np.float64) for v in found], Counter(
            step.node.op.name for step in steps
        )

    @require_fusion("channels_last", "batch_norm", *FUSIONS)
    def test_the_gradient_of_a_sum_takes_the_memory_of_its_addend(self) -> None:
        x, fetches = bottleneck()
        executor = ad.Executor(fetches, ctx=gpu(0), precision="bf16")
        steps = executor.plan({x: x.shape}).steps
        made = [step for step in steps if step.node.op is gradient_sums_ops[1]]
        self.assertEqual(len(made), 1)
        self.assertIs(made[0].outputs[0].buffer, made[0].inputs[6].buffer)

    @require_fusion("channels_last", "batch_norm", *FUSIONS)
    def test_filters_gradients_come_before_the_gradient_of_data(self) -> None:
        """Else the images of all layers would wait for the filters' gradients."""
        x, fetches = bottleneck()
        executor = ad.Executor(fetches, ctx=gpu(0), precision="bf16")
        steps = [step.node for step in executor.plan({x: x.shape}).steps]
        of_data = {n.inputs[1]: k for k, n in enumerate(steps) if "data_gradient" in n.op.name}
        of_filters = {
            n.inputs[1]: k for k, n in enumerate(steps) if n.op is filter_gradient_channels_last_op
        }
        self.assertEqual(len(of_filters), 5)
        for dy, at in of_filters.items():
            self.assertLess(at, of_data[dy])

    @require_fusion("channels_last", "batch_norm", *FUSIONS)
    def test_a_residual_block(self) -> None:
        exact, _ = self.values(FUSIONS)
        whole, kernels = self.values([])
        self.assertEqual(kernels["conv2d_channels_last_statistics"], 5)
        self.assertEqual(kernels["batch_normalize_relu_bits"], 4)
        self.assertEqual(kernels["conv2d_data_gradient_channels_last_sums"], 3)
        left = {"batch_normalize", "batch_statistics_single_pass", "batch_normalize_map_sums"}
        self.assertFalse(left & set(kernels))
        by_bits, kernels = self.values(["conv_statistics", "gradient_sums"])
        self.assertEqual(kernels["conv2d_channels_last"], 5)
        self.assertEqual(kernels["batch_normalize_relu_bits"], 2)
        for bits, value, wanted in zip(by_bits, whole, exact):
            np.testing.assert_array_equal(bits, wanted)
            # Sums in another order may round values to others of their neighbors.
            size = np.linalg.norm(wanted)
            self.assertLess(np.linalg.norm(value - wanted), 0.02 * size)

    @require_fusion("channels_last", "batch_norm", *FUSIONS)
    def test_a_residual_block_of_float32(self) -> None:
        """At tf32, which rounds operands alone: sums are those of values to 2^-24."""
        exact, kernels = self.values(FUSIONS, "tf32")
        self.assertEqual(kernels["conv2d_channels_last"], 5)
        whole, kernels = self.values([], "tf32")
        self.assertEqual(kernels["conv2d_channels_last_statistics"], 5)
        self.assertEqual(kernels["batch_normalize_relu_bits"], 4)
        self.assertEqual(kernels["conv2d_data_gradient_channels_last_sums"], 3)
        for value, wanted in zip(whole, exact):
            # A sum near a half may round to another neighbor in tf32.
            self.assertLess(np.linalg.norm(value - wanted), 1e-3 * np.linalg.norm(wanted))


if __name__ == "__main__":
    unittest.main()
