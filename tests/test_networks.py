"""The command line's convolutional networks: their plans, their training, their statistics."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from devices import require
from dlsys import autodiff as ad
from dlsys.data import Mnist, Split, load_mnist
from dlsys.executor.plan import Plan
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.settings import settings

NAMES = ("cnn", "resnet")


def load_script() -> Any:
    """The script at the top as a module; tests/mnist_dlsys.py, a door to it, has its name."""
    path = Path(__file__).resolve().parents[1] / "mnist_dlsys.py"
    spec = importlib.util.spec_from_file_location("networks_of_mnist", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


@cache
def digits() -> Split:
    """A few hundred real digits, so that the rest of the set can be forgotten."""
    train = load_mnist().train
    return Split(*(values[:500].copy() for values in train))


def training(name: str, ctx: Context | None, count: int = 8, **options: Any) -> Any:
    """The command line's Training on the first `count` images, in one batch unless asked for."""
    split = Split(*(values[:count] for values in digits()))
    chosen = dict(batch_size=count, lr=0.01, seed=7, epochs=1) | options
    return SCRIPT.Training(name, Mnist(split, split, split), ctx, Namespace(**chosen))


def feeds(net: Any) -> dict[ad.Node, np.ndarray]:
    images, labels = net.mnist.train
    return {net.images: images, net.labels: labels}


def losses(net: Any, steps: int) -> list[float]:
    """Of steps at the full rate on all the images."""
    return [float(net.step.run(feeds(net), True)[0]) for _ in range(steps)]


def states(net: Any) -> dict[str, np.ndarray]:
    """Everything that a step of training may change."""
    nodes = net.step.topo_order
    return {node.name: node.asnumpy() for node in nodes if isinstance(node, ad.Parameter)}


def running(net: Any) -> dict[str, np.ndarray]:
    """The running statistics."""
    return {
        name: value for name, value in states(net).items() if name.endswith((".mean", ".variance"))
    }


@cache
def numpy_losses(name: str, steps: int) -> list[float]:
    return losses(training(name, None, 16), steps)


def plan(name: str, ctx: Context | None, count: int) -> Plan:
    net = training(name, ctx)
    return net.step.plan({net.images: (count, 784), net.labels: (count,)})


class Networks:
    ctx: Context | None

    def test_the_planner_keeps_its_bounds(self) -> None:
        for name, count in (("cnn", 100), ("resnet", 100), ("resnet", 64)):
            with self.subTest(name=name, count=count):
                made = plan(name, self.ctx, count)
                self.assertLessEqual(made.arena_nbytes, 1.1 * made.live_nbytes)
                self.assertLessEqual(made.arena_nbytes, 0.6 * made.unshared_nbytes)

    def test_relu_keeps_its_result_alone(self) -> None:
        for name, count in (("cnn", 4), ("resnet", 7)):
            made = plan(name, self.ctx, 100)
            relus = [step for step in made.steps if step.node.op is ad.relu_op]
            self.assertEqual(len(relus), count)
            for step in relus:
                with self.subTest(name=name, step=step.node.name):
                    before, after = step.inputs[0], step.outputs[0]
                    self.assertIs(after.buffer, before.buffer, "in place")
                    readers = [s.node.op.name for s in made.steps if before in s.inputs]
                    self.assertEqual(readers, ["relu"])

    def test_max_pooling_keeps_places_and_no_planes(self) -> None:
        for name, count in (("cnn", 2), ("resnet", 3)):
            made = plan(name, self.ctx, 100)
            pools = [step for step in made.steps if step.node.op.name == "max_pool2d_gradient"]
            self.assertEqual(len(pools), count)
            for step in pools:
                gradient, places = step.inputs
                self.assertEqual(places.spec.dtype, np.int32)
                self.assertEqual(places.spec.shape, gradient.spec.shape)

    def test_no_gradient_reads_what_lenet_convolved(self) -> None:
        made = plan("cnn", self.ctx, 100)
        convolutions = [s for s in made.steps if s.node.op.name in ("conv2d", "conv2d_bias")]
        self.assertEqual(len(convolutions), 2)
        backward = [k for k, s in enumerate(made.steps) if s.node.op.name.endswith("gradient")]
        for step in convolutions:
            reads = [k for k, other in enumerate(made.steps) if step.outputs[0] in other.inputs]
            self.assertLess(max(reads), min(backward))

    def test_every_step_agrees_with_numpy_in_float64(self) -> None:
        for name in NAMES:
            with self.subTest(name=name):
                net = training(name, self.ctx)
                net.step.run(feeds(net))  # so that momentum and running statistics are not 0
                before = states(net)
                net.step.check(feeds(net))
                for parameter, value in states(net).items():
                    np.testing.assert_array_equal(value, before[parameter], parameter)

    def test_an_arena_without_sharing_gives_the_same_bits(self) -> None:
        for name in NAMES:
            with self.subTest(name=name):
                shared = training(name, self.ctx)
                expected = losses(shared, 1)
                with mock.patch.object(settings, "separate_arena", True):
                    separate = training(name, self.ctx)
                    self.assertEqual(losses(separate, 1), expected)
                wanted = states(shared)
                for parameter, value in states(separate).items():
                    np.testing.assert_array_equal(value, wanted[parameter], parameter)

    def test_a_step_advances_the_running_statistics(self) -> None:
        net = training("resnet", self.ctx)
        x, f = ad.Variable("x"), ad.Variable("f")
        mean = ad.mean_op(ad.conv2d(x, f, padding=1), axis=(0, 2, 3))
        planes = net.mnist.train.images.reshape(-1, 1, 28, 28)
        first = states(net)["stage1.filter"]
        expected = 0.1 * ad.Executor([mean]).run({x: planes, f: first})[0]
        before = running(net)
        self.assertEqual(len(before), 14)
        net.step.run(feeds(net))
        after = running(net)
        np.testing.assert_allclose(after["stage1.mean"], expected, rtol=1e-4, atol=1e-6)
        for name, value in after.items():
            self.assertTrue(np.isfinite(value).all(), name)
            self.assertTrue((value != before[name]).any(), name)

    def test_evaluation_uses_the_running_statistics_and_advances_none(self) -> None:
        net = training("resnet", self.ctx)
        net.step.run(feeds(net))
        before = states(net)
        images = net.mnist.test.images

        def logits(chosen: np.ndarray) -> np.ndarray:
            return net.evaluation.run({net.images: chosen}, True)[0]

        together = logits(images)
        alone = np.concatenate([logits(images[k : k + 1]) for k in range(4)])
        np.testing.assert_allclose(alone, together[:4], rtol=1e-4, atol=1e-4)
        for name, value in states(net).items():
            np.testing.assert_array_equal(value, before[name], name)
        mean = next(node for node in net.evaluation.topo_order if node.name == "b4.mean")
        mean.set(before["b4.mean"] + 1)
        self.assertGreater(np.abs(logits(images) - together).max(), 1e-3)


