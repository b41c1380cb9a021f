"""Running graphs: feeds, fetches, plans by shape, memory and threads."""

from __future__ import annotations

import sys
import threading
import tracemalloc
import unittest
import warnings
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import GraphError
from dlsys.executor.run.tables import Segment
from dlsys.runtime.device import Context, cpu, gpu, memory_stats
from support import sample
from support.devices import require
from support.graphs import Training, double_op, evaluate, on_host


class Seen(ad.Op):
    """Its input, whose address it notes."""

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        x = input_vals[0]
        node.attrs["seen"].append(x.ctypes.data if use_numpy else x.data_address)
        output_val[:] = x


def lines_of(call):
    """How many lines of the package a call runs."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "dlsys" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Runs:
    """What holds on every device."""

    ctx: Context | None

    def setUp(self):
        self.x = ad.Variable("x")
        self.host = np.array([[1, -2, 3], [4, 5, -6]], np.float32)

    def run_once(self, fetches, feeds):
        return evaluate(fetches, feeds, self.ctx)

    # ---- feeds ----
    def test_feeds_find_their_variables_in_any_order(self):
        late, early = ad.Variable("late"), ad.Variable("early")
        unused_by_the_plan = ad.Variable("shape only")
        y = ad.zeroslike_op(unused_by_the_plan) + early - 2 * late
        host = np.ones(3, np.float32)
        feeds = {late: host, unused_by_the_plan: host * 50, early: host * 7}
        for ordered in (feeds, dict(reversed(feeds.items()))):
            np.testing.assert_array_equal(self.run_once([y], ordered)[0], [5, 5, 5])

    def test_forms_of_feeds(self):
        x, host = self.x, self.host
        wide = np.zeros((4, 6), np.float32)
        wide[::2, ::2] = host
        frozen = host.copy()
        frozen.flags.writeable = False
        raw = bytes(1) + host.tobytes()
        forms = {
            "strided": wide[::2, ::2],
            "reversed": host[::-1, ::-1].copy()[::-1, ::-1],
            "Fortran order": np.asfortranarray(host),
            "read-only": frozen,
            "unaligned": np.frombuffer(raw, np.float32, 6, 1).reshape(2, 3),
            "big-endian": host.astype(">f4"),
            "broadcast": np.broadcast_to(host[0], (2, 3)),
            "nested list": host.tolist(),
            "array of another device": ndarray.array(host) if _native_cpu() else host,
        }
        for name, fed in forms.items():
            wanted = np.array(fed if name != "array of another device" else host, np.float64)
            with self.subTest(form=name):
                for y, expected in ((x * 2, wanted * 2), (ad.exp_op(x), np.exp(wanted))):
                    value = self.run_once([y], {x: fed})[0]
                    self.assertTrue(value.dtype.isnative)
                    np.testing.assert_allclose(value, expected, rtol=1e-6)

    def test_unaligned_feeds_are_copied(self):
        seen = []
        x = ad.Variable("x")
        y = Seen()(x, seen=seen)
        raw = np.zeros(25, np.uint8)
        raw[1:] = np.frombuffer(self.host.tobytes(), np.uint8)
        records = np.zeros(6, np.dtype([("byte", "u1"), ("value", "f4")]))
        records["value"] = self.host.ravel()
        shared = [raw[1:].view(np.float32), np.frombuffer(raw.data, np.float32, 6, 1)]
        if _native_cpu():
            shared.append(ndarray.from_dlpack(shared[0]))
        for fed in (*shared, records["value"]):
            value = self.run_once([y], {x: fed})[0]
            np.testing.assert_array_equal(value, self.host.ravel())
        self.assertEqual({address % 4 for address in seen}, {0})

    def test_a_feed_is_not_changed(self):
        host = self.host.copy()
        y = ad.relu_op(ad.exp_op(self.x * 2) + self.x)
        self.run_once([y, self.x + 1], {self.x: host})
        np.testing.assert_array_equal(host, self.host)

    def test_numbers(self):
        for fed in (3, 3.0, np.float32(3), np.float64(3), np.array(3.0)):
            value = self.run_once([self.x * 2], {self.x: fed})[0]
            self.assertEqual((value.shape, float(value)), ((), 6.0))

    def test_empty_arrays(self):
        x = self.x
        fetches = [
            x * 2,
            ad.sum_op(x),
            ad.sum_op(x, axis=0),
            ad.softmax_op(x),
            ad.transpose_op(x),
            ad.matmul_op(x, x, trans_A=True),
        ]
        with np.errstate(all="raise"):
            values = self.run_once(fetches, {x: np.zeros((0, 3), np.float32)})
        shapes = [value.shape for value in values]
        self.assertEqual(shapes, [(0, 3), (), (3,), (0, 3), (3, 0), (3, 3)])
        np.testing.assert_array_equal(values[2], np.zeros(3))
        np.testing.assert_array_equal(values[5], np.zeros((3, 3)))
        value = self.run_once([ad.matmul_op(x, x, trans_B=True)], {x: np.zeros((2, 0))})[0]
        np.testing.assert_array_equal(value, np.zeros((2, 2)))

    def test_nan_flows_through(self):
        x = self.x
        host = np.array([np.nan, -1, np.inf, 2], np.float32)
        values = self.run_once([ad.relu_op(x), x + 1, ad.sum_op(x)], {x: host})
        np.testing.assert_array_equal(values[0], [np.nan, 0, np.inf, 2])
        np.testing.assert_array_equal(values[1], host + 1)
        self.assertTrue(np.isnan(values[2]))

    # ---- fetches ----
    def test_the_work_is_proportional_to_feeds_and_fetches(self):
        def run(count):
            feeds = {ad.Variable(f"x{k}"): self.host for k in range(count)}
            fetches = [y for x in feeds for y in (x + 1, ad.reshape_op(x * 2, (6,)))]
            return lines_of(lambda: ad.Executor(fetches, self.ctx).run(feeds))

        run(1)
        few, many = run(100), run(200)
        self.assertLess(many, 2.2 * few)

    def test_results_are_fresh_writable_and_unaliased(self):
        x, host = self.x, self.host.copy()
        p = ad.Parameter(host[0].copy(), "p")
        update = ad.assign_op(p, p * 2)
        y = ad.exp_op(x)
        c = ad.constant(host)
        fetches = [
            x,
            x,
            p,
            p,
            ad.reshape_op(x, (6,)),
            ad.reshape_op(p, (3, 1)),
            update,
            ad.reshape_op(update, (1, 3)),
            y,
            y,
            ad.reshape_op(y, (3, 2)),
            c,
            ad.reshape_op(c, (-1,)),
            ad.reshape_op(ad.relu_gradient_op(x, x * 2 + 1), (-1,)),
        ]
        executor = ad.Executor(fetches, self.ctx)
        first = executor.run({x: host})
        kept = [on_host(value).copy() for value in first]
        old, e = host[0], np.exp(host)
        dx = np.where(host > 0, 2 * host + 1, 0).ravel()
        new = old * 2
        wanted = [host, host, old, old, host.ravel(), old[:, None], new, new[None]]
        wanted += [e, e, e.reshape(3, 2), host, host.ravel(), dx]
        for value, expected in zip(kept, wanted, strict=True):
            self.assertEqual(value.shape, expected.shape)
            np.testing.assert_allclose(value, expected, rtol=1e-6)
        for number, value in enumerate(first):
            value[:] = number
        for number, value in enumerate(first):
            self.assertTrue((on_host(value) == number).all())
        np.testing.assert_array_equal(host, self.host)
        np.testing.assert_array_equal(p.asnumpy(), new)
        second = executor.run({x: host})
        np.testing.assert_array_equal(on_host(second[11]), self.host)
        np.testing.assert_array_equal(on_host(second[6]), new * 2)
        for number, value in enumerate(first):
            self.assertTrue((on_host(value) == number).all(), fetches[number])

    def test_results_of_several_runs_keep_their_values(self):
        executor = ad.Executor([self.x * 2, ad.sum_op(self.x)], self.ctx)
        held = [executor.run({self.x: np.full((2, 3), k, np.float32)}) for k in range(5)]
        for k, (doubled, total) in enumerate(held):
            np.testing.assert_array_equal(on_host(doubled), np.full((2, 3), 2 * k))
            self.assertEqual(float(total), 6 * k)

    def test_a_result_can_be_fed(self):
        executor = ad.Executor([self.x * 2], self.ctx)
        value = self.host
        for _ in range(4):
            (value,) = executor.run({self.x: value})
        np.testing.assert_array_equal(on_host(value), self.host * 16)

    def test_a_group_has_no_value_and_no_fetches_no_results(self):
        p = ad.Parameter(np.float32([1]), "p")
        executor = ad.Executor([ad.group_op(ad.assign_op(p, p + 1)), self.x], self.ctx)
        group, value = executor.run({self.x: self.host})
        self.assertIsNone(group)
        np.testing.assert_array_equal(on_host(value), self.host)
        self.assertEqual(self.run_once([], {}), [])

    def test_nothing_fed_at_all(self):
        p = ad.Parameter(np.float32([1, 2]))
        np.testing.assert_array_equal(ad.Executor([p + 1], self.ctx).run(None, True)[0], [2, 3])

    def test_converted_results_are_numpy(self):
        value = self.run_once([self.x + 1], {self.x: self.host})[0]
        self.assertIs(type(value), np.ndarray)
        self.assertTrue(value.flags.writeable and value.flags.c_contiguous)

    # ---- plans ----
    def test_batches_of_any_size_share_one_executor(self):
        net = Training((6, 5, 4))
        executor = ad.Executor([net.loss], self.ctx)
        alone = Training((6, 5, 4))
        for rows in (3, 17, 1, 3, 40, 17, 2):
            value = on_host(executor.run(net.batch(rows))[0])
            wanted = evaluate([alone.loss], alone.batch(rows))[0]
            np.testing.assert_allclose(value, wanted, rtol=1e-5)

    def test_old_plans_follow_an_arena_that_grows(self):
        y = ad.sum_op(ad.exp_op(self.x) * 2 + ad.exp_op(-self.x), axis=0)
        executor = ad.Executor([y], self.ctx)
        for rows in (2, 500, 2, 5000, 500, 2):
            value = executor.run({self.x: np.zeros((rows, 3), np.float32)}, True)[0]
            np.testing.assert_array_equal(value, np.full(3, 3 * rows))

    def test_more_shapes_than_an_executor_remembers(self):
        executor = ad.Executor([ad.sum_op(ad.exp_op(self.x) + 1)], self.ctx)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for count, rows in enumerate((*range(1, 80), 1, 2, 79), 1):
                value = executor.run({self.x: np.zeros(rows, np.float32)})[0]
                self.assertEqual(float(value), 2 * rows)
                self.assertEqual(len(told), int(count > 64))
        (warning,) = told  # once, and at the line that runs
        self.assertIn("more than 64 sets of shapes", str(warning.message))
        self.assertEqual(warning.filename, __file__)

    def test_plan_without_running(self):
        net = Training((6, 5, 4))
        executor = ad.Executor([net.loss, net.train], self.ctx)
        before = net.values()
        plan = executor.plan(net.shapes(9))
        self.assertGreater(plan.arena_nbytes, 0)
        for value, wanted in zip(net.values(), before, strict=True):
            np.testing.assert_array_equal(value, wanted)
        with self.assertRaisesRegex(GraphError, "missing: labels"):
            executor.plan({net.x: (9, 6)})

    # ---- Python operators among native ones ----
    def test_a_python_operator_in_the_middle(self):
        x = self.x
        y = ad.sum_op(double_op(ad.exp_op(x)) * x)
        (dx,) = ad.gradients(y, [x])
        value, dx = self.run_once([y, dx], {x: self.host})
        e = np.exp(self.host)
        np.testing.assert_allclose(value, (2 * e * self.host).sum(), rtol=1e-5)
        np.testing.assert_allclose(dx, 2 * e * (1 + self.host), rtol=1e-5)

    def test_python_operators_on_feeds_states_fetches_and_constants(self):
        p = ad.Parameter(np.float32([[3], [0]]), "p")
        c = ad.constant(self.host)
        zero = ad.Variable("zero")
        fetches = [double_op(node) for node in (self.x, p, c, zero, ad.reshape_op(self.x, (6,)))]
        feeds = {self.x: self.host, zero: np.zeros((), np.float32)}
        wanted = [self.host, p.asnumpy(), self.host, np.zeros(()), self.host.ravel()]
        for value, expected in zip(self.run_once(fetches, feeds), wanted, strict=True):
            np.testing.assert_array_equal(value, 2 * expected)
        nested = double_op(double_op(double_op(self.x)))
        value = self.run_once([nested], {self.x: self.host})[0]
        np.testing.assert_array_equal(value, 8 * self.host)

    # ---- threads ----
    def test_two_executors_in_two_threads(self):
        results = {}

        def work(seed):
            net = Training((20, 16, 4), seed=seed)
            executor = ad.Executor([net.loss, net.train], self.ctx)
            feeds = net.batch(32)
            results[seed] = [float(executor.run(feeds)[0]) for _ in range(sample.count(30, 10))]

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 1 + 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together = dict(results)
        for seed in (1, 2, 3):
            work(seed)
            self.assertEqual(results[seed], together[seed])

    def test_one_executor_in_two_threads_is_refused(self):
        inside, release = threading.Event(), threading.Event()

        def wait():
            inside.set()
            self.assertTrue(release.wait(10))

        executor = ad.Executor([double_op(self.x, before=wait)], self.ctx)
        results = []
        feeds = {self.x: self.host}
        thread = threading.Thread(target=lambda: results.extend(executor.run(feeds)))
        thread.start()
        self.assertTrue(inside.wait(10))
        with self.assertRaisesRegex(GraphError, "running already"):
            executor.run(feeds)
        release.set()
        thread.join()
        np.testing.assert_array_equal(on_host(results[0]), 2 * self.host)
        np.testing.assert_array_equal(on_host(executor.run(feeds)[0]), 2 * self.host)

    def test_a_run_inside_a_run_is_refused_and_leaves_the_executor_usable(self):
        feeds, inside = {self.x: self.host}, [True]

        def again():
            if inside.pop():
                executor.run(feeds)

        executor = ad.Executor([double_op(self.x, before=again)], self.ctx)
        for call in (executor.run, lambda feeds: executor.run_many(2, feeds), executor.check):
            inside[:] = [False] * 4 + [True]
            with self.assertRaises(GraphError):
                call(feeds)
            with self.assertRaisesRegex(GraphError, "x is not fed"):
                call({})
            np.testing.assert_array_equal(on_host(executor.run(feeds)[0]), 2 * self.host)


def _native_cpu():
    from support.devices import native_contexts

    return cpu(0) in native_contexts()


class NumpyRuns(Runs, unittest.TestCase):
    ctx = None

    def test_results_are_no_views(self):
        values = ad.Executor([self.x, ad.reshape_op(self.x, (6,)), self.x * 2]).run(
            {self.x: self.host}
        )
        for value in values:
            self.assertTrue(value.flags.owndata or value.base.flags.owndata)
            self.assertFalse(np.shares_memory(value, self.host))
            for other in values:
                self.assertTrue(other is value or not np.shares_memory(value, other))

    def test_a_training_run_allocates_next_to_nothing(self):
        net = Training()
        executor = ad.Executor([net.loss, net.train])
        feeds = net.batch(1000)
        for _ in range(2):
            executor.run(feeds)
        arena = executor.plan(net.shapes(1000)).arena_nbytes
        tracemalloc.start()
        try:
            executor.run(feeds)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.assertLessEqual(peak, arena / 10)

    def test_a_run_keeps_no_cycle_of_garbage(self):
        executor = ad.Executor([self.x * 2])
        executor.run({self.x: self.host})
        with mock.patch("gc.disable") as disable:
            executor.run({self.x: self.host})
        disable.assert_not_called()


class NativeRuns(Runs):
    """What holds on native devices besides."""

    ctx: Context

    def test_results_are_arrays_of_the_device(self):
        value = ad.Executor([self.x * 2], self.ctx).run({self.x: self.host})[0]
        self.assertIs(type(value), ndarray.NDArray)
        self.assertEqual((value.ctx, value.dtype), (self.ctx, np.float32))

    def test_feeds_of_every_device(self):
        executor = ad.Executor([self.x * 2, ad.reshape_op(self.x, (3, 2))], self.ctx)
        for fed in (ndarray.array(self.host, cpu(0)), ndarray.array(self.host, self.ctx)):
            doubled, shown = executor.run({self.x: fed}, True)
            np.testing.assert_array_equal(doubled, self.host * 2)
            np.testing.assert_array_equal(shown, self.host.reshape(3, 2))
        wide = ndarray.array(self.host, self.ctx, np.float64)
        np.testing.assert_array_equal(executor.run({self.x: wide}, True)[0], self.host * 2)

    def test_a_feed_that_dies_at_once(self):
        executor = ad.Executor([ad.matmul_op(self.x, self.x, trans_A=True)], self.ctx)
        for k in range(20):
            (value,) = executor.run({self.x: np.full((300, 50), k, np.float64)})
            np.testing.assert_array_equal(value.asnumpy(), np.full((50, 50), 300 * k * k))

    def test_dropped_results_are_used_again_and_held_ones_are_not(self):
        executor = ad.Executor([self.x * 2, ad.sum_op(self.x)], self.ctx)
        feeds = {self.x: self.host}
        held = executor.run(feeds)
        executor.run(feeds)
        before = memory_stats(self.ctx)
        for _ in range(50):
            values = executor.run(feeds)
            del values
        after = memory_stats(self.ctx)
        self.assertEqual(after.device_allocations, before.device_allocations)
        np.testing.assert_array_equal(held[0].asnumpy(), self.host * 2)

    def test_shared_memory_of_a_result_is_held(self):
        executor = ad.Executor([self.x * 2], self.ctx)
        value = executor.run({self.x: self.host})[0]
        shared = ndarray.from_dlpack(value)
        del value
        executor.run({self.x: self.host * 100})
        np.testing.assert_array_equal(shared.asnumpy(), self.host * 2)

    def test_alternating_batches_allocate_nothing_once_seen(self):
        net = Training((20, 16, 4), momentum=0.9)
        step = ad.Executor([net.loss, net.train], self.ctx)
        score = ad.Executor([net.loss], self.ctx)
        runs = [(step, 64), (step, 10), (score, 100), (score, 7)]
        batches = [net.batch(rows) for _, rows in runs]
        for _ in range(2):
            for (executor, _), feeds in zip(runs, batches):
                executor.run(feeds)
        before = memory_stats(self.ctx)
        for _ in range(10):
            for (executor, _), feeds in zip(runs, batches):
                executor.run(feeds)
        after = memory_stats(self.ctx)
        self.assertEqual(after.device_allocations, before.device_allocations)
        self.assertEqual(after.in_use_nbytes, before.in_use_nbytes)

    def test_one_library_call_for_each_native_segment(self):
        x = self.x
        whole = ad.Executor([ad.sum_op(ad.exp_op(x) * 2 + x)], self.ctx)
        split = ad.Executor([ad.sum_op(double_op(ad.exp_op(x)) * 2 + x)], self.ctx)
        for executor, expected in ((whole, 1), (split, 2)):
            with mock.patch.object(Segment, "run", autospec=True, side_effect=Segment.run) as run:
                executor.run({x: self.host})
            self.assertEqual(run.call_count, expected)

    def test_a_training_step_is_one_segment(self):
        net = Training((20, 16, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], self.ctx)
        feeds = net.batch(8)
        with mock.patch.object(Segment, "run", autospec=True, side_effect=Segment.run) as run:
            executor.run(feeds)
        self.assertEqual(run.call_count, 1)

    def test_training_follows_numpy(self):
        native, plain = Training(momentum=0.9), Training(momentum=0.9)
        here = ad.Executor([native.loss, native.train], self.ctx)
        there = ad.Executor([plain.loss, plain.train])
        for k in range(5):
            loss = float(here.run(native.batch(50, seed=k))[0])
            self.assertAlmostEqual(loss, float(there.run(plain.batch(50, seed=k))[0]), places=4)
        for value, wanted in zip(native.values(), plain.values(), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-5)

    def test_same_bits_every_run(self):
        nets = [Training(), Training()]
        for net in nets:
            executor = ad.Executor([net.train], self.ctx)
            for k in range(3):
                executor.run(net.batch(100, seed=k))
        for a, b in zip(nets[0].values(), nets[1].values(), strict=True):
            np.testing.assert_array_equal(a, b)


@require(cpu(0))
class CpuRuns(NativeRuns, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuRuns(NativeRuns, unittest.TestCase):
    ctx = gpu(0)
