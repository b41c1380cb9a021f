"""Kernels chosen by measurement: what is chosen, and that whatever may be chosen is right. The file
of measurements is in test_tuning_cache.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import KernelError, NotApplicableError, OutOfMemoryError
from dlsys.executor.debug.check import call_kernel
from dlsys.executor.tune import autotune as tune
from dlsys.executor.tune.microbenchmark import LONG_US, Microbenchmark
from dlsys.learn.conv import Shape, node_of
from dlsys.rungs import HEURISTIC, Algorithm
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.runtime.library import load
from dlsys.runtime.tuning_cache import Measurement, TuningCache, tuning_cache
from dlsys.settings import settings
from support.devices import native_contexts, not_emulated, require, slow


def depthwise(ctx: Context) -> tuple[ad.Executor, dict[ad.Node, np.ndarray]]:
    """One convolution that all of the CPU's algorithms do."""
    rng = np.random.default_rng(0)
    x, f = ad.Variable("x"), ad.Variable("f")
    feeds = {x: rng.standard_normal((2, 6, 9, 8)), f: rng.standard_normal((6, 1, 3, 3))}
    executor = ad.Executor([ad.conv2d(x, f, padding=1, groups=6)], ctx)
    return executor, {node: value.astype(np.float32) for node, value in feeds.items()}


