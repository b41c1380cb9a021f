"""Updates of small convolutions that make their gradients: where the pass makes them, and that they
do what gradients and updates of their own do.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.graph.node import Node
from dlsys.runtime.device import Context, gpu
from fusion.test_weight_update import OPTIMIZERS
from support.devices import require
from support.fusion import without
from support.graphs import variable

GRADIENT, UPDATE = "conv2d_pool_filter_gradient", "conv2d_pool_sgd_update"


class Network:
    """Two convolutions with pools, the first without a bias, and the sum of squares behind them."""

    def __init__(self, images: int = 5) -> None:
        rng = np.random.default_rng(4)
        self.x = variable("x", images, 2, 12, 12)
        self.parameters = [
            ad.Parameter((0.3 * rng.standard_normal(shape)).astype(np.float32), name)
            for name, shape in (("f0", (6, 2, 3, 3)), ("f1", (3, 6, 3, 3)), ("b1", (3,)))
        ]
        first, second, bias = self.parameters
        y = ad.max_pool2d(ad.relu_op(ad.conv2d(self.x, first, padding=1)), 2)
        self.y = ad.max_pool2d(ad.relu_op(ad.conv2d(y, second, bias, padding=1)), 2)
        self.loss = ad.sum_op(self.y * self.y)

    def step(self, optimizer: optim.Optimizer | None = None) -> list[Node]:
        train = (optimizer or optim.SGD(0.01)).minimize(self.loss, self.parameters)
        return [self.loss, train]

    def feeds(self) -> dict[Node, np.ndarray]:
        shape = self.x.spec.shape
        return {self.x: np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def kernels_of(executor: ad.Executor, feeds: Sequence[Node]) -> list[str]:
    """The names of the operators of a plan."""
    plan = executor.plan({x: x.spec.shape for x in feeds})
    return [step.node.op.name for step in plan.steps]


@require(gpu(0))
class Rewrites(unittest.TestCase):
    """That they happen, and only where they may."""

    def assert_has(self, fetches: Sequence[Node], feeds: Sequence[Node], *counts: int) -> None:
        """A plan has so many filter gradients, updates, and updates of convolutions."""
        names = kernels_of(ad.Executor(fetches, gpu(0)), feeds)
        self.assertEqual(tuple(map(names.count, (GRADIENT, "sgd_update", UPDATE))), counts)

    def test_each_convolution_has_an_update_of_its_own(self) -> None:
        net = Network()
        self.assert_has(net.step(), [net.x], 0, 0, 2)
        with without("conv_update"):
            self.assert_has(net.step(), [net.x], 2, 1, 0)

    def test_a_gradient_that_somebody_else_reads_is_left(self) -> None:
        net = Network()
        (gradient,) = ad.gradients(net.loss, net.parameters[:1])
        self.assert_has([*net.step(), gradient], [net.x], 1, 1, 1)

    def test_parameters_of_other_layers_keep_their_update(self) -> None:
        model, other = nn.LeNet5(seed=0), ad.Parameter(np.ones(4, np.float32), "other")
        x, labels = variable("x", 4, 28, 28), variable("labels", 4, dtype=np.int64)
        loss = ad.softmax_cross_entropy(model(x), labels) + ad.sum_op(other * other)
        train = optim.SGD(0.05).minimize(loss, [*model.parameters(), other])
        self.assert_has([loss, train], [x, labels], 0, 1, 2)


@require(gpu(0))
class OnGpu(unittest.TestCase):
    """The kernels against numpy and against gradients and updates of their own."""

    ctx: Context = gpu(0)

    def trained(
        self, ctx: Context | None, optimizer: Callable, images: int, precision: str = "fp32"
    ) -> list[np.ndarray]:
        """The losses of some steps, and the parameters after them."""
        net = Network(images)
        executor = ad.Executor(net.step(optimizer()), ctx, precision)
        losses = [float(executor.run(net.feeds(), True)[0]) for _ in range(3)]
        self.kernels = kernels_of(executor, [net.x])
        return [np.float32(losses), *(p.asnumpy() for p in net.parameters)]

    def test_every_rule(self) -> None:
        for optimizer in (*OPTIMIZERS, lambda: optim.SGD(0.01, accumulate=2)):
            with self.subTest(optimizer=optimizer().rule):
                wanted = self.trained(None, optimizer, 5)
                found = self.trained(self.ctx, optimizer, 5)
                made = [name for name in self.kernels if name.startswith("conv2d_pool_")]
                self.assertEqual(len([name for name in made if name.endswith("_update")]), 2)
                with without("conv_update"):
                    plain = self.trained(self.ctx, optimizer, 5)
                for ours, theirs, right in zip(found, plain, wanted, strict=True):
                    bound = 1e-4 * float(np.abs(right).max())  # as of the operators' gradients
                    np.testing.assert_allclose(ours, right, rtol=0, atol=bound)
                    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)

    def test_images_of_all_numbers(self) -> None:
        def sgd() -> optim.Optimizer:
            return optim.SGD(0.01, momentum=0.5)

        for precision in ("fp32", "tf32"):
            for images in (1, 70):
                found = self.trained(self.ctx, sgd, images, precision)
                with without("conv_update"):
                    plain = self.trained(self.ctx, sgd, images, precision)
                for ours, theirs in zip(found, plain, strict=True):
                    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
