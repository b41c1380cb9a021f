"""Every error that users meet: its message, and that all goes on as if it had not been.

Errors of data files and of the command line are tested with those.
"""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
import warnings

import numpy as np

from dlsys import autodiff as ad
from dlsys import errors, ndarray, optim
from dlsys.errors import DeviceError, GraphError, OutOfMemoryError, ShapeError
from dlsys.runtime.device import Context, cpu, gpu
from support.devices import on_native_devices, require
from support.graphs import Training, evaluate, here


class Hierarchy(unittest.TestCase):
    def test_errors_are_also_what_python_calls_them(self):
        pairs = [
            (errors.ShapeError, ValueError),
            (errors.GraphError, ValueError),
            (errors.DataError, ValueError),
            (errors.KernelError, RuntimeError),
            (errors.DeviceError, RuntimeError),
            (errors.OutOfMemoryError, MemoryError),
            (errors.OutOfMemoryError, errors.KernelError),
            (errors.DeviceLostError, errors.KernelError),
        ]
        for error, python in pairs:
            self.assertTrue(issubclass(error, python) and issubclass(error, errors.DlsysError))


class GuardOp(ad.Op):
    """x itself, after `node.attrs["before"]` was called."""

    def __call__(self, x, before):
        return super().__call__(x, before=before)

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        node.attrs["before"]()
        output_val[:] = input_vals[0]

    def gradient(self, node, output_grad):
        return [output_grad]


guard_op = GuardOp()