class Cached(unittest.TestCase):
    """Tests with a file of their own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "tuning.json"
        self.mode("full")
        patch = mock.patch.object(settings, "tune_cache", str(self.path))
        patch.start()
        self.addCleanup(patch.stop)

    def mode(self, name: str) -> None:
        before, settings.tune = settings.tune, name
        self.addCleanup(setattr, settings, "tune", before)

    @contextlib.contextmanager
    def times(self, **us: float) -> Iterator[list[str]]:
        """Measurements find these times, by the names of algorithms, and a second for all others;
        yields what was said.
        """
        said: list[str] = []

        def us_of(self: Microbenchmark, algorithm: Algorithm, about: float = 0) -> float:
            self.results(algorithm)
            return us.get(algorithm.name or "heuristic", 1e6)

        with (
            mock.patch.object(Microbenchmark, "us", us_of),
            mock.patch.object(Microbenchmark, "us_about", us_of),
            contextlib.redirect_stderr(io.StringIO()) as told,
        ):
            yield said
        said += told.getvalue().splitlines()

    def algorithms_of(self, executor: ad.Executor, feeds: dict) -> tuple[str, ...]:
        executor.run(feeds)
        return executor.report().plans[0].algorithms


@require(cpu(0))
class Estimates(unittest.TestCase):
    def test_what_the_first_run_loads_is_not_in_its_time(self) -> None:
        benchmark = Microbenchmark(node_of(Shape(1, 2, 6, 2, 3), "forward", "fp32"), cpu(0))
        for runs, most in (([1e6, 6e4], 6e4), ([1e6, 5.0], LONG_US), ([5.0], LONG_US)):
            with mock.patch.object(Microbenchmark, "_us_of_run", side_effect=runs):
                self.assertLessEqual(benchmark.us_about(HEURISTIC), most)


@require(cpu(0))
class Choosing(Cached):
    ctx = cpu(0)

    def chosen(self) -> tuple[str, ...]:
        return self.algorithms_of(*depthwise(self.ctx))

    def test_the_fastest_is_used_and_told(self) -> None:
        with self.times(heuristic=10, depthwise=10, implicit=9):
            executor, feeds = depthwise(self.ctx)
            with mock.patch.object(settings, "debug", 1), io.StringIO() as printed:
                with contextlib.redirect_stdout(printed):
                    result = executor.run(feeds, True)[0]
                self.assertIn("conv2d by implicit", printed.getvalue())
        report = executor.report()
        self.assertEqual(report.plans[0].algorithms, ("conv2d by implicit",))
        self.assertIn("autotuned: conv2d by implicit", str(report))
        self.mode("off")
        heuristic = depthwise(self.ctx)[0]
        wanted = heuristic.run(dict(zip(heuristic._feeds.nodes, feeds.values())), True)[0]
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)

    def test_the_kernel_is_told(self) -> None:
        """The step calls the implementation by its number: one that does not fit fails."""
        with mock.patch.object(tune, "_algorithm", return_value=Algorithm(99, "none")):
            executor, feeds = depthwise(self.ctx)
            with self.assertRaisesRegex(KernelError, "there is no algorithm 99, expected 0 to "):
                executor.run(feeds)

    def test_another_device_is_not_told(self) -> None:
        """A device that only checks another one has implementations of its own."""
        with self.times(heuristic=10, depthwise=10, implicit=9):
            executor, feeds = depthwise(self.ctx)
            executor.run(feeds)
        runner, *_ = next(iter(executor._runners.values()))
        (step,) = (step for step in runner.plan.steps if step.node.op.tunable)
        step.node.attrs = {**step.node.attrs, "algorithm": Algorithm(99, "of a GPU")}
        arrays = [ndarray.array(value, self.ctx) for value in feeds.values()]
        made = ndarray.empty(step.outputs[0].spec.shape, self.ctx)
        call_kernel(self.ctx, step, arrays, [made])
        wanted = executor.run(feeds, True)[0]
        np.testing.assert_allclose(made.asnumpy(), wanted, rtol=1e-4, atol=1e-4)

    def test_measured_once(self) -> None:
        """Later executors use what was found, in any mode but off."""
        with self.times(heuristic=10, depthwise=10, implicit=9) as said:
            self.chosen()
        self.assertRegex(said[0], r"measured conv2d .*: implicit 9.0 us, heuristic 10.0 us")
        with mock.patch.object(tune, "_measured", side_effect=AssertionError("measured again")):
            for name, wanted in (("full", 1), ("cached", 1), ("off", 0)):
                self.mode(name)
                self.assertEqual(self.chosen(), ("conv2d by implicit",) * wanted)

    def test_cached_measures_nothing(self) -> None:
        self.mode("cached")
        with mock.patch.object(tune, "_measured", side_effect=AssertionError("measured")):
            self.assertEqual(self.chosen(), ())
        self.assertFalse(self.path.exists())

    def test_a_tie_is_the_heuristics(self) -> None:
        """That is remembered too."""
        with self.times(heuristic=10, depthwise=9.9, implicit=9.85):
            self.assertEqual(self.chosen(), ())
        with mock.patch.object(tune, "_measured", side_effect=AssertionError("measured again")):
            self.assertEqual(self.chosen(), ())

    def test_what_is_wrong_is_passed_over(self) -> None:
        right = Microbenchmark.results

        def results(self: Microbenchmark, algorithm: Algorithm) -> list[np.ndarray]:
            wrong = 1e-3 * (algorithm.name == "implicit")
            return [y + wrong * np.abs(y).max() for y in right(self, algorithm)]

        with mock.patch.object(Microbenchmark, "results", results):
            with self.times(heuristic=10, depthwise=9, implicit=5) as said:
                self.assertEqual(self.chosen(), ("conv2d by depthwise",))
        self.assertIn("implicit is wrong by more than the tolerance", said[0])

    def test_what_does_not_apply_is_passed_over(self) -> None:
        x, f = ad.Variable("x"), ad.Variable("f")
        feeds = {x: np.ones((2, 3, 8, 8), np.float32), f: np.ones((4, 3, 3, 3), np.float32)}
        executor = ad.Executor([ad.conv2d(x, f)], self.ctx)
        with self.times(heuristic=10, depthwise=1, implicit=9):
            self.assertEqual(self.algorithms_of(executor, feeds), ("conv2d by implicit",))

    def test_variants_are_measured_of_rungs_that_come_near(self) -> None:
        for size, winograd, wanted in ((8, 150, "implicit"), (9, 130, "winograd 4x4")):
            x, f = ad.Variable("x"), ad.Variable("f")
            executor = ad.Executor([ad.conv2d(x, f)], self.ctx)
            images, filters = np.ones((2, 3, size, size)), np.ones((4, 3, 3, 3))
            feeds = {x: images.astype(np.float32), f: filters.astype(np.float32)}
            us = {"heuristic": 100, "implicit": 90, "winograd": winograd, "winograd 4x4": 50}
            with self.times(**us):
                self.assertEqual(self.algorithms_of(executor, feeds), (f"conv2d by {wanted}",))

    def test_without_memory_to_measure_the_heuristic_stays(self) -> None:
        full = mock.patch.object(
            tune, "Microbenchmark", side_effect=OutOfMemoryError("none is left")
        )
        with full, contextlib.redirect_stderr(io.StringIO()) as told:
            self.assertEqual(self.chosen(), ())
        self.assertRegex(told.getvalue(), r"no memory to measure conv2d .*heuristic: none is left")
        self.assertFalse(self.path.exists())

    def test_what_the_library_does_not_have_is_not_used(self) -> None:
        """Implementations of other states of the sources, or of other versions of cuDNN."""
        with self.times(heuristic=10, depthwise=10, implicit=9):
            self.chosen()
        self.mode("cached")
        contents = json.loads(self.path.read_text())
        ((environment, measured),) = contents["measurements"].items()
        ((key, found),) = measured.items()
        for changes in ({"algorithm": "gone"}, {"source": "cuDNN 9.0.0"}):
            TuningCache(self.path).add(environment, {key: Measurement(**found | changes)})
            tuning_cache().__init__(self.path)  # type: ignore[misc]
            self.assertEqual(self.chosen(), ())
        TuningCache(self.path).add(environment + "x", {key: Measurement(**found)})
        self.assertEqual(self.chosen(), ())

    def test_what_was_found_under_another_limit_is_not_used(self) -> None:
        """An algorithm may need more workspace than there may be now."""
        with self.times(heuristic=10, depthwise=10, implicit=9):
            self.chosen()
        self.mode("cached")
        with mock.patch.object(settings, "conv_workspace", 1):
            self.assertEqual(self.chosen(), ())
        self.assertEqual(self.chosen(), ("conv2d by implicit",))

    def test_real_times(self) -> None:
        """What is measured is measured, and the file says so."""
        with contextlib.redirect_stderr(io.StringIO()):
            self.chosen()
        (measured,) = json.loads(self.path.read_text())["measurements"].values()
        ((key, found),) = measured.items()
        self.assertRegex(
            key, r"^conv2d float32\(2,6,9,8\) float32\(6,1,3,3\) -> float32\(2,6,9,8\)"
        )
        self.assertIn(found["algorithm"], ("", *load().algorithms("cpu", "conv2d")))
        self.assertTrue(0 < found["us"] <= found["us_heuristic"] < 1e6, found)

    def test_a_key_has_all_that_matters(self) -> None:
        x, f = ad.Variable("x", shape=(4, 6, 12, 12)), ad.Variable("f", shape=(9, 6, 3, 3))
        other = ad.Variable("x", shape=(4, 6, 12, 13))
        nodes = [
            ad.conv2d(x, f),
            ad.conv2d(other, f),
            ad.conv2d(x, f, stride=2),
            ad.conv2d(x, f, padding=1),
            ad.conv2d(x, f, dilation=2),
            ad.conv2d(x, f),
        ]
        nodes[-1].attrs["precision"] = "tf32"
        self.assertEqual(len(set(map(tune.key_of, nodes))), len(nodes))
        self.assertEqual(tune.key_of(nodes[0]), tune.key_of(ad.conv2d(x, f)))


TUNING = """
import numpy as np
from dlsys import autodiff as ad, ndarray
x, f = ad.Variable("x"), ad.Variable("f")
y = ad.conv2d(x, f, padding=1)
executor = ad.Executor([y, *ad.gradients(ad.sum_op(y * y), [x, f])], ndarray.cpu(0))
executor.run({x: np.ones((2, 8, 9, 8), np.float32), f: np.ones((8, 8, 3, 3), np.float32)})
print(sorted(executor.algorithms().items()))
"""


@slow
@require(cpu(0))
class Processes(Cached):
    def process(self, mode: str) -> subprocess.Popen:
        """A process that runs a convolution and its gradients, and prints their algorithms."""
        folders = os.pathsep.join(path for path in sys.path if path)
        settings = {"DLSYS_TUNE": mode, "DLSYS_TUNE_CACHE": str(self.path), "PYTHONPATH": folders}
        return subprocess.Popen(
            [sys.executable, "-c", TUNING],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def test_two_tune_at_once(self) -> None:
        """Both run, what they found is kept once, and a third process takes it."""
        both = [self.process("full") for _ in range(2)]
        for process in both:
            _, told = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 0, told)
            self.assertNotIn("Warning", told)
        (measured,) = json.loads(self.path.read_text())["measurements"].values()
        self.assertEqual(len(measured), 3)
        third = self.process("cached")
        out, told = third.communicate(timeout=120)
        self.assertEqual((third.returncode, told), (0, ""))
        kept = sorted((key, found["algorithm"]) for key, found in measured.items())
        self.assertEqual(out.strip(), str(kept))


class Data(unittest.TestCase):
    def test_trials_tell_precisions_apart(self) -> None:
        """By numpy: factors of 10 bits change nothing at tf32, and too much at fp32."""
        from dlsys.executor.tune.microbenchmark import _drawn, _error

        for exact in (True, False):
            a, b = (np.resize(np.roll(_drawn(exact), k), (64, 512)) for k in (0, 7919))
            wanted = a.astype(np.float64) @ b.T.astype(np.float64)
            nearest = [(m.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32) for m in (a, b)]
            error = _error(nearest[0].astype(np.float64) @ nearest[1].T, wanted)
            if exact:
                self.assertLess(error, 1e-6)
            else:
                self.assertGreater(error, 3e-4)


# Planes and attributes: odd ones, ones that cuDNN and tensor cores like, every attribute.
CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((8, 64, 14, 14), (64, 64, 3, 3), dict(padding=1)),
    ((3, 21, 13, 11), (37, 21, 3, 2), dict(padding=2)),
    ((5, 24, 17, 19), (40, 24, 3, 3), dict(stride=2, padding=1)),
    ((2, 16, 23, 21), (33, 16, 5, 5), dict(stride=3, padding=3, dilation=2)),
    ((4, 12, 9, 12), (20, 12, 4, 2), dict(stride=(1, 2), padding=((0, 2), (1, 0)))),
    ((2, 3, 20, 20), (5, 3, 7, 7), dict(stride=2, padding=3)),
    ((7, 100, 9, 9), (72, 100, 1, 1), dict()),
    ((5, 64, 8, 8), (48, 16, 3, 3), dict(padding=1, groups=4)),
    ((4, 24, 9, 9), (24, 1, 3, 3), dict(padding=1, groups=24)),
    ((1, 1, 1, 1), (1, 1, 1, 1), dict()),
]


def convolutions(x: Any, f: Any, attrs: dict) -> list[ad.Node]:
    """A convolution, one with a bias, and the gradients of it."""
    a, b, bias = ad.Variable("x", shape=x), ad.Variable("f", shape=f), ad.Variable("bias")
    y = ad.conv2d(a, b, **attrs) + ad.reshape_op(bias, (1, f[0], 1, 1))
    biased = ad.conv2d(a, b, bias, **attrs)
    return [y, biased, *ad.gradients(ad.sum_op(y * y), [a, b])]


# Rows, depth and columns of a layer: contents tiles, and what is none of any.
PRODUCTS = [(64, 784, 256), (1000, 256, 100), (37, 130, 11), (129, 65, 1), (5, 4097, 33), (3, 7, 5)]
PRODUCT_KERNELS = {"matmul", "matmul_bias", "matmul_gradient", "matmul_map", "matmul_sums"}


def products(rows: int, depth: int, columns: int) -> list[ad.Node]:
    """Two layers with all their gradients, and an activation without a bias."""
    shapes = (rows, depth), (depth, columns), (columns,), (columns, depth)
    x, w, b, v = (ad.Variable("xwbv"[k], shape=shape) for k, shape in enumerate(shapes))
    hidden = ad.relu_op(ad.matmul_op(x, w) + b)
    y = ad.matmul_op(hidden, v)
    loss = ad.sum_op(y * y)
    return [loss, *ad.gradients(loss, [x, w, b, v]), ad.tanh_op(ad.matmul_op(x, v, False, True))]


def tunable(fetches: list[ad.Node], ctx: Context, precision: str, **shapes: Any) -> list[ad.Node]:
    """The nodes of an executor's graph whose kernels let choose."""
    executor = ad.Executor(fetches, ctx, precision)
    known = {x: x.attrs.get("shape") or shapes[x.name] for x in executor._feeds.nodes}
    plan = executor.plan(known)
    return [step.node for step in plan.steps if step.node.op.tunable]


