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

from support.devices import slow

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")

# File, the line before which the addition goes, the addition.
SQUARE = (
    (
        "python/dlsys/ops/elementwise.py",
        "relu_op: ",
        'square_op = Elementwise("square", np.square, lambda x, y, dy: 2 * x * dy)\n',
    ),
    ("python/dlsys/ops/elementwise.py", '    "abs_op", ', '    "square_op",\n'),
    (
        "src/math/functors.h",
        'DLSYS_UNARY(Sigmoid, "sigmoid"',
        'DLSYS_UNARY(Square, "square", (x * x))\n',
    ),
    (
        "tests/support/table/samples.py",
        '    unary("sigmoid"',
        '    unary("square", lambda x: np.abs(x) ** 2, integers="same"),\n',
    ),
)


Additions = Sequence[tuple[str, str, str]]


def of_section(title: str) -> Additions:
    """The blocks of a section of docs/adding.md. Each is headed by its file and the line before
    which it goes; a new file has none.
    """
    page = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    (section,) = (text for text in page.split("\n## ") if text.startswith(f"{title}\n"))
    blocks = r"^`(\S+)`, (?:before `(.+?)`|new).*?\n\n```\w+\n(.*?)```"
    return re.findall(blocks, section, re.S | re.M)


class InACopy(unittest.TestCase):
    """A copy of the tree with `additions`."""

    additions: Additions = ()

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.copy = Path(folder.name)
        shutil.copy2(ROOT / "Makefile", cls.copy)
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.json")
        for part in ("python", "src", "tests"):
            shutil.copytree(ROOT / part, cls.copy / part, ignore=unwanted)
        for file, before, addition in cls.additions:
            path = cls.copy / file
            path.parent.mkdir(exist_ok=True)
            text = path.read_text(encoding="utf-8") if before else ""
            at = text.index(f"\n{before}") + 1 if before else 0
            path.write_text(text[:at] + addition + text[at:], encoding="utf-8")

    def count(self) -> tuple[int, int]:
        """The places that the additions touch, and the files."""
        return len(self.additions), len({file for file, *_ in self.additions})

    def run_in_copy(self, *command: str, **environment: str) -> str:
        own = {"PYTHONPATH": str(self.copy / "python"), "PYTHONWARNINGS": "error"}
        own["DLSYS_REQUIRE_GPU"] = ""  # the copies' libraries have no CUDA
        done = subprocess.run(
            command, cwd=self.copy, capture_output=True, text=True,
            env={**os.environ, **own, **environment},
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def make(self, target: str, *variables: str) -> None:
        """Builds a native library in the copy."""
        own = (f"PYTHON={sys.executable}", "VENV=", "CUDA=off", "CUDA_ARCHS=")
        self.run_in_copy("make", target, *own, *variables, MAKEFLAGS="", MAKELEVEL="")

    def check_registered(self, source: str, kernel: bytes) -> None:
        assert COMPILER is not None
        # One version of each loop: registrations do not depend on the processor.
        options = ("-std=c++17", "-O0", "-DDLSYS_ONE_ISA", "-Isrc")
        command = (*COMPILER.split(), *options, "-c", source, "-o", "made.o")
        self.run_in_copy(*command)
        self.assertIn(b"\0" + kernel + b"\0", (self.copy / "made.o").read_bytes())

    def check_row(self, name: str) -> None:
        printed = self.run_in_copy(
            sys.executable, "tests/run.py", "test_operators", "-k", f"NumpyOperators.test_{name}",
            "-k", "Table.test_every_operator_has_a_row",
        )  # fmt: skip
        self.assertRegex(printed, r"\n(?:[5-9]|1\d) passed, 0 failed, 0 skipped")


class AnElementwiseOperator(InACopy):
    """Its line in Python, its functor and its row are all: three files."""

    additions = SQUARE

    def test_three_files_are_touched(self) -> None:
        self.assertEqual(self.count(), (4, 3))

    def test_its_name_is_public(self) -> None:
        printed = self.run_in_copy(
            sys.executable,
            "-c",
            "from dlsys import autodiff as ad; print(ad.square_op(ad.Variable('x')))",
        )
        self.assertIn("square(x)", printed)

    def test_its_row_passes(self) -> None:
        self.check_row("square")

    @slow
    @unittest.skipIf(COMPILER is None, "no C++ compiler")
    def test_its_kernel_is_registered(self) -> None:
        self.check_registered("src/cpu/pointwise/elementwise.cc", b"square")

    def test_cuda_registers_the_same_list(self) -> None:
        for source in ("src/cpu/pointwise/elementwise.cc", "src/cuda/pointwise/elementwise.cu"):
            text = (ROOT / source).read_text(encoding="utf-8")
            self.assertIn("#define DLSYS_REGISTER_FUNCTORS\n", text)
            self.assertNotIn("DLSYS_KERNEL(", text)


class AFunction(InACopy):
    """The name by which users call the operator of before."""

    additions = (*SQUARE, *of_section("A function"))

    def test_two_files_are_touched(self) -> None:
        self.assertEqual(self.count(), (len(SQUARE) + 3, 3 + 2))

    def test_it_is_in_the_vocabulary(self) -> None:
        tests = ("tests/run.py", "test_functional", "test_vocabulary")
        self.assertRegex(self.run_in_copy(sys.executable, *tests), r"\n\d+ passed, 0 failed")

    def test_without_it_a_test_fails(self) -> None:
        math = self.copy / "python" / "dlsys" / "functional" / "math.py"
        text = math.read_text(encoding="utf-8")
        math.write_text(text.replace("square_op(", "neg_op("), encoding="utf-8")
        with self.assertRaisesRegex(AssertionError, "name='square_op'"):
            self.run_in_copy(sys.executable, "tests/run.py", "test_vocabulary")
        math.write_text(text, encoding="utf-8")


class AReduction(InACopy):
    """The files that docs/adding.md shows: the numpy form and operator, the monoid, the row."""

    additions = of_section("A reduction")

    def test_three_files_are_touched(self) -> None:
        self.assertEqual(self.count(), (5, 3))

    def test_its_row_passes(self) -> None:
        self.check_row("abs_sum")

    @slow
    @unittest.skipIf(COMPILER is None, "no C++ compiler")
    def test_its_kernel_is_registered(self) -> None:
        self.check_registered("src/cpu/reduce/reduce.cc", b"reduce_abs_sum")

    def test_cuda_registers_the_same_list(self) -> None:
        for source in ("src/cpu/reduce/reduce.cc", "src/cuda/reduce/reduce.cu"):
            text = (ROOT / source).read_text(encoding="utf-8")
            self.assertIn("\nDLSYS_MONOIDS(DLSYS_REGISTER_MONOID)\n", text)


@unittest.skipUnless((ROOT / "build" / "obj" / "cpu").is_dir(), "not here: objects in build/")
class Built(InACopy):
    """A copy of the tree with its objects, so that `make` compiles what the additions change."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        shutil.copytree(ROOT / "build" / "obj", cls.copy / "build" / "obj")


class AFusion(Built):
    """The files that docs/adding.md shows, with their tests, on the CPU and an emulated GPU."""

    additions = of_section("A fusion")

    def test_five_files_are_touched_four_of_them_new(self) -> None:
        self.assertEqual(self.count(), (6, 5))
        self.assertEqual(sum(not before for _, before, _ in self.additions), 4)

    def check_dot(self, library: str, passed: int) -> None:
        printed = self.run_in_copy(
            sys.executable, "tests/run.py", "test_operators", "test_dot",
            "-k", "test_dot", "-k", "Table.test_every_operator_has_a_row",
            DLSYS_LIBRARY=str(self.copy / library),
        )  # fmt: skip
        self.assertRegex(printed, rf"\n{passed} passed, 0 failed")

    def test_its_tests_pass_on_the_cpu(self) -> None:
        self.make("native")
        self.check_dot("python/dlsys/libdlsys.so", 12)

    @unittest.skipUnless(
        (ROOT / "build" / "obj" / "emulated").is_dir(), "not here: objects of `make emulator`"
    )
    @slow
    def test_its_tests_pass_on_an_emulated_gpu(self) -> None:
        self.make("emulator")
        self.check_dot("build/emulated/libdlsys.so", 16)


@unittest.skipIf(COMPILER is None, "no C++ compiler")
class ABackend(InACopy):
    """The files that docs/adding.md shows, in a copy without the kernels of other devices."""

    additions = of_section("A backend")

    def test_seven_files_are_touched_three_of_them_new(self) -> None:
        self.assertEqual(self.count(), (7, 7))
        self.assertEqual(sum(not before for _, before, _ in self.additions), 3)

    @slow
    def test_it_trains_and_its_rows_pass(self) -> None:
        for room in (self.copy / "src" / "cpu").iterdir():
            if room.name != "runtime":
                shutil.rmtree(room)
        self.make("interface", "CXXFLAGS=-O0")
        printed = self.run_in_copy(
            sys.executable, "tests/run.py", "--quick", "test_operators", "test_toy",
            "-k", "test_toy", "-k", "ToyOperators.test_*_values",
            DLSYS_LIBRARY=str(self.copy / "python/dlsys/libdlsys.so"),
        )  # fmt: skip
        self.assertRegex(printed, r"\n\d+ passed, 0 failed, 0 skipped")


class ADtype(unittest.TestCase):
    """The files that name a storage type are those that docs/adding.md lists."""

    def test_the_files_that_know_float16(self) -> None:
        page = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
        section = page.split("\n## A dtype\n")[1].split("\n## ")[0]
        listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
        naming = re.compile(r"(?<![bB])(?:float16|FLOAT16|Float16)\b")
        folders = (ROOT / "src", ROOT / "python")
        suffixes = (".h", ".cc", ".cu", ".cuh", ".py")
        found = []
        for path in sorted(path for folder in folders for path in folder.rglob("*")):
            if path.suffix in suffixes and path.name != "interface_text.py":
                text = re.sub(
                    r"^\s*(?://|#)[^\n]*$|\"{3}.*?\"{3}", "", path.read_text(), flags=re.M | re.S
                )
                if naming.search(text):
                    found.append(str(path.relative_to(ROOT)))
        self.assertEqual(sorted(listed), found)