class NativeNetworks(Networks):
    ctx: Context

    def test_losses_follow_numpy(self) -> None:
        for name, steps in (("cnn", 5), ("resnet", 3)):
            with self.subTest(name=name):
                expected = numpy_losses(name, steps)
                self.assertLess(expected[-1], expected[0])
                found = losses(training(name, self.ctx, 16), steps)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)

    def test_a_few_hundred_digits_train(self) -> None:
        net = training("cnn", self.ctx, 500, batch_size=50, lr=None, epochs=10)
        curve = [
            np.mean([float(net.train(x, y)) for x, y in net.batches()]) for _ in range(net.epochs)
        ]
        self.assertLess(curve[-1], 0.1 * curve[0], curve)
        self.assertGreater(net.accuracy(net.mnist.test), 0.95)


class NumpyNetworks(Networks, unittest.TestCase):
    ctx = None


@require(cpu(0))
class CpuNetworks(NativeNetworks, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuNetworks(NativeNetworks, unittest.TestCase):
    ctx = gpu(0)


class Options(unittest.TestCase):
    def made(self, *arguments: str) -> Any:
        options = SCRIPT.parse(["-c", "numpy", *arguments])
        split = Split(*(values[:16] for values in digits()))
        return SCRIPT.Training(options.model, Mnist(split, split, split), None, options)

    def test_networks_have_their_own_defaults(self) -> None:
        for name, lr in (("cnn", 0.05), ("resnet", 0.1)):
            net = self.made("-m", name)
            self.assertEqual((net.size, net.lr, net.recipe.momentum), (100, lr, 0.9))

    def test_batch_size_and_rate_are_taken(self) -> None:
        net = self.made("-m", "cnn", "--batch-size", "8", "--lr", "0.02")
        self.assertEqual((net.size, net.lr, net.count()), (8, 0.02, 2))
        self.assertEqual([len(y) for _, y in net.batches()], [8, 8])

    def test_the_rate_rises_falls_and_ends_at_nothing(self) -> None:
        net = self.made("-m", "cnn", "--batch-size", "2", "-e", "5", "--lr", "0.5")
        rates = []
        with mock.patch.object(net.step, "run", return_value=[0.0]):
            for _ in range(net.epochs):
                for x, y in net.batches():
                    net.train(x, y)
                    rates.append(float(net.optimizer.lr.asnumpy()))
        top = rates.index(max(rates))
        self.assertEqual((len(rates), top), (40, 12))
        self.assertAlmostEqual(rates[top], 0.5, places=6)
        self.assertEqual(rates[: top + 1], sorted(rates[: top + 1]))
        self.assertEqual(rates[top:], sorted(rates[top:], reverse=True))
        self.assertLess(rates[-1], 0.02)


if __name__ == "__main__":
    unittest.main()