class Right:
    """Every implementation of every kernel, on a device."""

    ctx: Context
    precisions = ("fp32", "tf32")
    least: dict[str, int] = {}  # implementations that apply to the first convolution, at least

    def tried(self, node: ad.Node) -> set[str]:
        """The algorithms that apply to a node; all are right, and repeat their bits."""
        benchmark = Microbenchmark(node, self.ctx)
        wanted = benchmark.results(HEURISTIC)
        names = load().algorithms(self.ctx.kernel_device, node.op.kernel)
        self.assertGreater(len(names), 0)
        applied = set()
        for number, name in enumerate(names, 1):
            algorithm = Algorithm(number, name)
            try:
                first = benchmark.results(algorithm)
            except NotApplicableError:
                continue
            with self.subTest(kernel=tune.key_of(node), algorithm=name):
                self.assertTrue(benchmark.is_right(algorithm, wanted))
                for one, two in zip(first, benchmark.results(algorithm)):
                    self.assertEqual(one.tobytes(), two.tobytes())
            applied.add(name)
        return applied

    @slow
    def test_convolutions(self) -> None:
        with mock.patch.object(settings, "tune", "off"):
            for precision in self.precisions:
                for x, f, attrs in CONVOLUTIONS:
                    nodes = tunable(convolutions(x, f, attrs), self.ctx, precision, bias=f[:1])
                    self.assertEqual(len({node.op.kernel for node in nodes}), 4)
                    for node in nodes:
                        self.assertGreater(len(self.tried(node)), 0)

    def test_numbers_that_are_none(self) -> None:
        x, f, attrs = CONVOLUTIONS[0]
        with mock.patch.object(settings, "tune", "off"):
            node = tunable(convolutions(x, f, attrs), self.ctx, "fp32", bias=f[:1])[0]
        for number in (-1, 1000):
            with self.assertRaisesRegex(KernelError, f"there is no algorithm {number}, expected"):
                Microbenchmark(node, self.ctx).results(Algorithm(number, ""))


