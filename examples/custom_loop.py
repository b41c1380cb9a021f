"""A training loop of one's own: two heads with two losses, first over frozen layers.

    python examples/custom_loop.py [--steps 150]

One network tells in which quadrant a point lies (a class) and how far out (a number).
"""

import argparse

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
options = parser.parse_args()

dl.manual_seed(0)
points = dl.randn(400, 2)
quadrant = (points[:, 0] > 0) * 2 + (points[:, 1] > 0) * 1
distance = (points**2).sum(axis=1, keepdims=True).sqrt()


class TwoHeads(nn.Module):
    """A body that both heads read."""

    def __init__(self) -> None:
        self.body = nn.Sequential(nn.Linear(2, 32, rng=0), nn.ReLU())
        self.quadrant = nn.Linear(32, 4, rng=1)
        self.distance = nn.Linear(32, 1, rng=2)

    def forward(self, x):
        features = self.body(x)
        return self.quadrant(features), self.distance(features)


model = TwoHeads()


def train(what: str) -> None:
    """Trains the Parameters that are not frozen."""
    optimizer = optim.Adam(0.01, params=[p for p in model.parameters() if p.trainable])
    for _ in range(options.steps):
        scores, length = model(points)
        # The weight says how much a unit of one loss is worth in the other.
        loss = F.cross_entropy(scores, quadrant) + 0.5 * F.mse_loss(length, distance)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    right = (scores.argmax(axis=1) == quadrant).mean()
    print(f"{what}: loss {loss:.3f}, quadrants {right:.2f}")


before = model.body.state_dict()["0.weight"].copy()
model.body.freeze()  # as one does with layers that were trained on other data
train("the heads alone")
print("the body is as it was:", bool((model.body.state_dict()["0.weight"] == before).all()))
model.body.unfreeze()
train("all layers")
