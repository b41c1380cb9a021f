"""Scattered sums added to an array, one kernel on a GPU."""

from __future__ import annotations

import itertools
import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.dtypes import FLOAT16, as_dtype, bfloat16, rounded
from dlsys.errors import OutOfRangeError
from dlsys.ops.elementwise import cast_op
from dlsys.ops.indexing import scatter_op
from dlsys.runtime.device import gpu
from support.devices import require
from support.fusion import fused
from support.graphs import operators, simplified, variable

SEED = 5


class Graphs(unittest.TestCase):
    def setUp(self) -> None:
        self.updates, self.x = variable("u", 6, 3), variable("x", 5, 3)
        self.ids = ad.Variable("ids", (6,), "int64")
        self.sums = scatter_op(self.updates, self.ids, 5)

    def names(self, *fetches: ad.Node) -> list[str]:
        return operators(fused(simplified(list(fetches)), "scattered"))

    def test_either_order(self) -> None:
        for total in (self.x + self.sums, self.sums + self.x):
            self.assertEqual(self.names(total), ["scatter_add_to"])

    def test_a_cast_is_part_of_it(self) -> None:
        narrow = ad.Variable("n", (5, 3), bfloat16)
        total = cast_op(narrow, np.float32) + self.sums
        self.assertEqual(self.names(total), ["scatter_add_to"])
        self.assertEqual(self.names(cast_op(total, bfloat16)), ["scatter_add_to"])
        self.assertNotIn("scatter_add_to", self.names(cast_op(total, FLOAT16)))

    def test_what_stays(self) -> None:
        self.assertNotIn("scatter_add_to", self.names(self.x + self.sums, self.sums))
        self.assertNotIn("scatter_add_to", self.names(self.sums + self.sums))
        self.assertNotIn("scatter_add_to", self.names(variable("r", 3) + self.sums))
        self.assertNotIn("scatter_add_to", self.names(cast_op(self.x + self.sums, bfloat16)))


@require(gpu(0))
class OnGpu(unittest.TestCase):
    def test_tied_embedding(self) -> None:
        """The gradient of a table that is looked up and multiplied, with a frequent token."""
        rng = np.random.default_rng(SEED)
        for width in (33, 68):
            tokens = rng.integers(0, 300, 400)
            tokens[rng.uniform(size=tokens.size) < 0.4] = 7
            values = rng.standard_normal((300, width)).astype(np.float32)
            table, ids = variable("table", 300, width), ad.Variable("ids", (400,), "int64")
            y = F.linear(F.embedding(ids, table), table)
            weights = variable("weights", 400, 300)
            (gradient,) = ad.gradients(ad.sum_op(y * weights), [table])
            feeds = {table: values, ids: tokens}
            feeds[weights] = rng.standard_normal((400, 300)).astype(np.float32)
            executor = ad.Executor([gradient], gpu(0))
            first, second = (
                executor.run(feeds, convert_to_numpy_ret_vals=True)[0] for _ in range(2)
            )
            wide = {node: np.float64(value) for node, value in feeds.items()}
            expected = wide[weights].T @ wide[table][tokens]
            np.add.at(expected, tokens, wide[weights] @ wide[table])
            self.assertEqual(first.tobytes(), second.tobytes())
            np.testing.assert_allclose(first, expected, atol=2e-3, rtol=1e-4)

    def test_narrow_array(self) -> None:
        rng = np.random.default_rng(SEED)
        for dtype in (bfloat16, FLOAT16):
            u, ids = variable("u", 90, 68), ad.Variable("ids", (90,), "int64")
            x = ad.Variable("x", (4, 68), dtype)
            total = cast_op(x, np.float32) + scatter_op(u, ids, 4)
            given = {
                u: rng.standard_normal((90, 68)).astype(np.float32),
                ids: np.repeat(np.arange(3), [5, 70, 15]),
                x: rounded(rng.standard_normal((4, 68)).astype(np.float32), dtype),
            }
            executor = ad.Executor([total], gpu(0))
            (found,) = executor.run(given, convert_to_numpy_ret_vals=True)
            self.assertTrue(executor._backend.target.has("scatter_add_to", as_dtype(dtype)))
            expected = given[x].astype(np.float64)
            np.add.at(expected, given[ids], given[u])
            np.testing.assert_allclose(found, expected, atol=1e-4)

    def test_narrow_total(self) -> None:
        """In the memory of the array, whose rows without updates stay as they are, and apart from
        it where somebody else reads this; rows of whole quads and others, few updates and many.
        """
        rng = np.random.default_rng(SEED)
        for dtype, width, apart in itertools.product((bfloat16, FLOAT16), (68, 33), (False, True)):
            with self.subTest(dtype, width=width, apart=apart):
                u, ids = variable("u", 90, width), ad.Variable("ids", (90,), "int64")
                a, b = variable("a", 4, 1), variable("b", 1, width)
                x = cast_op(a @ b, dtype)
                total = cast_op(cast_op(x, np.float32) + scatter_op(u, ids, 4), dtype)
                executor = ad.Executor([total, *[x] * apart], gpu(0))
                given = {
                    u: rng.standard_normal((90, width)).astype(np.float32),
                    ids: np.repeat([0, 1, 3], [5, 70, 15]),
                    a: rng.standard_normal((4, 1)).astype(np.float32),
                    b: rng.standard_normal((1, width)).astype(np.float32),
                }
                found, *others = executor.run(given, convert_to_numpy_ret_vals=True)
                (step,) = (
                    step for step in executor.plan({n: v.shape for n, v in given.items()}).steps
                    if step.node.op.name == "scatter_add_to"
                )  # fmt: skip
                self.assertEqual(step.inputs[2].buffer is step.outputs[0].buffer, not apart)
                before = rounded(given[a] * given[b], dtype)
                for other in others:
                    np.testing.assert_array_equal(other, before)
                exact = before.astype(np.float64)
                np.add.at(exact, given[ids], given[u])
                np.testing.assert_array_equal(found[2], before[2])
                rtol = 2.0 ** (-8 if dtype is bfloat16 else -11)  # half a unit in the last place
                np.testing.assert_allclose(found, exact, rtol=rtol, atol=1e-4)

    def test_index_out_of_range(self) -> None:
        u, ids, x = variable("u", 2, 3), ad.Variable("ids", (2,), "int64"), variable("x", 4, 3)
        executor = ad.Executor([x + scatter_op(u, ids, 4)], gpu(0))
        given = {u: np.ones((2, 3), "f4"), ids: np.array([1, 4]), x: np.ones((4, 3), "f4")}
        with self.assertRaises(OutOfRangeError):
            executor.run(given, convert_to_numpy_ret_vals=True)


if __name__ == "__main__":
    unittest.main()
