"""Parameters: what a run reads and writes, in which order, and on which device."""

from __future__ import annotations

import gc
import unittest
import weakref

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.errors import GraphError, ShapeError
from dlsys.runtime.device import Context
from support.devices import on_native_devices
from support.graphs import Training, evaluate, here


class State:
    """State on one device."""

    ctx: Context | None

    def parameter(self, values, name="p"):
        return ad.Parameter(np.array(values, np.float32), name)

    def run_once(self, fetches, feeds=None):
        return evaluate(fetches, feeds, self.ctx)

    def check(self, parameter, wanted):
        np.testing.assert_allclose(parameter.asnumpy(), wanted, rtol=1e-6)

    # ---- reads and writes of one run ----
    def test_a_swap(self):
        p, q = self.parameter([1, 2]), self.parameter([3, 4], "q")
        group = ad.group_op(ad.assign_op(p, q), ad.assign_op(q, p))
        executor = ad.Executor([group], self.ctx)
        executor.run()
        self.check(p, [3, 4])
        self.check(q, [1, 2])
        executor.run()
        self.check(p, [1, 2])
        self.check(q, [3, 4])

    def test_a_rotation_of_three(self):
        p, q, r = (self.parameter([k], f"p{k}") for k in range(3))
        updates = [ad.assign_op(p, q), ad.assign_op(q, r), ad.assign_op(r, p)]
        values = self.run_once([p, q, r, *updates])
        np.testing.assert_array_equal(np.ravel(values), [0, 1, 2, 1, 2, 0])
        for parameter, wanted in ((p, 1), (q, 2), (r, 0)):
            self.check(parameter, [wanted])

    def test_old_and_new_value_in_one_run(self):
        p = self.parameter([1, 2])
        new = ad.assign_op(p, p + 1)
        values = self.run_once([p, new, p * 10, new * 10, p * new, new - p, ad.sum_op(p)])
        wanted = [[1, 2], [2, 3], [10, 20], [20, 30], [2, 6], [1, 1], 3]
        for value, expected in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(value, expected)
        self.check(p, [2, 3])

    def test_order_of_fetches_does_not_matter(self):
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            p = self.parameter([5])
            fetches = [ad.assign_op(p, p * 2), p, ad.exp_op(p * 0) + p]
            values = self.run_once([fetches[k] for k in order])
            wanted = [10, 5, 6]
            np.testing.assert_array_equal(np.ravel(values), [wanted[k] for k in order])

    def test_chained_updates(self):
        p, q = self.parameter([1]), self.parameter([10], "q")
        first = ad.assign_op(p, q + 1)
        second = ad.assign_op(q, first + p)  # the new p and the old p
        values = self.run_once([second, q])
        np.testing.assert_array_equal(np.ravel(values), [12, 10])
        self.check(p, [11])
        self.check(q, [12])

    def test_views_of_state(self):
        p = self.parameter([[1, 2], [3, 4]])
        transposed = ad.assign_op(p, ad.transpose_op(p))
        flat = ad.reshape_op(p, (4,))
        values = self.run_once([flat, transposed, ad.reshape_op(transposed, (4,)), flat * 2])
        np.testing.assert_array_equal(values[0], [1, 2, 3, 4])
        np.testing.assert_array_equal(values[1], [[1, 3], [2, 4]])
        np.testing.assert_array_equal(values[2], [1, 3, 2, 4])
        np.testing.assert_array_equal(values[3], [2, 4, 6, 8])

    def test_assigning_itself_or_a_view_of_itself(self):
        p = self.parameter([[1, 2]])
        view = ad.reshape_op(ad.reshape_op(p, (2,)), (1, 2))
        self.run_once([ad.group_op(ad.assign_op(p, view))])
        self.check(p, [[1, 2]])

    def test_assign_from_a_feed(self):
        p, x = self.parameter([1, 2]), ad.Variable("x")
        executor = ad.Executor([ad.group_op(ad.assign_op(p, x))], self.ctx)
        host = np.array([7, 8], np.float32)
        executor.run({x: host})
        host[:] = 0
        self.check(p, [7, 8])

    def test_two_updates_of_one_parameter_name_both_lines(self):
        p = self.parameter([1])
        first, line = ad.assign_op(p, p + 1), here()
        second, other = ad.assign_op(p, p + 2), here()
        with self.assertRaises(GraphError) as caught:
            self.run_once([first, second])
        for part in ("p is updated twice", line, other):
            self.assertIn(part, str(caught.exception))
        self.check(p, [1])
        self.run_once([first])
        self.check(p, [2])

    def test_only_parameters_are_written(self):
        x = ad.Variable("x", shape=(1,), dtype=np.float32)
        for target in (x, ad.constant([1.0]), x * 2):
            with self.assertRaisesRegex(GraphError, "is no Parameter"):
                ad.assign_op(target, x)

    # ---- updates of optimizers ----
    def test_momentum_follows_a_loop_in_float64(self):
        rng = np.random.default_rng(0)
        start = rng.standard_normal((3, 4)).astype(np.float32)
        w, x = ad.Parameter(start, "w"), ad.Variable("x")
        loss = ad.sum_op(w * w * x)
        sgd = optim.SGD(lr=0.05, momentum=0.9)
        executor = ad.Executor([loss, sgd.minimize(loss, [w])], self.ctx)
        value, velocity = start.astype(np.float64), np.zeros((3, 4))
        for _ in range(10):
            fed = rng.random((3, 4), np.float32)
            got = float(executor.run({x: fed})[0])
            np.testing.assert_allclose(got, (value * value * fed).sum(), rtol=1e-5)
            velocity = 0.9 * velocity + 2 * value * fed
            value = value - 0.05 * velocity
        np.testing.assert_allclose(w.asnumpy(), value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sgd.velocity[w].asnumpy(), velocity, rtol=1e-5, atol=1e-6)

    def test_every_loss_is_that_of_the_weights_before_the_step(self):
        w = self.parameter([1])
        loss = ad.sum_op(w * w)
        executor = ad.Executor([optim.SGD(lr=0.25).minimize(loss, [w]), loss, w], self.ctx)
        for before in (1, 0.5, 0.25):
            _, value, fetched = executor.run(convert_to_numpy_ret_vals=True)
            np.testing.assert_array_equal([value, fetched[0]], [before**2, before])

    def test_the_rate_takes_effect_everywhere_at_once(self):
        w = self.parameter([1])
        loss = ad.sum_op(w * 1)
        sgd = optim.SGD(lr=0.5)
        train = sgd.minimize(loss, [w])
        executors = [ad.Executor([train], self.ctx) for _ in range(2)]
        executors[0].run()
        self.check(w, [0.5])
        sgd.lr.set(0.25)
        for executor in executors:
            executor.run()
        self.check(w, [0])
        sgd.lr.set(np.float64(2))
        executors[1].run()
        self.check(w, [-2])

    def test_a_rate_that_the_same_run_changes_is_the_old_one(self):
        w = self.parameter([1])
        sgd = optim.SGD(lr=0.5)
        decay = ad.assign_op(sgd.lr, sgd.lr * 0.5)
        executor = ad.Executor([sgd.minimize(ad.sum_op(w * 1), [w]), ad.group_op(decay)], self.ctx)
        executor.run()
        self.check(w, [0.5])
        self.check(sgd.lr, 0.25)
        executor.run()
        self.check(w, [0.25])

    def test_an_update_that_reads_the_state_it_writes(self):
        p, v = self.parameter([1, 2]), self.parameter([1, 1], "v")
        lr = self.parameter(1, "lr")
        update = ad.sgd_momentum_update_op(p, v, v, lr, momentum=0.5)
        self.run_once([ad.group_op(update)])
        self.check(v, [1.5, 1.5])
        self.check(p, [-0.5, 0.5])
        self.run_once([ad.group_op(ad.sgd_update_op(p, p, lr))])
        self.check(p, [0, 0])

    def test_large_parameters_are_updated_to_the_last_element(self):
        start = np.arange(50_001, dtype=np.float32)
        p, g = ad.Parameter(start, "p"), ad.Variable("g")
        sgd = ad.sgd_update_op(p, g, self.parameter(0.5, "lr"))
        self.run_once([ad.group_op(sgd)], {g: np.ones(50_001, np.float32)})
        np.testing.assert_array_equal(p.asnumpy(), start - 0.5)

    # ---- sharing ----
    def test_executors_share_parameters_and_evaluation_changes_nothing(self):
        net = Training((6, 5, 4))
        step = ad.Executor([net.loss, net.train], self.ctx)
        score = ad.Executor([net.loss], self.ctx)
        feeds = net.batch(16)
        first = float(score.run(feeds)[0])
        before = net.values()
        for _ in range(3):
            self.assertEqual(float(score.run(feeds)[0]), first)
        for value, wanted in zip(net.values(), before, strict=True):
            np.testing.assert_array_equal(value, wanted)
        for _ in range(20):
            loss = float(step.run(feeds)[0])
        self.assertLess(loss, first)
        after = float(score.run(feeds)[0])
        self.assertLess(after, loss)
        # a native training graph sums the loss in another kernel: 1.2e-7 apart, one unit
        apart = 4 * np.spacing(np.float32(after)) if self.ctx else 0
        self.assertAlmostEqual(float(step.run(feeds)[0]), after, delta=apart)

    def test_two_training_graphs_use_one_state(self):
        w = self.parameter([8])
        loss = ad.sum_op(w * w)
        sgd = optim.SGD(lr=0.25, momentum=0.5)
        a, b = (ad.Executor([sgd.minimize(loss, [w])], self.ctx) for _ in range(2))
        a.run()
        self.check(w, [4])
        b.run()  # velocity 0.5 * 16 + 8 = 16
        self.check(w, [0])

    def test_a_new_executor_finds_state_that_others_placed(self):
        p, q = self.parameter([1]), self.parameter([2], "q")
        self.run_once([ad.group_op(ad.assign_op(p, p + 1))])
        np.testing.assert_array_equal(self.run_once([p + q])[0], [4])

    def test_what_nobody_holds_is_freed_at_once(self):
        gc.collect()
        gc.disable()
        try:
            net = Training((6, 5, 4), momentum=0.9)
            executor = ad.Executor([net.loss, net.train], self.ctx)
            executor.run(net.batch(3))
            held = [weakref.ref(p) for p in net.parameters] + [weakref.ref(executor)]
            del net, executor
            self.assertEqual([reference() for reference in held], [None] * len(held))
        finally:
            gc.enable()

    # ---- reading, writing, moving ----
    def test_set_and_asnumpy(self):
        p = self.parameter([1, 2])
        executor = ad.Executor([p * 2], self.ctx)
        for value in ([3, 4], np.array([5.5, 6.5]), np.float32([7, 8])[::-1], [True, False]):
            p.set(value)
            self.check(p, value)
            np.testing.assert_allclose(executor.run(None, True)[0], 2 * np.asarray(value))
        copy = p.asnumpy()
        copy[:] = 99
        self.check(p, [1, 0])

    def test_set_refuses_what_does_not_fit(self):
        p = self.parameter([1, 2])
        for placed in (False, True):
            if placed:
                self.run_once([p])
            with self.assertRaisesRegex(
                ShapeError, r"Parameter p: set\(\) got .*\(3,\), expected .*\(2,\)"
            ):
                p.set([1, 2, 3])
            for value in (5, [["a", "b"]], ["a", "b"], [1j, 2]):
                with self.assertRaises(ShapeError):
                    p.set(value)
            self.check(p, [1, 2])

    def test_the_array_given_at_first_is_copied(self):
        host = np.ones(3, np.float32)
        p = ad.Parameter(host)
        host[:] = 5
        self.check(p, [1, 1, 1])
        self.run_once([p])
        host[:] = 6
        self.check(p, [1, 1, 1])

    def test_empty_and_scalar_parameters(self):
        empty = ad.Parameter(np.zeros((0, 3), np.float32), "empty")
        scalar = ad.Parameter(2.5, "scalar")
        values = self.run_once([empty * 2, ad.assign_op(scalar, scalar * 2), ad.sum_op(empty)])
        self.assertEqual([value.shape for value in values], [(0, 3), (), ()])
        self.check(scalar, 5)

    def test_a_parameter_that_cannot_be_fed(self):
        p = self.parameter([1])
        with self.assertRaisesRegex(GraphError, r"p is a Parameter and cannot be fed; use p.set"):
            self.run_once([p], {p: [2.0]})

    def test_values_survive_a_move_and_back(self):
        net = Training((6, 5, 4), momentum=0.9)
        other = None if self.ctx is not None else _a_native_device()
        if self.ctx is None and other is None:
            self.skipTest("no native device")
        feeds = net.batch(8)
        ad.Executor([net.train], self.ctx).run(feeds)
        state = net.parameters + list(net.optimizer.velocity.values()) + [net.optimizer.lr]
        before = [p.asnumpy() for p in state]
        for ctx in (other, self.ctx):
            for p in state:
                p.to(ctx)
            for p, wanted in zip(state, before, strict=True):
                np.testing.assert_array_equal(p.asnumpy(), wanted)
        there = ad.Executor([net.loss, net.train], self.ctx)
        there.run(feeds)
        self.assertTrue((net.values()[0] != before[0]).any())


