"""Captured programs: a step is one launch, with the bits of single launches."""

from __future__ import annotations

import itertools
import sys
import threading
import unittest
import warnings
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import GraphError, KernelError, OutOfMemoryError
from dlsys.executor.capture import graph
from dlsys.executor.run import rollback
from dlsys.executor.run.tables import Segment
from dlsys.runtime.device import counters, cpu, gpu, memory_stats, synchronize, trim
from dlsys.settings import settings
from support.devices import require
from support.graphs import Training, double_op


def trained(ctx: Any, steps: int, feeds: Any, capture: bool = True) -> tuple[list, list]:
    """Losses and Parameters after training on `feeds(net, k)`; every loss is held to the end."""
    with mock.patch.object(settings, "capture", capture):
        net = Training((20, 16, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], ctx)
        losses = [executor.run(feeds(net, k))[0] for k in range(steps)]
    return [loss.asnumpy() for loss in losses], net.values()


class Runs:
    """What holds on every device; a GPU replays."""

    ctx: Any

    def test_run_many_is_many_runs(self):
        once, many = Training((20, 16, 4), momentum=0.9), Training((20, 16, 4), momentum=0.9)
        batch = once.batch(8)
        one = ad.Executor([once.loss, once.train], self.ctx)
        several = ad.Executor([many.loss, many.train], self.ctx)
        wanted = [one.run(batch, convert_to_numpy_ret_vals=True)[0] for _ in range(7)]
        fed = dict(zip(many.batch(8), batch.values()))
        runs = 0
        for n in (1, 4, 2):  # a GPU captures the second run: it is one of several here
            value = several.run_many(n, fed, convert_to_numpy_ret_vals=True)[0]
            runs += n
            np.testing.assert_array_equal(value, wanted[runs - 1])
        for a, b in zip(once.values(), many.values(), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_run_many_refuses_nothing_to_do(self):
        net = Training()
        executor = ad.Executor([net.loss], self.ctx)
        with self.assertRaisesRegex(GraphError, "at least 1 run, got 0"):
            executor.run_many(0, net.batch(4))

    def test_run_many_refuses_a_part_of_a_run(self):
        net = Training()
        before = net.values()
        executor = ad.Executor([net.loss, net.train], self.ctx)
        for n in (2.5, np.float64(3), "3", None):
            with self.assertRaisesRegex(GraphError, "at least 1 run, got "):
                executor.run_many(n, net.batch(4))  # type: ignore[arg-type]
        for value, wanted in zip(net.values(), before, strict=True):
            np.testing.assert_array_equal(value, wanted)
        executor.run_many(np.int64(2), net.batch(4))  # type: ignore[arg-type]
        self.assertEqual(executor.report().plans[0].runs, 2)

    def test_report_names_what_breaks_a_step(self):
        x = ad.Variable("x")
        executor = ad.Executor([ad.sum_op(double_op(ad.exp_op(x)) + x)], self.ctx)
        for _ in range(3):
            executor.run({x: np.ones((2, 3), np.float32)})
        (plan,) = executor.report().plans
        self.assertEqual(plan.runs, 3)
        self.assertEqual(plan.feeds, (("x", (2, 3)),))
        if self.ctx is None:
            self.assertEqual([segment.kind for segment in plan.segments], ["numpy"])
        else:
            self.assertEqual([segment.kind for segment in plan.segments][1], "python")
            self.assertIn("double runs Python", plan.segments[1].why)
            self.assertIn("double runs Python", str(executor.report()))


class NumpyRuns(Runs, unittest.TestCase):
    ctx = None


@require(cpu(0))
class CpuRuns(Runs, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuRuns(Runs, unittest.TestCase):
    ctx = gpu(0)

    def on_device(self, feeds: dict) -> dict:
        return {node: ndarray.array(value, self.ctx) for node, value in feeds.items()}

    def test_equal_bits(self):
        plain = trained(self.ctx, 9, lambda net, k: net.batch(8, seed=k), capture=False)
        kinds = {
            "host": lambda net, k: net.batch(8, seed=k),
            "device": lambda net, k: self.on_device(net.batch(8, seed=k)),
            "by turns": lambda net, k: (
                self.on_device(net.batch(8, seed=k)) if k % 3 else net.batch(8, seed=k)
            ),
        }
        for kind, feeds in kinds.items():
            with self.subTest(feeds=kind):
                losses, values = trained(self.ctx, 9, feeds)
                np.testing.assert_array_equal(losses, plain[0])
                for a, b in zip(values, plain[1], strict=True):
                    np.testing.assert_array_equal(a, b)

    def test_one_launch_a_run_from_the_second_on(self):
        net = Training((20, 16, 4))
        executor = ad.Executor([net.loss, net.train], self.ctx)
        feeds = self.on_device(net.batch(8))
        executor.run(feeds)
        executor.run(feeds)
        before, memory = counters(), memory_stats(self.ctx)
        for _ in range(5):
            executor.run(feeds)
        executor.run_many(4, feeds)
        after = counters()
        self.assertEqual(after.program_launches - before.program_launches, 9)
        self.assertEqual(after.kernel_launches, before.kernel_launches)
        self.assertEqual(after.synchronizations, before.synchronizations)
        self.assertEqual(memory_stats(self.ctx).device_allocations, memory.device_allocations)
        (plan,) = executor.report().plans
        self.assertEqual((plan.launches, plan.runs), (1, 11))
        self.assertGreaterEqual(plan.segments[0].kernels, plan.steps)

    def test_a_replay_is_few_calls_of_python(self):
        net = Training((20, 16, 4))
        executor = ad.Executor([net.loss, net.train], self.ctx)
        feeds = self.on_device(net.batch(8))
        for _ in range(3):
            executor.run(feeds)
        calls: list[str] = []

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                calls.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            executor.run(feeds)
        finally:
            sys.setprofile(None)
        self.assertLessEqual(len(calls), 26, calls)  # 5 of them for each feed, 1 for each fetch

    def test_every_mix_of_feeds(self):
        xs = [ad.Variable(f"x{k}") for k in range(3)]
        executor = ad.Executor([xs[0] - 10 * xs[1] + 100 * xs[2]], self.ctx)
        ways = {
            "host": lambda host: host,
            "here": lambda host: ndarray.array(host, self.ctx),
            "on the CPU": lambda host: ndarray.array(host, cpu(0)),
        }
        values = itertools.count(1)
        for _, names in itertools.product(range(2), itertools.product(ways, repeat=len(xs))):
            hosts = [np.full(5, next(values), np.float32) for _ in xs]
            fed = {x: ways[name](host) for x, name, host in zip(xs, names, hosts)}
            with self.subTest(feeds=names):
                (got,) = executor.run(fed, convert_to_numpy_ret_vals=True)
                np.testing.assert_array_equal(got, hosts[0] - 10 * hosts[1] + 100 * hosts[2])

    def test_feeds_of_another_dtype(self):
        x, y = ad.Variable("x"), ad.Variable("y")
        executor = ad.Executor([x - y], self.ctx)
        for k in range(6):
            dtypes = (np.float64, np.float32) if k % 2 else (np.float32, np.int32)
            fed = [ndarray.array([k, 3], self.ctx, dtype) for dtype in dtypes]
            (got,) = executor.run(dict(zip((x, y), fed)), convert_to_numpy_ret_vals=True)
            np.testing.assert_array_equal(got, [0, 0])

    def test_groups_among_the_fetches(self):
        net = Training((20, 16, 4), momentum=0.9)
        fetches = [net.train, net.loss, net.train, net.x * 2, net.train]
        executor = ad.Executor(fetches, self.ctx)
        losses, _ = trained(self.ctx, 4, lambda other, k: other.batch(8, seed=k))
        for k in range(4):
            feeds = net.batch(8, seed=k)
            first, loss, second, doubled, third = executor.run(feeds)
            self.assertEqual([first, second, third], [None] * 3)
            np.testing.assert_array_equal(loss.asnumpy(), losses[k])
            np.testing.assert_array_equal(doubled.asnumpy(), 2 * feeds[net.x])

    def test_python_between_two_graphs(self):
        x = ad.Variable("x")
        executor = ad.Executor([double_op(ad.exp_op(x)) + x, double_op(x)], self.ctx)
        for k in range(4):
            host = np.full((3, 5), k, np.float32)
            fed = ndarray.array(host, self.ctx) if k % 2 else host
            first, second = executor.run({x: fed}, convert_to_numpy_ret_vals=True)
            np.testing.assert_allclose(first, 2 * np.exp(host) + host, rtol=1e-6)
            np.testing.assert_array_equal(second, 2 * host)
        kinds = {segment.kind for segment in executor.report().plans[0].segments}
        self.assertEqual(kinds, {"captured", "python"})

    def test_results_are_not_aliases(self):
        x = ad.Variable("x")
        executor = ad.Executor([x + 1, x * 2], self.ctx)
        held = [executor.run({x: np.full(1000, k, np.float32)}) for k in range(12)]
        for k, (plus, times) in enumerate(held):
            np.testing.assert_array_equal(plus.asnumpy(), np.full(1000, k + 1, np.float32))
            np.testing.assert_array_equal(times.asnumpy(), np.full(1000, 2 * k, np.float32))

    def test_many_feeds_and_odd_addresses(self):
        xs, dtype = [ad.Variable(f"x{k}") for k in range(70)], np.dtype(np.float32)
        executor = ad.Executor([ad.sum_node_list(xs)], self.ctx)
        for turn in range(3):
            whole = ndarray.array(np.arange(70 * 7 + 1, dtype=np.float32) + turn, self.ctx)
            parts = {
                x: ndarray.NDArray.from_block(whole.block, 4 * (7 * k + 1), (7,), dtype)
                for k, x in enumerate(xs)
            }
            total = executor.run(parts, convert_to_numpy_ret_vals=True)[0]
            wanted = (np.arange(1, 70 * 7 + 1, dtype=np.float64) + turn).reshape(70, 7).sum(0)
            np.testing.assert_allclose(total, wanted, rtol=1e-6)

    def test_arena_growth_captures_anew(self):
        net = Training((20, 16, 4))
        executor = ad.Executor([net.loss, net.train], self.ctx)
        reference = Training((20, 16, 4))
        plain = ad.Executor([reference.loss, reference.train])
        for k, rows in enumerate((4, 4, 4, 500, 4, 500, 4, 500)):
            got = float(executor.run(net.batch(rows, seed=k))[0])
            wanted = float(plain.run(reference.batch(rows, seed=k))[0])
            self.assertAlmostEqual(got, wanted, places=4)

    def test_trimming_and_other_work_leave_it_alone(self):
        net = Training((300, 200, 4))  # its products take scratch
        executor = ad.Executor([net.loss, net.train], self.ctx)
        losses = []
        for k in range(6):
            losses.append(float(executor.run(net.batch(64, seed=k))[0]))
            trim(self.ctx)
            noise = [ndarray.array(np.full(1 << 16, 1e30, np.float32), self.ctx) for _ in range(8)]
            del noise
        again = Training((300, 200, 4))
        plain = ad.Executor([again.loss, again.train])
        wanted = [float(plain.run(again.batch(64, seed=k))[0]) for k in range(6)]
        np.testing.assert_allclose(losses, wanted, rtol=1e-3)

    def test_a_moved_parameter_is_followed(self):
        net = Training((20, 16, 4))
        executor = ad.Executor([net.loss], self.ctx)
        feeds = net.batch(8)
        first = [float(executor.run(feeds)[0]) for _ in range(3)]
        for parameter in executor.topo_order:
            if isinstance(parameter, ad.Parameter):
                parameter.to(self.ctx)
                parameter.set(parameter.asnumpy() * 0)
        self.assertAlmostEqual(float(executor.run(feeds)[0]), np.log(4), places=5)
        self.assertAlmostEqual(float(executor.run(feeds)[0]), np.log(4), places=5)
        self.assertNotAlmostEqual(first[-1], np.log(4), places=3)

    def test_runs_of_python_operators_that_fail_are_taken_back(self):
        net, again = Training((20, 16, 4), momentum=0.9), Training((20, 16, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], self.ctx)
        feeds, run = net.batch(8), Segment.run
        executor.run(feeds)

        def fails(segment: Segment, on: int) -> None:
            run(segment, on)
            if any(step.node.op.writes for step in segment.steps):
                raise KernelError("behind the updates")

        plain = mock.patch.object(settings, "capture", False)
        failing = mock.patch.object(Segment, "run", fails)
        none_left = mock.Mock(side_effect=OutOfMemoryError("none for copies"))
        for block in (rollback.Block, none_left):
            before = net.values()
            with plain, failing, mock.patch.object(rollback, "Block", block):
                with self.assertRaisesRegex(KernelError, "behind the updates"):
                    ad.Executor([double_op(net.loss), net.train], self.ctx).run(feeds)
            for value, old in zip(net.values(), before, strict=True):
                np.testing.assert_array_equal(value, old)
        reference = ad.Executor([again.loss, again.train], self.ctx)
        wanted = [reference.run(again.batch(8))[0] for _ in range(2)]
        self.assertEqual(float(executor.run(feeds)[0]), float(wanted[1]))

    def test_a_capture_that_fails_warns_once_and_the_steps_run(self):
        x = ad.Variable("x")
        executor = ad.Executor([ad.exp_op(x)], self.ctx)
        host = np.ones(4, np.float32)
        with mock.patch.object(graph, "capture", side_effect=KernelError("no room")):
            executor.run({x: host})
            with self.assertWarnsRegex(RuntimeWarning, "launched one by one: no room"):
                got = executor.run({x: host}, convert_to_numpy_ret_vals=True)[0]
        np.testing.assert_allclose(got, np.e, rtol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            executor.run({x: host})
        (segment,) = executor.report().plans[0].segments
        self.assertEqual((segment.kind, segment.why), ("native", "no room"))

    def test_two_threads_and_an_executor_each(self):
        wanted = trained(self.ctx, 20, lambda net, k: net.batch(8, seed=k))
        found: dict[int, Any] = {}

        def work(number: int) -> None:
            found[number] = trained(self.ctx, 20, lambda net, k: net.batch(8, seed=k))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(found), 4)
        for losses, _ in found.values():
            np.testing.assert_array_equal(losses, wanted[0])

    def test_one_executor_in_two_threads_by_turns(self):
        net, again = Training((20, 16, 4)), Training((20, 16, 4))
        executor = ad.Executor([net.loss, net.train], self.ctx)
        alone = ad.Executor([again.loss, again.train], self.ctx)
        losses: list[float] = []
        for k in range(8):
            turn = threading.Thread(
                target=lambda k=k: losses.append(executor.run(net.batch(8, seed=k))[0])
            )
            turn.start()
            turn.join()
        wanted = [float(alone.run(again.batch(8, seed=k))[0]) for k in range(8)]
        self.assertEqual([float(loss) for loss in losses], wanted)

    def test_debugging_sees_every_step(self):
        net = Training((20, 16, 4))
        executor = ad.Executor([net.loss, net.train], self.ctx)
        feeds = net.batch(8)
        for _ in range(3):
            executor.run(feeds)
        before = counters()
        executor.check(feeds)
        synchronize(self.ctx)
        self.assertEqual(counters().program_launches, before.program_launches)
        float(executor.run(feeds)[0])
        self.assertEqual(counters().program_launches, before.program_launches + 1)
        with mock.patch.object(settings, "debug_nan", True):
            float(executor.run(feeds)[0])
        self.assertEqual(counters().program_launches, before.program_launches + 1)
        float(executor.run(feeds)[0])
        self.assertEqual(counters().program_launches, before.program_launches + 2)
