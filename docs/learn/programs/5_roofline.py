"""Chapter 5: where the time goes. The two roofs of this machine, and operators under them.

    python docs/learn/programs/5_roofline.py [--picture FILE.svg]

An operator can be no faster than its bytes at the speed of memory, nor than its arithmetic at the
speed of the cores: the lower roof at its intensity, in operations a byte, is its limit.
"""

import argparse
import time

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, nn, optim, profile, viz
from dlsys.executor.debug.observe import flops, traffic
from dlsys.runtime.device import best_context, emulated, synchronize

parser = argparse.ArgumentParser()
parser.add_argument("--picture")
options = parser.parse_args()
ctx = best_context()[0]
gpu = ctx is not None and ctx.name == "gpu" and not emulated()
SIDE = 4096 if gpu else 512  # of the product
COUNT = 1 << (26 if gpu else 24)  # elements of the others: beyond the caches


def measured(build, *shapes):
    """Intensity, GFLOP/s and GB/s of the one step of a graph, at its best of some runs."""
    inputs = [ad.Variable(f"x{k}", shape) for k, shape in enumerate(shapes)]
    executor = ad.Executor([build(*inputs)], ctx)
    rng = np.random.default_rng(0)
    feeds = {node: rng.random(node.shape, dtype=np.float32) for node in inputs}
    if ctx is not None:
        feeds = {node: ndarray.array(value, ctx) for node, value in feeds.items()}
    best = np.inf
    for _ in range(7):
        begin = time.perf_counter()
        executor.run(feeds)
        if ctx is not None:
            synchronize(ctx)
        best = min(best, time.perf_counter() - begin)
    (step,) = executor.plan({node: node.shape for node in inputs}).steps
    nbytes, operations = traffic(step), flops(step)
    return operations / nbytes, operations / best / 1e9, nbytes / best / 1e9


works = {
    "add": (lambda a, b: a + b, (COUNT,), (COUNT,)),
    "exp": (ad.exp_op, (COUNT,)),
    "sum of rows": (lambda a: ad.sum_op(a, axis=1), (COUNT // 1024, 1024)),
    "matrix times vector": (ad.matmul_op, (COUNT // 2048, 2048), (2048, 1)),
    "matrix product": (ad.matmul_op, (SIDE, SIDE), (SIDE, SIDE)),
}
found = {name: measured(*work) for name, work in works.items()}
bandwidth = max(speed for name, (_, _, speed) in found.items() if name != "matrix product")
peak = found["matrix product"][1]
print(f"memory {bandwidth:.0f} GB/s, arithmetic {peak:.0f} GFLOP/s")
for name, (intensity, rate, _) in found.items():
    roof = min(peak, bandwidth * intensity)
    limit = "arithmetic" if bandwidth * intensity > peak else "memory"
    print(f"  {name:20} {intensity:7.2f} FLOP a byte: {rate:7.1f} GFLOP/s of {roof:.1f} GFLOP/s, "
          f"limited by {limit}")  # fmt: skip

# A training step by operator, timed by the device's own clock.
x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
model = nn.LeNet5(seed=0)
loss = ad.softmax_cross_entropy(model(x), y)
step = ad.Executor([loss, optim.SGD(0.1, momentum=0.9).minimize(loss, model.parameters())], ctx)
feeds = {x: np.zeros((64, 1, 28, 28), np.float32), y: np.zeros(64, np.int64)}
step.run(feeds)
step.recorder = profile.Profile()
for _ in range(10):
    step.run(feeds)
rows = step.recorder.rows()
products = sum(row.ms for row in rows if row.name.startswith(("conv", "matmul"))) / 10
print(f"a step of LeNet-5: convolutions and products {products:.2f} ms, "
      f"all operators {sum(row.ms for row in rows) / 10:.2f} ms")  # fmt: skip
if options.picture:
    viz.save(viz.operator_times(step.recorder), options.picture)
