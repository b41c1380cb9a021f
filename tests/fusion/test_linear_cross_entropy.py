"""Fused linear cross-entropy: where logits are not stored, and its loss and gradients."""

from __future__ import annotations

import unittest
from dataclasses import replace
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.dtypes import FLOAT32, as_dtype, rounded
from dlsys.errors import OutOfRangeError
from dlsys.graph.node import Node, find_topo_sort
from dlsys.graph.spec import Spec
from dlsys.runtime.device import gpu
from dlsys.runtime.target import target_of
from support.devices import require
from support.fusion import GPU, fused, require_fusion, without
from support.graphs import operators, simplified, variable

KERNEL, PRODUCT = "linear_cross_entropy", "matmul_row_factors"
BFLOAT16 = as_dtype("bfloat16")


class Layer:
    """The logits of a linear layer of 16 bits, their mean loss, and gradients."""

    def __init__(
        self, rows: int, classes: int, features: int, dtype: Any = BFLOAT16, **options: Any
    ) -> None:
        self.x = variable("x", rows, features, dtype=dtype)
        self.w = variable("w", classes, features, dtype=BFLOAT16)
        self.labels = variable("labels", rows, dtype=np.dtype(np.int64))
        x = self.x if dtype == BFLOAT16 else ad.cast_op(self.x, BFLOAT16)
        rung = {"algo": options.pop("algo")} if "algo" in options else {}
        self.logits = ad.matmul_op(x, self.w, trans_B=True, **rung)
        self.loss = F.cross_entropy(ad.cast_op(self.logits, FLOAT32), self.labels, **options)
        self.d_logits, self.dx, self.dw = ad.gradients(self.loss, [self.logits, self.x, self.w])

    def run(self, x: np.ndarray, w: np.ndarray, labels: np.ndarray) -> tuple[Any, ...]:
        """The loss and the gradients of x and w on the GPU, by the kernel whatever the sizes."""
        wide = [ad.cast_op(node, FLOAT32) for node in (self.dx, self.dw)]
        executor = ad.Executor([self.loss, *wide], gpu(0))
        forced = (KERNEL, PRODUCT) if x.shape[1] % 8 == 0 else (KERNEL,)
        backend = executor._backend
        fits = backend.target.fits
        backend.target = replace(
            backend.target, kernel_fits=lambda name, *given: name in forced or fits(name, *given)
        )
        feeds = {self.x: x, self.w: w, self.labels: labels}
        made = executor.run(feeds, True)
        shapes = {node: value.shape for node, value in feeds.items()}
        names = {step.node.op.kernel for step in executor.plan(shapes).steps}
        assert names.issuperset(forced), names
        return tuple(made)


