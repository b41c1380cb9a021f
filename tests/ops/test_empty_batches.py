"""A training step over no samples: the loss is what PyTorch gives, NaN for a mean and 0 for a sum;
the gradient is 0, as the sum of no samples' gradients is. So no step has to be refused, and weights
and running statistics stay as they are.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.runtime.device import Context
from support.devices import on_native_devices

IMAGE = (2, 6, 6)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.AvgPool2d(3),
        nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


def rows() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(72, 8), nn.LayerNorm(8), nn.Tanh(),
        nn.Dropout(0.5), nn.Linear(8, 5),
    )  # fmt: skip


def of_classes(logits: ad.Node, labels: ad.Node, how: str) -> ad.Node:
    return ad.softmax_cross_entropy(logits, labels, reduction=how)


def of_ignored(logits: ad.Node, labels: ad.Node, how: str) -> ad.Node:
    return ad.softmax_cross_entropy(logits, labels, reduction=how, ignore_index=3)


def of_squares(logits: ad.Node, labels: ad.Node, how: str) -> ad.Node:
    return ad.mean_squared_error(logits, ad.one_hot_op(labels, 5, np.float32), how)


class EmptyBatches:
    ctx: Context | None = None

    def check(self, model: nn.Module, loss_of: Callable, optimizer: Any, how: str, n: int) -> None:
        """One step over n samples, all of the class that is ignored where one is."""
        x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
        loss = loss_of(model(x), y, how)
        train = optimizer.minimize(loss, list(model.parameters()))
        executor = ad.Executor([loss, train], self.ctx)
        before = model.state_dict()
        for _ in range(3):
            feeds = {x: np.ones((n, *IMAGE), np.float32), y: np.full(n, 3)}
            value, _ = executor.run(feeds, convert_to_numpy_ret_vals=True)
            np.testing.assert_equal(float(value), np.nan if how == "mean" else 0.0)
        for name, array in model.state_dict().items():
            if not name.endswith("step") and ("running" not in name or n == 0):
                np.testing.assert_array_equal(array, before[name], name)

    def test_nothing_changes(self) -> None:
        for make in (images, rows):
            for loss in (of_classes, of_ignored, of_squares):
                for how in ("mean", "sum"):
                    with self.subTest(f"{make.__name__} {loss.__name__} {how}"):
                        optimizer = optim.SGD(0.1, momentum=0.9, clip_norm=1.0)
                        self.check(make(), loss, optimizer, how, 0)

    def test_adam_makes_no_step_of_no_gradient(self) -> None:
        self.check(images(), of_classes, optim.Adam(0.1), "mean", 0)

    def test_a_batch_that_is_ignored_as_a_whole_is_no_samples_too(self) -> None:
        for make in (images, rows):
            self.check(make(), of_ignored, optim.SGD(0.1), "mean", 3)


class NumpyEmptyBatches(EmptyBatches, unittest.TestCase):
    pass


CpuEmptyBatches, GpuEmptyBatches = on_native_devices(EmptyBatches)