class Refusals:
    """Feeds and graphs that a run refuses, on one device; the same executor works afterwards."""

    ctx: Context | None

    def setUp(self):
        self.x = ad.Variable("x", shape=(None, 3), dtype=np.float32)
        self.y = ad.Variable("y")
        self.w = ad.Parameter(np.ones((3, 2), np.float32), "w")
        self.product = ad.matmul_op(self.x, self.w)
        loss = ad.sum_op(self.product * self.y)
        train = optim.SGD(lr=0.5).minimize(loss, [self.w])
        self.executor = ad.Executor([loss, train], self.ctx)
        self.good = {self.x: np.ones((4, 3), np.float32), self.y: np.ones((4, 2), np.float32)}

    def check(self, error, message, feeds):
        self.executor.run(self.good)
        before = self.w.asnumpy()
        for _ in range(2):
            with self.assertRaisesRegex(error, message):
                self.executor.run(feeds)
        np.testing.assert_array_equal(self.w.asnumpy(), before)
        self.executor.run(self.good)
        np.testing.assert_array_equal(self.w.asnumpy(), before - 0.5 * 4)

    def feeds(self, **changed):
        host = {**self.good}
        for name, value in changed.items():
            host[getattr(self, name)] = value
        return host

    def test_missing(self):
        feeds = self.feeds()
        del feeds[self.y]
        self.check(
            GraphError, r"^y is not fed; .*add it to feed_dict \[test_errors.py:\d+\]$", feeds
        )
        self.check(GraphError, "is not fed", None)

    def test_unknown(self):
        other = ad.Variable("other")
        self.check(GraphError, "^other is not used by this graph", {**self.good, other: 1})
        self.check(GraphError, "is computed, not fed", {**self.good, self.product: 1})
        self.check(GraphError, r"w is a Parameter.*w.set\(array\)", {**self.good, self.w: 1})
        self.check(GraphError, "key 'x', expected a Variable", {**self.good, "x": 1})

    def test_rank_shape_and_dtype(self):
        for shape in ((3,), (4, 1, 3), (), (4, 2)):
            self.check(
                ShapeError,
                r"^x is fed shape \(.*\), expected \(None, 3\) \[test_errors.py:\d+\]$",
                self.feeds(x=np.ones(shape, np.float32)),
            )
        self.check(ShapeError, "^x is fed float64, declared float32", self.feeds(x=np.ones((4, 3))))
        self.check(ShapeError, "^x is fed int64, declared", self.feeds(x=np.ones((4, 3), np.int64)))

    def test_shapes_that_do_not_fit_each_other(self):
        self.check(
            ShapeError,
            r"^mul: shapes do not broadcast: matmul.\d+ \(4, 2\) and y \(3, 2\) \[test_errors.py",
            self.feeds(y=np.ones((3, 2), np.float32)),
        )

    def test_values_that_are_no_numbers(self):
        for value in (None, "text", np.array(["a"]), object(), 1j, {1: 2}, [[1, 2], [3]], self.x):
            with self.subTest(value=value):
                self.check(ShapeError, "^y is fed", self.feeds(y=value))

    def test_fetches_that_are_no_nodes(self):
        for fetch in (3, "loss", None, [self.x], np.ones(2)):
            with self.assertRaisesRegex(GraphError, "Executor: expected nodes to fetch, got"):
                ad.Executor([self.x, fetch], self.ctx)
        for fetches in (self.x, 3, None):
            with self.assertRaisesRegex(GraphError, "Executor: expected"):
                ad.Executor(fetches, self.ctx)

    def test_an_exception_in_a_users_operator(self):
        problems = []

        def before():
            if problems:
                raise problems.pop()

        guarded = guard_op(self.product, before=before)
        loss = ad.sum_op(guarded * self.y)
        sgd = optim.SGD(lr=0.5, momentum=0.5)
        train = sgd.minimize(loss, [self.w])
        late = guard_op(self.x * 2, before=before)
        for fetches in ([train, loss], [loss, train, late], [late, train]):
            executor = ad.Executor(fetches, self.ctx)
            executor.run(self.good)
            velocity = sgd.velocity[self.w]
            for problem in (RuntimeError("mine"), KeyboardInterrupt(), MemoryError()):
                before_run = [self.w.asnumpy(), velocity.asnumpy()]
                problems.append(problem)
                with self.assertRaises(type(problem)) as caught:
                    executor.run(self.good)
                self.assertIs(caught.exception, problem)
                np.testing.assert_array_equal(self.w.asnumpy(), before_run[0])
                np.testing.assert_array_equal(velocity.asnumpy(), before_run[1])
                executor.run(self.good)
                momentum = 0.5 * before_run[1] + 4
                np.testing.assert_allclose(velocity.asnumpy(), momentum)
                np.testing.assert_allclose(self.w.asnumpy(), before_run[0] - 0.5 * momentum)

    def test_shapes_that_a_users_operator_gets_wrong(self):
        for returned in (None, 3, (2.5,), (-1, 2), "ab"):

            class LyingOp(ad.Op):
                value = returned

                def infer_shape(self, node, input_shapes):
                    return self.value

                def compute(self, node, input_vals, output_val, use_numpy=True):
                    output_val[:] = 0

            with self.subTest(returned=returned), self.assertRaisesRegex(ValueError, "lying"):
                evaluate([LyingOp()(self.y)], {self.y: np.ones(2, np.float32)}, self.ctx)

    def test_an_operator_without_a_form_for_the_device(self):
        class BareOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

        with self.assertRaisesRegex(GraphError, "bare"):
            evaluate([BareOp()(self.y)], {self.y: np.ones(2, np.float32)}, self.ctx)

    def test_no_rule_for_shapes(self):
        with self.assertRaisesRegex(GraphError, "empty defines neither infer nor infer_shape"):

            class EmptyOp(ad.Op):
                pass

            evaluate([EmptyOp()(self.y)], {self.y: np.ones(2, np.float32)}, self.ctx)


class NumpyRefusals(Refusals, unittest.TestCase):
    ctx = None


CpuRefusals, GpuRefusals = on_native_devices(Refusals)


RANGE = "is out of range: there are"


