"""Scratch memory is planned: no kernel of a run asks the allocator for any."""

import ctypes
import unittest
from contextlib import contextmanager
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import KernelError
from dlsys.graph.node import Spec
from dlsys.ndarray import array, empty
from dlsys.runtime.device import cpu, gpu, stream
from dlsys.runtime.interface import interface
from dlsys.runtime.library import DLStep, DLValue, load
from dlsys.settings import settings
from executor.test_networks import Net, feeds
from support.allocations import requests_of_kernels
from support.devices import require
from support.graphs import Training

FLOAT32 = np.dtype(np.float32)
LONG = 1 << 20  # elements, whose sum is made in parts


class Workspaces:
    """On the device `ctx`."""

    def requests(self, executor, values):
        """How often each of three runs asks the allocator between its first and last kernel."""
        plain = mock.patch.multiple(settings, capture=False, separate_arena=False)
        with requests_of_kernels(self.ctx) as requests, plain:
            for _ in range(3):
                executor.run(values)
        return requests

    def test_dense_layers_request_nothing(self):
        net = Training((300, 200, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], self.ctx)
        self.assertEqual(self.requests(executor, net.batch(64)), [0, 0, 0])

    def test_convolutions_and_norms_request_nothing(self):
        x, labels = ad.Variable("x"), ad.Variable("labels", dtype=np.int64)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * 6 * 6, 4),
        )  # fmt: skip
        loss = ad.softmax_cross_entropy(model(x), labels)
        train = optim.Adam(0.01, clip_norm=1.0).minimize(loss, model.parameters())
        executor = ad.Executor([loss, train], self.ctx)
        values = {x: np.ones((4, 3, 8, 8), FLOAT32), labels: np.arange(4)}
        self.assertEqual(self.requests(executor, values), [0, 0, 0])

    def test_the_arena_holds_it(self):
        x = ad.Variable("x")
        executor = ad.Executor([ad.sum_op(x * 2)], self.ctx)
        plan = executor.plan({x: (LONG,)})
        (workspace,) = (value for step in plan.steps for value in step.workspace)
        self.assertEqual(workspace.buffer.kind, "arena")
        wanted = load().workspace(
            self.ctx.kernel_device, "reduce_sum", Spec((LONG,), FLOAT32), 1, 1.0, Spec((), FLOAT32)
        )
        self.assertEqual(workspace.buffer.nbytes, wanted)
        self.assertLessEqual(plan.arena_nbytes, 1.1 * plan.live_nbytes)
        self.assertGreaterEqual(plan.live_nbytes, 4 * LONG + wanted)

    def test_a_step_that_was_given_too_little_fails(self):
        x, y = array(np.ones(LONG, FLOAT32), self.ctx), empty((), self.ctx)
        values = (DLValue * 5)()
        values[0].p, values[1].i, values[2].f, values[3].p = (
            x.handle_address,
            1,
            1,
            y.handle_address,
        )
        library, on, device = load(), stream(self.ctx), self.ctx.kernel_device
        kernel = library.index[device, "reduce_sum", FLOAT32]
        nbytes = library.workspace(device, "reduce_sum", x, 1, 1.0, y)
        self.assertGreater(nbytes, 0)

        def call(nargs):
            step = DLStep(kernel, 0, nargs, 0)
            library.check(library.cdll.DLKernelCall(ctypes.byref(step), values, 5, on))

        with self.assertRaisesRegex(KernelError, f"takes {nbytes} bytes of workspace; 0 were"):
            call(4)
        enough = empty((nbytes,), self.ctx, np.uint8)
        values[4].p = enough.handle_address
        call(5)
        self.assertEqual(float(y), LONG)


@contextmanager
def threads(count):
    load().set_threads(count)
    try:
        yield
    finally:
        load().set_threads(settings.threads)


@require(cpu(0))
class CpuWorkspace(Workspaces, unittest.TestCase):
    """A thread has scratch of its own, of as many threads as there were for the plan."""

    ctx = cpu(0)

    def test_the_networks_of_the_command_line_request_nothing(self):
        for name in ("cnn", "resnet"):
            with self.subTest(name):
                net = Net(name, self.ctx)
                self.assertEqual(self.requests(net.step, feeds(net)), [0, 0, 0])

    def bits(self, executor, values):
        return [y.tobytes() for y in executor.run(values, convert_to_numpy_ret_vals=True)]

    def convolution(self):
        """A convolution, its gradients and a product of many small matrices, and their feeds."""
        rng = np.random.default_rng(0)
        x, f, a = ad.Variable("x"), ad.Variable("f"), ad.Variable("a")
        y = ad.conv2d_op(x, f, stride=2, padding=1)
        loss = ad.sum_op(y * y) + ad.sum_op(ad.batched_matmul_op(a, a))
        executor = ad.Executor([y, *ad.gradients(loss, [x, f, a])], self.ctx)
        shapes = {x: (16, 3, 15, 15), f: (7, 3, 3, 3), a: (40, 9, 9)}
        return executor, {
            v: rng.standard_normal(shape).astype(FLOAT32) for v, shape in shapes.items()
        }

    def test_threads_may_become_more_or_fewer_after_planning(self):
        with threads(1):
            executor, values = self.convolution()
            expected = self.bits(executor, values)
        for planned in (1, 2, 5):
            with threads(planned):
                executor, values = self.convolution()
                executor.run(values)
            for now in (1, 2, 3, 48):
                with self.subTest(planned=planned, now=now), threads(now):
                    with requests_of_kernels(self.ctx) as requests:
                        for _ in range(5):
                            self.assertEqual(self.bits(executor, values), expected)
                    self.assertFalse(any(requests), requests)

    def test_a_plan_has_scratch_for_its_threads(self):
        pair = (1, 1)
        windows = interface.struct("WindowOptions")(stride=pair, before=pair, dilation=pair)

        def nbytes(x, count):
            with threads(count):
                specs = [Spec(s, FLOAT32) for s in (x, (4, 3, 3, 3), (x[0], 4, *x[2:]))]
                return load().workspace("cpu", "conv2d", *specs, windows, 1, 0, 0)

        one, two, eight = (nbytes((8, 3, 64, 64), count) for count in (1, 2, 8))
        self.assertGreater(two, 1.5 * one)
        self.assertGreater(eight, 3 * two)
        few = [nbytes((1, 3, 8, 8), count) for count in (1, 64)]  # one task alone
        self.assertEqual(*few)


@require(gpu(0))
class GpuWorkspace(Workspaces, unittest.TestCase):
    ctx = gpu(0)
