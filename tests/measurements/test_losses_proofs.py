"""The proofs of benchmarks/learning/losses.py: right training passes, wrong is found; the table."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from support.devices import require

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from dlsys import nn
from dlsys.data import Mnist, Split
from dlsys.ndarray import Context, cpu
from learning import losses, losses_proofs
from learning.losses_proofs import Proof, Training
from shared.workloads import Work
from tables import losses as losses_table
from tables.gpu import Results

DENSE = Work("mlp", "dense", (784, 256, 100, 10), 50)
RESIDUAL = Work("residual-4", "residual", (), 4)
PROOF = Proof(200, 0.1, 1.0, 2)


def digits() -> Mnist:
    """Images that have something of their label."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 10, 200)
    images = rng.random((200, 784), np.float32) * 0.1
    images[np.arange(200)[:, None], labels[:, None] * 70 + np.arange(70)] += 0.5
    split = Split(images, labels)
    return Mnist(split, split, split)


def faster(work: Work, rate: float, ctx: Context | None) -> Training:
    """A device whose rate is wrong by one in a hundred."""
    return Training(work, rate if ctx is None else rate * 1.01, ctx)


def forgetful(work: Work, rate: float, ctx: Context | None) -> Training:
    """A device on which batch norm moves its running numbers too little."""
    good = nn.BatchNorm2d.__init__

    def bad(self: nn.BatchNorm2d, channels: int) -> None:
        good(self, channels, momentum=0.1 if ctx is None else 0.09)

    with mock.patch.object(nn.BatchNorm2d, "__init__", bad):
        return Training(work, rate, ctx)


@require(cpu(0))
class Found(unittest.TestCase):
    def setUp(self) -> None:
        patch = mock.patch.object(losses_proofs, "load_mnist", digits)
        patch.start()
        self.addCleanup(patch.stop)

    def test_a_right_training_passes(self) -> None:
        for kind, prove in losses_proofs.KINDS.items():
            with self.subTest(kind=kind):
                found = prove(DENSE, PROOF, cpu(0))
                self.assertTrue(found["ok"], found)
                self.assertEqual(found["steps"], 12)
        self.assertEqual(found["compared"], 6)
        self.assertIn("5.bias", found["update_error_by_parameter"])

    def test_a_wrong_rate_is_found(self) -> None:
        with mock.patch.object(losses_proofs, "Training", faster):
            curve = losses_proofs.curve(DENSE, PROOF, cpu(0))
            steps = losses_proofs.steps(DENSE, PROOF, cpu(0))
        self.assertFalse(curve["ok"], curve)
        self.assertFalse(steps["ok"], steps)
        self.assertAlmostEqual(steps["update_error"]["median"], 0.01, places=3)

    def test_running_numbers_count(self) -> None:
        proof = Proof(4, 0.01, 0.01, 1, 2e-3)
        for made, right in ((Training, True), (forgetful, False)):
            with self.subTest(right=right), mock.patch.object(losses_proofs, "Training", made):
                found = losses_proofs.steps(RESIDUAL, proof, cpu(0))
                self.assertEqual(found["ok"], right, found)
        mean = found["update_error_by_parameter"]["2.running_mean"]["median"]
        self.assertAlmostEqual(mean, 0.1, places=3)

    def test_a_curve_that_does_not_fall_proves_nothing(self) -> None:
        found = losses_proofs.curve(DENSE, PROOF._replace(gentle=0.0), cpu(0))
        self.assertLess(found["largest_difference"], 1e-6)
        self.assertFalse(found["ok"])


class Shares(unittest.TestCase):
    def test_errors_are_shares_of_the_largest_update(self) -> None:
        before = {"w": np.array([1.0, 2.0]), "b": np.array([0.0])}
        expected = {"w": np.array([1.5, 2.1]), "b": np.array([0.0])}
        after = {"w": np.array([1.5, 2.2]), "b": np.array([0.0])}
        found = losses_proofs.update_errors(before, after, expected)
        self.assertAlmostEqual(found["w"], 0.2)
        self.assertEqual(found["b"], 0)
        after["b"] = np.array([1e-9])
        self.assertEqual(losses_proofs.update_errors(before, after, expected)["b"], math.inf)

    def test_the_reference_is_float64_throughout(self) -> None:
        training = Training(RESIDUAL, 0.1, None)
        dtypes = {value.dtype for value in training.network.state_dict().values()}
        self.assertEqual(dtypes, {np.dtype(np.float64)})


class Shown(unittest.TestCase):
    def test_a_device_that_is_not_there(self) -> None:
        with (
            mock.patch.object(losses, "unavailable", lambda ctx: f"{ctx} is not there."),
            mock.patch.object(sys, "argv", ["losses.py"]),
            mock.patch("sys.stderr") as said,
        ):
            self.assertEqual(losses.main(), 2)
        self.assertIn("gpu(0) is not there.", said.write.call_args_list[0].args[0])

    def test_the_table(self) -> None:
        common = {"ok": True, "rate": 0.1, "epoch_losses": [2.0, 1.0, 0.5], "seconds": 3.2}
        curve = {**common, "steps": 150, "largest_difference": 3e-5}
        curve["largest_difference_of_epoch_means"] = 4e-7
        error = {"median": 1e-6, "largest": 0.01}
        steps = {**common, "steps": 150, "compared": 75, "loss_error": error, "update_error": error}
        work = {**PROOF._asdict(), "curve": curve, "steps": steps}
        broken = {**work, "steps": {"ok": False, "error": "no memory"}}
        text = self.table({"mlp": work, "logreg": broken})
        name = "MLP 784-256-100-10, batch 1000"
        self.assertIn(f"| {name} | 200 | 0.1 | 2.000, 1.000, 0.500 | 150 | 3.0e-05 |", text)
        self.assertIn("| 75 of 150 | 1.0e-02 | 1.0e-06 | 0.0001 | 1.0e-02 | 3 |", text)
        self.assertIn("| 200 | failed |", text)
        self.assertIn("no memory", losses.line("logreg steps", broken["steps"]))

    def table(self, works: dict[str, Any]) -> str:
        """The table of a record of these works."""
        machine = {"gpu": "a GPU", "python": "3.12", "numpy": "2.4"}
        record = {"date": "today", "commit": "c", "command": "losses", "machine": machine}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "losses.json"
            path.write_text(json.dumps({**record, "bounds": losses_proofs.BOUNDS, "works": works}))
            return losses_table.table(Results(Path(folder)))
