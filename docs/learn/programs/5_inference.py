"""Chapter 5: answers in place of gradients: memory, latency, and how many a second by batch.

python docs/learn/programs/5_inference.py
"""

import time

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.runtime.device import best_context, synchronize

ctx = best_context()[0]
model = nn.LeNet5(seed=0)
x, y = ad.Variable("x", (None, 1, 28, 28)), ad.Variable("y", (None,), dtype=np.int64)
scores = model(x)
loss = ad.softmax_cross_entropy(scores, y)
train = optim.SGD(0.1).minimize(loss, model.parameters())


def milliseconds(f):
    """The best of some calls, the device's work included; the first ones plan, and capture."""
    best = np.inf
    for _ in range(12):
        begin = time.perf_counter()
        f()
        if ctx is not None:
            synchronize(ctx)
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


# Nothing waits for a sweep back, so that less is alive at once.
shapes = {x: (128, 1, 28, 28), y: (128,)}
training = ad.Executor([loss, train], ctx=None).plan(shapes).arena_nbytes
inference = ad.Executor([scores], ctx=None).plan({x: shapes[x]}).arena_nbytes
print(f"arena at batch 128 on numpy: training {training:,} bytes, inference {inference:,}")

# A batch shares the weights, the launches and the host: more answers a second, each of them later.
answer = ad.Executor([scores], ctx)
rng = np.random.default_rng(0)
for batch in (1, 8, 64, 512):
    images = rng.random((batch, 1, 28, 28), dtype=np.float32)
    ms = milliseconds(lambda images=images: answer.run({x: images}))
    print(f"batch {batch:3}: {ms:7.3f} ms, {batch / ms * 1e3:9,.0f} images/s")

# The same on Tensors, recorded at each call, and as one program.
one = dl.tensor(rng.random((1, 1, 28, 28), dtype=np.float32))
model.eval()
jitted = dl.jit(model)
with dl.no_grad():
    same = np.array_equal(model(one).numpy(), jitted(one).numpy())
    ways = {
        "graph": lambda: answer.run({x: one.numpy()}),
        "Tensors": lambda: model(one).numpy(),
        "jit": lambda: jitted(one).numpy(),
    }
    for name, f in ways.items():
        print(f"one image by {name:8} {milliseconds(f):7.3f} ms")
print("the same scores:", same)
