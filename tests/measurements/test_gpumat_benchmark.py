"""The contestants of benchmarks/operators/gpumat.py multiply the same matrices, and right."""

from __future__ import annotations

import sys
import unittest
from importlib.util import find_spec
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from dlsys.ndarray import cpu
from operators import gpumat
from support.devices import require


class Products(unittest.TestCase):
    @require(cpu(0))
    def test_all_are_right(self):
        rows = gpumat.compare("cpu", 60, 2)
        self.assertEqual([row["system"] for row in rows], ["gpumat", "torch"][: len(rows)])
        self.assertEqual(len(rows), 1 + (find_spec("torch") is not None))
        for row in rows:
            self.assertTrue(row["right"], row)
            self.assertEqual((row["program"]["n"], row["product"]["n"]), (2, 2))

    def test_a_wrong_product_would_be_seen(self):
        a, b, c = gpumat.matrices(60)
        c[...] = a @ b
        self.assertLess(gpumat.error((a, b, c)), gpumat.BOUND)
        c[:, 7] += 1e-3
        self.assertGreater(gpumat.error((a, b, c)), gpumat.BOUND)
        self.assertFalse(np.isnan(gpumat.error((a, b, c))))
