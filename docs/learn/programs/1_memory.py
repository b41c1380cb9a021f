"""Chapter 1: what a warp asks of memory, counted; and the same lessons in the kernels of dlsys.

python docs/learn/programs/1_memory.py
"""

import numpy as np

import dlsys as dl
from dlsys.runtime.device import best_context
from dlsys.runtime.library import load

LANES = np.arange(32)  # the threads of a warp, which issue one access together


def sectors(elements):
    """How many sectors of 32 bytes hold these float32 elements: what memory has to deliver."""
    return len(np.unique(np.asarray(elements) * 4 // 32))


def conflict(elements):
    """How often shared memory is asked: it has 32 banks, and each gives one word of 4 bytes."""
    words = np.unique(elements)  # lanes that want the same word get it together
    return np.bincount(words % 32).max()


print("one load of a warp, 128 bytes wanted")
n = 4096
for what, elements in {
    "neighbors, x[i]": LANES,
    "shifted by one, x[i + 1]": LANES + 1,
    "every second, x[2 i]": 2 * LANES,
    "a column, x[i * 4096]": LANES * n,
    "all the same, x[0]": 0 * LANES,
}.items():
    print(f"  {what:26} {sectors(elements):2} sectors, {32 * sectors(elements):5} bytes")

# A tile of 16 × 16: lane t of the first warp has row t // 16 and column t % 16.
i, j = LANES // 16, LANES % 16
print("the transposes of kernels.cu, a warp's accesses")
print(f"  Transpose       reads {sectors(i * n + j):2} sectors, writes {sectors(j * n + i):2}")
print(f"  TransposeTiled  reads {sectors(i * n + j):2} sectors, writes {sectors(i * n + j):2}")
print(f"  a column of a tile 16 wide asks a bank {conflict(j * 16 + i)} times, 17 wide "
      f"{conflict(j * 17 + i)}")  # fmt: skip

print(f"a product of n = {n}: bytes that the threads read, with tiles of T")
for tile in (1, 16, 128):
    nbytes = 2 * n**3 / tile * 4
    print(f"  T = {tile:3}: {nbytes / 1e9:6.1f} GB, {2 * n**3 / nbytes:5.2f} FLOP a byte")

# A tree adds numbers of like size: it is parallel, and it is also more accurate than a loop.
x = np.random.default_rng(0).uniform(size=1_000_000).astype(np.float32)
exact = x.sum(dtype=np.float64)
loop = np.cumsum(x, dtype=np.float32)[-1]  # one float32 sum, front to back
print("a million float32 numbers, relative error of their sum")
print(f"  one after the other {abs(loop - exact) / exact:.0e}, by a tree "
      f"{abs(np.add.reduce(x.reshape(-1, 64).sum(1)) - exact) / exact:.0e}")  # fmt: skip
total = dl.tensor(x).sum()
again = {dl.tensor(x).sum().item() for _ in range(5)}
print(f"  dlsys below 1e-6: {abs(total.item() - exact) / exact < 1e-6}, "
      f"five times the same bits: {len(again) == 1}")  # fmt: skip

# The library is a table of kernels; the wrapper of each is made from its C++ signature.
ctx = best_context()[0]
if ctx is None:
    print("no native library here: `make lib` builds it")
else:
    kernels = {name for device, name, _ in load().index if device == ctx.kernel_device}
    both = all(name in kernels for name in ("add", "transpose", "reduce_sum", "matmul"))
    print(f"dlsys has native kernels for add, transpose, reduce_sum, matmul: {both}")
    product = (dl.tensor(x[:4096]).reshape(64, 64) @ dl.tensor(x[:4096]).reshape(64, 64)).numpy()
    square = x[:4096].reshape(64, 64).astype(np.float64)
    print(f"  its product of 64 × 64 is right: {np.allclose(product, square @ square, rtol=1e-5)}")
