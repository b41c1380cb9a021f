"""A GPU with less shared memory gets the tiles that it has room for."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path

from devices import EMULATED

# Of small integers, which both precisions multiply exactly, and so large that a GPU with more
# shared memory takes larger tiles than the smaller ones have room for.
PROGRAM = """
import numpy as np
from dlsys import autodiff as ad, ndarray
rng = np.random.default_rng(0)
x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((1024, 64), (64, 512)))
a, b = ad.Variable("a"), ad.Variable("b")
for precision in ("fp32", "tf32"):
    executor = ad.Executor([ad.matmul_op(a, b)], ctx=ndarray.gpu(0), precision=precision)
    (y,) = executor.run({a: x, b: w}, convert_to_numpy_ret_vals=True)
    print(precision, np.array_equal(y, x @ w))
"""


@unittest.skipUnless(EMULATED, "only an emulated GPU can be made smaller")
class SmallerGpu(unittest.TestCase):
    def test_products(self) -> None:
        for kbytes in (64, 99, 163):  # compute capability 7.5, 8.6 and 8.0
            with self.subTest(kbytes=kbytes):
                done = subprocess.run(
                    [sys.executable, "-c", PROGRAM],
                    cwd=Path(__file__).parent,
                    env={**os.environ, "DLSYS_EMULATED_SHARED": str(kbytes << 10)},
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                self.assertEqual(done.stdout, "fp32 True\ntf32 True\n", done.stderr)


if __name__ == "__main__":
    unittest.main()
