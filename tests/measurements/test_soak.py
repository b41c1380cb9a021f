"""The soak of benchmarks/proofs/soak.py: flat memory passes, a leak of each kind is found."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import mmap
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import dlsys as dl
from dlsys.ndarray import cpu
from proofs import soak
from support.devices import require
from tables import reliability
from tables.gpu import Results

STEPS = 200
# Of so short a soak the resident bytes say little: other tests' pages come and go.
LIMITS = soak.LIMITS | {"resident_bytes": 32 << 20}


@require(cpu(0))
class Soak(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        gc.collect()
        gc.freeze()  # the soak collects 40 times, and what other tests left is not its concern
        self.addCleanup(gc.unfreeze)

    def run_main(self, leak: soak.Step = lambda number: None) -> tuple[int, dict[str, Any]]:
        """Exit status and record of a short soak whose steps leak besides."""
        made = soak.training

        def training(device: str) -> tuple[soak.Step, list[float]]:
            step, losses = made(device)
            return lambda number: (step(number), leak(number))[0], losses

        argv = ["soak.py", "--steps", str(STEPS), "--out", str(self.folder)]
        with (
            mock.patch.object(soak, "training", training),
            mock.patch.object(soak, "LIMITS", LIMITS),
            mock.patch.object(sys, "argv", argv),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            status = soak.main()
        return status, json.loads((self.folder / "soak.json").read_text())

    def test_training_is_flat_and_the_table_says_so(self) -> None:
        status, record = self.run_main()
        self.assertEqual((status, record["ok"]), (0, True), record["counts"])
        self.assertGreater(record["counts"]["live_bytes"]["at"][0], 0)
        text = reliability.soak(Results(self.folder))
        self.assertIn("| live bytes | ", text)
        self.assertIn(f"| at step {STEPS // 4} | at step {STEPS} |", text)

    def test_a_tensor_that_is_held_is_found(self) -> None:
        held: list[Any] = []

        def leak(number: int) -> None:
            if number % 10 == 0:
                held.append(dl.ones(1, device="cpu") + number)
                held[-1].item()

        status, record = self.run_main(leak)
        self.assertEqual((status, record["counts"]["live_bytes"]["flat"]), (1, False))

    def test_objects_and_host_memory_that_are_held_are_found(self) -> None:
        held: list[Any] = []

        def leak(number: int) -> None:
            pages = mmap.mmap(-1, 1 << 18)  # new ones, whatever the heap has left
            pages.write(bytes(1 << 18))
            held.append((pages, [[] for _ in range(5)]))

        status, record = self.run_main(leak)
        flat = {name: count["flat"] for name, count in record["counts"].items()}
        wanted = {"resident_bytes": False, "live_bytes": True, "python_blocks": False}
        self.assertEqual((status, flat), (1, wanted))

    def test_warming_up_is_no_growth(self) -> None:
        counts = [float(min(k, soak.WARM - 1)) * 1e9 for k in range(soak.WINDOWS)]
        self.assertEqual(soak.rise(counts), 0.0)
        self.assertAlmostEqual(soak.rise([float(k) for k in range(soak.WINDOWS)]), 29.0)
