"""tests/run.py counts every outcome, also that of a process that breaks down."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

DOOMED = """
import os, unittest

class Mixed(unittest.TestCase):
    def test_fails(self): print("seen"); self.fail("no")
    def test_passes(self): pass
    @unittest.skip("a reason")
    def test_skipped(self): pass

class Dies(unittest.TestCase):
    def test_dies(self): os._exit(7)

class Lives(unittest.TestCase):
    def test_subtests(self):
        for k in range(2):
            with self.subTest(k=k):
                self.assertEqual(k, 0)
"""


class Runner(unittest.TestCase):
    def check(self, processes: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "doomed.py").write_text(DOOMED)
            names = ["doomed"] if processes != "1" else ["doomed.Mixed", "doomed.Lives"]
            done = subprocess.run(
                [sys.executable, Path(__file__).parents[1] / "run.py", "-j", processes, *names],
                env={**os.environ, "PYTHONPATH": folder, "DLSYS_REQUIRE_GPU": "0"},
                capture_output=True,
                text=True,
            )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("1 x a reason", done.stdout)
        self.assertIn("AssertionError: no", done.stderr)
        self.last = done.stdout.splitlines()[-1]
        return done.stderr

    def test_one_process(self) -> None:
        self.check("1")
        self.assertEqual(self.last, "1 passed, 2 failed, 1 skipped")

    def test_a_process_that_dies_fails_its_tests_alone(self) -> None:
        said = self.check("2")
        self.assertEqual(self.last, "1 passed, 3 failed, 1 skipped")
        self.assertIn("ended with status 7: doomed.Dies.test_dies", said)
        self.assertIn("seen", said)


if __name__ == "__main__":
    unittest.main()