@require(cpu(0))
class CpuImplementations(Right, unittest.TestCase):
    ctx = cpu(0)
    precisions = ("fp32",)


@not_emulated
@require(gpu(0))
class GpuImplementations(Right, unittest.TestCase):
    ctx = gpu(0)

    def test_products(self) -> None:
        kernels = set()
        with mock.patch.object(settings, "tune", "off"):
            for precision in self.precisions:
                for sizes in PRODUCTS:
                    for node in tunable(products(*sizes), self.ctx, precision):
                        kernels.add(node.op.kernel)
                        self.assertIn("warp 64x64 by 1", self.tried(node))
        self.assertLessEqual(PRODUCT_KERNELS, kernels)

    def test_what_applies(self) -> None:
        """A layer of many channels has all rungs but those of other shapes, a product too."""
        x, f, attrs = CONVOLUTIONS[0]
        for precision in self.precisions:
            for node in tunable(convolutions(x, f, attrs), self.ctx, precision, bias=f[:1]):
                kinds = {name.split()[0] for name in self.tried(node)}
                rungs = {"naive", "im2col", "winograd", "fft", "implicit", "cudnn"}
                self.assertEqual(kinds, rungs)
        for node in tunable(products(256, 512, 128), self.ctx, "fp32"):
            kinds = {name.split()[0] for name in self.tried(node)}
            self.assertLessEqual({"naive", "tiled", "register", "warp", "cublas"}, kinds)


