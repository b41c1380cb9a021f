"""Training allocates and launches as promised, by the library's counters and by CUPTI's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from dlsys.runtime.device import gpu
from support.devices import not_emulated, require

FOLDER = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(FOLDER))

import cupti_counter  # noqa: E402


class Counted:
    """A short and a three times longer training, each in a process of its own."""

    counts: dict[int, dict[str, Any]]
    steps = (10, 30)
    feeds = "host"

    @classmethod
    def setUpClass(cls) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                counter = cupti_counter.build(Path(folder))
            except cupti_counter.CuptiMissing as missing:
                raise unittest.SkipTest(f"CUPTI cannot count here: {missing}") from None
            cls.counts = {steps: cls._train(counter, Path(folder), steps) for steps in cls.steps}

    @classmethod
    def _train(cls, counter: Path, folder: Path, steps: int) -> dict[str, Any]:
        out = folder / f"{steps}.json"
        program = [str(FOLDER / "counted.py"), str(counter), str(out), str(FOLDER / "train.py")]
        done = subprocess.run(
            [sys.executable, *program, str(steps), cls.feeds],
            capture_output=True,
            text=True,
            timeout=300,
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

    def _added(self, name: str) -> int:
        """How many more of CUPTI's calls the longer training made."""
        short, long = self._by_steps("cupti", name)
        return long - short

    def test_a_step_is_one_graph_launch(self) -> None:
        self.assertGreater(self._by_steps("cupti", "kernel_launches")[0], 0, "CUPTI saw no launch")
        self.assertEqual(self._added("graph_launches"), self.steps[1] - self.steps[0])

    def test_no_kernel_is_launched_outside(self) -> None:
        self.assertEqual(self._added("kernel_launches"), 0)

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


@not_emulated
@require(gpu(0))
class HostFeeds(Counted, unittest.TestCase):
    """The loss is read at each step, which waits."""


class Unread(Counted):
    def test_nothing_waits(self) -> None:
        self.assertEqual(self._added("synchronizations"), 0)


@not_emulated
@require(gpu(0))
class DeviceFeeds(Unread, unittest.TestCase):
    feeds = "device"


@not_emulated
@require(gpu(0))
class RunMany(Unread, unittest.TestCase):
    feeds = "many"