def wanted(
    x: np.ndarray, w: np.ndarray, labels: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """The mean loss, the gradient of the logits, and the logits, in float64."""
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    less = logits - logits.max(axis=1, keepdims=True)
    log_p = less - np.log(np.exp(less).sum(axis=1, keepdims=True))
    rows = np.arange(len(x))
    gradient = np.exp(log_p)
    gradient[rows, labels] -= 1
    return -log_p[rows, labels].mean(), gradient / len(x), logits


def drawn(
    rows: int, classes: int, features: int, size: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, weights that make logits of about this size, and labels."""
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, features)), rng.normal(size=(classes, features))
    w *= size / features**0.5
    arrays = (rounded(a.astype(np.float32), BFLOAT16) for a in (x, w))
    return (*arrays, rng.integers(0, classes, rows))


class Rewrites(unittest.TestCase):
    def names(self, *fetches: Node) -> list[str]:
        return operators(fused(simplified(fetches), "cross_entropy", KERNEL, target=GPU))

    def test_neither_logits_nor_their_gradient_are_stored(self) -> None:
        layer = Layer(6, 16, 8)
        names = self.names(layer.loss, layer.dx, layer.dw)
        self.assertIn(KERNEL, names)
        self.assertNotIn("fused_sparse_cross_entropy", names)
        self.assertEqual([names.count(name) for name in ("matmul", PRODUCT)], [1, 1])

    def test_a_gradient_of_one_of_the_two(self) -> None:
        layer = Layer(6, 16, 8)
        for gradient in (layer.dx, layer.dw):
            self.assertIn(KERNEL, self.names(layer.loss, gradient))
            self.assertIn(KERNEL, self.names(gradient))

    def test_x_in_float32_is_read_for_the_gradient_of_the_weights(self) -> None:
        for dtype in (BFLOAT16, FLOAT32):
            layer = Layer(6, 16, 8, dtype)
            made = fused(simplified([layer.dw]), "cross_entropy", KERNEL, target=GPU)
            (node,) = (node for node in find_topo_sort(made) if node.op.kernel == KERNEL)
            self.assertEqual([x.spec.dtype for x in node.inputs[:2]], [BFLOAT16, dtype])

    def test_what_is_read_otherwise_stays(self) -> None:
        layer = Layer(6, 16, 8)
        read = layer.loss, layer.dx, layer.dw
        for more in (layer.logits, layer.d_logits, ad.sum_op(layer.logits)):
            self.assertNotIn(KERNEL, self.names(*read, more))

    def test_rows_that_count_differently_and_named_rungs_stay(self) -> None:
        for options in (dict(ignore_index=3), dict(algo="hopper")):
            layer = Layer(6, 16, 8, **options)
            self.assertNotIn(KERNEL, self.names(layer.loss, layer.dx, layer.dw))


@require(gpu(0))
@require_fusion("cross_entropy", KERNEL)
class Values(unittest.TestCase):
    def setUp(self) -> None:
        if not target_of(gpu(0)).has(KERNEL, BFLOAT16):
            self.skipTest("no kernel for this GPU")

    def check(
        self, x: np.ndarray, w: np.ndarray, labels: np.ndarray, dtype: Any = BFLOAT16
    ) -> None:
        """Logits are sums in float32 of K terms, and exponentials of arguments of up to 2^7 binary
        orders: the loss has an error of a few 2^-18 of these. Each gradient is rounded three times
        by up to 2^-8: exponentials, the row's factor times a side or the result, and the result.
        """
        loss, dx, dw = Layer(len(x), len(w), x.shape[1], dtype).run(x, w, labels)
        expected, gradient, logits = wanted(x, w, labels)
        self.assertLessEqual(abs(loss - expected), 2.0**-18 * (1 + abs(logits).max()))
        for found, exact, scale in (
            (dx, gradient @ w, abs(gradient) @ abs(w)),
            (dw, gradient.T @ x, abs(gradient).T @ abs(x)),
        ):  # fmt: skip
            np.testing.assert_array_less(abs(found - exact), scale * 3.1 * 2.0**-8 + 1e-30)
            error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
            self.assertLessEqual(error, 2.0**-8)

    def test_close_to_float64(self) -> None:
        """Of tiles that are full and such that are not, of K that is not a multiple of a panel."""
        for shape in ((300, 520, 72), (256, 512, 64), (2, 8, 8), (129, 1096, 40)):
            with self.subTest(shape=shape):
                self.check(*drawn(*shape))

    def test_x_in_float32(self) -> None:
        for shape in ((256, 512, 64), (129, 1096, 42)):
            self.check(*drawn(*shape), dtype=FLOAT32)

    def test_losses_of_tens(self) -> None:
        """Labels that are e^-50 and less as likely as others."""
        self.check(*drawn(260, 520, 64, size=12.0))

    def test_rows_beyond_the_range_are_made_again(self) -> None:
        """Losses of some rows are above 83, where exponentials leave float32's range; of those in
        between, which are not, nothing changes.
        """
        x, w, labels = drawn(260, 520, 64)
        x[::37] *= 64
        logits = x @ w.T
        labels[::37] = logits[::37].argmin(axis=1)
        self.assertGreater((logits.max(axis=1) - logits[range(260), labels]).max(), 200)
        layer = Layer(260, 520, 64)
        loss, dx, dw = layer.run(x, w, labels)
        expected, gradient, logits = wanted(x, w, labels)
        # Their logits are rounded to 16 bits, as is one of the largest in each.
        self.assertLessEqual(abs(loss - expected), 2.0**-9 * abs(logits).max() / 30)
        others = np.arange(260) % 37 > 0
        exact = gradient[others] @ w
        error = np.linalg.norm(dx[others] - exact) / np.linalg.norm(exact)
        self.assertLessEqual(error, 2.0**-8)
        self.assertTrue(np.isfinite(dx).all() and np.isfinite(dw).all())
        sums = (gradient @ w).sum(axis=0)
        np.testing.assert_allclose(dx.sum(axis=0), sums, atol=0.1 * abs(gradient @ w).max())

    def test_nan_stays_in_its_row(self) -> None:
        x, w, labels = drawn(256, 512, 64)
        x[7, 3] = np.nan
        loss, dx, _ = Layer(256, 512, 64).run(x, w, labels)
        self.assertTrue(np.isnan(loss))
        np.testing.assert_array_equal(np.isnan(dx).any(axis=1), np.arange(256) == 7)

    def test_a_label_out_of_range_is_refused(self) -> None:
        x, w, labels = drawn(256, 512, 64)
        labels[1] = 512
        with self.assertRaisesRegex(OutOfRangeError, "label 512 at position 1 "):
            Layer(256, 512, 64).run(x, w, labels)

    def test_products_of_few_tiles_share_them(self) -> None:
        """Of 2,048 rows, as of 16,384, the product rounds once."""
        classes, features = 50304, 768
        for rows in (2048, 16384):
            arrays = ((rows, classes), (classes, features), (rows, 1), (rows, features))
            specs = [Spec(x, FLOAT32 if x[1] == 1 else BFLOAT16) for x in arrays]
            self.assertTrue(target_of(gpu(0)).fits(PRODUCT, *specs))

    def test_the_same_bits_every_time(self) -> None:
        arrays = drawn(256, 512, 64)
        layer = Layer(256, 512, 64)
        for first, second in zip(layer.run(*arrays), layer.run(*arrays)):
            np.testing.assert_array_equal(first, second)

    def test_as_without(self) -> None:
        """What kernels that store logits compute, but for the rounding of these to 16 bits."""
        arrays = drawn(256, 512, 64)
        found = Layer(256, 512, 64).run(*arrays)
        layer = Layer(256, 512, 64)
        with without(KERNEL):
            wide = [ad.cast_op(node, FLOAT32) for node in (layer.dx, layer.dw)]
            executor = ad.Executor([layer.loss, *wide], gpu(0))
            plain = executor.run(dict(zip((layer.x, layer.w, layer.labels), arrays)), True)
        self.assertAlmostEqual(float(found[0]), float(plain[0]), delta=2.0**-8)
        for one, other in zip(found[1:], plain[1:]):
            self.assertLessEqual(np.linalg.norm(one - other), 2.0**-7 * np.linalg.norm(other))


if __name__ == "__main__":
    unittest.main()