@not_emulated
@require(gpu(0))
class GpuChoosing(Cached):
    def test_the_whole_way(self) -> None:
        """Measured, kept, used by another executor; the same bits with the same file."""
        x, f, attrs = CONVOLUTIONS[0]
        rng = np.random.default_rng(1)
        given = [rng.standard_normal(shape).astype(np.float32) for shape in (x, f, f[:1])]
        runs = []
        for name in ("full", "cached", "off"):
            self.mode(name)
            fetches = convolutions(x, f, attrs)
            executor = ad.Executor(fetches, gpu(0), "tf32")
            feeds = dict(
                zip(sorted(executor._feeds.nodes, key=lambda v: "xfb".index(v.name[0])), given)
            )
            with contextlib.redirect_stderr(io.StringIO()):
                results = [executor.run(feeds, True) for _ in range(3)]
            for again in results[1:]:  # recorded
                self.assertEqual(*([y.tobytes() for y in run] for run in (results[0], again)))
            runs.append((executor.report().plans[0].algorithms, results[0]))
        self.assertEqual(runs[0][0], runs[1][0])
        self.assertEqual(runs[2][0], ())
        for full, cached, heuristic in zip(*(results for _, results in runs)):
            self.assertEqual(full.tobytes(), cached.tobytes())
            np.testing.assert_allclose(full, heuristic, atol=3e-3 * np.abs(heuristic).max())
        self.assertEqual(
            len(next(iter(json.loads(self.path.read_text())["measurements"].values()))), 4
        )


if __name__ == "__main__":
    assert native_contexts()
    unittest.main()
