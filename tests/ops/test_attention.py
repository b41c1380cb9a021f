"""Attention: every rung of every device against float64, and what no row of the table says: what is
not read, what cannot leak, and that no matrix of weights is held.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import optim
from dlsys.dtypes import bfloat16, rounded
from dlsys.errors import GraphError, NotApplicableError, SignatureError
from dlsys.ops.attention.heads import heads_of
from dlsys.runtime.device import Context, gpu
from dlsys.settings import settings
from support.devices import fewer, native_contexts, require
from support.seeds import SEED
from support.table.families.attention import attended, differentiated

RUNGS = ("naive", "tiled")
CONTEXTS: list[Context | None] = [None, *native_contexts()]


class Problem(NamedTuple):
    """Arrays by name, and the attributes."""

    arrays: dict[str, np.ndarray]
    causal: bool = False

    def result(self, ctx: Context | None, **options: Any) -> np.ndarray:
        return computed(self, ctx, gradients=False, **options)[0]

    @property
    def reference(self) -> np.ndarray:
        q, k, v, *rest = (
            x.astype(np.float64) if x.dtype.kind == "f" else x for x in self.arrays.values()
        )
        names = tuple(self.arrays)[3:]
        return attended(q, k, v, *rest, given=names, causal=self.causal)


def computed(
    problem: Problem, ctx: Context | None, *, dy: np.ndarray | None = None, gradients: bool = True,
    precision: str = "fp32", dtype: Any = None, algo: str | None = None, **options: Any,
) -> list[np.ndarray]:  # fmt: skip
    """The output and the gradients of q, k and v, for dy or ones."""
    nodes = {
        name: ad.Variable(name, x.shape, dtype if dtype and x.dtype.kind == "f" else x.dtype)
        for name, x in problem.arrays.items()
    }
    y = F.scaled_dot_product_attention(**nodes, causal=problem.causal, algo=algo, **options)
    feeds = {nodes[name]: x for name, x in problem.arrays.items()}
    fetches = [y]
    if gradients:
        seed = ad.oneslike_op(y) if dy is None else ad.Variable("dy", dy.shape, dtype or dy.dtype)
        fetches += ad.gradients(y, [nodes[name] for name in "qkv"], seed)
        feeds |= {} if dy is None else {seed: dy}
    executor = ad.Executor(fetches, ctx, precision=precision)
    return list(executor.run(feeds, convert_to_numpy_ret_vals=True))


def drawn(rng: np.random.Generator) -> Problem:
    """Random extents, heads and ways to hide keys."""
    n, kv, group, rows, columns = (int(rng.integers(1, high)) for high in (4, 3, 4, 150, 150))
    size, value_size = (int(x) for x in rng.choice((3, 16, 32, 40, 64, 100), 2))
    make = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    arrays = dict(
        q=make(n, kv * group, rows, size), k=make(n, kv, columns, size),
        v=make(n, kv, columns, value_size),
    )  # fmt: skip
    if rng.random() < 0.5:
        mask = rng.random((n, 1, rows, columns)) < 0.7
        arrays["mask"] = mask if rng.random() < 0.5 else make(kv * group, rows, columns)
    if rng.random() < 0.5:
        arrays["lengths"] = rng.integers(0, columns + 1, n)
    if rng.random() < 0.5:
        arrays["query_lengths"] = rng.integers(0, rows + 1, n).astype(np.int32)
    return Problem(arrays, bool(rng.random() < 0.5))


def ways() -> Iterator[tuple[Context | None, str]]:
    for ctx in CONTEXTS:
        for algo in RUNGS:
            yield ctx, algo


class AgainstFloat64(unittest.TestCase):
    def test_random_problems(self) -> None:
        """Worst of the largest value: 2.7e-7, and 3.9e-4 in tf32, whose operands have 11 bits."""
        rng = np.random.default_rng([SEED, 19])
        for _ in range(fewer(12)):
            problem = drawn(rng)
            wanted, largest = problem.reference, np.abs(problem.arrays["v"]).max()
            for ctx, algo in ways():
                for precision, bound in (("fp32", 1e-6), ("tf32", 1.5e-3)):
                    got = problem.result(ctx, algo=algo, precision=precision)
                    with self.subTest(ctx=ctx, algo=algo, precision=precision, seed=SEED):
                        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound * largest)

    def test_gradients_at_every_precision(self) -> None:
        """Worst of the largest gradient: 7.2e-7, and 8.9e-4 in tf32."""
        rng = np.random.default_rng([SEED, 20])
        shapes = dict(q=(2, 4, 70, 24), k=(2, 2, 90, 24), v=(2, 2, 90, 24))
        arrays = {name: rng.standard_normal(s, np.float32) for name, s in shapes.items()}
        dy = rng.standard_normal((2, 4, 70, 24), np.float32)
        for causal in (False, True):
            wanted = differentiated(*(x.astype(float) for x in (*arrays.values(), dy)), causal)
            for ctx, algo in ways():
                for precision, bound in (("fp32", 2e-6), ("tf32", 4e-3)):
                    got = computed(
                        Problem(arrays, causal), ctx, dy=dy, algo=algo, precision=precision
                    )  # fmt: skip
                    flat = np.concatenate([x.ravel() for x in got[1:]])
                    with self.subTest(ctx=ctx, algo=algo, precision=precision, causal=causal):
                        error = np.abs(flat - wanted).max() / np.abs(wanted).max()
                        self.assertLess(error, bound)

    def test_packed_heads(self) -> None:
        """Random problems as one array. Worst of the largest result: 9.5e-7, and of the largest
        gradient 1.5e-6.
        """
        rng = np.random.default_rng([SEED, 22])
        for size in (32, 80, 128, int(rng.integers(1, 70))):
            n, kv, group, length = (int(rng.integers(1, high)) for high in (3, 3, 4, 140))
            counts, causal = (kv * group, kv, kv), bool(rng.random() < 0.5)
            qkv = rng.standard_normal((n, length, sum(counts) * size), np.float32)
            dy = rng.standard_normal((n, length, counts[0] * size), np.float32)
            parts = [x.astype(float) for x in (*heads_of(qkv, counts), *heads_of(dy, counts[:1]))]
            wanted = attended(*parts[:3], causal=causal), differentiated(*parts, causal)
            x, d = ad.Variable("x", qkv.shape, qkv.dtype), ad.Variable("d", dy.shape, dy.dtype)
            for ctx, algo in ways():
                y = F.packed_attention(x, counts[0], kv, causal=causal, algo=algo)
                executor = ad.Executor([y, *ad.gradients(y, [x], d)], ctx)
                got = executor.run({x: qkv, d: dy}, convert_to_numpy_ret_vals=True)
                found = heads_of(got[0], counts[:1]), heads_of(got[1], counts)
                for values, right, bound in zip(found, wanted, (3e-6, 4e-6)):
                    flat = np.concatenate([one.ravel() for one in values])
                    error = np.abs(flat - right.ravel()).max() / np.abs(right).max()
                    with self.subTest(ctx=ctx, algo=algo, size=size, causal=causal, seed=SEED):
                        self.assertLess(error, bound)

    def test_heads_of_every_size_in_bfloat16(self) -> None:
        """The tiles of 32, 64, 128 and 256, full and not. Worst: 8.9e-3 of values up to 4, which
        are rounded to 8 bits, and 4.7e-3 of the largest gradient.
        """
        rng = np.random.default_rng([SEED, 21])
        for size in (32, 48, 64, 96, 128, 192, 256):
            arrays = {
                name: rounded(rng.standard_normal((1, 1, 40, size), np.float32), bfloat16)
                for name in "qkv"
            }
            problem = Problem(arrays, causal=True)
            dy = rounded(rng.standard_normal((1, 1, 40, size), np.float32), bfloat16)
            wanted = differentiated(*(x.astype(float) for x in (*arrays.values(), dy)), True)
            for ctx in native_contexts():
                got = computed(problem, ctx, dy=dy, algo="tiled", dtype=bfloat16)
                with self.subTest(ctx=ctx, size=size):
                    np.testing.assert_allclose(got[0], problem.reference, rtol=0, atol=0.03)
                    flat = np.concatenate([x.ravel() for x in got[1:]])
                    self.assertLess(np.abs(flat - wanted).max() / np.abs(wanted).max(), 0.02)


class WhatIsRead(unittest.TestCase):
    def padded(self, filled: float) -> tuple[Problem, np.ndarray]:
        rng = np.random.default_rng([SEED, 22])
        q, k, v, dy = (rng.standard_normal((3, 2, 140, 16), np.float32) for _ in range(4))
        lengths = np.array([140, 0, 37])
        for n, length in enumerate(lengths):
            for x in (q, k, v, dy):
                x[n, :, length:] = filled
        arrays = dict(q=q, k=k, v=v, lengths=lengths, query_lengths=lengths)
        return Problem(arrays, causal=True), dy

    def test_what_stands_behind_lengths_is_not(self) -> None:
        """NaN there changes no bit of the results or the gradients, which are 0 there."""
        for ctx, algo in ways():
            (clean, dy), (dirty, dirty_dy) = self.padded(0.0), self.padded(np.nan)
            wanted = computed(clean, ctx, dy=dy, algo=algo)
            got = computed(dirty, ctx, dy=dirty_dy, algo=algo)
            with self.subTest(ctx=ctx, algo=algo):
                for one, other in zip(got, wanted, strict=True):
                    np.testing.assert_array_equal(one, other)
                    self.assertFalse(one[1].any() or one[2, :, 37:].any())

    def test_later_tokens_are_not(self) -> None:
        """Under `causal` earlier outputs are the same bits whatever comes later."""
        rng = np.random.default_rng([SEED, 23])
        q, k, v = (rng.standard_normal((1, 2, 150, 16), np.float32) for _ in range(3))
        changed = [x.copy() for x in (q, k, v)]
        for ctx, algo in ways():
            before = Problem(dict(q=q, k=k, v=v), True).result(ctx, algo=algo)
            for at in (1, 70, 149):
                for x, own in zip(changed, (q, k, v)):
                    x[:], x[:, :, at:] = own, 5 * rng.standard_normal(own[:, :, at:].shape)
                after = Problem(dict(zip("qkv", changed)), True).result(ctx, algo=algo)
                with self.subTest(ctx=ctx, algo=algo, at=at):
                    self.assertEqual(before[:, :, :at].tobytes(), after[:, :, :at].tobytes())
                    self.assertFalse(np.array_equal(before[:, :, at:], after[:, :, at:]))

    def test_a_row_that_sees_no_key_is_0(self) -> None:
        q = np.ones((1, 1, 2, 4), np.float32)
        hidden = np.array([[False] * 2, [True, False]])
        masks = (hidden, np.where(hidden, 0, -np.inf).astype(np.float32))
        for ctx, algo in ways():
            for mask in masks:
                y, *gradients = computed(Problem(dict(q=q, k=q, v=q, mask=mask)), ctx, algo=algo)
                with self.subTest(ctx=ctx, algo=algo, dtype=mask.dtype):
                    np.testing.assert_array_equal(y[0, 0], [[0] * 4, [1] * 4])
                    self.assertTrue(all(np.isfinite(x).all() for x in gradients))

    def test_nan_stays_in_its_row(self) -> None:
        q, k = np.ones((1, 1, 3, 4), np.float32), np.ones((1, 1, 5, 4), np.float32)
        q[0, 0, 1, 2] = np.nan
        for ctx, algo in ways():
            y = Problem(dict(q=q, k=k, v=k)).result(ctx, algo=algo)
            with self.subTest(ctx=ctx, algo=algo):
                self.assertEqual(np.isnan(y).any(axis=-1)[0, 0].tolist(), [False, True, False])


class Memory(unittest.TestCase):
    def test_no_matrix_of_weights_is_held(self) -> None:
        """Forward and backward of 2048 tokens take less than a tenth of one such matrix."""
        q = ad.Variable("q", (1, 1, 2048, 16), np.float32)
        for ctx in native_contexts():
            y = F.scaled_dot_product_attention(q, q, q, causal=True, algo="tiled")
            executor = ad.Executor([y, *ad.gradients(y, [q])], ctx)
            plan = executor.plan({q: q.shape})
            with self.subTest(ctx=ctx):
                self.assertLess(plan.arena_nbytes, 2048 * 2048 * 4 / 2)


class Dropout(unittest.TestCase):
    def setUp(self) -> None:
        rng = np.random.default_rng([SEED, 24])
        self.problem = Problem(
            {name: rng.standard_normal((1, 2, 40, 8), np.float32) for name in "qkv"}, causal=True
        )

    def test_every_rung_of_every_device_drops_the_same_weights(self) -> None:
        wanted = None
        for ctx, algo in ways():
            options = dict(dropout=0.4, generator=ad.Generator(7))
            got = computed(self.problem, ctx, algo=algo, **options)
            wanted = got if wanted is None else wanted
            with self.subTest(ctx=ctx, algo=algo):
                for one, other in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)

    def test_it_draws_anew_and_only_in_training(self) -> None:
        q, k, v = (ad.constant(x) for x in self.problem.arrays.values())
        y = F.scaled_dot_product_attention(q, k, v, dropout=0.4)
        executor = ad.Executor([y])
        first, second = (executor.run({}, True)[0] for _ in range(2))
        self.assertFalse(np.array_equal(first, second))
        executor.draws = 0
        np.testing.assert_array_equal(executor.run({}, True)[0], first)
        plain = F.scaled_dot_product_attention(q, k, v, dropout=0.4, training=False)
        self.assertEqual(plain.inputs[0].op.name, "attention")
        self.assertFalse(plain.inputs[0].op.random)

    def test_a_training_step_advances_the_draw(self) -> None:
        q = ad.Parameter(self.problem.arrays["q"], "q")
        loss = ad.mean_op(F.scaled_dot_product_attention(q, q, q, dropout=0.5))
        train = optim.SGD(0.0).minimize(loss, [q])
        executor = ad.Executor([loss, train])
        self.assertNotEqual(executor.run({}, True)[0], executor.run({}, True)[0])


class Rungs(unittest.TestCase):
    def operators(self, ctx: Context | None, **options: Any) -> set[str]:
        q = ad.Variable("q", (1, 1, 40, 8), np.float32)
        y = F.scaled_dot_product_attention(q, q, q, **options)
        plan = ad.Executor([y, *ad.gradients(y, [q])], ctx).plan({q: q.shape})
        return {step.node.op.name for step in plan.steps}

    def test_a_node_or_the_setting_names_the_rung(self) -> None:
        for ctx in CONTEXTS:
            for setting, algo, wanted in (
                ("auto", "naive", "softmax"),
                ("auto", "tiled", "attention"),
                ("naive", None, "softmax"),
                ("tiled", None, "attention"),
                ("naive", "tiled", "attention"),
                ("tiled", "naive", "softmax"),
            ):
                with mock.patch.object(settings, "attention", setting):
                    found = self.operators(ctx, algo=algo)
                with self.subTest(ctx=ctx, setting=setting, algo=algo):
                    self.assertIn(wanted, found)
                    self.assertEqual("attention_gradient" in found, wanted == "attention")


class Refusals(unittest.TestCase):
    def test_rungs(self) -> None:
        q = ad.Variable("q", (1, 1, 2, 300), np.float32)
        with self.assertRaisesRegex(SignatureError, "auto, naive, tiled or flash, got 'quick'"):
            F.scaled_dot_product_attention(q, q, q, algo="quick")

    def test_third_gradients(self) -> None:
        q = ad.Variable("q", (1, 1, 2, 3), np.float32)
        x = F.scaled_dot_product_attention(q, q, q)
        for _ in range(2):
            x = ad.gradients(x * x, [q])[0]
        with self.assertRaisesRegex(GraphError, "second gradients cannot be differentiated again"):
            ad.gradients(x, [q])


@require(gpu(0))
class OnTheGpu(unittest.TestCase):
    def test_heads_beyond_256_take_the_composition(self) -> None:
        q = ad.Variable("q", (1, 1, 2, 300), np.float32)
        feeds = {q: np.ones((1, 1, 2, 300), np.float32)}
        for algo, refused in (("auto", False), ("naive", False), ("tiled", True)):
            executor = ad.Executor([F.scaled_dot_product_attention(q, q, q, algo=algo)], gpu(0))
            if refused:
                with self.assertRaisesRegex(NotApplicableError, "a head is larger than 256; use"):
                    executor.run(feeds)
            else:
                np.testing.assert_allclose(executor.run(feeds, True)[0], 1, rtol=1e-6)


if __name__ == "__main__":
    unittest.main()
