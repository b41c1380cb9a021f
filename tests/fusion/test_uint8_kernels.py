"""The kernels of batches that stay bytes: products, grouped updates, and the rows themselves."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dlsys.errors import KernelError, NotApplicableError
from dlsys.fusion.shared.body import ACTIVATIONS
from dlsys.fusion.shared.update_operators import argument
from dlsys.ndarray import NDArray, array, empty, launch
from dlsys.ops.optim.rules import RULES
from dlsys.ops.random.device_batch import ordered
from dlsys.runtime.device import Context, gpu
from dlsys.runtime.library import load
from support import sample
from support.devices import EMULATED, require, slow
from support.table.families.fused.gemm import FORMULAS

FLOAT32 = np.float32
FP32, TF32 = 0, 1  # precisions, as kernels number them
SCALE = FLOAT32(0.25)


class Kernels(unittest.TestCase):
    """Kernels called with arrays that no executor makes: of all bytes and of small integers, whose
    sums are exact in every order and precision.
    """

    ctx: Context = gpu(0)

    def setUp(self) -> None:
        self.rng = np.random.default_rng(0)
        self.scale = array(SCALE, self.ctx)

    def bytes_of(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 256, shape).astype(np.uint8)

    def integers(self, *shape: int) -> np.ndarray:
        return self.rng.integers(-3, 4, shape).astype(FLOAT32)

    def zeros(self, *shape: int, dtype: Any = FLOAT32) -> NDArray:
        return array(np.zeros(shape, dtype), self.ctx)

    def shifted(self, value: np.ndarray, by: int) -> NDArray:
        """The value `by` elements behind the beginning of a block."""
        offset = by * value.itemsize
        block = empty((offset + value.nbytes,), self.ctx, np.uint8).block
        made = NDArray.from_block(block, offset, value.shape, value.dtype)
        made[:] = value
        return made


@require(gpu(0))
class GpuProducts(Kernels):
    """The products of bytes."""

    def multiply(
        self, a: NDArray, b: NDArray, bias: NDArray | None = None, **options: Any
    ) -> np.ndarray:
        columns = b.shape[0 if options.get("trans_b") else 1]
        y = options.get("to")
        if y is None:
            y = array(np.full((a.shape[0], columns), np.nan, FLOAT32), self.ctx)
        kernel, given = "matmul_u8", []
        if bias is not None:
            kernel, given = "matmul_u8_bias", [bias]
        numbers = [options.get(name, 0) for name in ("trans_a", "trans_b", "choice")]
        scale = options.get("scale", self.scale)
        precision, activation = options.get("precision", TF32), options.get("activation", 0)
        launch(kernel, self.ctx, a, b, *given, scale, *numbers, precision, activation, y)
        return y.asnumpy()

    def factors(self, rows: int, depth: int, columns: int) -> Iterator[tuple]:
        """In each layout: A, B and the bias on the GPU, scale · A op(B), and the flag."""
        for trans_b in (False, True):
            a, b = self.bytes_of(rows, depth), self.integers(depth, columns)
            bias = self.integers(columns)
            given = (array(x, self.ctx) for x in (a, b.T.copy() if trans_b else b, bias))
            yield (*given, SCALE * (a.astype(FLOAT32) @ b), trans_b)

    def test_every_algorithm(self) -> None:
        """All tilings for bytes over all splits; rows at whole addresses and at odd ones."""
        names = load().algorithms(self.ctx.kernel_device, "matmul_u8")
        self.assertEqual(names, load().algorithms(self.ctx.kernel_device, "matmul_u8_bias"))
        columns = itertools.cycle((1, 7, 12, 64, 33, 130))
        sizes = list(itertools.product((1, 7, 64, 65, 130), (1, 15, 16, 17, 100)))
        applied = set()
        for rows, depth in [*sample.of(sizes, 9), (65, 304), (3, 1001)]:
            for a, b, bias, product, trans_b in self.factors(rows, depth, next(columns)):
                for number, name in enumerate(names, 1):
                    try:
                        y = self.multiply(a, b, bias, choice=number, trans_b=trans_b)
                    except NotApplicableError:
                        continue
                    applied.add(name)
                    with self.subTest(name, a=a.shape, b=b.shape, trans_b=trans_b):
                        np.testing.assert_array_equal(y, product + bias.asnumpy())
        tiles = ("128x64", "64x64", "64x32", "32x32", "32x16", "16x32")
        of_bytes = {f"tensor {tile} by {splits}" for tile in tiles for splits in (1, 2, 4, 8)}
        self.assertEqual(applied, of_bytes | {"tensor"})

    def test_sizes_by_the_rule(self) -> None:
        """Nothing to multiply among them, and large ones."""
        sizes = [(0, 3, 4), (3, 0, 4), (3, 4, 0), (300, 784, 100), (1, 2000, 1)]
        for size in sizes:
            for a, b, bias, product, trans_b in self.factors(*size):
                for precision in (FP32, TF32):
                    with self.subTest(size=size, trans_b=trans_b, precision=precision):
                        options = {"trans_b": trans_b, "precision": precision}
                        np.testing.assert_array_equal(self.multiply(a, b, **options), product)
                        y = self.multiply(a, b, bias, **options)
                        np.testing.assert_array_equal(y, product + bias.asnumpy())

    def test_weights_are_rounded_as_the_precision_says(self) -> None:
        a, b = self.bytes_of(33, 300), self.rng.standard_normal((300, 20)).astype(FLOAT32)
        bits = (b.view(np.uint32) + 0x1000) & 0xFFFFE000  # to 10 bits, halves away from zero
        scale = array(FLOAT32(1 / 255), self.ctx)
        for precision, seen in ((FP32, b), (TF32, bits.view(FLOAT32))):
            wanted = a.astype(np.float64) @ seen / 255
            y = self.multiply(
                array(a, self.ctx), array(b, self.ctx), scale=scale, precision=precision
            )
            np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())

    def test_products_at_fp32_are_those_of_whole_floats(self) -> None:
        """One product a sum, so that nothing hides a bit; and what is no number."""
        a = self.bytes_of(40, 96)
        sizes = 2.0 ** self.rng.integers(-90, 90, (96, 96))
        values = np.diag(self.rng.standard_normal(96)) * sizes
        b = values.astype(FLOAT32)
        given = [array(a, self.ctx), array(b, self.ctx)]
        product = SCALE * a.astype(np.float64) @ b.astype(np.float64)
        y = self.multiply(*given, precision=FP32)
        np.testing.assert_allclose(y, product, rtol=2.0**-23, atol=0)
        a[:], b[:] = np.maximum(a, 1), 1
        b[5, 1], b[6, 2], b[7, 3], b[8, 4] = np.inf, -np.inf, np.nan, 3e38
        with np.errstate(invalid="ignore", over="ignore"):
            product = SCALE * (a.astype(FLOAT32) @ b)
        y = self.multiply(array(a, self.ctx), array(b, self.ctx), precision=FP32)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(product))
        np.testing.assert_array_equal(np.isinf(y), np.isinf(product))

    def test_every_activation(self) -> None:
        a, b = self.bytes_of(9, 20), 2.0**-8 * self.integers(20, 12)
        bias = self.integers(12)
        plain = SCALE * (a.astype(FLOAT32) @ b) + bias
        self.assertTrue((plain < -3).any() and (plain > 3).any() and (abs(plain) < 1).any())
        given = [array(x.astype(x.dtype), self.ctx) for x in (a, b.astype(FLOAT32), bias)]
        for number, name in enumerate(("", *ACTIVATIONS)):
            for precision in (FP32, TF32):
                y = self.multiply(*given, activation=number, precision=precision)
                wanted = FORMULAS[name](plain.astype(np.float64))
                np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6, err_msg=name)

    def test_arrays_at_any_address(self) -> None:
        for size in ((40, 64, 36), (70, 112, 12)):
            for a, b, bias, product, trans_b in self.factors(*size):
                values = [x.asnumpy() for x in (a, b, bias)]
                for by in ((1, 0, 0), (4, 0, 0), (16, 4, 4), (0, 1, 0), (0, 0, 1), (15, 3, 2)):
                    for to in (0, 1):
                        arrays = [self.shifted(x, k) for x, k in zip(values, by, strict=True)]
                        y = self.shifted(np.zeros_like(product), to)
                        with self.subTest(by=by, to=to, trans_b=trans_b):
                            made = self.multiply(*arrays, trans_b=trans_b, to=y)
                            np.testing.assert_array_equal(made, product + values[2])

    def test_what_it_refuses(self) -> None:
        a, b = self.zeros(3, 4, dtype=np.uint8), self.zeros(4, 5)
        for message, arguments, options in (
            ("a uint8 A cannot be transposed", (a, b), {"trans_a": 1}),
            (
                "expected one scale of the uint8 operand, got shape",
                (a, b),
                {"scale": self.zeros(2)},
            ),
            ("expected uint8, got float32", (self.zeros(3, 4), b), {}),
            ("expected uint8, got int32", (self.zeros(3, 4, dtype=np.int32), b), {}),
            ("expected float32, got uint8", (a, self.zeros(4, 5, dtype=np.uint8)), {}),
            ("expected float32, got int32", (a, b), {"scale": self.zeros(1, dtype=np.int32)}),
            ("shapes do not fit", (a, self.zeros(3, 5)), {}),
            ("shapes do not fit", (a, b), {"trans_b": 1, "to": self.zeros(3, 5)}),
            ("there is no algorithm 1000", (a, b), {"choice": 1000}),
            ("there is no precision 3", (a, b), {"precision": 3}),
            ("expected a bias of 5 elements, got shape", (a, b, self.zeros(6)), {}),
            ("there is no epilogue 10", (a, b), {"activation": 10}),
        ):
            with self.assertRaisesRegex(KernelError, f"matmul_u8(_bias)?: {message}"):
                self.multiply(*arguments, **options)


@require(gpu(0))
class GpuUpdates(Kernels):
    """Grouped updates with factors of bytes: SGD at a rate of 1/2."""

    def launch(
        self, states: list, left: list, right: list, sums: Sequence, of: Sequence, **more: Any
    ) -> None:
        lr, scales = [array(FLOAT32(0.5), self.ctx)], more.get("scales", [self.scale])
        launch(
            "matmul_sgd_update", self.ctx, states, left, right, lr, [], [], [], scales,
            argument(RULES["sgd_update"], {}, sums, of, more.get("precision", TF32)),
        )  # fmt: skip

    def check(self, *products: tuple[int, int, int, str, str], by: int = 0, **more: Any) -> None:
        """Products of depth k of (m, n), with bytes for A, for B or for none, and with the sums of
        A, of B or of none; of all factors and states `by` elements behind an aligned address.
        """
        left, right, states, wanted = [], [], [], []
        of_sums, wanted_sums = [], []
        for k, m, n, of, sums in products:
            a = self.bytes_of(k, m) if of == "A" else self.integers(k, m)
            b = self.bytes_of(k, n) if of == "B" else self.integers(k, n)
            left.append(self.shifted(a, by))
            right.append(self.shifted(b, by))
            gradient = (SCALE if of else 1) * (a.astype(FLOAT32).T @ b.astype(FLOAT32))
            w = self.integers(m, n)
            states.append(self.shifted(w, by))
            wanted.append(w - gradient / 2)
            if sums:
                factor = a if sums == "A" else b
                s = self.integers(factor.shape[1])
                of_sums.append(self.shifted(s, by))
                wanted_sums.append(s - factor.sum(axis=0) / 2)
        of_each = ([product[part] for product in products] for part in (4, 3))
        self.launch(states + of_sums, left, right, *of_each, **more)
        for state, right_value in zip(states + of_sums, wanted + wanted_sums, strict=True):
            np.testing.assert_array_equal(state.asnumpy(), right_value)

    def test_products_of_all_shapes(self) -> None:
        shapes = (
            (1, 1, 1), (1, 7, 5), (0, 7, 5), (3, 0, 5), (3, 5, 0), (37, 784, 10), (37, 10, 784),
            (33, 7, 5), (15, 17, 16), (16, 16, 16), (300, 130, 70), (64, 64, 64), (70, 33, 129),
        )  # fmt: skip
        sides = (("A", ""), ("A", "B"), ("B", ""), ("B", "A"))
        every = itertools.product(shapes, sides, (FP32, TF32))
        for (k, m, n), (of, sums), precision in sample.of(every, 45):
            with self.subTest(k=k, m=m, n=n, of=of, sums=sums, precision=precision):
                self.check((k, m, n, of, sums), precision=precision)

    @slow
    def test_tiles_and_splits_of_all_sizes(self) -> None:
        """Shapes for which the launcher takes all of the tilings, and all numbers of splits, on an
        H200.
        """
        large = [(520, 1500, 130), (1100, 1500, 70)]
        shapes = (
            (8, 900, 600), (70, 300, 900), (300, 1500, 70), (300, 1500, 33), (1100, 500, 33),
            (24, 20, 10), (300, 33, 900), (70, 1500, 33), (300, 500, 20), (70, 20, 10),
            (300, 1500, 10), (300, 20, 10), (1100, 20, 10), (130, 130, 900), (300, 33, 600),
            (300, 33, 300), *([] if EMULATED else large),
        )  # fmt: skip
        for k, m, n in sample.of(shapes, 7):
            for of in ("AB"[(k + m) // 10 % 2],) if EMULATED else ("A", "B"):
                for precision in (FP32, TF32):
                    with self.subTest(k=k, m=m, n=n, of=of, precision=precision):
                        self.check((k, m, n, of, "A" if of == "B" else "B"), precision=precision)

    def test_gradients_at_fp32_are_those_of_whole_floats(self) -> None:
        """Of bytes by tensor cores, of floats by FFMA beside them. On an H200 they were off by 0.74
        and by 1.6 units of 2^-24 at most.
        """
        sizes = (37, 70, 33), (300, 200, 100), (1000, 130, 64)
        for (k, m, n), of in itertools.product(sizes, "AB"):
            bytes_ = self.bytes_of(k, m)
            x, d = self.rng.standard_normal((2, k, n)).astype(FLOAT32)
            first, second = (bytes_, d) if of == "A" else (d, bytes_)
            states = [self.zeros(first.shape[1], second.shape[1]), self.zeros(n, n)]
            left, right = (
                [array(each, self.ctx) for each in two] for two in ((first, x), (second, d))
            )
            self.launch(states, left, right, ("", ""), (of, ""), precision=FP32)
            for state, (a, b), scale in zip(
                states, ((first, second), (x, d)), (SCALE, 1), strict=True
            ):
                wanted = scale * a.astype(np.float64).T @ b.astype(np.float64) / -2
                size = scale * np.abs(a.astype(np.float64)).T @ np.abs(b.astype(np.float64)) / 2
                error = np.abs(state.asnumpy() - wanted)
                self.assertLess((error / size).max(), 3 * 2.0**-24)

    def test_groups(self) -> None:
        products = [
            (50, 48, 30, "A", ""), (50, 30, 17, "", "B"), (50, 7, 32, "B", "A"), (1, 1, 1, "", "A"),
            (0, 5, 6, "A", "B"), (200, 12, 20, "B", ""), (9, 64, 6, "", ""), (20, 5, 16, "A", "B"),
        ]  # fmt: skip
        for precision in (FP32, TF32):
            for count in (2, 3, len(products)):
                with self.subTest(precision=precision, count=count):
                    self.check(*products[:count], precision=precision)
        self.check(*products[1:2], scales=[])

    def test_large_products_beside_those_of_bytes(self) -> None:
        """The launcher takes the large tiles at fp32."""
        for of in ("A", "B"):
            self.check((33, 70, 40, of, ""), (33, 640, 600, "", "B"), precision=FP32)

    @slow
    def test_gradients_of_a_network(self) -> None:
        """784-256-100-10 at batch 1000, whose products of floats are of medium tiles at fp32."""
        for precision in (FP32, TF32):
            with self.subTest(precision=precision):
                products = (256, 784, "B", "A"), (100, 256, "", "A"), (10, 100, "", "A")
                self.check(*((1000, *product) for product in products), precision=precision)

    def test_arrays_at_any_address(self) -> None:
        for by in (1, 2, 4, 15, 16):
            for of, sums in (("A", "B"), ("B", "A")):
                with self.subTest(by=by, of=of):
                    self.check((40, 64, 48, of, sums), (40, 48, 36, "", "B"), by=by)

    def test_what_it_refuses(self) -> None:
        w, s, a, b = self.zeros(3, 4), self.zeros(3), self.zeros(5, 3), self.zeros(5, 4)
        stored = self.zeros(5, 3, dtype=np.uint8)
        lists = "expected a scale exactly where an operand is uint8"
        two = {"scales": [self.zeros(2)]}
        for message, arguments, more in (
            (lists, ([w], [stored], [b], "", "A"), {"scales": []}),
            (lists, ([w], [stored], [b], "", "A"), {"scales": [self.scale, self.scale]}),
            (lists, ([w], [a], [b], "", ""), {}),
            (lists, ([w, s], [stored], [b], "A", "A"), {}),
            (
                r"expected one scale of the uint8 operand, got shape \(2,\)",
                ([w], [stored], [b], "", "A"),
                two,
            ),
            ("expected uint8, got float32", ([w], [a], [b], "", "A"), {}),
            ("expected float32, got uint8", ([w], [stored], [b], "", "B"), {}),
            ("expected float32, got uint8", ([w], [stored], [b], "", ""), {"scales": []}),
        ):
            with self.assertRaisesRegex(KernelError, f"matmul_sgd_update: .*{message}"):
                self.launch(*arguments, **more)


@require(gpu(0))
class GpuRows(Kernels):
    """Batches as they are stored."""

    def test_rows_are_numpys(self) -> None:
        count, seed = 50, 7
        for size in (1, 15, 16, 784):
            for labels in (np.arange(count), self.integers(count, 3)):
                for batch, at in ((1, 0), (33, 2**35), (130, 1)):
                    for shuffle in (False, True):
                        with self.subTest(size=size, batch=batch, shuffle=shuffle):
                            positions = np.arange(batch, dtype=np.uint64) + np.uint64(at * batch)
                            plain = (positions % np.uint64(count)).astype(np.int64)
                            chosen = ordered(positions, count, seed) if shuffle else plain
                            for by in (0, 1):
                                self.check_rows(size, labels, at, chosen, by, shuffle)

    def check_rows(
        self, size: int, labels: np.ndarray, at: int, chosen: np.ndarray, by: int, shuffle: bool
    ) -> None:
        samples = self.bytes_of(len(labels), size)
        x = self.shifted(np.zeros((len(chosen), size), np.uint8), by)
        y = array(np.zeros_like(labels, shape=(len(chosen), *labels.shape[1:])), self.ctx)
        given = self.shifted(samples, by), array(labels, self.ctx), array(np.int64(at), self.ctx)
        launch("shuffled_rows", self.ctx, *given, 7, int(shuffle), x, y)
        np.testing.assert_array_equal(x.asnumpy(), samples[chosen])
        np.testing.assert_array_equal(y.asnumpy(), labels[chosen])

    def test_what_it_refuses(self) -> None:
        samples, labels = self.zeros(6, 4, dtype=np.uint8), self.zeros(6, dtype=np.int64)
        x, y = self.zeros(3, 4, dtype=np.uint8), self.zeros(3, dtype=np.int64)
        step = self.zeros(dtype=np.int64)
        for message, given, made in (
            ("expected bytes, got float32 into uint8", (self.zeros(6, 4), labels, step), (x, y)),
            (
                "expected bytes, got uint8 into float32",
                (samples, labels, step),
                (self.zeros(3, 4), y),
            ),
            ("have labels of", (samples, self.zeros(5, dtype=np.int64), step), (x, y)),
            ("expected a step of one int64", (samples, labels, self.zeros()), (x, y)),
        ):
            with self.assertRaisesRegex(KernelError, f"shuffled_rows: .*{message}"):
                launch("shuffled_rows", self.ctx, *given, 0, 1, *made)
