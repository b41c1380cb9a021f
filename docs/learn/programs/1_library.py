"""Chapter 1: the kernels of dlsys, called by their names on arrays of a device.

    python docs/learn/programs/1_library.py [--device cpu|gpu]

The emulated GPU: DLSYS_LIBRARY=build/emulated/libdlsys.so and --device gpu, after `make emulator`.
"""

import argparse
import time

import numpy as np

from dlsys import ndarray
from dlsys.runtime.device import best_context, emulated, synchronize
from dlsys.runtime.library import load

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=("cpu", "gpu"))
options = parser.parse_args()
ctx = getattr(ndarray, options.device)(0) if options.device else best_context()[0]
if ctx is None:
    raise SystemExit("this needs the native library: make lib")
plays = ctx.name == "gpu" and emulated()  # then times mean nothing
n = 64 if plays else 4096 if ctx.name == "gpu" else 512
rng = np.random.default_rng(0)
a, b = rng.normal(size=(2, n, n)).astype(np.float32)
x, y = ndarray.array(a, ctx), ndarray.array(b, ctx)


def run(kernel, *arguments, shape):
    """A kernel's result, and the best of some times in milliseconds."""
    out = ndarray.empty(shape, ctx)
    best = np.inf
    for _ in range(10):
        synchronize(ctx)
        begin = time.perf_counter()
        ndarray.launch(kernel, ctx, *arguments, out)
        synchronize(ctx)
        best = min(best, time.perf_counter() - begin)
    return out.asnumpy(), best * 1e3


scaled = np.exp(a - a.max(1, keepdims=True))
calls = {  # kernel: arguments, the result, bytes moved at least, operations
    "add": ((x, y), a + b, 12 * n * n, 0),
    "relu": ((x,), np.maximum(a, 0), 8 * n * n, 0),
    "reduce_sum": ((x, 0b01, 1.0), a.sum(0), 4 * n * n, 0),  # the axes as bits; a factor
    "softmax": ((x,), scaled / scaled.sum(1, keepdims=True), 8 * n * n, 0),
    "matmul": ((x, False, y, False, 0, 0), a @ b, 0, 2 * n**3),  # transposed? algorithm, precision
}
print("i: an input array, o: an output, l: an integer, f: a float")
for name, (arguments, wanted, nbytes, flops) in calls.items():
    result, ms = run(name, *arguments, shape=wanted.shape)
    right = np.allclose(result, wanted, rtol=1e-3, atol=n * 1e-6)
    speed = f" {max(nbytes, flops) / ms * 1e-6:8.1f} {'GB/s' if nbytes else 'GFLOP/s'}"
    signature = load().signature[ctx.kernel_device, name]
    print(f"{name:10} {signature:8} {'right' if right else 'WRONG'}{'' if plays else speed}")