def _a_native_device() -> Context | None:
    from support.devices import native_contexts

    return next(iter(native_contexts()), None)


class NumpyState(State, unittest.TestCase):
    ctx = None

    def test_integer_parameters(self):
        p = ad.Parameter(np.array([1, 2]), "p")
        self.run_once([ad.group_op(ad.assign_op(p, p + 1))])
        self.assertEqual((p.asnumpy().tolist(), p.asnumpy().dtype), ([2, 3], np.int64))

    def test_parameters_of_lists_are_float32(self):
        self.assertEqual(ad.Parameter([1.0, 2.0]).dtype, np.float32)
        self.assertEqual(ad.Parameter(np.ones(2)).dtype, np.float64)

    def test_only_numbers_are_parameters(self):
        for value in ("text", [1j], None):
            with self.assertRaises(ShapeError):
                ad.Parameter(value)


class Moves:
    """Parameters between numpy and one native device."""

    ctx: Context

    def setUp(self):
        self.p = ad.Parameter(np.float32([1, 2]), "p")
        self.here = ad.Executor([self.p * 2, ad.assign_op(self.p, self.p + 1)])
        self.there = ad.Executor([self.p * 2, ad.assign_op(self.p, self.p + 1)], self.ctx)

    def test_another_device_is_refused_with_what_to_do(self):
        self.here.run()
        with self.assertRaises(GraphError) as caught:
            self.there.run()
        self.assertEqual(
            str(caught.exception),
            f"Parameter p lives on numpy and this executor runs on {self.ctx!r}; "
            f"move it with p.to(ndarray.{self.ctx!r}), or all of a model with "
            f"model.to(ndarray.{self.ctx!r})",
        )
        np.testing.assert_array_equal(self.p.asnumpy(), [2, 3])
        np.testing.assert_array_equal(self.here.run()[0], [4, 6])

    def test_the_other_way_round(self):
        self.there.run()
        with self.assertRaisesRegex(GraphError, r"move it with p.to\(None\)"):
            self.here.run()
        np.testing.assert_array_equal(self.there.run(None, True)[0], [4, 6])

    def test_moves_follow_each_other(self):
        expected = np.float32([1, 2])
        for executor, ctx in ((self.here, None), (self.there, self.ctx)) * 2:
            self.p.to(ctx)
            value, new = executor.run(None, True)
            np.testing.assert_array_equal(value, expected * 2)
            np.testing.assert_array_equal(new, expected + 1)
            expected = expected + 1
            other = self.there if executor is self.here else self.here
            with self.assertRaisesRegex(GraphError, "lives on"):
                other.run()

    def test_a_home_chosen_before_the_first_run(self):
        self.p.to(self.ctx)
        with self.assertRaisesRegex(GraphError, "lives on"):
            self.here.run()
        np.testing.assert_array_equal(self.there.run(None, True)[0], [2, 4])

    def test_a_first_run_that_was_refused_places_nothing(self):
        x = ad.Variable("x")
        for first, second in ((self.ctx, None), (None, self.ctx)):
            p = ad.Parameter(np.float32([1, 2]), "p")
            late = ad.Executor([x * p, ad.assign_op(p, p + x)], first)
            with self.assertRaises(ShapeError):
                late.run({x: np.ones(3, np.float32)})
            evaluate([p * 1], ctx=second)
            with self.assertRaisesRegex(GraphError, "lives on"):
                late.run({x: np.ones(2, np.float32)})
            p.to(first)
            np.testing.assert_array_equal(late.run({x: np.ones(2, np.float32)}, True)[0], [1, 2])

    def test_set_on_the_device(self):
        self.there.run()
        self.p.set(np.array([10.0, 20.0]))
        np.testing.assert_array_equal(self.there.run(None, True)[0], [20, 40])
        self.assertEqual(self.p.asnumpy().dtype, np.float32)


CpuState, GpuState = on_native_devices(State)


CpuMoves, GpuMoves = on_native_devices(Moves)
