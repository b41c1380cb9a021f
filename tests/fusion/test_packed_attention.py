"""Attention of parts of one array: where it is found, and that it computes the same."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.graph.node import Node
from dlsys.runtime.device import Context
from support.devices import each_context
from support.fusion import fused, without
from support.graphs import operators, simplified, variable

N, LENGTH, HEADS, SIZE = 2, 5, 4, 3
WIDTH = HEADS * SIZE
PERMUTED = (0, 2, 1, 3)


def by_part(qkv: Node) -> Any:
    """As nanoGPT's successors write it."""
    x = F.transpose(F.reshape(qkv, (N, LENGTH, 3, HEADS, SIZE)), (2, 0, 3, 1, 4))
    return x[0], x[1], x[2]


def by_split(qkv: Node) -> Any:
    """As GPT-2's first code has it."""
    parts = F.split(qkv, 3, axis=2)
    return [F.transpose(F.reshape(x, (N, LENGTH, HEADS, SIZE)), PERMUTED) for x in parts]


def by_slices_between(qkv: Node) -> Any:
    x = F.transpose(F.reshape(qkv, (N, LENGTH, 3, HEADS, SIZE)), (0, 3, 2, 1, 4))
    return [x[:, :, k] for k in range(3)]


def of_groups(qkv: Node) -> Any:
    """Six heads of queries for three of keys: grouped queries."""
    x = F.reshape(qkv, (N, LENGTH, 3 * HEADS, SIZE))
    ends = ((0, 6), (6, 9), (9, 12))
    return [F.transpose(x[:, :, a:b], PERMUTED) for a, b in ends]


def in_another_order(qkv: Node) -> Any:
    k, q, v = by_part(qkv)
    return q, k, v


def by_interleaved_heads(qkv: Node) -> Any:
    """Each head's q, k and v beside each other, as in GPT-NeoX."""
    x = F.transpose(F.reshape(qkv, (N, LENGTH, HEADS, 3, SIZE)), (3, 0, 2, 1, 4))
    return x[0], x[1], x[2]


FOUND: tuple[Callable[[Node], Any], ...] = (by_part, by_split, by_slices_between, of_groups)
OTHERS = (in_another_order, by_interleaved_heads)


def attended(qkv: Node, cut: Callable[[Node], Any], **options: Any) -> Node:
    y = F.scaled_dot_product_attention(*cut(qkv), causal=True, **options)
    return F.flatten(F.transpose(y, PERMUTED), 2)


class Pass(unittest.TestCase):
    """The rewrite of graphs, with no device."""

    def setUp(self) -> None:
        self.qkv = variable("qkv", N, LENGTH, 3 * WIDTH)

    def found(self, *fetches: Node) -> list[str]:
        return operators(fused(simplified(fetches), "packed_attention"))

    def test_nothing_is_moved(self) -> None:
        for cut in FOUND:
            y = attended(self.qkv * 2.0, cut)
            (gradient,) = ad.gradients(ad.sum_op(y * y), [self.qkv])
            names = self.found(y, gradient)
            with self.subTest(cut.__name__):
                self.assertEqual(names.count("packed_attention"), 1)
                self.assertEqual(names.count("packed_attention_gradient"), 1)
                self.assertFalse({"transpose", "place", "slice", "window"} & set(names), names)

    def test_forward_alone(self) -> None:
        names = self.found(attended(self.qkv, by_part))
        self.assertIn("packed_attention", names)
        self.assertNotIn("transpose", names)

    def test_parts_that_lie_otherwise(self) -> None:
        for cut in OTHERS:
            with self.subTest(cut.__name__):
                self.assertNotIn("packed_attention", self.found(attended(self.qkv, cut)))

    def test_gradients_that_are_read_elsewhere(self) -> None:
        q, k, v = by_part(self.qkv)
        y = F.scaled_dot_product_attention(q, k, v)
        names = self.found(y, *ad.gradients(ad.sum_op(y * y), [self.qkv, q]))
        self.assertNotIn("packed_attention", names)


class Values(unittest.TestCase):
    def test_are_those_without_it(self) -> None:
        rng = np.random.default_rng(3)
        x = rng.standard_normal((N, LENGTH, 3 * WIDTH), np.float32)
        for ctx in each_context():
            for cut in (*FOUND, *OTHERS):
                for dropout in (0.0, 0.4):
                    with self.subTest(ctx=ctx, cut=cut.__name__, dropout=dropout):
                        self.check(ctx, cut, dropout, x)

    def check(
        self, ctx: Context | None, cut: Callable[[Node], Any], dropout: float, x: np.ndarray
    ) -> None:
        results = []
        for names in ((), ("packed_attention",)):
            qkv = variable("qkv", *x.shape)
            y = attended(qkv * 1.5, cut, dropout=dropout, generator=ad.Generator(7))
            with without(*names):
                executor = ad.Executor([y, *ad.gradients(ad.sum_op(y * y), [qkv])], ctx)
                results.append(executor.run({qkv: x}, convert_to_numpy_ret_vals=True))
        for one, other in zip(*results):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
