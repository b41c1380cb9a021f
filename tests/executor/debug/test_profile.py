"""Profiles, traces, device counters, and the ranges that NVTX shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

import dlsys
from dlsys import autodiff as ad
from dlsys import ndarray, profile
from dlsys.errors import DlsysError
from dlsys.runtime import toolchain
from dlsys.runtime.device import gpu, memory_stats, unavailable
from dlsys.runtime.library import load
from support.devices import native_contexts, not_emulated, require
from support.graphs import Training, double_op

LISTENER = Path(__file__).resolve().parents[2] / "gpu" / "nvtx_listener.cc"
CONTEXTS = [None, *native_contexts()]


def small(ctx=None):
    """An executor of a few steps, its feeds, and how many steps there are."""
    x, y = ad.Variable("x"), ad.Variable("y")
    product = ad.matmul_op(x, y)
    executor = ad.Executor([ad.sum_op(ad.exp_op(product - 8.0)), product], ctx)
    feeds = {x: np.ones((4, 8), np.float32), y: np.ones((8, 2), np.float32)}
    return executor, feeds, len(executor.plan(shapes_of(feeds)).steps)


def shapes_of(feeds):
    return {node: value.shape for node, value in feeds.items()}


def product():
    """An executor of one product alone, and its feeds."""
    x, y = ad.Variable("x"), ad.Variable("y")
    feeds = {x: np.ones((4, 8), np.float32), y: np.ones((8, 2), np.float32)}
    return ad.Executor([ad.matmul_op(x, y)]), feeds


class Failing(ad.Op):
    """Fails when it is run."""

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        raise ZeroDivisionError


class Yielding(float):
    """Lets other threads run while it is added to something."""

    def __radd__(self, other):
        time.sleep(1e-5)
        return other + float(self)


class Table(unittest.TestCase):
    def test_rows_add_up_the_runs_of_each_operator(self):
        executor, feeds, _ = small()
        plan = executor.plan(shapes_of(feeds))
        table = profile.Profile()
        expected: dict[str, float] = {}
        for scale in (1.0, 10.0):
            ms = [scale * 2**k for k in range(len(plan.steps))]
            table.add(plan, ms)
            for step, t in zip(plan.steps, ms):
                expected[step.node.op.name] = expected.get(step.node.op.name, 0.0) + t
        rows = table.rows()
        self.assertEqual({row.name: row.ms for row in rows}, expected)
        self.assertEqual([row.ms for row in rows], sorted(expected.values(), reverse=True))
        self.assertIn("total of 2 runs", str(table))

    def test_nothing_adds_up_to_nothing(self):
        last = str(profile.Profile()).splitlines()[-1]
        self.assertEqual(last.split(), ["total", "of", "0", "runs", "0", "0.000", "0.0%"])

    def test_speeds(self):
        row = profile.Row("a", 3, 2.0, nbytes=4_000_000, flops=6_000_000_000)
        self.assertAlmostEqual(row.gigabytes_per_second, 2.0)
        self.assertAlmostEqual(row.gigaflops, 3000.0)

    def test_a_run_that_fails_is_not_counted(self):
        for ctx in CONTEXTS:
            x = ad.Variable("x")
            executor = ad.Executor([ad.exp_op(Failing()(ad.exp_op(x)))], ctx)
            executor.recorder = profile.Profile()
            with self.assertRaises(ZeroDivisionError):
                executor.run({x: np.ones(3, np.float32)})
            self.assertEqual((executor.recorder.runs, executor.recorder.rows()), (0, []))

    def test_threads_share_one(self):
        executor, feeds = product()
        plan = executor.plan(shapes_of(feeds))
        table = profile.Profile()

        def work():
            for _ in range(100):
                table.add(plan, [Yielding(1.0)])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(table.rows()[0][:3], ("matmul", 400, 400.0))

    def test_bytes_and_operations_of_a_product(self):
        executor, feeds = product()
        table = profile.Profile()
        for _ in range(2):
            table.add(executor.plan(shapes_of(feeds)), [1.0])
        row = table.rows()[0]
        self.assertEqual((row.name, row.calls, row.ms), ("matmul", 2, 2.0))
        self.assertEqual(row.nbytes, 2 * 4 * (4 * 8 + 8 * 2 + 4 * 2))
        self.assertEqual(row.flops, 2 * 2 * 4 * 8 * 2)

    def test_bytes_of_what_reads_a_part(self):
        table, k = ad.Variable("table"), ad.Variable("k", shape=(3,), dtype=np.int64)
        executor = ad.Executor([ad.gather_op(table, k)])
        rows = profile.Profile()
        feeds = {table: np.zeros((1000, 8), np.float32), k: np.arange(3)}
        rows.add(executor.plan(shapes_of(feeds)), [1.0])
        self.assertEqual(rows.rows()[0].nbytes, 2 * 3 * 8 * 4 + 3 * 8)

    def test_every_device_fills_it(self):
        for ctx in CONTEXTS:
            with self.subTest(ctx=ctx):
                executor, feeds, steps = small(ctx)
                executor.recorder = profile.Profile()
                result = executor.run(feeds, convert_to_numpy_ret_vals=True)[0]
                self.assertAlmostEqual(float(result), 8.0, places=5)
                rows = executor.recorder.rows()
                self.assertEqual(sum(row.calls for row in rows), steps)
                self.assertTrue(all(row.ms > 0 for row in rows))


class Traces(unittest.TestCase):
    def events(self, trace, **wanted):
        return [
            event
            for event in trace.json()["traceEvents"]
            if all(event[key] == value for key, value in wanted.items())
        ]

    def test_steps_follow_each_other_inside_their_run(self):
        for ctx in CONTEXTS:
            with self.subTest(ctx=ctx):
                executor, feeds, count = small(ctx)
                trace = executor.recorder = profile.Trace(ctx)
                for _ in range(3):
                    executor.run(feeds)
                runs = self.events(trace, ph="X", pid=0)
                steps = self.events(trace, ph="X", pid=1)
                self.assertEqual([run["name"] for run in runs], ["run 1", "run 2", "run 3"])
                self.assertEqual(len(steps), 3 * count)
                for k, run in enumerate(runs):
                    at = run["ts"]
                    for step in steps[count * k : count * k + count]:
                        self.assertAlmostEqual(step["ts"], at, delta=0.01)
                        at += step["dur"]
                    self.assertAlmostEqual(run["ts"] + run["dur"], at, delta=0.01)
                for run, after in zip(runs, runs[1:]):
                    self.assertGreaterEqual(after["ts"], run["ts"] + run["dur"] - 0.01)

    def test_a_step_tells_what_it_is(self):
        executor, feeds = product()
        trace = executor.recorder = profile.Trace()
        executor.run(feeds)
        step = self.events(trace, ph="X", pid=1, name="matmul")[0]
        self.assertEqual(step["args"]["inputs"], ["x float32 (4, 8)", "y float32 (8, 2)"])
        self.assertEqual(step["args"]["outputs"][0].split(" ", 1)[1], "float32 (4, 2)")
        self.assertEqual((step["args"]["bytes"], step["args"]["flops"]), (224, 128))
        self.assertTrue(step["args"]["line"].startswith("test_profile.py:"))

    def test_rows_are_named(self):
        trace = profile.Trace(ndarray.cpu(0))
        with trace.span("batch", size=100):
            pass
        names = [(event["name"], event["args"]["name"]) for event in self.events(trace, ph="M")]
        self.assertIn(("process_name", "host"), names)
        self.assertIn(("process_name", "cpu(0)"), names)
        self.assertIn(("thread_name", threading.current_thread().name), names)
        self.assertEqual(self.events(trace, name="batch")[0]["args"], {"size": 100})

    def test_each_thread_has_a_row_on_host_and_device(self):
        executor, feeds = product()
        trace = executor.recorder = profile.Trace()
        executor.run(feeds)
        thread = threading.Thread(target=executor.run, args=(feeds,), name="other")
        thread.start()
        thread.join()
        rows = {
            (event["pid"], event["args"]["name"]): event["tid"]
            for event in self.events(trace, ph="M", name="thread_name")
        }
        own = threading.current_thread().name
        self.assertEqual(set(rows), {(0, own), (1, own), (0, "other"), (1, "other")})
        for pid in (0, 1):
            rows_used = {event["tid"] for event in self.events(trace, ph="X", pid=pid)}
            self.assertEqual(rows_used, {rows[pid, own], rows[pid, "other"]})

    def test_any_argument_is_valid_json(self):
        trace = profile.Trace()
        with trace.span("a", loss=float("nan"), step=np.int64(3), shape=(1, 2), ok=True, lr=0.5):
            pass
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.write(path)

            def refuse(word):
                raise AssertionError(word)

            read = json.loads(path.read_bytes(), parse_constant=refuse)
        arguments = read["traceEvents"][-1]["args"]
        expected = {"loss": "nan", "step": "3", "shape": "(1, 2)", "ok": True, "lr": 0.5}
        self.assertEqual(arguments, expected)

    def test_a_span_ends_where_its_block_raises(self):
        trace = profile.Trace()
        with self.assertRaises(KeyError), trace.span("batch"):
            raise KeyError
        self.assertEqual(len(self.events(trace, name="batch")), 1)

    def test_steps_in_python_are_on_the_hosts_row(self):
        for ctx in native_contexts():
            x = ad.Variable("x")
            executor = ad.Executor([ad.exp_op(double_op(x))], ctx)
            trace = executor.recorder = profile.Trace(ctx)
            executor.run({x: np.ones(3, np.float32)})
            self.assertEqual(self.events(trace, name="double")[0]["pid"], 0)
            self.assertEqual(self.events(trace, name="exp")[0]["pid"], 1)

    def test_events_beyond_the_limit_are_counted(self):
        executor, feeds = product()
        trace = executor.recorder = profile.Trace(limit=4)
        for _ in range(3):
            executor.run(feeds)
        self.assertEqual(len(self.events(trace, ph="X")), 4)
        self.assertEqual((trace.runs, trace.dropped), (3, 2))
        self.assertEqual(trace.json()["otherData"]["dropped events"], 2)

    def test_a_training_step_is_written_as_json(self):
        training = Training((20, 8, 4), momentum=0.9)
        executor = ad.Executor([training.loss, training.train])
        trace = executor.recorder = profile.Trace()
        executor.run(training.batch(16))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.write(path)
            self.assertEqual(json.loads(path.read_bytes()), trace.json())
            before = path.read_bytes()
            with mock.patch.object(trace, "json", lambda: {"bad": object()}):
                self.assertRaises(TypeError, trace.write, path)
            self.assertEqual(path.read_bytes(), before)
            self.assertEqual(os.listdir(folder), ["trace.json"])


class DeviceCounters(unittest.TestCase):
    def test_they_follow_the_allocator(self):
        for ctx in native_contexts():
            with self.subTest(ctx=ctx):
                before = profile.counters(ctx)
                held = ndarray.empty((1 << 20,), ctx)
                after = profile.counters(ctx)
                grown = after.memory.in_use_nbytes - before.memory.in_use_nbytes
                self.assertGreaterEqual(grown, 4 << 20)
                self.assertEqual(after.memory, memory_stats(ctx))
                self.assertEqual(after.memory.requests, before.memory.requests + 1)
                self.assertLessEqual(after.free_nbytes, after.total_nbytes)
                self.assertGreater(after.total_nbytes, 1 << 28)
                self.assertEqual(held.shape, (1 << 20,))

    def test_the_table_has_every_number(self):
        for ctx in native_contexts():
            found = profile.counters(ctx)
            lines = str(found).splitlines()
            self.assertEqual(lines[0].split(maxsplit=1)[1], found.device)
            table = {line.split()[0]: line.split()[1] for line in lines[1:]}
            self.assertEqual(table, {name: f"{value:,}" for name, value in found.rows()})
            self.assertIn("peak_in_use_nbytes", table)

    def test_a_device_that_is_not_there_is_refused(self):
        self.assertRaises(DlsysError, profile.counters, ndarray.gpu(999))


@not_emulated
class Ranges(unittest.TestCase):
    """DLSYS_NVTX=1, seen by a tool that NVTX loads into the process."""

    PROGRAM = (
        "import numpy as np\n"
        "from dlsys import autodiff as ad, ndarray\n"
        "x = ad.Variable('x')\n"
        "executor = ad.Executor([ad.sum_op(ad.exp_op(ad.matmul_op(x, x)))], ctx=ndarray.{ctx})\n"
        "executor.run({{x: np.ones((3, 3), np.float32)}})\n"
        "print(*(step.node.op.kernel for step in executor.plan({{x: (3, 3)}}).steps))\n"
    )

    @classmethod
    def setUpClass(cls) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        include = toolchain.cuda_include_dir()
        if compiler is None or unavailable(ndarray.cpu(0)) is not None:
            raise unittest.SkipTest("no C++ compiler or no native library here")
        if ("cuda", "matmul") not in load().signature:
            raise unittest.SkipTest("this library has no GPU part, which is what marks ranges")
        if include is None or not Path(include, "nvtx3", "nvToolsExt.h").exists():
            raise unittest.SkipTest(f"no nvtx3/nvToolsExt.h in {include or 'any CUDA toolkit'}")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.listener = cls.folder / "listener.so"
        command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{include}", str(LISTENER)]
        subprocess.run([*command, "-o", str(cls.listener), "-ldl"], check=True, timeout=120)

    def heard(self, switch: str, ctx: str) -> tuple[str | None, list[str]]:
        """What the listener wrote, None where NVTX was never entered; and the plan's kernels."""
        out = self.folder / "ranges"
        out.unlink(missing_ok=True)
        environment = dict(os.environ, DLSYS_NVTX=switch, NVTX_LISTENER_OUT=str(out))
        environment["NVTX_INJECTION64_PATH"] = str(self.listener)
        environment["PYTHONPATH"] = str(Path(dlsys.__file__).parent.parent)
        program = self.PROGRAM.format(ctx=ctx)
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment, check=True, timeout=120, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return out.read_text() if out.exists() else None, done.stdout.split()

    def test_each_step_is_a_range_named_by_its_kernel(self):
        ranges, kernels = self.heard("1", "cpu(0)")
        self.assertGreaterEqual(len(kernels), 2)
        self.assertEqual(ranges, "".join(f"+ {kernel}\n-\n" for kernel in kernels))

    def test_nothing_is_marked_without_the_switch(self):
        self.assertIsNone(self.heard("0", "cpu(0)")[0])

    @not_emulated
    @require(gpu(0))
    def test_steps_on_the_gpu_too(self):
        ranges, kernels = self.heard("1", "gpu(0)")
        self.assertEqual(ranges, "".join(f"+ {kernel}\n-\n" for kernel in kernels))