class Labels:
    """An index or a class label out of range is one error, wherever it is read."""

    ctx: Context | None

    def test_one_error_for_all_operators(self):
        index = ad.Variable("index", dtype=np.int64)
        x, samples = ad.constant(np.ones((5, 3), np.float32)), ad.constant(np.ones((5, 3), "u1"))
        one = ad.constant(np.float32(1))
        rows = ad.constant(np.ones((2, 3), np.float32))
        for node, op, count in (
            (ad.gather_op(x, index), "gather: index", 5),
            (ad.gather_op(x, index, 1), "gather: index", 3),
            (ad.embedding_op(x, index), "gather: index", 5),
            (ad.one_hot_op(index, 4), "one_hot: index", 4),
            (ad.scatter_add_op(x, index, rows), "scatter_add: index", 5),
            (ad.take_batch_op(samples, index, one, one), "take_batch: index", 5),
            (ad.softmax_cross_entropy(rows, index), "sparse_softmax_cross_entropy: label", 3),
            (ad.negative_log_likelihood(rows, index), "negative_log_likelihood: label", 3),
            (
                ad.gradients(ad.negative_log_likelihood(rows, index), [rows])[0],
                "negative_log_likelihood_gradient: label",
                3,
            ),
        ):
            executor = ad.Executor([node], self.ctx)
            [wanted] = executor.run({index: np.array([0, 2])}, True)
            for bad in (7, -1, -(2**63)):
                message = (
                    rf"^{op} {bad} at position 1 {RANGE} {count}, counted from 0 \[.*test_errors"
                )
                with self.assertRaisesRegex(errors.OutOfRangeError, message):
                    executor.run({index: np.array([0, bad])}, True)
                [after] = executor.run({index: np.array([0, 2])}, True)
                np.testing.assert_array_equal(after, wanted)
        self.assertTrue(issubclass(errors.OutOfRangeError, (ShapeError, IndexError)))

    def test_a_training_step(self):
        x, labels = ad.Variable("x"), ad.Variable("labels", dtype=np.int64)
        w = ad.Parameter(np.zeros((3, 5), np.float32), "w")
        loss = ad.softmax_cross_entropy(ad.matmul_op(x, w), labels)
        sgd = optim.SGD(lr=0.1, momentum=0.9)
        executor = ad.Executor([loss, sgd.minimize(loss, [w])], self.ctx)
        host = np.ones((4, 3), np.float32)
        executor.run({x: host, labels: np.array([0, 4, 1, 2])})
        before = w.asnumpy()
        for bad in (5, -1, 2**40, -(2**63)):
            message = rf"^sparse_softmax_cross_entropy: label {bad} at position 1 {RANGE} 5"
            with self.assertRaisesRegex(errors.OutOfRangeError, message):
                executor.run({x: host, labels: np.array([0, bad, 1, 2])}, True)
            self.check_and_restore(sgd, w, before)
        executor.run({x: host, labels: np.array([0, 4, 1, 2])})
        self.assertTrue(np.isfinite(w.asnumpy()).all() and (w.asnumpy() != before).any())

    def check_and_restore(self, sgd: optim.SGD, w: ad.Parameter, before: np.ndarray) -> None:
        """A step that fails changes no Parameter."""
        np.testing.assert_array_equal(w.asnumpy(), before)


class NumpyLabels(Labels, unittest.TestCase):
    ctx = None


