"""Chapter 4: what fusion leaves of a step, and what a GPU's captured graph leaves of the host.

    python docs/learn/programs/4_fusion.py [--picture FILE.svg] [--gpu]

`--picture` draws the graph that runs; `--gpu` takes the GPU, also where it is an emulated one.
"""

import argparse
import time
from collections import Counter

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, nn, optim, viz
from dlsys.runtime.device import best_context, emulated
from dlsys.settings import settings

parser = argparse.ArgumentParser()
parser.add_argument("--picture")
parser.add_argument("--gpu", action="store_true")
options = parser.parse_args()
# The best is a GPU, else the CPU, else None for numpy, which fuses nothing.
ctx = ndarray.gpu(0) if options.gpu else best_context()[0]
RUNS = 5 if options.gpu and emulated() else 100


def network():
    """The loss and the update of an MLP, and its feeds."""
    rng = np.random.default_rng(0)
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    model = nn.Sequential(nn.Linear(64, 128, rng=0), nn.ReLU(), nn.Linear(128, 10, rng=1))
    loss = ad.softmax_cross_entropy(model(x), y)
    train = optim.Adam(1e-3).minimize(loss, model.parameters())
    feeds = {x: rng.normal(size=(100, 64)).astype(np.float32), y: rng.integers(0, 10, 100)}
    return [loss, train], feeds


def measure(fusion):
    """Steps, and milliseconds of a run, under a setting of DLSYS_FUSION."""
    settings.fusion = fusion
    fetches, feeds = network()
    executor = ad.Executor(fetches, ctx)
    plan = executor.plan({node: value.shape for node, value in feeds.items()})
    first = float(executor.run(feeds)[0])
    executor.run(feeds)  # a GPU captures here
    begin = time.perf_counter()
    for _ in range(RUNS):
        value = executor.run(feeds)[0]
    float(value)
    ms = (time.perf_counter() - begin) / RUNS * 1e3
    return plan, first, ms, executor.report()


plain, plain_loss, plain_ms, _ = measure("off")
plan, loss, ms, report = measure("all")
print(f"without fusion {len(plain.steps)} steps, {plain_ms:.3f} ms; "
      f"with it {len(plan.steps)} steps, {ms:.3f} ms")  # fmt: skip
print(f"the same loss: {abs(loss - plain_loss) < 1e-5}")
for what, one in (("without", plain), ("with", plan)):
    names = Counter(step.node.op.name for step in one.steps)
    print(f"{what} fusion:")
    for name, n in names.items():
        print(f"  {n} {name}")
for step in plan.steps:
    body = step.node.attrs.get("body")
    if body is not None and step.node.op.name == "matmul_bias":
        print(f"matmul_bias = {body}")
print(str(report).splitlines()[2].strip())

# Fusing elementwise operators saves trips through memory: three operators, one kernel.
z = ad.Variable("z")
chain = ad.tanh_op(z * z + 1.0)
for fusion in ("off", "all"):
    settings.fusion = fusion
    steps = ad.Executor([chain], ctx).plan({z: (1000, 1000)}).steps
    print(f"tanh(z z + 1), fusion {fusion}: {len(steps)} kernels, "
          f"{sum(len(s.inputs) + len(s.outputs) for s in steps) * 4} MB of traffic")  # fmt: skip
if options.picture:
    picture = viz.graph_svg(plan)
    viz.save(picture.replace("<svg ", '<svg style="background:#fff" ', 1), options.picture)
