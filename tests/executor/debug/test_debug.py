"""DLSYS_DEBUG and DLSYS_DEBUG_ARENA, as the settings that they set."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import unittest
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import KernelError
from dlsys.executor.executor import Executor
from dlsys.runtime.device import Context
from dlsys.settings import Settings, settings
from support.devices import on_native_devices
from support.graphs import Training, here


class Debugging:
    """The ladder on one device."""

    ctx: Context | None

    def setUp(self):
        self.x = ad.Variable("x")
        self.y = ad.sum_op(ad.exp_op(self.x) * 1, name="total")

    def printed(self, executor, feeds, **changes):
        """What a run prints, and what it returns."""
        out = io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(out))
            for name, value in changes.items():
                stack.enter_context(mock.patch.object(settings, name, value))
            values = executor.run(feeds, convert_to_numpy_ret_vals=True)
        return out.getvalue(), values

    def run_at(self, level):
        executor = Executor([self.y], self.ctx)
        host = np.zeros((2, 3), np.float32)
        text, (value,) = self.printed(executor, {self.x: host}, debug=level)
        self.assertEqual(value, 6)
        return text, executor, host

    def test_level_0_is_silent(self):
        self.assertEqual(self.run_at(0)[0], "")

    def test_level_1_prints_each_plan_once(self):
        text, executor, host = self.run_at(1)
        self.assertIn("largest sum of live bytes", text)
        self.assertRegex(text, r"0 +exp +exp\.\d+ \(2, 3\)")
        self.assertRegex(text, r"1 +sum +total \(\)")
        self.assertEqual(self.printed(executor, {self.x: host}, debug=1)[0], "")
        self.assertIn("total", self.printed(executor, {self.x: host[:1]}, debug=1)[0])

    def test_level_2_prints_a_line_a_step_at_every_run(self):
        text, executor, host = self.run_at(2)
        again, _ = self.printed(executor, {self.x: host}, debug=2)
        self.assertIn("largest sum of live bytes", text)
        lines = again.splitlines()
        self.assertEqual(len(lines), 2)
        for line, name in zip(lines, ("exp.", "total")):
            self.assertRegex(
                line,
                rf"^{name}.* +[\d.]+ ms +[\d.]+ GB/s +[\d.]+ GFLOP/s .*\[test_debug\.py:\d+\]$",
            )

    def test_level_3_prints_the_graph_before_and_after_each_pass(self):
        text, *_ = self.run_at(3)
        before, after = text.split("# before simplify")[1].split("# after simplify")
        self.assertIn("mul_const", before)
        self.assertNotIn("mul_const", after)
        for part in (before, after):
            self.assertRegex(part, r"float32 \(2, 3\)")

    def test_nan_names_the_first_node_that_made_one(self):
        x = self.x
        bad, line = ad.log_op(x - 1, name="bad"), here()
        executor = Executor([ad.sum_op(bad * 2)], self.ctx)
        good = {x: np.full(3, 2, np.float32)}
        for fed, kind in ((0.0, "NaN"), (1.0, "infinity")):
            with self.assertRaises(KernelError) as caught:
                self.printed(executor, {x: np.full(3, fed, np.float32)}, debug_nan=True)
            message = str(caught.exception)
            for part in ("bad (log) is the first node", kind, "add_const", line):
                self.assertIn(part, message)
        text, (value,) = self.printed(executor, good, debug_nan=True)
        self.assertEqual((text, value), ("", 0))
        self.assertTrue(np.isnan(self.printed(executor, {x: np.zeros(3)})[1][0]))

    def test_nan_stops_before_the_update(self):
        net = Training((4, 3, 2))
        executor = Executor([net.loss, net.train], self.ctx)
        executor.run(net.batch(5))
        before = net.values()
        feeds = net.batch(5)
        feeds[net.x][2, 1] = np.nan
        with self.assertRaisesRegex(KernelError, r"matmul.*w0|w0.*matmul|matmul\.\d+|head.*w0"):
            self.printed(executor, feeds, debug_nan=True)
        for value, wanted in zip(net.values(), before, strict=True):
            np.testing.assert_array_equal(value, wanted)

    def test_nan_names_an_update_that_overflows(self):
        p, x = ad.Parameter(np.float32([1]), "p"), ad.Variable("x")
        update = ad.sgd_update_op(p, x, ad.Parameter(np.float32(1e30)), name="update")
        with self.assertRaisesRegex(KernelError, "update .*infinity"):
            executor = Executor([update], self.ctx)
            self.printed(executor, {x: np.float32([1e30])}, debug_nan=True)

    def test_debugging_changes_no_result(self):
        results = []
        for changes in ({}, {"debug": 2}, {"debug_nan": True}, {"separate_arena": True}):
            net = Training((6, 5, 4), momentum=0.9)
            executor = Executor([net.loss, net.train], self.ctx)
            losses = []
            for k in range(4):
                feeds = net.batch(7 + k % 2, seed=k)
                _, values = self.printed(executor, feeds, **changes)
                losses.append(float(values[0]))
            results.append((losses, [value.tolist() for value in net.values()]))
        for result in results[1:]:
            self.assertEqual(result, results[0])

    def test_separate_shares_no_byte(self):
        net = Training((6, 5, 5, 5, 4))
        with mock.patch.object(settings, "separate_arena", True):
            plan = Executor([net.loss, net.train], self.ctx).plan(net.shapes(9))
        taken = sorted((b.offset, b.offset + b.nbytes) for b in plan.buffers if b.kind == "arena")
        self.assertGreater(len(taken), 5)
        for before, after in zip(taken, taken[1:]):
            self.assertLessEqual(before[1], after[0])

    def test_separate_poisons_what_is_dead(self):
        """An operator that reads memory it keeps from an earlier step sees NaN."""
        kept = []

        class KeepOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

            def compute(self, node, input_vals, output_val, use_numpy=True):
                kept.append(input_vals[0])
                output_val[:] = input_vals[0]

        class LookOp(ad.Op):
            def infer_shape(self, node, input_shapes):
                return input_shapes[0]

            def compute(self, node, input_vals, output_val, use_numpy=True):
                output_val[:] = kept[0]

        y = LookOp()(ad.exp_op(KeepOp()(self.x * 2) * 1.5))
        executor = Executor([y], self.ctx)
        _, (value,) = self.printed(executor, {self.x: np.ones(3)}, separate_arena=True)
        self.assertTrue(np.isnan(value).all())


class NumpyDebugging(Debugging, unittest.TestCase):
    ctx = None


CpuDebugging, GpuDebugging = on_native_devices(Debugging)


class Environment(unittest.TestCase):
    def settings(self, **environment):
        code = (
            "from dlsys.settings import settings as s; "
            "print(s.debug, s.debug_nan, s.separate_arena, s.threads)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), **environment},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.split()

    def test_variables_become_settings(self):
        self.assertEqual(self.settings(), ["0", "False", "False", "0"])
        self.assertEqual(self.settings(DLSYS_DEBUG="2")[0], "2")
        self.assertEqual(self.settings(DLSYS_DEBUG="nan")[:2], ["0", "True"])
        self.assertEqual(self.settings(DLSYS_DEBUG_ARENA="separate")[2], "True")
        self.assertEqual(self.settings(DLSYS_DEBUG="", DLSYS_THREADS="")[::3], ["0", "0"])

    def test_values_that_are_none_are_refused(self):
        for name in ("BLAS", "CAPTURE", "DEBUG_ARENA", "REQUIRE_GPU", "TUNE"):
            with mock.patch.dict(os.environ, {f"DLSYS_{name}": "true"}):
                with self.assertRaisesRegex(ValueError, f"DLSYS_{name}=true: expected "):
                    Settings()
