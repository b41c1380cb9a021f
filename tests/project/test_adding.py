"""What an addition costs: a new operator in a copy of the tree, and the files that it touches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")

# File, the line before which the addition goes, the addition.
SQUARE = (
    (
        "python/dlsys/ops/elementwise.py",
        "relu_op = ",
        'square_op = Elementwise("square", np.square, lambda x, y, dy: 2 * x * dy)\n',
    ),
    ("python/dlsys/ops/elementwise.py", '    "abs_op", ', '    "square_op",\n'),
    (
        "src/math/functors.h",
        'DLSYS_UNARY(Sigmoid, "sigmoid"',
        'DLSYS_UNARY(Square, "square", (x * x))\n',
    ),
    (
        "tests/support/samples.py",
        '    unary("sigmoid"',
        '    unary("square", lambda x: np.abs(x) ** 2, integers="same"),\n',
    ),
)


# Each block of the page is headed by its file and the line before which it goes.
REDUCTION = re.findall(
    r"^`(\S+)`, before `(.+?)`.*?\n\n```\w+\n(.*?)```",
    (ROOT / "docs" / "adding.md").read_text(encoding="utf-8").split("\n## A fusion")[0],
    re.S | re.M,
)
Additions = Sequence[tuple[str, str, str]]


class InACopy(unittest.TestCase):
    """A copy of the tree with `additions`."""

    additions: Additions = ()

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.copy = Path(folder.name)
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.json")
        for part in ("python", "src", "tests"):
            shutil.copytree(ROOT / part, cls.copy / part, ignore=unwanted)
        for file, before, addition in cls.additions:
            path = cls.copy / file
            text = path.read_text(encoding="utf-8")
            at = text.index(f"\n{before}") + 1
            path.write_text(text[:at] + addition + text[at:], encoding="utf-8")

    def run_in_copy(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.copy, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(self.copy / "python"), "PYTHONWARNINGS": "error"},
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def check_registered(self, source: str, kernel: bytes) -> None:
        assert COMPILER is not None
        command = (*COMPILER.split(), "-std=c++17", "-O0", "-Isrc", "-c", source, "-o", "made.o")
        self.run_in_copy(*command)
        self.assertIn(b"\0" + kernel + b"\0", (self.copy / "made.o").read_bytes())

    def check_row(self, name: str) -> None:
        printed = self.run_in_copy(
            sys.executable, "tests/run.py", "test_operators", "-k", f"NumpyOperators.test_{name}",
            "-k", "Table.test_every_operator_has_a_row",
        )  # fmt: skip
        self.assertRegex(printed, r"\n[5-9] passed, 0 failed, 0 skipped")


class AnElementwiseOperator(InACopy):
    """Its line in Python, its functor and its row are all: three files."""

    additions = SQUARE

    def test_three_files_are_touched(self) -> None:
        self.assertEqual(len({file for file, *_ in SQUARE}), 3)

    def test_its_name_is_public(self) -> None:
        printed = self.run_in_copy(
            sys.executable,
            "-c",
            "from dlsys import autodiff as ad; print(ad.square_op(ad.Variable('x')))",
        )
        self.assertIn("square(x)", printed)

    def test_its_row_passes(self) -> None:
        self.check_row("square")

    @unittest.skipIf(COMPILER is None, "no C++ compiler")
    def test_its_kernel_is_registered(self) -> None:
        self.check_registered("src/cpu/pointwise/elementwise.cc", b"square")

    def test_cuda_registers_the_same_list(self) -> None:
        for source in ("src/cpu/pointwise/elementwise.cc", "src/cuda/pointwise/elementwise.cu"):
            text = (ROOT / source).read_text(encoding="utf-8")
            self.assertIn("#define DLSYS_REGISTER_FUNCTORS\n", text)
            self.assertNotIn("DLSYS_KERNEL(", text)


class AReduction(InACopy):
    """The files that docs/adding.md shows: the numpy form and operator, the monoid, the row."""

    additions = REDUCTION

    def test_three_files_are_touched(self) -> None:
        self.assertEqual((len(REDUCTION), len({file for file, *_ in REDUCTION})), (5, 3))

    def test_its_row_passes(self) -> None:
        self.check_row("abs_sum")

    @unittest.skipIf(COMPILER is None, "no C++ compiler")
    def test_its_kernel_is_registered(self) -> None:
        self.check_registered("src/cpu/reduce/reduce.cc", b"reduce_abs_sum")

    def test_cuda_registers_the_same_list(self) -> None:
        for source in ("src/cpu/reduce/reduce.cc", "src/cuda/reduce/reduce.cu"):
            text = (ROOT / source).read_text(encoding="utf-8")
            self.assertIn("\nDLSYS_MONOIDS(DLSYS_REGISTER_MONOID)\n", text)


if __name__ == "__main__":
    unittest.main()
