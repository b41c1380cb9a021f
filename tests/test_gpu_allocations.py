"""Training allocates device memory in its first steps only, by two independent counters."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from devices import require
from dlsys.runtime.device import gpu

FOLDER = Path(__file__).resolve().parent / "gpu"
sys.path.insert(0, str(FOLDER))

import cupti_counter  # noqa: E402


@require(gpu(0))
class Allocations(unittest.TestCase):
    """A short and a three times longer training, each in a process of its own."""

    counts: dict[int, dict[str, Any]]
    steps = (10, 30)

    @classmethod
    def setUpClass(cls) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                counter = cupti_counter.build(Path(folder))
            except cupti_counter.CuptiMissing as missing:
                raise unittest.SkipTest(f"CUPTI cannot count here: {missing}") from None
            cls.counts = {steps: cls._train(counter, Path(folder), steps) for steps in cls.steps}

    @staticmethod
    def _train(counter: Path, folder: Path, steps: int) -> dict[str, Any]:
        out = folder / f"{steps}.json"
        program = [str(FOLDER / "counted.py"), str(counter), str(out), str(FOLDER / "train.py")]
        done = subprocess.run(
            [sys.executable, *program, str(steps)], capture_output=True, text=True, timeout=300
        )
        if "CuptiMissing" in done.stderr:
            reason = done.stderr.strip().splitlines()[-1]
            raise unittest.SkipTest(f"CUPTI cannot count here: {reason}")
        if done.returncode:
            raise AssertionError(f"training failed:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())

    def _by_steps(self, source: str, name: str) -> tuple[int, int]:
        short, long = self.steps
        return self.counts[short][source][name], self.counts[long][source][name]

    def test_cupti_sees_the_library(self) -> None:
        short, long = self._by_steps("cupti", "launches")
        self.assertGreater(short, self.steps[0], "no launch was seen: CUPTI counted nothing")
        self.assertGreater(long, 2 * short)

    def test_library_counter(self) -> None:
        short, long = self._by_steps("library", "device_allocations")
        self.assertGreater(short, 0)
        self.assertEqual(short, long)

    def test_runtime_allocations(self) -> None:
        short, long = self._by_steps("cupti", "runtime_allocations")
        self.assertGreater(short, 0)
        self.assertEqual(short, long)

    def test_driver_allocations(self) -> None:
        self.assertEqual(*self._by_steps("cupti", "driver_allocations"))

    def test_pinned_allocations(self) -> None:
        self.assertEqual(*self._by_steps("cupti", "host_allocations"))


if __name__ == "__main__":
    unittest.main()
