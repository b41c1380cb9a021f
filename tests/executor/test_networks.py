"""The command line's convolutional networks: their plans, their training, their statistics."""

from __future__ import annotations

import unittest
from functools import cache
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import train
from dlsys.apps.setup import choose
from dlsys.data import Loader, Split, mnist_sets
from dlsys.executor.plan.memory import Plan
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.settings import settings
from support import sample
from support.devices import EMULATED, require, slow
from support.fusion import fusions, require_fusion, without

NAMES = ("cnn", "resnet")
FEW = 4 if EMULATED else 8  # images


@cache
def digits() -> Split:
    """A few hundred real digits, so that the rest of the set can be forgotten."""
    images, labels = mnist_sets().train.take(slice(500))
    return Split((images / 255).astype(np.float32), labels.copy())


class Net:
    """A network as the command line makes it, its training step and its evaluation."""

    def __init__(self, name: str, ctx: Context | None, count: int = FEW) -> None:
        self.split = Split(*(values[:count] for values in digits()))
        setup = choose(name, {"seed": 7, "lr": 0.01, "schedule": "constant"})
        self.model = setup.build_model()
        self.images = ad.Variable("images", shape=(None, 1, 28, 28), dtype=np.float32)
        self.labels = ad.Variable("labels", shape=(None,), dtype=np.int64)
        loss = ad.softmax_cross_entropy(self.model(self.images), self.labels)
        optimizer = setup.build_optimizer(setup.build_schedule(10))
        update = optimizer.minimize(loss, self.model.parameters())
        self.step = ad.Executor([loss, update], ctx=ctx)
        self.evaluation = ad.Executor([self.model.eval()(self.images)], ctx=ctx)


def feeds(net: Net) -> dict[ad.Node, np.ndarray]:
    return {net.images: net.split.images, net.labels: net.split.labels}


def losses(net: Net, steps: int) -> list[float]:
    """Of steps at the full rate on all the images."""
    return [float(net.step.run(feeds(net), True)[0]) for _ in range(steps)]


def states(net: Net) -> dict[str, np.ndarray]:
    """Everything that a step of training may change."""
    nodes = net.step.topo_order
    return {node.name: node.asnumpy() for node in nodes if isinstance(node, ad.Parameter)}


def running(net: Net) -> dict[str, np.ndarray]:
    """The running statistics."""
    return {name: buffer.asnumpy() for name, buffer in net.model.named_buffers()}


@cache
def numpy_losses(name: str, steps: int) -> list[float]:
    return losses(Net(name, None, 2 * FEW), steps)


def plan(name: str, ctx: Context | None, count: int) -> Plan:
    net = Net(name, ctx)
    return net.step.plan({net.images: (count, 1, 28, 28), net.labels: (count,)})


