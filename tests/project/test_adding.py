"""What an addition costs: a new operator in a copy of the tree, and the files that it touches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
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


class AnElementwiseOperator(unittest.TestCase):
    """Its line in Python, its functor and its row are all: three files."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.copy = Path(folder.name)
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.json")
        for part in ("python", "src", "tests"):
            shutil.copytree(ROOT / part, cls.copy / part, ignore=unwanted)
        for file, before, addition in SQUARE:
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
        parts = ("NumpyOperators.test_square", "Table.test_every_operator_has_a_row")
        chosen = [argument for part in parts for argument in ("-k", part)]
        printed = self.run_in_copy(sys.executable, "tests/run.py", "test_operators", *chosen)
        self.assertRegex(printed, r"\n[5-9] passed, 0 failed, 0 skipped")

    @unittest.skipIf(COMPILER is None, "no C++ compiler")
    def test_its_kernel_is_registered(self) -> None:
        assert COMPILER is not None
        source = "src/cpu/pointwise/elementwise.cc"
        command = (*COMPILER.split(), "-std=c++17", "-O0", "-Isrc", "-c", source, "-o", "made.o")
        self.run_in_copy(*command)
        self.assertIn(b"\0square\0", (self.copy / "made.o").read_bytes())

    def test_cuda_registers_the_same_list(self) -> None:
        for source in ("src/cpu/pointwise/elementwise.cc", "src/cuda/pointwise/elementwise.cu"):
            text = (ROOT / source).read_text(encoding="utf-8")
            self.assertIn("#define DLSYS_REGISTER_FUNCTORS\n", text)
            self.assertNotIn("DLSYS_KERNEL(", text)


if __name__ == "__main__":
    unittest.main()
