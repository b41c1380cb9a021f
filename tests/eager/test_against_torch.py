"""Random programs on Tensors give what PyTorch gives (support/tensor_programs.py).

DLSYS_TENSOR_PROGRAMS says how many; `make fuzz` draws new ones.
"""

from __future__ import annotations

import importlib.util
import os
import unittest

from dlsys.ndarray import cpu
from support.devices import require
from support.seeds import SEED
from support.table.draws import Draw

COUNT = int(os.environ.get("DLSYS_TENSOR_PROGRAMS", "60"))


@unittest.skipUnless(importlib.util.find_spec("torch"), "PyTorch is not installed")
class AgainstTorch(unittest.TestCase):
    device = "numpy"

    def test_random_programs(self):
        from support.tensor_programs import Program

        for k in range(COUNT):
            with self.subTest(f"DLSYS_TEST_SEED={SEED}, program {k}"):
                Program(Draw(SEED, k), self.device).run()


@require(cpu(0))
class AgainstTorchOnTheCpu(AgainstTorch):
    device = "cpu"