@require(cpu(0))
class CpuLabels(Labels, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuLabels(Labels, unittest.TestCase):
    ctx = gpu(0)

    def check_and_restore(self, sgd: optim.SGD, w: ad.Parameter, before: np.ndarray) -> None:
        """The GPU tells when all of the step is done."""
        self.assertTrue(np.isnan(w.asnumpy()).any())
        w.set(before)
        sgd.velocity[w].set(np.zeros_like(before))


class Construction(unittest.TestCase):
    """Mistakes that are told where they are made."""

    def setUp(self):
        self.a = ad.Variable("a", shape=(2, 3), dtype=np.float32)
        self.b = ad.Variable("b", shape=(4, 5), dtype=np.float32)

    def check(self, message, make):
        with self.assertRaisesRegex(ShapeError, message) as caught:
            make()
        self.assertRegex(str(caught.exception), r"\[test_errors.py:\d+\]$")

    def test_shapes(self):
        a, b = self.a, self.b
        shapes = r"a \(2, 3\) and b \(4, 5\)"
        self.check(f"^add: shapes do not broadcast: {shapes}", lambda: a + b)
        self.check(f"^matmul: inner dimensions differ: {shapes}", lambda: a @ b)
        self.check("^product: expected at least one dimension, got a", lambda: a @ 2.0)
        self.check(
            r"^reshape: a \(2, 3\) has 6 elements and cannot become \(4,",
            lambda: ad.reshape_op(a, (4, 2)),
        )
        self.check("^reshape: a", lambda: ad.reshape_op(a, (-1, 4)))
        self.check("^reshape: a", lambda: ad.reshape_op(a, (-1, -1)))
        self.check("^transpose: axes", lambda: ad.transpose_op(a, (0, 0)))
        self.check("^transpose: axes", lambda: ad.transpose_op(a, (0,)))
        self.check("^sum: axes", lambda: ad.sum_op(a, axis=2))
        self.check("^mean: axes", lambda: ad.mean_op(a, axis=(0, -2)))
        self.check("^broadcast_to: a", lambda: ad.broadcast_to_op(a, (3,)))
        self.check("^softmax: expected", lambda: ad.softmax_op(ad.constant(1.0)))
        self.check("softmax_cross_entropy: logits", lambda: ad.softmax_cross_entropy(a, b))

    def test_extents(self):
        with self.assertRaisesRegex(ShapeError, "full: "):
            ad.full_op((2, -1), 1.0)
        for shape in (3, (2, -1), ("a",)):
            with self.subTest(shape=shape), self.assertRaisesRegex(ShapeError, "Variable"):
                ad.Variable("v", shape=shape)

    def test_updates(self):
        p = ad.Parameter(np.zeros(3, np.float32), "p")
        lr = ad.Parameter(np.zeros(2, np.float32), "lr")
        self.check("^assign: shapes differ", lambda: ad.assign_op(p, lr))
        self.check("^sgd_update: expected", lambda: ad.sgd_update_op(p, p * 2, lr))
        self.check("^sgd_update: expected", lambda: ad.sgd_update_op(p, lr, lr))

    def test_arguments(self):
        with self.assertRaisesRegex(GraphError, "reduction must be mean, sum or none, got 'avg'"):
            ad.softmax_cross_entropy(self.a, self.a, reduction="avg")
        for lr, momentum in ((-1, 0), (float("nan"), 0), (0.1, 1), (0.1, -0.1)):
            with self.assertRaisesRegex(GraphError, "SGD: expected"):
                optim.SGD(lr, momentum)

    def test_axes_of_numpy_integers(self):
        self.assertEqual(ad.sum_op(self.a, axis=np.int64(0)).spec.shape, (3,))
        self.assertEqual(ad.mean_op(self.a, axis=np.array([0, 1])).spec.shape, ())

    def test_the_line_is_the_users_when_shapes_are_known_only_at_run_time(self):
        x, y = ad.Variable("x"), ad.Variable("y")
        z, line = ad.exp_op(x @ y), here()
        with self.assertRaises(ShapeError) as caught:
            evaluate([z], {x: np.ones((2, 3)), y: np.ones((2, 3))})
        self.assertIn(line, str(caught.exception))
        self.assertIn("did you mean", str(caught.exception))


class Devices(unittest.TestCase):
    def test_a_context_of_another_kind(self):
        x = ad.Variable("x")
        for ctx in ("tpu", 0, cpu):
            with self.subTest(ctx=ctx), self.assertRaises((DeviceError, TypeError)) as caught:
                ad.Executor([x], ctx)
            self.assertRegex(str(caught.exception), "ndarray.cpu|context")

    @require(cpu(0))
    def test_no_such_device(self):
        with self.assertRaises(DeviceError) as caught:
            ad.Executor([ad.Variable("x")], cpu(5))
        self.assertIn("5", str(caught.exception))

    def test_no_gpu(self):
        code = (
            "from dlsys import autodiff as ad, ndarray\n"
            "ad.Executor([ad.Variable('x')], ndarray.gpu(0))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": "-1"},
            capture_output=True,
            text=True,
        )
        last = done.stderr.splitlines()[-1]
        self.assertRegex(last, r"^dlsys\.errors\.DeviceError: .*(driver|GPU|library|CUDA)")

    def test_no_library(self):
        code = (
            "import numpy as np\n"
            "from dlsys import autodiff as ad, ndarray\n"
            "x = ad.Variable('x')\n"
            "for ctx in (ndarray.cpu(0), ndarray.gpu(0)):\n"
            "    try:\n"
            "        ad.Executor([x], ctx)\n"
            "    except RuntimeError as error:\n"
            "        print(type(error).__name__, error)\n"
            "print(ad.Executor([x * 2]).run({x: np.ones(2)})[0].tolist())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "DLSYS_LIBRARY": "/nowhere/libdlsys.so"},
            capture_output=True,
            text=True,
            check=True,
        )
        lines = done.stdout.splitlines()
        self.assertEqual(lines[-1], "[2.0, 2.0]")
        self.assertEqual(len(lines), 3)
        for line in lines[:2]:
            self.assertRegex(line, "^DeviceError .*make lib.*ctx=None")


