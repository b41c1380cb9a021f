"""The MLP of micrograd, 300-300-300-1 on a batch of 100 for 20 steps, in ten lines.

    python examples/micrograd.py

`dlsys.micrograd` runs the program as its page has it; this is the same with what dlsys offers.
"""

import dlsys as dl
from dlsys import nn, optim

dl.manual_seed(0)
xs, ys = dl.randn(100, 300), dl.rand(100, 1) * 2 - 1  # on the best device that is there
sizes = [300, 300, 300, 1]
model = nn.Sequential(
    *[nn.Sequential(nn.Linear(m, n), nn.Tanh()) for m, n in zip(sizes, sizes[1:])]
)
optimizer = optim.SGD(0.001, params=model.parameters())
for step in range(20):
    loss = ((model(xs) - ys) ** 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 19 == 0:
        print(f"loss {loss:.2f} on {xs.device}")
