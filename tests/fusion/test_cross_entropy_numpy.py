"""Softmax cross-entropy and its gradient as one operator of numpy: as a float64 formula has them,
and where they are fused.
"""

from __future__ import annotations

import unittest
from collections.abc import Sequence

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import OutOfRangeError
from dlsys.fusion.cross_entropy import SHORT_ROW
from dlsys.graph.node import Node
from support.fusion import require_fusion, without

FUSED = "fused_sparse_cross_entropy"
SHAPES = (1, 10), (1000, 10), (3, 4, 7), (5, 1), (257, 2), (64, SHORT_ROW)


class Problem:
    """Logits and class indices, the loss and its gradient."""

    def __init__(self, shape: tuple[int, ...], reduction: str = "mean") -> None:
        rng = np.random.default_rng(len(shape) + shape[0])
        self.x, self.labels = ad.Variable("x"), ad.Variable("labels", dtype=np.int64)
        self.loss = ad.softmax_cross_entropy(self.x, self.labels, reduction)
        self.fetches = [self.loss, *ad.gradients(self.loss, [self.x])]
        self.feeds = {
            self.x: 3 * rng.standard_normal(shape).astype(np.float32),
            self.labels: rng.integers(0, shape[-1], shape[:-1]),
        }

    def formula(self, reduction: str) -> list[np.ndarray]:
        """In float64."""
        x, labels = np.float64(self.feeds[self.x]), self.feeds[self.labels]
        shifted = x - x.max(axis=-1, keepdims=True)
        total = np.exp(shifted).sum(axis=-1, keepdims=True)
        own = np.eye(x.shape[-1])[labels]
        losses = np.log(total[..., 0]) - (shifted * own).sum(axis=-1)
        rows = losses.size if reduction == "mean" else 1
        return [losses.sum() / rows, (np.exp(shifted) / total - own) / rows]


def run(fetches: Sequence[Node], feeds: dict[Node, np.ndarray]) -> list[np.ndarray]:
    return ad.Executor(fetches).run(feeds, convert_to_numpy_ret_vals=True)


def steps(fetches: Sequence[Node], feeds: dict[Node, np.ndarray]) -> list[str]:
    """The operators of a plan."""
    plan = ad.Executor(fetches).plan({x: a.shape for x, a in feeds.items()})
    return [step.node.op.name for step in plan.steps]


@require_fusion("cross_entropy")
class Values(unittest.TestCase):
    def test_as_in_float64(self) -> None:
        for shape in SHAPES:
            for reduction in ("mean", "sum"):
                problem = Problem(shape, reduction)
                with self.subTest(shape=shape, reduction=reduction):
                    self.assertEqual(steps(problem.fetches, problem.feeds)[0], FUSED)
                    for got, wanted in zip(
                        run(problem.fetches, problem.feeds), problem.formula(reduction)
                    ):
                        self.assertEqual((got.shape, got.dtype), (wanted.shape, np.float32))
                        # Measured at most 3.3e-7 of the largest: float32, and logits of about 10.
                        scale = 1e-6 * np.abs(wanted).max() + 1e-7
                        np.testing.assert_allclose(got, wanted, rtol=0, atol=scale)

    def test_large_logits_and_what_is_not_finite(self) -> None:
        problem = Problem((6, 5))
        x = problem.feeds[problem.x]
        x[0], x[1, 2], x[2, 3], x[3, 1] = 1e30, np.inf, np.nan, -np.inf
        got = run(problem.fetches, problem.feeds)
        with without("cross_entropy"):
            plain = run(problem.fetches, problem.feeds)
        for a, b in zip(got, plain):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)

    def test_a_label_out_of_range_is_refused_as_by_the_plain_operator(self) -> None:
        problem = Problem((9, 4))
        for label in (-1, 4):
            problem.feeds[problem.labels][7] = label
            message = f"sparse_softmax_cross_entropy: label {label} at position 7"
            with self.assertRaisesRegex(OutOfRangeError, message):
                run(problem.fetches, problem.feeds)


class Rewrites(unittest.TestCase):
    def test_long_rows_and_float64_stay(self) -> None:
        long = Problem((20, SHORT_ROW + 1))
        self.assertNotIn(FUSED, steps(long.fetches, long.feeds))
        x, labels = ad.Variable("x", dtype=np.float64), ad.Variable("labels", dtype=np.int64)
        loss = ad.softmax_cross_entropy(x, labels)
        feeds = {x: np.ones((20, 4)), labels: np.zeros(20, np.int64)}
        self.assertNotIn(FUSED, steps([loss, *ad.gradients(loss, [x])], feeds))

    def test_a_loss_alone_stays(self) -> None:
        problem = Problem((20, 4))
        self.assertNotIn(FUSED, steps([problem.loss], problem.feeds))

    def test_no_rows(self) -> None:
        problem = Problem((0, 4))
        loss, gradient = run(problem.fetches, problem.feeds)
        self.assertTrue(np.isnan(loss))
        self.assertEqual(gradient.shape, (0, 4))


if __name__ == "__main__":
    unittest.main()
