"""Scratch memory is planned: no launch of a run asks the allocator for any."""

import ctypes
import unittest
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import KernelError
from dlsys.executor.run.native import Program
from dlsys.graph.node import Spec
from dlsys.ndarray import array, empty
from dlsys.runtime.device import gpu, memory_stats, stream
from dlsys.runtime.library import DLStep, DLValue, load
from dlsys.settings import settings
from support.devices import require
from support.graphs import Training

FLOAT32 = np.dtype(np.float32)
LONG = 1 << 20  # elements, whose sum is made in parts


@require(gpu(0))
class GpuWorkspace(unittest.TestCase):
    ctx = gpu(0)

    def requests_of_launches(self, executor, feeds):
        """How often each of three runs asks the allocator between its first and last launch."""
        launch, found = Program._launch, []

        def counted(program, on):
            before = memory_stats(self.ctx).requests
            launch(program, on)
            found.append(memory_stats(self.ctx).requests - before)

        with mock.patch.object(Program, "_launch", counted):
            with mock.patch.object(settings, "capture", False):
                for _ in range(3):
                    executor.run(feeds)
        return found

    def test_launches_of_dense_layers_request_nothing(self):
        net = Training((300, 200, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], self.ctx)
        self.assertEqual(self.requests_of_launches(executor, net.batch(64)), [0, 0, 0])

    def test_launches_of_convolutions_and_norms_request_nothing(self):
        x, labels = ad.Variable("x"), ad.Variable("labels", dtype=np.int64)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * 6 * 6, 4),
        )  # fmt: skip
        loss = ad.softmax_cross_entropy(model(x), labels)
        train = optim.Adam(0.01, clip_norm=1.0).minimize(loss, model.parameters())
        executor = ad.Executor([loss, train], self.ctx)
        feeds = {x: np.ones((4, 3, 8, 8), FLOAT32), labels: np.arange(4)}
        self.assertEqual(self.requests_of_launches(executor, feeds), [0, 0, 0])

    def test_the_arena_holds_it(self):
        x = ad.Variable("x")
        executor = ad.Executor([ad.sum_op(x * 2)], self.ctx)
        plan = executor.plan({x: (LONG,)})
        (workspace,) = (value for step in plan.steps for value in step.workspace)
        self.assertEqual(workspace.buffer.kind, "arena")
        wanted = load().workspace("cuda", "reduce_sum", Spec((LONG,), FLOAT32), 1, 1.0,
                                  Spec((), FLOAT32))  # fmt: skip
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
        library, on = load(), stream(self.ctx)
        kernel = library.index["cuda", "reduce_sum"]
        nbytes = library.workspace("cuda", "reduce_sum", x, 1, 1.0, y)
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
