"""A new reduction in a copy of the tree: four files, as docs/adding.md walks through them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
TEXT = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
SECTION = re.search(r"## A reduction\n(.*?)\n## ", TEXT, re.S)
assert SECTION is not None
# Each block of the section is headed by its file and the line before which it goes.
ADDITIONS = re.findall(r"^`(\S+)`, before `(.+?)`.*?\n\n```\w+\n(.*?)```", SECTION[1], re.S | re.M)


class AReduction(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.copy = Path(folder.name)
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.json")
        for part in ("python", "src", "tests"):
            shutil.copytree(ROOT / part, cls.copy / part, ignore=unwanted)
        for file, before, addition in ADDITIONS:
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

    def test_four_files_are_touched(self) -> None:
        self.assertEqual((len(ADDITIONS), len({file for file, *_ in ADDITIONS})), (6, 4))

    def test_its_row_passes(self) -> None:
        printed = self.run_in_copy(
            sys.executable, "tests/run.py", "test_operators", "-k",
            "NumpyOperators.test_abs_sum", "-k", "Table.test_every_operator_has_a_row",
        )  # fmt: skip
        self.assertRegex(printed, r"\n[5-9] passed, 0 failed, 0 skipped")

    @unittest.skipIf(COMPILER is None, "no C++ compiler")
    def test_its_kernel_is_registered(self) -> None:
        assert COMPILER is not None
        source = "src/cpu/reduce/statistics.cc"
        command = (*COMPILER.split(), "-std=c++17", "-O0", "-Isrc", "-c", source, "-o", "made.o")
        self.run_in_copy(*command)
        self.assertIn(b"\0reduce_abs_sum\0", (self.copy / "made.o").read_bytes())


if __name__ == "__main__":
    unittest.main()