@require(cpu(0))
class Ranks(unittest.TestCase):
    def test_more_dimensions_than_native_arrays_have(self):
        x = ad.Variable("x")
        deep = ad.reshape_op(x, (1,) * 9, name="deep")
        with self.assertRaisesRegex(ValueError, "8 dimensions"):
            evaluate([deep + 1], {x: np.ones(1)}, cpu(0))
        self.assertEqual(evaluate([deep + 1], {x: np.ones(1)})[0].shape, (1,) * 9)


class Memory:
    """Out of memory leaves everything usable."""

    ctx: Context

    def test_an_arena_that_does_not_fit(self):
        x = ad.Variable("x")
        p = ad.Parameter(np.float32([1]), "p")
        y = ad.sum_op(ad.exp_op(ad.broadcast_to_op(ad.reshape_op(x, (-1, 1)), (2**16, 2**30))) * p)
        huge = ad.Executor([y, ad.assign_op(p, p + 1)], self.ctx)
        with self.assertRaises(OutOfMemoryError) as caught:
            huge.run({x: np.ones(2**16, np.float32)})
        self.assertRegex(str(caught.exception), "requested [0-9]+")
        self.assertEqual(p.asnumpy(), [1])
        small = ad.Executor([ad.sum_op(ad.exp_op(x) * p), ad.assign_op(p, p + 1)], self.ctx)
        self.assertEqual(float(small.run({x: np.zeros(5, np.float32)})[0]), 5)
        self.assertEqual(p.asnumpy(), [2])

    def test_the_same_executor_with_a_smaller_batch(self):
        net = Training((4, 3, 2))
        wide = ad.broadcast_to_op(ad.reshape_op(net.loss, (1, 1)), (2**16, 2**30))
        total = ad.sum_op(wide * 2)
        with self.assertRaises(OutOfMemoryError):
            ad.Executor([total, net.train], self.ctx).run(net.batch(3))
        x = ad.Variable("x")
        y = ad.sum_op(ad.exp_op(ad.matmul_op(x, x, trans_A=True)))
        executor = ad.Executor([y], self.ctx)
        small = np.zeros((2, 3), np.float32)
        self.assertEqual(float(executor.run({x: small})[0]), 9)
        with self.assertRaises(OutOfMemoryError):
            executor.run({x: np.zeros((0, 2**24), np.float32)})
        self.assertEqual(float(executor.run({x: small})[0]), 9)

    def test_results_that_do_not_fit(self):
        x = ad.Variable("x")
        executor = ad.Executor(
            [ad.broadcast_to_op(ad.reshape_op(x, (-1, 1)), (4, 2**50))], self.ctx
        )
        with self.assertRaises(OutOfMemoryError):
            executor.run({x: np.ones(4, np.float32)})
        self.assertEqual(ndarray.array(np.ones(3), self.ctx).asnumpy().sum(), 3)


CpuMemory, GpuMemory = on_native_devices(Memory)


class Warnings(unittest.TestCase):
    """numpy's warnings about data are not the caller's business."""

    def test_a_run_is_silent(self):
        x = ad.Variable("x")
        fetches = [ad.log_op(x), x / 0.0, ad.exp_op(x * 1e4), ad.mean_op(ad.reshape_op(x, (-1,)))]
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            evaluate(fetches, {x: np.array([-1.0, 0.0, 1e300])})
            evaluate([ad.mean_op(x), ad.softmax_op(x)], {x: np.zeros((0, 3))})

    def test_building_is_silent(self):
        x = ad.Variable("x")
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            for base in (0, -2.0, 0.0):
                ad.gradients(base**x, [x])
