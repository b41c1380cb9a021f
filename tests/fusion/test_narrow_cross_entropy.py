"""Fused cross-entropy of logits of 16 bits: where its casts become parts of the kernel, that the
gradient overwrites the logits, and that the loss is float32's.
"""

from __future__ import annotations

import math
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.dtypes import FLOAT32, ROUNDING, as_dtype, rounded
from dlsys.graph.node import Node
from dlsys.runtime.device import Context
from support.devices import on_native_devices
from support.fusion import fused, require_fusion
from support.graphs import operators, simplified, variable

KERNEL = "fused_sparse_cross_entropy"


def loss_of(dtype: str, rows: int, classes: int, **options: Any) -> tuple[Node, Node, Node, Node]:
    """Logits of 16 bits, labels, the mean loss of their float32 copy, and the logits' gradient."""
    x = variable("x", rows, classes, dtype=as_dtype(dtype))
    labels = variable("labels", rows, dtype=np.dtype(np.int64))
    loss = F.cross_entropy(ad.cast_op(x, FLOAT32), labels, **options)
    (gradient,) = ad.gradients(loss, [x])
    return x, labels, loss, gradient


class Rewrites(unittest.TestCase):
    def fused(self, *fetches: Node) -> list[Node]:
        return fused(simplified(fetches), "cross_entropy")

    def test_the_casts_around_a_loss_are_parts_of_its_kernel(self) -> None:
        for dtype in ("bfloat16", "float16"):
            _, _, loss, gradient = loss_of(dtype, 6, 5)
            total, dx = self.fused(loss, gradient)
            self.assertEqual(operators([total, dx]), [KERNEL])
            self.assertEqual((total.spec.dtype, str(dx.spec.dtype)), (FLOAT32, dtype))

    def test_a_gradient_that_is_read_in_float32_keeps_them(self) -> None:
        x = variable("x", 6, 5, dtype=as_dtype("bfloat16"))
        wide = ad.cast_op(x, FLOAT32)
        loss = F.cross_entropy(wide, variable("labels", 6, dtype=np.dtype(np.int64)))
        d_wide, dx = ad.gradients(loss, [wide, x])
        for fetches in ([loss, d_wide], [loss, dx, d_wide], [loss, dx, 2 * d_wide]):
            self.assertIn("cast", operators(self.fused(*fetches)))

    def test_losses_and_gradients_that_differ_by_row_read_16_bits_each(self) -> None:
        weights = (1.0, 2.0, 3.0, 4.0, 5.0)
        for options in (dict(ignore_index=3), dict(weight=weights)):
            with self.subTest(options=options):
                _, _, loss, gradient = loss_of("bfloat16", 6, 5, **options)
                found = operators(self.fused(loss, gradient))
                self.assertIn("narrow_cross_entropy_gradient", found)
                self.assertIn("narrow_cross_entropy", operators(self.fused(loss)))
                self.assertNotIn(KERNEL, found)

    def test_what_else_reads_the_copy_keeps_it(self) -> None:
        _, _, loss, gradient = loss_of("bfloat16", 6, 5, label_smoothing=0.1)
        found = operators(self.fused(loss, gradient))
        self.assertIn("cast", found)
        self.assertIn("narrow_cross_entropy", found)


