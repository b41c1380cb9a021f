"""Attention that is written by hand: where it is found, and that training is the same with it."""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.graph.node import Node
from support.devices import native_contexts
from support.fusion import fused, without
from support.graphs import operators, simplified, variable

LATER = np.triu(np.ones((5, 5), bool), 1)
BIAS = np.linspace(-1, 1, 25, dtype=np.float32).reshape(5, 5)
WINDOW = np.abs(np.subtract.outer(np.arange(5), np.arange(5))) < 3


def plain(q: Node, k: Node, v: Node) -> Any:
    return F.matmul(F.softmax(F.matmul(q, k, transpose_b=True) / 2.0, -1), v)


def causal(q: Node, k: Node, v: Node) -> Any:
    scores = F.matmul(q * 0.5, F.swapaxes(k, -1, -2))
    return F.softmax(F.where(LATER, -math.inf, scores), -1) @ v


def biased(q: Node, k: Node, v: Node) -> Any:
    scores = F.matmul(q, k, transpose_b=True) * 0.5 + BIAS
    return F.softmax(F.where(WINDOW, scores, -math.inf), axis=-1) @ v


def dropped(q: Node, k: Node, v: Node) -> Any:
    weights = F.softmax(F.matmul(q, k, transpose_b=True) * 0.5, -1)
    return F.dropout(weights, 0.4, generator=ad.Generator(3)) @ v


WRITTEN: tuple[Callable[..., Any], ...] = (plain, causal, biased, dropped)


class Pass(unittest.TestCase):
    """The rewrite of graphs, with no device."""

    def setUp(self) -> None:
        self.qkv = [variable(name, 2, 3, 5, 4) for name in "qkv"]

    def found(self, *fetches: Node) -> list[str]:
        return operators(fused(simplified(fetches), "attention"))

    def test_forward(self) -> None:
        for written in WRITTEN:
            with self.subTest(written.__name__):
                names = self.found(written(*self.qkv))
                self.assertIn("attention", names)
                self.assertNotIn("softmax", names)

    def test_with_gradients(self) -> None:
        for written in WRITTEN:
            y = written(*self.qkv)
            names = self.found(y, *ad.gradients(ad.sum_op(y * y), self.qkv))
            with self.subTest(written.__name__):
                self.assertEqual(names.count("attention"), 1)
                self.assertEqual(names.count("attention_gradient"), 1)
                self.assertFalse({"softmax", "batched_matmul", "sum"} & set(names), names)

    def test_one_head(self) -> None:
        q, k, v = (variable(name, 2, 5, 4) for name in "qkv")
        self.assertIn("attention", self.found(causal(q, k, v)))

    def test_what_is_something_else_stays(self) -> None:
        q, k, v = self.qkv
        scores = F.matmul(q, k, transpose_b=True)
        weights = F.softmax(scores, -1)
        blind = np.zeros((5, 5), bool)
        mask = ad.Variable("mask", (5, 5), np.float32)
        other = ad.Variable("k", (2, 1, 5, 4), np.float32)
        for fetches in (
            (weights @ v, weights),  # somebody wants the weights
            (weights @ v, scores),
            (F.softmax(scores, 2) @ v,),  # of the columns
            (F.softmax(F.where(blind, scores, -math.inf), -1) @ v,),  # NaN
            (F.softmax(scores + mask, -1) @ v,),  # which may hide all keys
            (F.softmax((scores + BIAS) * 0.5, -1) @ v,),
            (F.softmax(F.matmul(q, other, transpose_b=True), -1) @ v,),
            (F.matmul(weights, v, algo="naive"),),
        ):
            self.assertNotIn("attention", self.found(*fetches))


class Training(unittest.TestCase):
    def test_values_and_gradients(self) -> None:
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal((2, 3, 5, 4), np.float32) for _ in range(3)]
        for written in WRITTEN:
            for ctx in native_contexts():
                nodes = [ad.Variable(name, (2, 3, 5, 4), np.float32) for name in "qkv"]
                y = written(*nodes)
                fetches = [y, *ad.gradients(ad.sum_op(y * y), nodes)]
                feeds = dict(zip(nodes, arrays))
                executor = ad.Executor(fetches, ctx)
                got = executor.run(feeds, True)
                names = str(executor.plan({x: x.shape for x in nodes}))
                with without("attention"):
                    wanted = ad.Executor(fetches, ctx).run(feeds, True)
                with self.subTest(written.__name__, ctx=ctx):
                    self.assertIn("attention_gradient", names)
                    for one, other in zip(got, wanted, strict=True):
                        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


if __name__ == "__main__":
    unittest.main()
