"""Transactions: a run that updates Parameters commits or is rolled back."""

from __future__ import annotations

import os
import signal
import sys
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import DlsysError, KernelError
from dlsys.graph.node import Node
from dlsys.ndarray import cpu, gpu
from dlsys.profile import Profile
from dlsys.settings import settings
from support.devices import require


class AndThenOp(ad.Op):
    """Its input, after `act()`."""

    def __call__(self, x: Node, act: Callable[[], None]) -> Node:  # type: ignore[override]
        node = ad.Op.__call__(self)
        node.inputs, node.act, node.name = [x], act, f"AndThen({x.name})"
        return node

    def compute(self, node, input_vals, output_val, use_numpy=True):
        node.act()
        output_val[:] = input_vals[0]

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]


and_then = AndThenOp()


class Failure(Exception):
    """What the operators of these tests raise."""


def fail() -> None:
    raise Failure


def press() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


class Press:
    """A profile function that presses Ctrl-C at the given one of the points at which Python looks
    for it: where a function begins, and behind a call of one in C.
    """

    def __init__(self, point: int) -> None:
        self.left = point

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_return"):
            self.left -= 1
            if self.left == -1:
                signal.raise_signal(signal.SIGINT)


def reached(point: int, run: Callable[[], Any]) -> bool:
    """Whether a run comes to a point; Ctrl-C is pressed there."""
    press = Press(point)
    try:
        sys.setprofile(press)
        run()
    except (KeyboardInterrupt, Failure):
        pass
    finally:
        sys.setprofile(None)
    return press.left < 0


class Transactions:
    """A step that adds 1 to `a`, then acts, then adds 1 to `b`."""

    def setUp(self) -> None:
        self.a = ad.Parameter(np.zeros(3, np.float32), "a")
        self.b = ad.Parameter(np.zeros(3, np.float32), "b")

    def executor(self, act: Callable[[], None]) -> ad.Executor:
        new = ad.assign_op(self.a, self.a + 1)
        return ad.Executor([ad.assign_op(self.b, and_then(new, act))], self.ctx)

    def values(self) -> list[float]:
        return [float(p.asnumpy()[0]) for p in (self.a, self.b)]

    def test_a_failure_after_an_update_rolls_back(self) -> None:
        broken, whole = self.executor(fail), self.executor(lambda: None)
        for k in range(3):  # a GPU captures the second run
            with self.assertRaises(Failure):
                broken.run()
            self.assertEqual(self.values(), [k, k])
            whole.run()
            self.assertEqual(self.values(), [k + 1, k + 1])

    def test_it_takes_back_that_run_alone(self) -> None:
        count = 0

        def fail_at_the_third() -> None:
            nonlocal count
            count += 1
            if count == 3:
                fail()

        with self.assertRaises(Failure):
            self.executor(fail_at_the_third).run_many(5)
        self.assertEqual(self.values(), [2, 2])

    def test_ctrl_c_waits_for_the_end_of_the_run(self) -> None:
        executor = self.executor(press)
        for k in range(3):
            with self.assertRaises(KeyboardInterrupt):
                executor.run_many(4)
            self.assertEqual(self.values(), [k + 1, k + 1])
            self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_ctrl_c_twice_does_not_wait(self) -> None:
        def press_twice() -> None:
            press()
            press()

        with self.assertRaises(KeyboardInterrupt):
            self.executor(press_twice).run()
        self.assertEqual(self.values(), [0, 0])

    def check_ctrl_c_everywhere(self, executor: ad.Executor) -> None:
        """Wherever it is pressed, the run has happened or not, and the next one works."""
        next_one = self.executor(lambda: None)
        point = 0
        for _ in range(3):  # a GPU captures the second run
            reached(-1, executor.run)
        while reached(point, executor.run):
            before, after = self.values()
            self.assertEqual(before, after, f"point {point}")
            self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
            reached(-1, executor.run)
            next_one.run()
            self.assertEqual(*self.values())
            self.assertGreater(self.values()[0], before)
            point += 1
        self.assertGreater(point, 20)

    def test_ctrl_c_anywhere(self) -> None:
        self.check_ctrl_c_everywhere(self.executor(lambda: None))

    def test_ctrl_c_anywhere_in_a_run_that_fails(self) -> None:
        self.check_ctrl_c_everywhere(self.executor(fail))

    def test_ctrl_c_anywhere_in_a_run_without_python(self) -> None:
        updates = [ad.assign_op(p, p + 1) for p in (self.a, self.b)]
        self.check_ctrl_c_everywhere(ad.Executor(updates, self.ctx))

    def test_ctrl_c_anywhere_in_a_profiled_run(self) -> None:
        updates = [ad.assign_op(p, p + 1) for p in (self.a, self.b)]
        executor = ad.Executor(updates, self.ctx)
        executor.recorder = Profile()
        self.check_ctrl_c_everywhere(executor)

    def test_ctrl_c_anywhere_in_a_debugged_run(self) -> None:
        updates = [ad.assign_op(p, p + 1) for p in (self.a, self.b)]
        with mock.patch.object(settings, "debug_nan", True):
            self.check_ctrl_c_everywhere(ad.Executor(updates, self.ctx))

    def test_what_debugging_refuses_after_an_update(self) -> None:
        x = ad.Variable("x")
        new = ad.assign_op(self.a, self.a + x)
        executor = ad.Executor([ad.assign_op(self.b, ad.log_op(new))], self.ctx)
        with mock.patch.object(settings, "debug_nan", True):
            executor.run({x: np.ones(3, np.float32)})
            for _ in range(2):
                with self.assertRaisesRegex(KernelError, "first node that made NaN"):
                    executor.run({x: np.full(3, -2, np.float32)})
                self.assertEqual(self.values(), [1, 0])


class FailsAtOnce(Transactions):
    """Kernels that report a failure when they return."""

    def test_a_value_out_of_range_after_an_update(self) -> None:
        row, new = ad.Parameter(np.int64([1]), "row"), ad.Variable("new", dtype=np.int64)
        table = ad.Parameter(np.zeros((3, 2), np.float32), "table")
        executor = ad.Executor([ad.gather_op(table, ad.assign_op(row, new))], self.ctx)
        executor.run({new: np.int64([2])})
        for _ in range(2):
            with self.assertRaisesRegex(DlsysError, "index 3 at position 0 is out of range"):
                executor.run({new: np.int64([3])})
            np.testing.assert_array_equal(row.asnumpy(), [2])


class NumpyTransactions(FailsAtOnce, unittest.TestCase):
    ctx = None


@require(cpu(0))
class CpuTransactions(FailsAtOnce, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuTransactions(Transactions, unittest.TestCase):
    ctx = gpu(0)
