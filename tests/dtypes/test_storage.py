"""Floats stored in 16 bits stay so in memory: kernels read and write them as they are, and no cast
stands between operators that have such kernels.
"""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.dtypes import FLOAT16, ROUNDING, bfloat16, rounded
from dlsys.errors import ShapeError
from dlsys.graph.node import Node
from dlsys.runtime.device import Context
from support.devices import on_native_devices
from support.graphs import evaluate, variable

NARROW = (bfloat16, FLOAT16)


class Storage:
    """Operators over floats of 16 bits on the device `ctx`."""

    ctx: Context

    def run_narrow(self, fetches: Sequence[Node], feeds: dict, *names: str) -> list[np.ndarray]:
        """The fetches, computed by steps of these names, whose arrays take two bytes an element."""
        plan = self.plan_of(fetches, feeds)
        self.assertEqual(sorted(step.node.op.name for step in plan.steps), sorted(names))
        for step in plan.steps:
            for value in step.outputs:
                self.assertEqual(value.buffer.nbytes, 2 * value.spec.size, step.node)
        return evaluate(fetches, feeds, self.ctx)

    def plan_of(self, fetches: Sequence[Node], feeds: dict) -> Any:
        """What runs on the device."""
        return ad.Executor(fetches, self.ctx).plan({x: x.spec.shape for x in feeds})

    def numbers(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        rng = np.random.default_rng(3)
        return rounded(rng.standard_normal(shape).astype(np.float32), dtype)

    def test_sums_that_give_float32(self) -> None:
        """They are rounded to float32 alone, on the way to which they add in it or wider."""
        for dtype in NARROW:
            values = self.numbers((6, 300, 5), dtype)
            x = variable("x", *values.shape, dtype=dtype)
            for axis in (None, 0, 1, (0, 2)):
                total, mean = (op(x, axis=axis, dtype="float32") for op in (ad.sum_op, ad.mean_op))
                (gradient,) = ad.gradients(ad.sum_op(total), [x])
                self.assertIs(gradient.dtype, x.dtype)
                plan = self.plan_of([total, mean], {x: values})
                self.assertEqual([step.node.op.name for step in plan.steps], ["sum", "mean"])
                exact = values.astype(np.float64)
                found = evaluate([total, mean, gradient], {x: values}, self.ctx)
                bound = 2.0**-22 * np.abs(exact).sum(axis)
                self.assertTrue((abs(found[0] - exact.sum(axis)) <= bound).all(), axis)
                np.testing.assert_allclose(found[1], exact.mean(axis), rtol=1e-4, atol=1e-6)
                np.testing.assert_array_equal(found[2], np.ones(values.shape))
        with self.assertRaisesRegex(ShapeError, "dtype is float64, expected bfloat16, or float32"):
            ad.sum_op(variable("x", 3, dtype="bfloat16"), dtype="float64")

    def test_copies_of_many_parameters_are_one_step(self) -> None:
        for dtype in NARROW:
            sizes = (1, 0, 7, 70_001, *range(2, 40))
            values = [self.numbers((size,), np.float32) for size in sizes]
            parameters = [ad.Parameter(value, "p") for value in values]
            copies = [ad.cast_op(p, dtype) for p in parameters]
            together = ad.concat(copies)
            plan = self.plan_of([together], {})
            self.assertEqual(plan.steps[0].node.op.name, "casts")
            self.assertNotIn("cast", [step.node.op.name for step in plan.steps])
            (found,) = evaluate([together], {}, self.ctx)
            np.testing.assert_array_equal(found, rounded(np.concatenate(values), dtype))

    def test_an_embedding_and_its_gradient(self) -> None:
        shape = (4, 50, 24)
        for dtype in NARROW:
            table = ad.Parameter(self.numbers((11, 24), dtype), "table", dtype)
            k, dy = variable("k", *shape[:2], dtype=np.int64), variable("dy", *shape, dtype=dtype)
            y = ad.embedding_op(table, k)
            (gradient,) = ad.gradients(y * dy, [table])
            rows, given = (
                np.random.default_rng(0).integers(0, 10, (4, 50)),
                self.numbers(shape, dtype),
            )
            with self.subTest(dtype=str(dtype)):
                found = self.run_narrow(
                    [y, gradient], {k: rows, dy: given}, "gather", "scatter_add"
                )
                wanted = np.zeros((11, 24))
                np.add.at(wanted, rows, given)
                np.testing.assert_array_equal(found[0], table.asnumpy()[rows])
                np.testing.assert_allclose(found[1], rounded(wanted, dtype), 2 * ROUNDING[dtype])

    def test_one_hot_rows(self) -> None:
        k = variable("k", 300, dtype=np.int32)
        feeds = {k: np.random.default_rng(0).integers(0, 7, 300).astype(np.int32)}
        for dtype in NARROW:
            (rows,) = self.run_narrow([ad.one_hot_op(k, 7, dtype)], feeds, "one_hot")
            np.testing.assert_array_equal(rows, np.eye(7)[feeds[k]])

    def test_gradients_of_paddings(self) -> None:
        for dtype in NARROW:
            for mode in ("edge", "reflect"):
                x, dy = variable("x", 5, 700, dtype=dtype), variable("dy", 5, 706, dtype=dtype)
                y = ad.pad_op(x, ((0, 0), (2, 4)), mode)
                (gradient,) = ad.gradients(y * dy, [x])
                given = self.numbers((5, 706), dtype)
                feeds = {x: self.numbers((5, 700), dtype), dy: given}
                (dx,) = self.run_narrow([gradient], feeds, f"pad_{mode}_gradient")
                wanted = np.zeros((5, 700))
                source = np.pad(np.arange(700), (2, 4), mode)
                np.add.at(wanted.T, source, given.T)
                np.testing.assert_allclose(dx, wanted, 2 * ROUNDING[dtype], 1e-6)

    def test_resizings_and_their_gradients(self) -> None:
        shape, larger = (2, 3, 7, 9), (2, 3, 14, 5)
        for dtype in NARROW:
            for mode in ("nearest", "bilinear"):
                x, dy = variable("x", *shape, dtype=dtype), variable("dy", *larger, dtype=dtype)
                y = ad.resize(x, size=larger[2:], mode=mode)
                (dx,) = ad.gradients(y * dy, [x])
                feeds = {x: self.numbers(shape, dtype), dy: self.numbers(larger, dtype)}
                names = f"resize_{mode}", f"resize_{mode}_gradient"
                found = self.run_narrow([y, dx], feeds, *names)
                wide = {v: variable(v.name, *v.spec.shape) for v in (x, dy)}
                y = ad.resize(wide[x], size=larger[2:], mode=mode)
                fetches = [y, *ad.gradients(y * wide[dy], [wide[x]])]
                fed = {wide[v]: feeds[v].astype(np.float32) for v in feeds}
                for value, exact in zip(found, evaluate(fetches, fed, self.ctx), strict=True):
                    np.testing.assert_array_equal(value, rounded(exact, dtype))

    def test_dropout_and_its_gradient(self) -> None:
        for dtype in NARROW:
            x, dy = variable("x", 33, 65, dtype=dtype), variable("dy", 33, 65, dtype=dtype)
            y = ad.dropout(x, 0.25)
            (gradient,) = ad.gradients(y * dy, [x])
            feeds = {v: self.numbers((33, 65), dtype) for v in (x, dy)}
            names = [step.node.op.name for step in self.plan_of([y, gradient], feeds).steps]
            self.assertNotIn("cast", names)
            found = evaluate([y, gradient], feeds, self.ctx)
            kept = found[0] != 0
            for value, given in zip(found, feeds.values(), strict=True):
                wanted = kept * (given.astype(np.float32) / np.float32(0.75))
                np.testing.assert_allclose(value.astype(np.float32), wanted, ROUNDING[dtype])
            self.assertLess(abs(kept.mean() - 0.75), 0.05)


CpuStorage, GpuStorage = on_native_devices(Storage)

if __name__ == "__main__":
    unittest.main()
