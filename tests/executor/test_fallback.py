"""A step whose kernel the target lacks runs its numpy form on the host, and the report says so."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import OutOfRangeError
from dlsys.runtime.target import NUMPY, target_of
from support.devices import on_native_devices, require
from support.fusion import lacking
from support.graphs import Training


class Targets(unittest.TestCase):
    def test_numpy_has_no_kernels_and_no_abilities(self) -> None:
        self.assertIs(target_of(None), NUMPY)
        self.assertFalse(NUMPY.has("matmul") or NUMPY.native or NUMPY.streams or NUMPY.capture)

    @require(ndarray.cpu(0))
    def test_it_has_the_kernels_of_its_column(self) -> None:
        target = target_of(ndarray.cpu(0))
        self.assertIs(target, target_of(ndarray.cpu(1)))
        self.assertTrue(target.has("matmul"))
        self.assertFalse(target.has("no such kernel") or target.has(None))

    def test_a_target_is_constant(self) -> None:
        with self.assertRaises(AttributeError):
            NUMPY.native = True  # type: ignore[misc]


class Fallback:
    ctx: Any = None

    def trained(self, lacks: Callable[[str], bool]) -> tuple[list[np.ndarray], ad.Executor]:
        """The loss and the Parameters after five steps with momentum."""
        net = Training((20, 16, 12, 4), momentum=0.9)
        executor = lacking(ad.Executor([net.loss, net.train], self.ctx), lacks)
        for k in range(5):
            (loss, _) = executor.run(net.batch(8, seed=k), convert_to_numpy_ret_vals=True)
        return [loss, *net.values()], executor

    def test_training_without_some_kernels_and_without_any(self) -> None:
        wanted, whole = self.trained(lambda name: False)
        self.assertNotIn("falls back", str(whole.report()))
        kernels = {step.node.op.kernel for step in self.plan(whole).steps}
        some = sorted(kernels)[::2]
        for lacks in (lambda name: name in some, lambda name: True):
            got, executor = self.trained(lacks)
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # other orders of sums
            (plan,) = executor.report().plans
            fallen = [segment for segment in plan.segments if segment.kind == "numpy"]
            steps = [s.node.op.kernel for s in self.plan(executor).steps]
            self.assertEqual(len(fallen), sum(map(lacks, steps)))
            self.assertGreater(len(fallen), 0)
            name = self.plan(executor).steps[0].node.op.name
            self.assertRegex(
                str(executor.report()),
                rf"1 step numpy: {executor.target.name} has no kernel \w+; \w+ falls back to numpy",
                name,
            )

    def plan(self, executor: ad.Executor) -> Any:
        (runner, *_) = executor._runners.values()
        return runner[0].plan

    def test_a_step_between_feeds_views_and_fetches(self) -> None:
        x = ad.Variable("x")
        tail = x[1:]
        value, double = ad.exp_op(tail), ad.exp_op(tail) * 2.0
        executor = lacking(ad.Executor([value, double], self.ctx), lambda name: name == "exp")
        for k in range(3):
            host = np.float32([k, 1, 2, 3])
            got = executor.run({x: host}, convert_to_numpy_ret_vals=True)
            exact = np.exp(host[1:])
            np.testing.assert_allclose(got[0], exact, rtol=1e-6)
            np.testing.assert_allclose(got[1], 2 * exact, rtol=1e-6)

    def test_the_bits_of_random_numbers(self) -> None:
        x = ad.Variable("x")
        dropped, results = ad.dropout_op(x, 0.5), []
        for lacks in (lambda name: False, lambda name: "dropout" in name):
            executor = lacking(ad.Executor([dropped], self.ctx), lacks)
            results.append(executor.run({x: np.ones(1000, np.float32)}, True)[0])
        np.testing.assert_array_equal(results[0], results[1])

    def test_a_failure_rolls_the_updates_back(self) -> None:
        table = ad.Parameter(np.ones((3, 2), np.float32), "table")
        index = ad.Variable("index", dtype=np.int64)
        new = ad.assign_op(table, table + 1.0)
        executor = ad.Executor([ad.gather_op(new, index)], self.ctx)
        lacking(executor, lambda name: name.startswith("gather"))
        executor.run({index: np.int64([2])})
        for _ in range(2):
            with self.assertRaisesRegex(OutOfRangeError, "index 3 at position 0 is out of range"):
                executor.run({index: np.int64([3])})
            np.testing.assert_array_equal(table.asnumpy(), np.full((3, 2), 2.0))

    def test_observed_and_timed_runs(self) -> None:
        x = ad.Variable("x")
        executor = lacking(ad.Executor([ad.exp_op(x) + 1.0], self.ctx), lambda name: name == "exp")
        executor.check({x: np.float32([1, 2])})
        runner = executor._runners[executor._signatures][0]
        fetched, ms = runner.run_timed([np.float32([1, 2])])
        self.assertEqual(len(ms), len(runner.plan.steps))
        np.testing.assert_allclose(fetched[0].asnumpy(), np.exp([1, 2]) + 1, rtol=1e-6)


CpuFallback, GpuFallback = on_native_devices(Fallback)
