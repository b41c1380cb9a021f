"""Chapter 4: shapes, lifetimes and one arena: planned by hand, then by dlsys.

    python docs/learn/programs/4_plan.py [--picture FILE.svg]

`--picture` draws the memory of a step of eight layers.
"""

import argparse

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim, viz
from dlsys.errors import ShapeError
from dlsys.executor.plan.arena import pack

parser = argparse.ArgumentParser()
parser.add_argument("--picture")
options = parser.parse_args()


def first_fit(spans):
    """Offsets for (bytes, first step, last step), each the lowest that is free all that time."""
    placed, top = [], 0
    for nbytes, first, last in spans:
        offset = 0
        for at, end, begun, ended in sorted(placed):
            if begun <= last and first <= ended and offset + nbytes > at:  # alive together, and
                offset = max(offset, end)  # in the way: go on behind it
        placed.append((offset, offset + nbytes, first, last))
        top = max(top, offset + nbytes)
    return top


# A network that is described, not yet computed: shapes are known as the graph is built.
x, y = ad.Variable("x", (None, 784)), ad.Variable("y", (None,), dtype=np.int64)
model = nn.Sequential(nn.Linear(784, 256, rng=0), nn.ReLU(), nn.Linear(256, 10, rng=1))
scores = model(x)
loss = ad.softmax_cross_entropy(scores, y)
print("scores have the shape", scores.shape)
try:
    scores @ ad.Variable("w", (12, 3))
except ShapeError as error:
    print("refused:", str(error).split(": expected")[0])

# Inference needs no activation twice, training needs them for the gradients: count what lives.
train = optim.SGD(0.1).minimize(loss, model.parameters())
shapes = {x: (128, 784), y: (128,)}
for what, fetches, feeds in (("inference", [scores], {x: shapes[x]}),
                             ("training", [loss, train], shapes)):  # fmt: skip
    plan = ad.Executor(fetches, ctx=None).plan(feeds)
    print(f"{what}: {len(plan.steps)} steps, {plan.unshared_nbytes:,} bytes without reuse, "
          f"{plan.live_nbytes:,} live at once, arena {plan.arena_nbytes:,}")  # fmt: skip

# The same lifetimes for both planners: in place and sharing are decided by then.
inside = [b for b in plan.buffers if b.kind == "arena" and b.nbytes]
spans = [(b.nbytes, b.first, b.last) for b in inside]
print(f"first fit needs {first_fit(spans):,} bytes, dlsys {pack(spans)[1]:,} (aligned to 256)")

# A deeper chain: the arena of inference does not grow with depth, that of training does.
for depth in (2, 4, 8):
    made = []
    layers = [layer for k in range(depth) for layer in (nn.Linear(64, 64, rng=k), nn.Tanh())]
    deep = nn.Sequential(*layers)
    z = ad.Variable("z", (None, 64))
    out = deep(z)
    step = optim.SGD(0.1).minimize(ad.mean_op(out), deep.parameters())
    for fetches in ([out], [step]):
        plan = ad.Executor(fetches, ctx=None).plan({z: (256, 64)})
        made.append(plan.arena_nbytes)
    print(f"{depth} layers: arena of inference {made[0]:9,}, of training {made[1]:9,}")

if options.picture:
    picture = viz.memory_plan(plan)
    viz.save(picture.replace("<svg ", '<svg style="background:#fff" ', 1), options.picture)
