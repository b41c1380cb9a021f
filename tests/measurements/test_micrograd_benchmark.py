"""The contestants of benchmarks/steps/micrograd.py compute the same training."""

from __future__ import annotations

import sys
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from dlsys.ndarray import cpu
from steps import micrograd
from support.devices import require


@require(cpu(0))
class Contestants(unittest.TestCase):
    @mock.patch.object(micrograd, "LOOK", 5)
    def test_their_losses_agree(self):
        expected = [micrograd.graph("cpu")()]
        for name, make in micrograd.LOOPS.items():
            with self.subTest(name):
                if name == "torch eager" and find_spec("torch") is None:
                    continue
                if name != "torch captured":  # needs a GPU
                    np.testing.assert_allclose([make("cpu")()], expected, rtol=1e-4)

    def test_each_device_has_all_of_ours(self):
        there = micrograd.systems(["cpu"])
        self.assertEqual(there[: len(micrograd.OURS)], [("cpu", name) for name in micrograd.OURS])
