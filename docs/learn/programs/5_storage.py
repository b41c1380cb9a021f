"""Chapter 5: floats of 16 bits: what they hold, what they lose, and what they save.

python docs/learn/programs/5_storage.py
"""

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys.dtypes import as_dtype, rounded
from dlsys.executor.debug.observe import traffic
from dlsys.runtime.device import best_context

TYPES = ("float32", "float16", "bfloat16")


def store(value, dtype):
    """The number that is nearest to a value among those of a storage type."""
    with np.errstate(over="ignore"):
        return float(rounded(np.float32(value), as_dtype(dtype)))


def spacing(dtype):
    """The distance from 1 to the next number above."""
    step = 1.0
    while store(1 + step / 2, dtype) > 1:
        step /= 2
    return step


print("type      above 1   a million is  1e-8 is")
for dtype in TYPES:
    big, small = store(1e6, dtype), store(1e-8, dtype)
    print(f"{dtype:9} 2^{np.log2(spacing(dtype)):<7.0f} {big:<13.7g} {small:.2g}")

# A gradient that float16 cannot hold is held if the loss is multiplied first: loss scaling.
print(f"1e-8 · 65536 in float16, divided again: {store(1e-8 * 65536, 'float16') / 65536:.2g}")

# Ten thousand updates of 1e-4: 16 bits lose each, so optimizers want a copy in float32.
for dtype in TYPES:
    w = 1.0
    for _ in range(10_000):
        w = store(w + 1e-4, dtype)
    print(f"1 + 10000 · 1e-4 in {dtype:9} {w:.4f}")

# Kernels here read and write 16 bits and compute in float32: a long sum rounds once.
rng = np.random.default_rng(0)
numbers = rounded(rng.uniform(size=100_000), as_dtype("bfloat16"))
exact = numbers.sum(dtype=np.float64)
for dtype in TYPES[1:]:
    total = dl.tensor(rounded(numbers, as_dtype(dtype)), dtype=dtype).sum()
    held = rounded(numbers, as_dtype(dtype)).sum(dtype=np.float64)
    print(f"sum of 100,000 in {dtype:9} {float(total):.0f}, exact {held:.0f}")

# What is saved: bytes, and with them time wherever memory is the limit.
ctx = best_context()[0]
for dtype in TYPES:
    x, w = (ad.Variable(name, (512, 512), as_dtype(dtype)) for name in "xw")
    for what, out in {"softmax": ad.softmax_op(x), "product": ad.matmul_op(x, w)}.items():
        nodes = {node: node.shape for node in (x, w)[: len(out.inputs)]}
        steps = ad.Executor([out], ctx).plan(nodes).steps
        names = ", ".join(step.node.op.name for step in steps)
        print(f"{what} in {dtype:9} {sum(map(traffic, steps)) / 2**20:.1f} MiB by {names}")
