"""Every fusion can be left out, by DLSYS_FUSION or by deleting its file: the values stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

import dlsys
from dlsys import autodiff as ad
from dlsys import ndarray, nn, optim
from dlsys.errors import SettingError
from dlsys.fusion import FUSIONS, select
from dlsys.graph.node import Node
from dlsys.passes.pipeline import PASSES, Options, Pass, arrange
from dlsys.runtime.device import Context
from dlsys.runtime.library import load
from dlsys.runtime.target import NUMPY, target_of
from support import sample
from support.devices import EMULATED, on_native_devices, require, slow
from support.fusion import CPU, GPU, fusions, lacking, named, without

PACKAGE = Path(dlsys.__file__).parent
NAMES = [fusion.name for fusion in FUSIONS]
Built = tuple[list[Node], dict[Node, np.ndarray]]


def mlp() -> Built:
    """Dense layers with a bias, trained by Adam under a schedule: all but the convolutions."""
    rng = np.random.default_rng(0)
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    model = nn.Sequential(
        nn.Linear(12, 9, rng=1), nn.ReLU(), nn.Linear(9, 7, rng=2), nn.GELU(),
        nn.Linear(7, 5, rng=3),
    )  # fmt: skip
    loss = ad.softmax_cross_entropy(model(x), y)
    rate = optim.Warmup(optim.Cosine(0.05, 20), 3)
    train = optim.Adam(rate, weight_decay=0.01).minimize(loss, model.parameters())
    feeds = {x: rng.standard_normal((16, 12)).astype(np.float32), y: rng.integers(0, 5, 16)}
    return [loss, train], feeds


def convolutions() -> Built:
    """A small LeNet: convolution, relu and pool; then a batch norm with a shortcut."""
    rng = np.random.default_rng(1)
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, rng=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, rng=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 4 * 4, 5, rng=3),
    )  # fmt: skip
    loss = ad.softmax_cross_entropy(model(x), y)
    train = optim.SGD(0.05, momentum=0.9).minimize(loss, model.parameters())
    feeds = {x: rng.standard_normal((6, 1, 8, 8)).astype(np.float32), y: rng.integers(0, 5, 6)}
    return [loss, train], feeds


NETWORKS: tuple[Callable[[], Built], ...] = (mlp, convolutions)


def losses(build: Callable[[], Built], ctx: Context | None, precision: str = "fp32") -> list[float]:
    """The losses of a few training steps."""
    fetches, feeds = build()
    executor = ad.Executor(fetches, ctx, precision)
    return [float(executor.run(feeds, convert_to_numpy_ret_vals=True)[0]) for _ in range(4)]


class Settings(unittest.TestCase):
    """The words of DLSYS_FUSION, and the order of passes."""

    def names(self, setting: str) -> list[str]:
        return [fusion.name for fusion in select(FUSIONS, setting)]

    def test_a_setting_leaves_fusions(self) -> None:
        self.assertEqual(self.names("all"), NAMES)
        self.assertEqual(self.names("off"), [])
        self.assertEqual(self.names("pointwise, conv_pool"), ["conv_pool", "pointwise"])
        self.assertEqual(
            self.names("-pointwise,-conv_pool"),
            [name for name in NAMES if name not in ("pointwise", "conv_pool")],
        )

    def test_what_names_no_fusion_is_refused(self) -> None:
        for wrong in ("of", "pointwise,of", "-of", "-pointwise,conv_pool", "", "-"):
            with (
                self.subTest(wrong),
                self.assertRaisesRegex(SettingError, f"DLSYS_FUSION={wrong}: expected off, all"),
            ):
                select(FUSIONS, wrong)

    def test_every_file_is_a_fusion_but_what_they_share(self) -> None:
        files = {path.stem for path in (PACKAGE / "fusion").rglob("*.py")}
        shared = {"__init__", "body", "rewrite"}
        kinds = "conv_pool", "cudnn", "head", "image", "norm", "update"
        shared |= {f"{kind}_operators" for kind in kinds}
        shared.add("kept_filters")  # only programs for inference name it
        self.assertEqual(files - shared, set(NAMES))
        positions = [fusion.position for fusion in FUSIONS]
        self.assertEqual(positions, sorted(set(positions)))
        self.assertTrue(all(3 <= position <= 90 for position in positions))

    def test_passes_run_in_order_under_their_conditions(self) -> None:
        def arranged(**options: object) -> list[str]:
            return [one.name for one in arrange(FUSIONS, Options(**options))]  # type: ignore[arg-type]

        only_fp32 = "matvec", "matvec_chain"
        in_tf32 = [name for name in NAMES if name not in only_fp32]
        without_draws = ["simplify", *in_tf32, "precision"]
        self.assertEqual(arranged(target=GPU, precision="tf32"), without_draws)
        self.assertIn("matvec", arranged(target=GPU, precision="fp32"))
        self.assertIn("uint8_inputs", arranged(target=GPU, precision="fp32"))
        self.assertNotIn("uint8_inputs", arranged(target=GPU, precision="bf16"))
        self.assertNotIn("pointwise", arranged(target=CPU, one_by_one=True))
        on_numpy = ["simplify", "quantized", "conv_pool", "conv_pool_chain", "cross_entropy"]
        self.assertEqual(arranged(target=NUMPY), on_numpy)
        self.assertEqual([one.name for one in PASSES], ["simplify", "fresh_draws", "precision"])

    def test_no_fusion_is_imported_by_name(self) -> None:
        modules = [f"fusion.{name}" for name in NAMES] + [f".{name} import" for name in NAMES]
        for path in PACKAGE.rglob("*.py"):
            text = path.read_text() if path.parent.name in ("fusion", "executor", "passes") else ""
            for module in modules:
                self.assertNotIn(f"from {module}" if "." == module[0] else module, text, path)

    def test_an_executor_takes_fusions_of_its_own(self) -> None:
        seen = []

        def look(fetches: list[Node], options: Options) -> list[Node]:
            seen.append(options.target)
            return list(fetches)

        executor = ad.Executor([ad.constant(1.0) * 2], fusions=[Pass("look", look, position=50)])
        self.assertEqual(float(executor.run()[0]), 2)
        self.assertEqual(seen, [NUMPY])


class Values:
    """Losses with all fusions, with none, and without each, on the device `ctx`."""

    ctx: Context

    def test_losses_do_not_depend_on_fusions(self) -> None:
        for build in NETWORKS:
            expected = losses(build, None)
            settings = ["all", "off", *(f"-{name}" for name in NAMES), *NAMES]
            for setting in sample.of(settings, len(NAMES)) if EMULATED else settings:
                with self.subTest(build.__name__, fusion=setting), fusions(setting):
                    np.testing.assert_allclose(losses(build, self.ctx), expected, rtol=2e-4)

    def run_without(
        self, lacks: Iterable[str], expected: list[float], passes: Sequence[Pass] | None = None
    ) -> tuple[set[str], str]:
        """Trains on a target that lacks these kernels, by some passes, and compares the losses;
        returns the kernels of the steps and the report.
        """
        fetches, feeds = self.build()
        executor = ad.Executor(fetches, self.ctx, fusions=passes)
        lacking(executor, frozenset(lacks).__contains__)
        got = [float(executor.run(feeds, convert_to_numpy_ret_vals=True)[0]) for _ in range(4)]
        np.testing.assert_allclose(got, expected, rtol=2e-4)
        ((runner, *_), *_) = executor._runners.values()
        return {step.node.op.kernel for step in runner.plan.steps}, str(executor.report())

    def check_lacking(self, fusion: Pass, expected: list[float]) -> None:
        target = target_of(self.ctx)
        fused, _ = self.run_without((), expected)
        with without(fusion.name):
            unfused, _ = self.run_without((), expected)
        # The pass asks the target: the nodes keep kernels of their own.
        kernels, report = self.run_without(fusion.needs, expected)
        self.assertEqual(kernels, unfused)
        self.assertNotIn("falls back", report)
        # Without these as well, the nodes run on the host, or another fusion gives way to nodes
        # that have kernels. A pass that asks nobody leaves a fused node, whose body runs there.
        blind = [named(one.name, target) if one is fusion else one for one in FUSIONS]
        lacks = {*fusion.needs}
        for lacked, passes in ((lacks | (unfused - fused), None), (lacks, blind)):
            made, report = self.run_without(lacked, expected, passes)
            for kernel in made & lacked:
                self.assertIn(f"{target.name} has no kernel {kernel}; ", report)
            self.on_host |= made & lacked

    def test_a_target_without_the_kernels_of_a_fusion(self) -> None:
        target = target_of(self.ctx)
        self.on_host: set[str] = set()
        served = [one for one in FUSIONS if one.needs and all(map(target.has, one.needs))]
        tried = sample.of(served, len(served) // 2) if EMULATED else served
        with fusions("all"):
            for self.build in NETWORKS:
                expected = losses(self.build, None)
                for fusion in tried:
                    with self.subTest(self.build.__name__, fusion=fusion.name):
                        self.check_lacking(fusion, expected)
        if tried == served:  # of nodes and of bodies
            expected_here = {"matmul", "max_pool2d", "conv2d_pool", "matmul_bias", "pointwise"}
            self.assertLessEqual(expected_here, self.on_host)

    def test_the_graph_as_text_names_the_passes(self) -> None:
        script = f"from fusion.test_plugins import *; losses(mlp, ndarray.{self.ctx})"
        done = run(script, PACKAGE, DLSYS_DEBUG="3", DLSYS_FUSION="all")
        self.assertRegex(done, "# passes: simplify, rungs, attention, .*conv_pool, cross_entropy")
        self.assertIn("# after gemm_epilogue\n", done)
        off = run(script, PACKAGE, DLSYS_DEBUG="3", DLSYS_FUSION="off")
        self.assertIn("# passes: simplify, rungs, precision\n", off)
        self.assertNotIn("matmul_bias", off)


CpuValues, GpuValues = on_native_devices(Values)


def run(script: str, package: Path, **environment: str) -> str:
    """What a script prints in a new interpreter, with a package and the tests on its path."""
    path = os.pathsep.join([str(package.parent), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


@require(ndarray.cpu(0))
class Deleted(unittest.TestCase):
    """Copies of the package in which the file of a fusion is missing."""

    @slow
    def test_a_package_without_a_fusion_trains_the_same(self) -> None:
        expected = {build: losses(build, None) for build in NETWORKS}
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder, "dlsys")
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(PACKAGE, package, ignore=ignored)
            deleted = sample.of(NAMES, 8)
            script = f"DELETED = {deleted}\n{WITHOUT_EACH}"
            lines = iter(run(script, package, DLSYS_LIBRARY=str(load().path)).splitlines())
        for name in deleted:
            with self.subTest(deleted=name):
                self.assertEqual(next(lines).split(), [one for one in NAMES if one != name])
                for build in NETWORKS:
                    np.testing.assert_allclose(
                        [*map(float, next(lines).split())], expected[build], rtol=2e-4
                    )
        self.assertEqual(list(lines), [])


# Without the file of each fusion by turns: the fusions that the package has, and the losses of each
# network under it. numpy and the standard library are imported once, the package by each child.
WITHOUT_EACH = """
import os, sys, numpy, ctypes, unittest
from pathlib import Path
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
folder = Path(sys.path[0], "dlsys", "fusion")
for name in DELETED:
    [file] = folder.rglob(name + ".py")
    hidden = folder / "hidden"
    os.rename(file, hidden)
    child = os.fork()
    if not child:
        import dlsys.fusion
        print(*(fusion.name for fusion in dlsys.fusion.FUSIONS))
        from fusion.test_plugins import NETWORKS, losses, ndarray
        for build in NETWORKS: print(*losses(build, ndarray.cpu(0)))
        sys.stdout.flush()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    os.rename(hidden, file)
    if status: sys.exit(name + " deleted: status " + str(status))
"""
