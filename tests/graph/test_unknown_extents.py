"""Shapes with extents that only a feed decides: what is known of them when the graph is built.

`each_unknown_extents` of test_operators.py asks every operator that nothing wrong is claimed.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn
from dlsys.errors import ShapeError
from dlsys.graph.node import Op
from dlsys.ops.extents import STAND_INS


def batch(*shape: int | None, dtype: Any = np.float32) -> ad.Node:
    return ad.Variable("x", shape, dtype)


def parameter(*shape: int) -> ad.Parameter:
    return ad.Parameter(np.zeros(shape, np.float32), "w")


class Half(Op):
    """The first half of the rows, by the shape rule of a user's operator."""

    def infer_shape(self, node: ad.Node, input_shapes: Any) -> tuple[int, ...]:
        return (input_shapes[0][0] // 2, *input_shapes[0][1:])


class Broken(Op):
    """Its rule fails in a way of its own."""

    def infer_shape(self, node: ad.Node, input_shapes: Any) -> tuple[int, ...]:
        return {5: (1,)}[input_shapes[0][0]]


class UnknownExtents(unittest.TestCase):
    def test_a_rule_is_asked_once_for_layers_that_are_alike(self) -> None:
        # Sizes of no other test, whose rules have not been asked before.
        x, relu = batch(None, 37), F.relu(parameter(1)).op
        with mock.patch.object(relu, "infer", wraps=relu.infer) as infer:
            for _ in range(10):
                x = F.relu(F.linear(x, parameter(37, 37)))
            self.assertEqual(infer.call_count, len(STAND_INS))
            self.assertEqual(F.relu(F.linear(x, parameter(41, 37))).shape, (None, 41))
            self.assertEqual(infer.call_count, 2 * len(STAND_INS))

    def test_what_is_remembered_knows_kinds_of_numbers(self) -> None:
        x = batch(None, 3, dtype=np.int64)
        for number in (2, 2.0, 2, 2.0):
            known = ad.Variable("x", (4, 3), np.int64)
            self.assertEqual((x * number).dtype, (known * number).dtype, repr(number))

    def test_a_rule_of_a_users_operator_is_asked_each_time(self) -> None:
        half = Half()
        x = batch(None, 3)
        with mock.patch.object(half, "infer", wraps=half.infer) as infer:
            self.assertEqual((half(x).shape, half(x).shape), ((None, 3), (None, 3)))
        self.assertEqual(infer.call_count, 2 * len(STAND_INS))

    def test_shapes_and_dtypes_are_known_through_a_graph(self) -> None:
        x = batch(None, 784)
        logits = F.linear(x, parameter(10, 784))
        images = batch(None, 3, 32, 32)
        for node, shape in (
            (x, (None, 784)),
            (logits, (None, 10)),
            (logits + parameter(10), (None, 10)),
            (logits.softmax().sum(axis=0), (10,)),
            (logits.mean(), ()),
            (logits.max(axis=1, keepdims=True), (None, 1)),
            (logits.T, (10, None)),
            (logits.reshape(-1, 2, 5), (None, 2, 5)),
            (x.reshape(-1, 1, 28, 28).flatten(1), (None, 784)),
            (logits[:, 1:4], (None, 3)),
            (logits[0], (10,)),
            (F.concatenate((logits, x), axis=1), (None, 794)),
            (F.concatenate((logits, logits)), (None, 10)),
            (F.one_hot(batch(None, dtype=np.int64), 7), (None, 7)),
            (F.cross_entropy(logits, batch(None, dtype=np.int64), reduction="none"), (None,)),
            (F.max_pool2d(F.conv2d(images, parameter(6, 3, 5, 5)), 2), (None, 6, 14, 14)),
            (F.conv2d(batch(8, 3, None, None), parameter(6, 3, 3, 3)), (8, 6, None, None)),
            (ad.max_pool_op(images, window=4)[1], (None, 3, 8, 8)),
            (ad.gradients(logits.mean(), [x])[0], (None, 784)),
        ):
            with self.subTest(node=repr(node)):
                self.assertEqual(node.shape, shape)
                self.assertIsNone(None if None not in shape else node.size)
                self.assertEqual(node.ndim, len(shape))
        self.assertEqual((logits.dtype, x.dtype), (np.float32, np.float32))
        self.assertIn("float32 (None, 10)", repr(logits))

    def test_models(self) -> None:
        for model, shape in (
            (nn.LeNet5(), (None, 784)),
            (nn.ResNet18(), (None, 3, 64, 64)),
            (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout()), (None, 1, 9, 9)),
        ):
            y = model(batch(*shape))
            assert y.shape is not None
            self.assertEqual(y.shape[0], None)
            self.assertNotIn(None, y.shape[1:])

    def test_what_depends_on_the_extent_stays_unknown(self) -> None:
        x = batch(None, 6)
        for node, shape in (
            (x[:5], (None, 6)),  # a batch may be smaller
            (x[1:], (None, 6)),
            (x + ad.full_op((64, 1), 1.0), None),  # 1 and 64 fit
            (x.squeeze(), None),  # of a batch of 1 both axes would go
            (F.mse_loss(x, np.ones((64, 6), np.float32), "none"), None),
            (x[1:][:-1] - ad.full_op((5, 6), 0.0), None),
            (F.split(x, 7)[0], (None, 6)),
            (x[1:].squeeze(0), None),  # of a batch of 2
        ):
            with self.subTest(node=repr(node)):
                self.assertEqual(node.shape, shape)
        values = np.arange(42, dtype=np.float32).reshape(7, 6)
        difference = x[1:][:-1] - ad.full_op((5, 6), 1.0)
        np.testing.assert_array_equal(
            ad.Executor([difference]).run({x: values})[0], values[1:-1] - 1
        )

    def test_errors_that_hold_for_every_extent_are_raised_where_they_are_built(self) -> None:
        x, weight = batch(None, 784), parameter(10, 785)
        logits = F.linear(x, parameter(10, 784))
        faults: tuple[tuple[Callable[[], Any], str], ...] = (
            (lambda: F.linear(x, weight), r"inner dimensions differ: x \(None, 784\) and w"),
            (lambda: logits + parameter(3), r"shapes do not broadcast: \S+ \(None, 10\) and w"),
            (lambda: F.mse_loss(logits, x), r"mean_squared_error: prediction and target must have"),
            (lambda: F.concatenate((logits, x)), "shapes differ beside axis 0"),
            (lambda: x.sum(axis=2), "axes .* do not fit"),
            (lambda: F.conv2d(x, weight), r"conv2d: .*\(None, 784\)"),
            (lambda: nn.Linear(784, 5)(logits), "inner dimensions differ"),
        )
        for make, message in faults:
            with self.subTest(message=message):
                with self.assertRaisesRegex(ShapeError, message) as caught:
                    make()
                self.assertIn("test_unknown_extents.py", str(caught.exception))
                for extent in STAND_INS[1:]:
                    self.assertNotIn(str(int(extent)), str(caught.exception))

    def test_errors_that_a_feed_may_avoid_wait_for_it(self) -> None:
        x = batch(None, 6)
        y = x + ad.full_op((4, 6), 1.0)
        executor = ad.Executor([y])
        self.assertEqual(executor.run({x: np.zeros((4, 6), np.float32)})[0].shape, (4, 6))
        with self.assertRaisesRegex(ShapeError, "do not broadcast"):
            executor.run({x: np.zeros((3, 6), np.float32)})

    def test_operators_of_users(self) -> None:
        half, broken = Half(), Broken()
        self.assertEqual(half(batch(None, 6)).shape, (None, 6))
        self.assertEqual(half(batch(8, None)).shape, (4, None))
        self.assertIsNone(broken(batch(None, 6)).shape)
        self.assertIsNone(half(broken(batch(None, 6))).shape)
        self.assertIsNone(half(ad.Variable("unknown")).shape)


if __name__ == "__main__":
    unittest.main()