class Networks:
    ctx: Context | None

    def test_the_planner_keeps_its_bounds(self) -> None:
        for name, count in (("cnn", 100), ("resnet", 100), ("resnet", 64)):
            with self.subTest(name=name, count=count):
                made = plan(name, self.ctx, count)
                self.assertLessEqual(made.arena_nbytes, 1.1 * made.live_nbytes)
                with fusions("off"):  # what is never stored counts as saved
                    unshared = plan(name, None, count).unshared_nbytes
                self.assertLessEqual(made.arena_nbytes, 0.6 * unshared)

    @require_fusion("conv_pool", "gemm_epilogue", "batch_norm")
    def test_relu_keeps_its_result_alone(self) -> None:
        for name, on_numpy, on_cpu in (("cnn", 2, 0), ("resnet", 7, 5)):
            made = plan(name, self.ctx, 100)
            relus = [step for step in made.steps if step.node.op is ad.relu_op]
            left = {None: on_numpy, cpu(0): on_cpu, gpu(0): 0}[self.ctx]
            self.assertEqual(len(relus), left, "others are fused")
            for step in relus:
                with self.subTest(name=name, step=step.node.name):
                    before, after = step.inputs[0], step.outputs[0]
                    self.assertIs(after.buffer, before.buffer, "in place")
                    readers = [s.node.op.name for s in made.steps if before in s.inputs]
                    self.assertEqual(readers, ["relu"])

    def test_max_pooling_keeps_places_and_no_planes(self) -> None:
        for name, count in (("cnn", 2), ("resnet", 3)):
            with without("conv_pool"):
                made = plan(name, self.ctx, 100)
            pools = [step for step in made.steps if step.node.op.name == "max_pool2d_gradient"]
            self.assertEqual(len(pools), count)
            for step in pools:
                gradient, places = step.inputs
                self.assertEqual(places.spec.dtype, np.int32)
                self.assertEqual(places.spec.shape, gradient.spec.shape)

    @slow
    def test_every_step_agrees_with_numpy_in_float64(self) -> None:
        for name in NAMES:
            with self.subTest(name=name):
                net = Net(name, self.ctx)
                net.step.run(feeds(net))  # so that momentum and running statistics are not 0
                before = states(net)
                net.step.check(feeds(net))
                for parameter, value in states(net).items():
                    np.testing.assert_array_equal(value, before[parameter], parameter)

    @slow
    def test_an_arena_without_sharing_gives_the_same_bits(self) -> None:
        for name in NAMES:
            with self.subTest(name=name):
                shared = Net(name, self.ctx)
                expected = losses(shared, 1)
                with mock.patch.object(settings, "separate_arena", True):
                    separate = Net(name, self.ctx)
                    self.assertEqual(losses(separate, 1), expected)
                wanted = states(shared)
                for parameter, value in states(separate).items():
                    np.testing.assert_array_equal(value, wanted[parameter], parameter)

    def test_a_step_advances_the_running_statistics(self) -> None:
        net = Net("resnet", self.ctx)
        x, f = ad.Variable("x"), ad.Variable("f")
        mean = ad.mean_op(ad.conv2d(x, f, padding=1), axis=(0, 2, 3))
        planes = net.split.images
        first = states(net)["1.weight"]
        expected = 0.1 * ad.Executor([mean]).run({x: planes, f: first})[0]
        before = running(net)
        self.assertEqual(len(before), 14)
        net.step.run(feeds(net))
        after = running(net)
        np.testing.assert_allclose(after["2.running_mean"], expected, rtol=1e-4, atol=1e-6)
        for name, value in after.items():
            self.assertTrue(np.isfinite(value).all(), name)
            self.assertTrue((value != before[name]).any(), name)

    @slow
    def test_evaluation_uses_the_running_statistics_and_advances_none(self) -> None:
        net = Net("resnet", self.ctx)
        net.step.run(feeds(net))
        before = states(net)
        images = net.split.images

        def logits(chosen: np.ndarray) -> np.ndarray:
            return net.evaluation.run({net.images: chosen}, True)[0]

        together = logits(images)
        alone = np.concatenate([logits(images[k : k + 1]) for k in range(4)])
        np.testing.assert_allclose(alone, together[:4], rtol=1e-4, atol=1e-4)
        for name, value in states(net).items():
            np.testing.assert_array_equal(value, before[name], name)
        name, mean = [item for item in net.model.named_buffers() if "mean" in item[0]][-1]
        mean.set(before[name] + 1)
        self.assertGreater(np.abs(logits(images) - together).max(), 1e-3)


class NativeNetworks(Networks):
    ctx: Context

    @require_fusion("conv_pool")
    def test_no_plane_in_front_of_a_pool_is_stored(self) -> None:
        made = plan("cnn", self.ctx, 100)
        planes = {(100, 6, 28, 28), (100, 16, 10, 10)}
        stored = [value.spec.shape for step in made.steps for value in step.outputs]
        self.assertFalse(planes & set(stored))
        pools = [step for step in made.steps if step.node.op.name == "conv2d_pool"]
        self.assertEqual(len(pools), 2)
        for step in pools:
            value, code = step.outputs
            self.assertEqual((code.spec.shape, code.spec.dtype), (value.spec.shape, np.uint8))

    def test_losses_follow_numpy(self) -> None:
        for name, steps in (("cnn", sample.count(5, 3)), ("resnet", sample.count(3, 2))):
            with self.subTest(name=name):
                expected = numpy_losses(name, steps)
                self.assertLess(expected[-1], expected[0])
                found = losses(Net(name, self.ctx, 2 * FEW), steps)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)

    @slow
    def test_a_few_hundred_digits_train(self) -> None:
        if EMULATED and self.ctx is gpu(0):
            self.skipTest("not here: an emulated GPU, of which each step is compared with numpy")
        setup = choose("cnn", {"seed": 7, "batch_size": 50})
        model, data = setup.build_model(), Loader(digits(), 50, shuffle=True, seed=7)
        optimizer = setup.build_optimizer(setup.build_schedule(10 * len(data)))
        history = train.fit(model, data, optimizer, epochs=10, ctx=self.ctx, quiet=True)
        curve = history.column("loss")
        self.assertLess(curve[-1], 0.1 * curve[0], curve)
        self.assertGreater(train.evaluate(model, data, ctx=self.ctx)["accuracy"], 0.95)


class NumpyNetworks(Networks, unittest.TestCase):
    ctx = None

    def test_no_gradient_reads_what_lenet_convolved(self) -> None:
        with without("conv_pool"):
            made = plan("cnn", self.ctx, 100)
        convolutions = [s for s in made.steps if s.node.op.name in ("conv2d", "conv2d_bias")]
        self.assertEqual(len(convolutions), 2)
        backward = [k for k, s in enumerate(made.steps) if s.node.op.name.endswith("gradient")]
        for step in convolutions:
            reads = [k for k, other in enumerate(made.steps) if step.outputs[0] in other.inputs]
            self.assertLess(max(reads), min(backward))


@require(cpu(0))
class CpuNetworks(NativeNetworks, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuNetworks(NativeNetworks, unittest.TestCase):
    ctx = gpu(0)