class Values:
    ctx: Context

    def test_close_to_float64(self) -> None:
        """Of rows of an odd number of classes, of one that fills vectors of 16 bytes, of one longer
        than what a block of a GPU holds, and of short rows. exp has a relative error of 2^-22 and,
        of arguments down to -12, 12 · 2^-23 by that of its argument; a sum by threads of up to 60
        terms each adds less than 2^-20. In all 2^-18 is allowed of the loss, whose terms are up to
        12, and of the gradient, which is rounded besides.
        """
        rng = np.random.default_rng(0)
        for dtype, classes in (
            ("bfloat16", 4101), ("float16", 4104), ("bfloat16", 59001), ("bfloat16", 37),
            ("float32", 4101),
        ):  # fmt: skip
            with self.subTest(dtype=dtype, classes=classes):
                x, labels, loss, gradient = loss_of(dtype, 7, classes)
                values = rounded(rng.normal(size=(7, classes)).astype(np.float32), as_dtype(dtype))
                at = rng.integers(0, classes, 7)
                executor = ad.Executor([loss, ad.cast_op(gradient, FLOAT32)], self.ctx)
                total, dx = executor.run({x: values, labels: at}, True)
                p = np.exp(values.astype(np.float64))
                p /= p.sum(axis=1, keepdims=True)
                wanted = -np.log(p[range(7), at]).mean()
                self.assertLessEqual(abs(total - wanted), 12 * 2.0**-18)
                p[range(7), at] -= 1
                least = 2.0**-25 if dtype == "float16" else 0  # half its smallest number
                unit = 1.01 * ROUNDING.get(as_dtype(dtype), 0) + 2.0**-18
                np.testing.assert_array_less(abs(dx - p / 7), abs(p / 7) * unit + least + 1e-30)

    def test_ignored_rows_and_weights(self) -> None:
        """The bounds of `test_close_to_float64`, with a factor a row that is exact but for one
        rounding to float32.
        """
        rng = np.random.default_rng(2)
        for dtype, classes in (("bfloat16", 4101), ("float16", 4104), ("bfloat16", 37)):
            with self.subTest(dtype=dtype, classes=classes):
                x, labels, loss, gradient = loss_of(dtype, 7, classes, ignore_index=5)
                values = rounded(rng.normal(size=(7, classes)).astype(np.float32), as_dtype(dtype))
                at = np.array([5, 0, classes - 1, 5, 7, 8, 9])
                executor = ad.Executor([loss, ad.cast_op(gradient, FLOAT32)], self.ctx)
                total, dx = executor.run({x: values, labels: at}, True)
                p = np.exp(values.astype(np.float64))
                p /= p.sum(axis=1, keepdims=True)
                taken = at != 5
                wanted = -np.log(p[range(7), at])[taken].mean()
                self.assertLessEqual(abs(total - wanted), 12 * 2.0**-18)
                p[range(7), at] -= 1
                p *= taken[:, None] / taken.sum()
                least = 2.0**-25 if dtype == "float16" else 0
                unit = 1.01 * ROUNDING[as_dtype(dtype)] + 2.0**-18
                np.testing.assert_array_less(abs(dx - p), abs(p) * unit + least + 1e-30)

    def test_a_label_out_of_range_is_refused(self) -> None:
        x, labels, loss, gradient = loss_of("bfloat16", 3, 4101)
        executor = ad.Executor([loss, gradient], self.ctx)
        feeds = {x: np.zeros((3, 4101), np.float32), labels: np.array([0, 4101, 1])}
        with self.assertRaisesRegex(Exception, "label 4101 at position 1 "):
            executor.run(feeds, True)

    @require_fusion("cross_entropy")
    def test_the_gradient_of_a_language_model_takes_the_logits_memory(self) -> None:
        tokens, targets = (ad.Variable(name, (2, 8), np.int64) for name in ("tokens", "targets"))
        model = nn.GPT(
            nn.GPTConfig(vocabulary=40, context=8, layers=1, heads=2, features=16), seed=0
        )
        loss = F.cross_entropy(model(tokens), targets)
        step = optim.AdamW(1e-3).minimize(loss, model.parameters())
        executor = ad.Executor([loss, step], self.ctx, precision="bf16")
        shapes = {tokens: (2, 8), targets: (2, 8)}
        (found,) = (s for s in executor.plan(shapes).steps if s.node.op.kernel == KERNEL)
        total, dx = found.outputs
        self.assertIs(dx.buffer, found.inputs[0].buffer)
        self.assertEqual((total.spec.dtype, str(dx.spec.dtype)), (FLOAT32, "bfloat16"))
        ids = np.arange(16).reshape(2, 8)
        losses = [float(executor.run({tokens: ids, targets: ids}, True)[0]) for _ in range(3)]
        self.assertLess(losses[2], losses[0])
        self.assertAlmostEqual(losses[0], math.log(40), delta=0.3)

    def test_in_place_gives_the_same_bits(self) -> None:
        """A row longer than what a block of a GPU holds, and one whose ends are shared."""
        rng = np.random.default_rng(1)
        for classes in (4099, 59001):
            x = variable("x", 3, classes)
            labels = variable("labels", 3, dtype=np.dtype(np.int64))
            logits = ad.cast_op(x * 2, as_dtype("bfloat16"))
            loss = F.cross_entropy(ad.cast_op(logits, FLOAT32), labels)
            (gradient,) = ad.gradients(loss, [logits])
            feeds = {x: rng.normal(size=(3, classes)).astype(np.float32),
                     labels: np.array([0, classes - 1, 17])}  # fmt: skip
            read_again = ad.sum_op(ad.cast_op(logits, FLOAT32))
            found = ad.Executor([loss, ad.cast_op(gradient, FLOAT32)], self.ctx).run(feeds, True)
            apart = ad.Executor([loss, ad.cast_op(gradient, FLOAT32), read_again], self.ctx)
            for one, other in zip(found, apart.run(feeds, True)):
                np.testing.assert_array_equal(one, other)


CpuValues, GpuValues = on_native_devices(Values)

if __name__ == "__main__":
    unittest.main()
