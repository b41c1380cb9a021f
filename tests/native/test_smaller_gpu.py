"""A GPU with less shared memory gets the tiles that it has room for, and one with little memory
keeps its Parameters where a run does not fit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import unittest

from support.devices import emulated_gpu

# Of small integers, which both precisions multiply exactly, and so large that a GPU with more
# shared memory takes larger tiles than the smaller ones have room for.
PRODUCTS = """
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

# Updates at fp32 by gradients of bytes, whose tiles take more memory than any others.
UPDATES = """
import unittest
from fusion.test_uint8_kernels import GpuUpdates
only = GpuUpdates("test_gradients_at_fp32_are_those_of_whole_floats")
done = unittest.TextTestRunner().run(only)
assert done.wasSuccessful() and done.testsRun == 1 and not done.skipped
"""

# A first run with so much memory left, in steps, until it fits: in some the memory runs out at a
# gradient of a convolution, behind the updates of the layers above it.
LITTLE = """
import gc
import numpy as np
from dlsys import autodiff as ad, ndarray, nn, optim
from dlsys.errors import OutOfMemoryError
from dlsys.runtime.device import Block, device_memory, trim
ctx = ndarray.gpu(0)
feeds = np.random.default_rng(1).normal(size=(8, 3, 12, 12)).astype(np.float32), np.arange(8)

def attempt(left):
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, rng=rng), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, rng=rng), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, rng=rng), nn.ReLU(), nn.Flatten(),
        nn.Linear(1152, 64, rng=rng), nn.ReLU(), nn.Linear(64, 10, rng=rng),
    )
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    optimizer = optim.SGD(0.05, momentum=0.9)
    update = optimizer.minimize(ad.softmax_cross_entropy(model(x), y), model.parameters())
    states = [*model.parameters(), *optimizer.velocity.values()]
    executor = ad.Executor([update], ctx)
    before = [state.asnumpy() for state in states]
    taken = []
    for size in (4 << 20, 1 << 18, 1 << 14):
        while device_memory(ctx)[0] - left >= size:
            taken.append(Block(ctx, size))
    try:
        executor.run(dict(zip((x, y), feeds)))
    except OutOfMemoryError:
        fits = False
    else:
        fits = True
    return fits, [bool((state.asnumpy() != old).any()) for state, old in zip(states, before)]

found = set()
for left in range(0, 3 << 20, 1 << 15):
    fits, changed = attempt(left)
    found.add((fits, any(changed), all(changed)))
    gc.collect()
    trim(ctx)
    if fits:
        break
for each in sorted(found):
    print(each)
"""


@emulated_gpu
class SmallerGpu(unittest.TestCase):
    def printed(self, program: str, variable: str, nbytes: int) -> str:
        """What a program prints on a GPU that has so much of something."""
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), variable: str(nbytes)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_products(self) -> None:
        for kbytes in (64, 99, 163):  # compute capability 7.5, 8.6 and 8.0
            with self.subTest(kbytes=kbytes):
                printed = self.printed(PRODUCTS, "DLSYS_EMULATED_SHARED", kbytes << 10)
                self.assertEqual(printed, "fp32 True\ntf32 True\n")

    def test_updates_by_bytes(self) -> None:
        for kbytes in (64, 99, 163):
            with self.subTest(kbytes=kbytes):
                self.printed(UPDATES, "DLSYS_EMULATED_SHARED", kbytes << 10)

    def test_a_run_that_does_not_fit_changes_no_parameter(self) -> None:
        printed = self.printed(LITTLE, "DLSYS_EMULATED_MEMORY", 48 << 20)
        self.assertEqual(printed, "(False, False, False)\n(True, True, True)\n")
