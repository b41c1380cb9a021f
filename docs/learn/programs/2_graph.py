"""Chapter 2: what dlsys does instead: nodes of arrays, gradients that are nodes, and the tape.

python docs/learn/programs/2_graph.py
"""

import time

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.graph.node import find_topo_sort

# The numbers of 2_engine.py as nodes: nothing is computed when this is built.
a, b = ad.Variable("a"), ad.Variable("b")
y = a * b + a * a
da, db = ad.gradients(y, [a, b])
(daa,) = ad.gradients(da, [a])  # gradients are nodes, so that they have gradients
values = ad.Executor([y, da, db, daa]).run({a: np.float32(2), b: np.float32(-3)})
print("y, dy/da, dy/db, d²y/da² =", [float(v) for v in values])

# Exclusive or once more: the same sweep, over arrays.
x, t = ad.Variable("x"), ad.Variable("t")
rng = np.random.default_rng(1)
w = ad.Parameter(rng.uniform(-1, 1, (2, 4)).astype(np.float32), "w")
v = ad.Parameter(rng.uniform(-1, 1, (4, 1)).astype(np.float32), "v")
c, d = ad.Parameter(np.zeros(4, np.float32), "c"), ad.Parameter(np.zeros(1, np.float32), "d")
out = F.tanh(F.tanh(x @ w + c) @ v + d)
loss = F.sum((out - t) ** 2)
gradients = ad.gradients(loss, [w, v, c, d])
forward, both = len(find_topo_sort([loss])), len(find_topo_sort([loss, *gradients]))
print(f"{forward} nodes of the loss, {both} with the gradients of 4 Parameters")
step = ad.Executor([loss, optim.SGD(0.1).minimize(loss, [w, v, c, d])])
feeds = {
    x: np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32),
    t: np.array([[-1], [1], [1], [-1]], np.float32),
}
losses = [float(step.run(feeds)[0]) for _ in range(301)]
print("loss at steps 0, 100, 200, 300:", " ".join(f"{losses[k]:.4f}" for k in (0, 100, 200, 300)))

# One sweep against one evaluation a parameter: reverse mode costs about one more forward pass.
model = nn.Sequential(nn.Linear(100, 100, rng=0), nn.Tanh(), nn.Linear(100, 1, rng=1))
inputs = dl.randn(200, 100)
count = model.num_parameters()


def milliseconds(f, repeats=30):
    f(), f()  # the first calls plan
    begin = time.perf_counter()
    for _ in range(repeats):
        f()
    return (time.perf_counter() - begin) / repeats * 1e3


def sweep():
    (model(inputs) ** 2).mean().backward()
    for p in model.parameters():
        p.grad.numpy()
        p.grad = None


def evaluate():
    with dl.no_grad():
        (model(inputs) ** 2).mean().item()


forward_ms, sweep_ms = milliseconds(evaluate), milliseconds(sweep)
print(f"{count:,} gradients: {sweep_ms:.2f} ms by a sweep, "
      f"{count * forward_ms:.0f} ms by differences, {forward_ms:.2f} ms each")  # fmt: skip

# Tensors: calls go onto a tape, and the second round of a loop finds the program of the first.
z = dl.tensor([1.0, 2.0], requires_grad=True)
(z**3).sum().backward()
print("3 z² =", z.grad.tolist())
hessian = dl.grad(lambda u: dl.grad(lambda s: (s**3).sum())(u).sum())
print("6 z =", hessian(z.detach()).tolist())
