"""Convolutions of 16 bits on the GPU, in the layout (N, C, H, W) and with channels last, those of
float32 at tf32 with channels last, and the pass that moves the channels of a network.
"""

from __future__ import annotations

import itertools
import unittest
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.dtypes import FLOAT16, ROUNDING, bfloat16, rounded
from dlsys.errors import NotApplicableError
from dlsys.fusion.conv.channels_last import FIRST, LAST
from dlsys.graph.node import Node
from dlsys.graph.spec import FLOAT32
from dlsys.ndarray import NDArray, array, empty, launch
from dlsys.ops.conv.convolution import (
    convolution_op,
    data_gradient_like_op,
    filter_gradient_like_op,
)
from dlsys.runtime.device import gpu
from dlsys.runtime.library import load
from support import sample
from support.devices import require
from support.fusion import lacking

Array = np.ndarray
CASES: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (  # (n, c, h, w, o, kernel), attributes
    ((2, 16, 9, 7, 24, 3), dict(padding=1)),
    ((3, 8, 14, 14, 72, 1), {}),
    ((2, 3, 17, 15, 10, 7), dict(stride=2, padding=3)),
    ((1, 64, 8, 8, 136, 3), dict(stride=2, padding=1)),
    ((2, 24, 10, 9, 16, 3), dict(stride=2, padding=2, dilation=2)),
    ((1, 40, 7, 7, 48, 3), dict(padding=((0, 1), (2, 1)), groups=2)),
    ((1, 5, 6, 5, 7, 2), dict(stride=3, padding=1)),
    ((2, 128, 7, 7, 64, 1), dict(stride=2)),
    ((2, 8, 6, 6, 8, 3), dict(padding=1, groups=8)),
    ((1, 513, 3, 3, 9, 3), dict(padding=1)),
    ((2, 3, 17, 15, 16, 7), dict(stride=2, padding=3)),
    ((2, 1, 9, 11, 8, 5), dict(padding=((1, 2), (0, 2)), dilation=1)),
    ((1, 3, 8, 7, 72, 3), dict(padding=2, stride=1)),
)
# Those that every algorithm computes, of more rows than a tile has and of parts of one.
DENSE: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((3, 72, 13, 11, 136, 3), dict(padding=1)),
    ((2, 64, 9, 10, 264, 3), dict(stride=2, padding=1)),
    ((2, 40, 17, 16, 72, 5), dict(stride=3, padding=2)),
    ((2, 64, 19, 17, 64, 3), dict(padding=2, dilation=2)),
    ((1, 24, 7, 5, 40, 3), dict(padding=((0, 1), (2, 1)))),
    ((2, 16, 12, 12, 8, 2), dict(stride=2)),
    ((2, 8, 25, 9, 8, 3), dict(stride=8, padding=1)),
    ((5, 128, 7, 7, 64, 1), dict(stride=2)),
)
# What reads images once for all kernel offsets: sizes, attributes and its directions. Panels of
# positions are whole and in part, of one image and of two.
HALO: tuple[tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]], ...] = (
    ((3, 64, 16, 24, 64, 3), dict(padding=1), (0, 1, 2)),
    ((1, 40, 10, 18, 64, 3), {}, (0, 2)),
    ((2, 3, 32, 48, 64, 7), dict(stride=2, padding=3), (0, 2)),
    ((3, 72, 13, 11, 136, 3), dict(padding=1), (2,)),
    ((3, 128, 7, 7, 72, 3), dict(padding=1), (2,)),
    ((1, 24, 7, 5, 40, 3), dict(padding=((0, 1), (2, 1))), (2,)),
)
# One channel a group, by (channels, h, w, multiple, kernel): by four in strips of rows, and others
# one by one; several strips and blocks of channels.
DEPTHWISE: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = tuple(
    ((2, c, h, w, c * multiple, kernel), dict(groups=c) | attrs)
    for c, h, w, multiple, kernel, attrs in (
        (8, 9, 7, 1, 3, dict(padding=1)),
        (3, 9, 7, 1, 3, dict(padding=1)),
        (17, 8, 8, 1, 3, dict(stride=2, padding=1)),
        (129, 6, 5, 1, 3, dict(padding=1)),
        (513, 5, 5, 1, 5, dict(padding=2)),
        (144, 14, 13, 1, 3, dict(stride=2, padding=1)),
        (132, 17, 16, 1, 3, {}),
        (36, 12, 12, 1, 5, dict(stride=2, padding=2)),
        (12, 12, 15, 1, 5, dict(padding=2)),
        (68, 13, 12, 1, 7, dict(padding=3)),
        (16, 14, 14, 1, 7, dict(stride=2, padding=3)),
        (8, 11, 11, 1, 3, dict(padding=((0, 1), (2, 1)))),
        (8, 11, 11, 1, 3, dict(stride=2, padding=((0, 1), (2, 0)))),
        (8, 12, 12, 1, 3, dict(stride=2, padding=4)),
        (8, 7, 7, 1, 3, dict(padding=4)),
        (8, 11, 10, 1, 3, dict(padding=2, dilation=2)),
        (4, 9, 8, 3, 3, dict(padding=1)),
        (6, 9, 9, 2, 3, dict(stride=2, padding=1)),
        (8, 9, 9, 1, 4, dict(stride=3, padding=1)),
        (4, 40, 40, 1, 3, dict(padding=1)),
    )
)
# Few channels a group, in strips and segments that are whole and in part, of one image and of two.
GROUPED: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = tuple(
    ((n, c, h, w, c, 3), dict(groups=c // group) | attrs)
    for n, c, h, w, group, attrs in (
        (2, 16, 9, 7, 4, dict(padding=1)),
        (3, 32, 14, 13, 8, dict(padding=1)),
        (1, 48, 7, 7, 16, dict(padding=1)),
        (3, 64, 17, 16, 8, dict(stride=2, padding=1)),
        (2, 32, 15, 20, 4, dict(stride=2, padding=1)),
        (1, 128, 5, 9, 8, {}),
        (2, 16, 12, 12, 8, dict(padding=2)),
        (2, 16, 12, 12, 4, dict(padding=((0, 1), (2, 1)))),
        (5, 32, 7, 7, 8, dict(stride=2)),
        (1, 16, 6, 40, 8, dict(padding=4)),
    )
)
OF_GROUPS = "implicit groups", "depthwise"  # algorithms
KERNELS = [
    f"conv2d{direction}_channels_last" for direction in ("", "_data_gradient", "_filter_gradient")
]
POINTWISE: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((3, 72, 14, 13, 136, 1), {}),
    ((1, 264, 7, 7, 8, 1), {}),
    ((1, 264, 2, 2, 264, 1), {}),  # a filter of more parts than blocks that add them
)


def directions(
    x: Array, f: Array, dy: Array | None, stride: int, padding: Any, dilation: int, groups: int
) -> tuple[Array, Array, Array]:
    """y, dx and df in float64, a kernel offset at a time; dy None is one everywhere."""
    (top, bottom), (left, right) = (
        padding if isinstance(padding, tuple) else ((padding, padding), (padding, padding))
    )
    around = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    n, o, (kh, kw) = len(x), len(f), f.shape[2:]
    out = [
        (around.shape[2 + k] - (f.shape[2 + k] - 1) * dilation - 1) // stride + 1 for k in (0, 1)
    ]
    dy = np.ones((n, o, *out)) if dy is None else dy
    y, dx, df = np.zeros((n, o, *out)), np.zeros_like(around), np.zeros_like(f)
    for g in range(groups):
        of = slice(g * o // groups, (g + 1) * o // groups)
        ins = slice(g * f.shape[1], (g + 1) * f.shape[1])
        for a in range(kh):
            for b in range(kw):
                rows = slice(a * dilation, a * dilation + (out[0] - 1) * stride + 1, stride)
                cols = slice(b * dilation, b * dilation + (out[1] - 1) * stride + 1, stride)
                seen = around[:, ins, rows, cols]
                y[:, of] += np.einsum("nchw,oc->nohw", seen, f[of, :, a, b])
                dx[:, ins, rows, cols] += np.einsum("nohw,oc->nchw", dy[:, of], f[of, :, a, b])
                df[of, :, a, b] = np.einsum("nohw,nchw->oc", dy[:, of], seen)
    return y, dx[:, :, top : top + x.shape[2], left : left + x.shape[3]], df


def drawn(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Array:
    """Normally distributed values that products take as they are: of float32, those of tf32."""
    values = rng.standard_normal(shape).astype(np.float32)
    if dtype == FLOAT32:
        values.view(np.uint32)[...] &= 0xFFFFE000
        return values.astype(np.float64)
    return rounded(values, dtype).astype(np.float64)


def fed(values: Array, dtype: Any) -> Array:
    return values.astype(np.float16 if dtype == FLOAT16 else np.float32)


@require(gpu(0))
class Convolutions(unittest.TestCase):
    """Products of 16 bits are exact in float32, sums of k of them are off by k roundings there, and
    the result is rounded once.
    """

    def run_case(
        self, sizes: tuple[int, ...], attrs: dict[str, Any], dtype: Any, layout: bool
    ) -> None:
        n, c, h, w, o, k = sizes
        attrs = dict(stride=1, padding=0, dilation=1, groups=1) | attrs
        rng = np.random.default_rng(sum(sizes))
        x, f = drawn(rng, (n, c, h, w), dtype), drawn(rng, (o, c // attrs["groups"], k, k), dtype)
        shape = directions(x, f, None, **attrs)[0].shape
        dy = drawn(rng, shape, dtype)
        nodes = [
            ad.Variable(name, a.shape, dtype=dtype) for name, a in (("x", x), ("f", f), ("dy", dy))
        ]
        fetches = [
            convolution_op(nodes[0], nodes[1], **attrs),
            data_gradient_like_op(nodes[1], nodes[2], nodes[0], **attrs),
            filter_gradient_like_op(nodes[0], nodes[2], nodes[1], **attrs),
        ]
        executor = ad.Executor(fetches, ctx=gpu(0))
        if not layout:
            lacking(executor, lambda kernel: kernel.endswith("_channels_last"))
        got = executor.run({a: fed(b, dtype) for a, b in zip(nodes, (x, f, dy))})
        self.compare([v.asnumpy() for v in got], (x, f, dy), attrs, dtype)

    def compare(
        self,
        got: Sequence[Any],
        arrays: Sequence[Array],
        attrs: dict[str, Any],
        dtype: Any,
        of: Sequence[int] = range(3),
    ) -> None:
        x, f, dy = arrays
        o, k = len(f), f.shape[2]
        wanted = directions(x, f, dy, **attrs)
        scales = directions(abs(x), abs(f), abs(dy), **attrs)
        counts = (f[0].size, o * k * k, dy[:, 0].size)
        for value, right, scale, count in [(got[k], wanted[k], scales[k], counts[k]) for k in of]:
            rounding = ROUNDING.get(dtype, 2.0**-24)
            limit = rounding * abs(right) + (count + 1) * 2.0**-23 * scale + 2.0**-25
            off = abs(np.asarray(value, np.float64) - right)
            self.assertTrue((off <= limit).all(), (x.shape, f.shape, attrs, (off - limit).max()))

    def run_by(
        self,
        number: int,
        sizes: tuple[int, ...],
        attrs: dict[str, Any],
        dtype: Any,
        directions: Sequence[int] = range(3),
    ) -> None:
        """The kernels of directions by an algorithm."""
        n, c, h, w, o, k = sizes
        attrs = dict(stride=1, padding=0, dilation=1, groups=1) | attrs
        rng = np.random.default_rng(sum(sizes))
        x = drawn(rng, (n, c, h, w), dtype)
        f = drawn(rng, (o, c // attrs["groups"], k, k), dtype)
        node = convolution_op(ad.Variable("x", x.shape), ad.Variable("f", f.shape), **attrs)
        windows = convolution_op.windows(node, *(one.spec for one in node.inputs)).argument
        dy = drawn(rng, node.spec.shape, dtype)
        images = [array(fed(one.transpose(LAST), dtype), gpu(0), dtype) for one in (x, dy)]
        filters = array(fed(f, dtype), gpu(0), dtype)
        results = [empty(one.shape, gpu(0), dtype) for one in (images[1], images[0], filters)]
        inputs = (images[0], filters), (filters, images[1]), images
        for k in directions:
            results[k][:] = np.nan  # what is not written is seen
            launch(KERNELS[k], gpu(0), *inputs[k], results[k], windows, attrs["groups"], number)
        got = [results[k].asnumpy().astype(np.float64) if k in directions else x for k in range(3)]
        got[:2] = [one.transpose(FIRST) for one in got[:2]]
        self.compare(got, (x, f, dy), attrs, dtype, directions)

    def test_all_directions_against_float64(self) -> None:
        for layout in (True, False):
            for k, (sizes, attrs) in enumerate(CASES if layout else sample.of(CASES, 5)):
                with self.subTest(sizes=sizes, layout=layout):
                    self.run_case(sizes, attrs, (bfloat16, FLOAT16)[k % 2], layout)

    def test_every_algorithm_against_float64(self) -> None:
        for number, name in enumerate(load().algorithms("cuda", KERNELS[0]), 1):
            for k, (sizes, attrs) in enumerate(sample.of(DENSE + POINTWISE, 2)):
                with self.subTest(name=name, sizes=sizes):
                    try:
                        self.run_by(number, sizes, attrs, (bfloat16, FLOAT16)[k % 2])
                    except NotApplicableError:
                        of_others = name.startswith(("implicit mma ", "implicit halo", *OF_GROUPS))
                        self.assertTrue(of_others or name.startswith("implicit gemm"))
                        of_pointwise = sizes[-1] == 1 and not attrs
                        of_float32 = name.endswith((" 128x128", " fitted"))
                        self.assertTrue(of_others or not of_pointwise or of_float32)

    def test_one_channel_a_group_against_float64(self) -> None:
        number = load().algorithms("cuda", KERNELS[0]).index("depthwise") + 1
        cases = itertools.product(DEPTHWISE, (FLOAT32, bfloat16, FLOAT16))
        for k, ((sizes, attrs), dtype) in enumerate(cases):
            with self.subTest(sizes=sizes, dtype=dtype):
                self.run_by(number * (k % 2), sizes, attrs, dtype)
        with self.assertRaisesRegex(NotApplicableError, "it is for one channel a group"):
            self.run_by(number, *DENSE[0], bfloat16)

    def test_groups_of_few_channels_against_float64(self) -> None:
        number = load().algorithms("cuda", KERNELS[0]).index("implicit groups") + 1
        for (sizes, attrs), dtype in itertools.product(GROUPED, (FLOAT32, bfloat16, FLOAT16)):
            with self.subTest(sizes=sizes, dtype=dtype):
                self.run_by(number, sizes, attrs, dtype)
        with self.assertRaisesRegex(NotApplicableError, "for strides of 1 and 2"):
            self.run_by(number, (1, 32, 9, 9, 32, 3), dict(groups=2, stride=3), bfloat16)
        with self.assertRaisesRegex(NotApplicableError, "of 4, 8 or 16 channels"):
            self.run_by(number, *DENSE[0], FLOAT32)

    def test_images_that_are_read_once_for_all_kernel_offsets(self) -> None:
        number = load().algorithms("cuda", KERNELS[0]).index("implicit halo") + 1
        for k, (sizes, attrs, of) in enumerate(HALO):
            with self.subTest(sizes=sizes):
                self.run_by(number, sizes, attrs, (bfloat16, FLOAT16)[k % 2], of)
        refused = (HALO[3], (1,)), (DENSE[1] + ((),), (2,)), (POINTWISE[0] + ((),), (0,))
        for (sizes, attrs, _), of in refused:
            with self.assertRaisesRegex(NotApplicableError, "3 x 3 elements at stride 1"):
                self.run_by(number, sizes, attrs, bfloat16, of)

    def test_float32_against_float64(self) -> None:
        for sizes, attrs in (*CASES, *DENSE, *POINTWISE):
            with self.subTest(sizes=sizes):
                self.run_by(0, sizes, attrs, FLOAT32)

    def test_every_tiling_of_float32_against_float64(self) -> None:
        algorithms = enumerate(load().algorithms("cuda", KERNELS[0]), 1)
        tilings = [(number, name) for number, name in algorithms if "wgmma" in name]
        cases = itertools.product(tilings, (DENSE[0], DENSE[2], POINTWISE[0]))
        for (number, name), (sizes, attrs) in sample.of(cases, len(tilings)):  # each of them once
            with self.subTest(name=name, sizes=sizes):
                self.run_by(number, sizes, attrs, FLOAT32)

    def test_gradients_of_filters_by_mma_in_float32(self) -> None:
        algorithms = load().algorithms("cuda", KERNELS[0])
        names = [name for name in algorithms if name.startswith("implicit mma")]
        self.assertEqual(len(names), 5)
        images = ((2, 3, 17, 15, 16, 7), dict(stride=2, padding=3))
        for name in names:
            number = algorithms.index(name) + 1
            for sizes, attrs in (DENSE[0], DENSE[4], DENSE[7], POINTWISE[1], images):
                with self.subTest(name=name, sizes=sizes):
                    self.run_by(number, sizes, attrs, FLOAT32, (2,))
            with self.assertRaisesRegex(NotApplicableError, "the gradient of a filter"):
                self.run_by(number, *DENSE[4], FLOAT32, (0,))

    def test_float32_is_rounded_to_tf32(self) -> None:
        """To the nearest, by 2^-11 of an operand: of a product twice that and little more."""
        rng = np.random.default_rng(0)
        x, f = (rng.standard_normal(shape) for shape in ((2, 5, 7, 64), (24, 64, 3, 3)))
        node = convolution_op(ad.Variable("x", (2, 64, 5, 7)), ad.Variable("f", f.shape), padding=1)
        windows = convolution_op.windows(node, *(one.spec for one in node.inputs)).argument
        dy = rng.standard_normal((2, 5, 7, 24))
        arrays = [array(a.astype(np.float32), gpu(0)) for a in (x, f, dy)]
        results = [empty(arrays[k].shape, gpu(0)) for k in (2, 0, 1)]
        for name, inputs, made in zip(KERNELS, ((0, 1), (1, 2), (0, 2)), results):
            launch(name, gpu(0), *[arrays[k] for k in inputs], made, windows, 1, 0)
        exact = [a.asnumpy().astype(np.float64) for a in arrays]
        operands = exact[0].transpose(FIRST), exact[1], exact[2].transpose(FIRST)
        attrs: dict[str, Any] = dict(stride=1, padding=1, dilation=1, groups=1)
        wanted = directions(*operands, **attrs)
        scales = directions(*map(abs, operands), **attrs)
        got = [made.asnumpy() for made in results]
        got[:2] = [one.transpose(FIRST) for one in got[:2]]
        for value, right, scale in zip(got, wanted, scales):
            error = abs(value - right) / scale
            self.assertLess(error.max(), 2.0**-10 * 1.01)
            self.assertGreater(error.max(), 2.0**-14)

    def test_float32_that_is_not_at_16_bytes(self) -> None:
        shapes = (1, 6, 6, 8), (8, 8, 3, 3)
        values = [np.linspace(-1, 1, int(np.prod(s)), dtype=np.float32).reshape(s) for s in shapes]
        node = convolution_op(
            ad.Variable("x", (1, 8, 6, 6)), ad.Variable("f", shapes[1]), padding=1
        )
        windows = convolution_op.windows(node, *(one.spec for one in node.inputs)).argument
        copies = [array(value, gpu(0)) for value in values]
        views = []
        for value in values:
            block = empty((value.size + 1,), gpu(0)).block
            views.append(NDArray.from_block(block, 4, value.shape, FLOAT32))
            views[-1][:] = value
        made = [empty(shapes[0], gpu(0)) for _ in range(2)]
        for inputs, result in zip((views, copies), made):
            launch(KERNELS[0], gpu(0), *inputs, result, windows, 1, 0)
        np.testing.assert_allclose(made[0].asnumpy(), made[1].asnumpy(), rtol=1e-4, atol=1e-4)

    def test_an_algorithm_that_cannot_says_which_can(self) -> None:
        number = load().algorithms("cuda", KERNELS[0]).index("implicit wgmma") + 1
        for dtype, message in (
            (bfloat16, "by eight; use implicit mma"),
            (FLOAT32, "by four; use implicit"),
        ):
            with self.assertRaisesRegex(NotApplicableError, message):
                self.run_by(number, (1, 22, 5, 5, 8, 3), dict(padding=1), dtype)
        with self.assertRaisesRegex(NotApplicableError, "it has no groups; use implicit"):
            self.run_by(number, (1, 32, 5, 5, 32, 3), dict(groups=2), FLOAT32)


def block(x: Node, norm: bool) -> tuple[Node, list[Node]]:
    """Two convolutions with a shortcut, and max-pooling between: logits and the Parameters."""
    # Seeds, since other weights may lead a maximum or a relu to a tie that rounding decides.
    layers = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False, rng=0), nn.Conv2d(16, 16, 1, bias=False, rng=1)
    ]  # fmt: skip
    norms = [nn.BatchNorm2d(16) for _ in range(2)]
    h = F.relu(norms[0](layers[0](x)) if norm else layers[0](x))
    h = F.max_pool2d(h, 3, stride=2, padding=1)
    y = norms[1](layers[1](h)) if norm else layers[1](h)
    parameters = [p for layer in (*layers, *(norms if norm else [])) for p in layer.parameters()]
    return F.relu(y + h), parameters


@require(gpu(0))
class Layout(unittest.TestCase):
    def values(
        self, fetches: Sequence[Node], x: Node, layout: bool, precision: str = "bf16"
    ) -> list[Array]:
        """`layout`: all that can have their channels last do."""
        executor = ad.Executor(fetches, ctx=gpu(0), precision=precision)
        if not layout:
            lacking(executor, lambda kernel: kernel.endswith("_channels_last"))
        else:
            target = executor._backend.target
            executor._backend.target = replace(target, kernel_fits=lambda *arguments: True)
        images = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
        return [v.asnumpy().astype(np.float64) for v in executor.run({x: images})]

    def test_a_network_computes_the_same_in_either_layout(self) -> None:
        x = ad.Variable("x", (2, 3, 11, 9))
        y, parameters = block(x, norm=False)
        weights = ad.constant(np.linspace(-1, 1, 2 * 16 * 6 * 5, dtype=np.float32))
        loss = F.sum(y * F.reshape(weights, (2, 16, 6, 5)))
        fetches = [y, *ad.gradients(loss, parameters)]
        for last, first in zip(self.values(fetches, x, True), self.values(fetches, x, False)):
            np.testing.assert_array_equal(last, first)  # of the same sums in the same order

    def test_batch_normalization_and_means_follow(self) -> None:
        x = ad.Variable("x", (2, 3, 11, 9))
        y, _ = block(x, norm=True)
        fetches = [F.global_avg_pool2d(y)]
        for last, first in zip(self.values(fetches, x, True), self.values(fetches, x, False)):
            # Sums in another order may round a value to the other of two neighbors, at each of the
            # three roundings that it goes through.
            np.testing.assert_allclose(last, first, rtol=3 * 2.0**-7, atol=2.0**-7)

    def test_the_report_counts_what_is_left_of_the_other_layout(self) -> None:
        x = ad.Variable("x", (2, 3, 11, 9))
        y, parameters = block(x, norm=False)
        loss = ad.sum_op(y * y)
        executor = ad.Executor([loss, *ad.gradients(loss, parameters)], gpu(0), "bf16")
        executor.run({x: np.ones(x.attrs["shape"], np.float32)})
        found = executor.report().plans[0].last_channels
        # Two forward, the gradients of both filters, and of the data of the second one.
        self.assertEqual(found.convolutions, 5)
        self.assertIn(
            f"channels last: 5 convolutions, {found.transposes} transpose(s)",
            str(executor.report()),
        )
        steps = executor.plan({x: x.attrs["shape"]}).steps
        self.assertEqual(found.transposes, sum(s.node.op.name == "transpose" for s in steps))
        plain = ad.Executor([y], gpu(0))
        plain.run({x: np.ones(x.attrs["shape"], np.float32)})
        self.assertIsNone(plain.report().plans[0].last_channels)

    def test_a_residual_network_has_one_transpose_left(self) -> None:
        model = nn.ResNet50(10, seed=0)
        x = ad.Variable("images", (2, 3, 64, 64))
        labels = ad.Variable("labels", (2,), dtype=np.int64)
        loss = F.cross_entropy(model(x), labels)
        update = optim.SGD(1e-3, momentum=0.9).minimize(loss, model.parameters())
        plan = ad.Executor([loss, update], ctx=gpu(0), precision="bf16").plan(
            {x: (2, 3, 64, 64), labels: (2,)}
        )
        count = Counter(step.node.op.name for step in plan.steps)
        self.assertEqual(count["transpose"], 1)
        for name, number in (("", 53), ("_data_gradient", 52), ("_filter_gradient", 53)):
            # Some of them make what batch normalization needs of their results.
            kernel = f"conv2d{name}_channels_last"
            self.assertEqual(sum(count[k] for k in count if k.startswith(kernel)), number)

    def test_a_network_of_depthwise_layers_has_one_transpose_left(self) -> None:
        model = nn.EfficientNetLite(10, seed=0)
        x = ad.Variable("images", (128, 3, 224, 224))
        labels = ad.Variable("labels", (128,), dtype=np.int64)
        loss = F.cross_entropy(model(x), labels)
        fetches = [loss, *ad.gradients(loss, model.parameters())]
        for precision in ("bf16", "tf32"):
            count = self.kernels(fetches, {x: x.shape, labels: labels.shape}, precision)
            self.assertEqual(
                count["transpose"], 1
            )  # a filter's gradient, and its cast, is no image
            self.assertEqual(count["conv2d_channels_last_statistics"], 49)
            self.assertEqual(count["conv2d_data_gradient_channels_last"], 48)
            self.assertEqual(count["conv2d_filter_gradient_channels_last"], 49)

    def test_a_network_of_float32_computes_the_same_in_either_layout(self) -> None:
        """Both round operands to tf32, and sum in other orders."""
        x = ad.Variable("x", (2, 3, 11, 9))
        for norm in (False, True):
            y, parameters = block(x, norm)
            weights = ad.constant(np.linspace(-1, 1, 2 * 16 * 6 * 5, dtype=np.float32))
            loss = F.sum(y * F.reshape(weights, (2, 16, 6, 5)))
            fetches = [y, F.global_avg_pool2d(y), *ad.gradients(loss, parameters)]
            last, first = (self.values(fetches, x, layout, "tf32") for layout in (True, False))
            for a, b in zip(last, first):
                # A sum near zero may round to the other neighbor in tf32: a part in 2^11 of it.
                np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * abs(b).max())

    def kernels(self, fetches: Sequence[Node], feeds: dict[Node, Any], precision: str) -> Counter:
        plan = ad.Executor(fetches, ctx=gpu(0), precision=precision).plan(feeds)
        return Counter(step.node.op.name for step in plan.steps)

    def test_a_residual_network_of_float32_moves_at_tf32_alone(self) -> None:
        model = nn.ResNet50(1000, seed=0)
        feeds: dict[Node, Any] = {
            ad.Variable("images", (128, 3, 224, 224)): (128, 3, 224, 224),
            ad.Variable("labels", (128,), dtype=np.int64): (128,),
        }
        x, labels = feeds
        loss = F.cross_entropy(model(x), labels)
        fetches = [loss, *ad.gradients(loss, model.parameters())]
        count = self.kernels(fetches, feeds, "tf32")
        self.assertEqual(count["transpose"], 1)
        self.assertEqual(count["conv2d_channels_last_statistics"], 53)
        self.assertEqual(count["conv2d_data_gradient_channels_last"], 8)
        self.assertEqual(count["conv2d_data_gradient_channels_last_sums"], 44)
        self.assertEqual(count["conv2d_filter_gradient_channels_last"], 53)
        self.assertEqual(count["max_pool2d_channels_last"], 1)
        for precision in ("fp32", "3xtf32"):
            count = self.kernels(fetches, feeds, precision)
            self.assertFalse([name for name in count if "_channels_last" in name])

    def test_biases_of_float32_are_added_by_what_follows(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1),
            nn.ReLU(),
        )
        x = ad.Variable("x", (64, 64, 56, 56))
        loss = F.sum(F.global_avg_pool2d(model(x)))
        count = self.kernels([loss, *ad.gradients(loss, model.parameters())], {x: x.shape}, "tf32")
        self.assertEqual(count["conv2d_channels_last"], 2)
        self.assertEqual(count["conv2d_filter_gradient_channels_last"], 2)
        self.assertEqual(count["pointwise"], 2)
        self.assertEqual(count["conv2d_bias"] + count["broadcast_to"], 0)

    def test_float32_stays_where_transposes_would_cost_more(self) -> None:
        x = ad.Variable("x", (64, 256, 28, 28))
        f = ad.Variable("f", (256, 256, 3, 3))
        y = convolution_op(x, f, padding=1)
        feeds: dict[Node, Any] = {x: x.shape, f: f.shape}
        self.assertEqual(self.kernels([y], feeds, "tf32"), Counter(conv2d=1))
        y = convolution_op(
            F.concatenate([convolution_op(y, f, padding=1), y], axis=1)[:, 128:384], f
        )
        self.assertNotIn("conv2d_channels_last", self.kernels([y], feeds, "tf32"))

    def test_a_rung_by_name_keeps_its_layout(self) -> None:
        x = ad.Variable("x", (1, 16, 4, 4), dtype=bfloat16)
        f = ad.Variable("f", (16, 16, 1, 1), dtype=bfloat16)
        made = convolution_op(x, f, algo="naive")
        plan = ad.Executor([made], ctx=gpu(0)).plan({x: x.shape, f: f.shape})
        self.assertIn("conv2d", [step.node.op.name for step in plan.steps])


if __name__ == "__main__":
    unittest.main()
