"""A small transformer learns to sort: it reads digits and writes them in order.

    python examples/transformer.py [--steps 400]

A sequence is the digits, then their sorted copy. Causal attention lets each position see those
before it only, so that one pass trains the prediction of every next digit.
"""

import argparse

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
options = parser.parse_args()
COUNT, BATCH, WIDTH = 5, 64, 32

model = nn.Sequential(
    nn.Embedding(10, WIDTH, rng=0),
    nn.LearnedPositions(2 * COUNT, WIDTH, rng=1),
    nn.TransformerBlock(WIDTH, heads=4, causal=True, rng=2),
    nn.TransformerBlock(WIDTH, heads=4, causal=True, rng=3),
    nn.LayerNorm(WIDTH),
    nn.Linear(WIDTH, 10, rng=4),
)  # tokens (N, L) to the scores of the next token (N, L, 10)
optimizer = optim.Adam(3e-3, params=model.parameters())
rng = np.random.default_rng(0)


def batch(size: int) -> np.ndarray:
    """Digits and their sorted copy, (size, 2 COUNT)."""
    digits = rng.integers(0, 10, (size, COUNT))
    return np.concatenate([digits, np.sort(digits, axis=1)], axis=1)


for _ in range(options.steps):
    tokens = batch(BATCH)
    # The digits themselves are random: only the sorted half can be learned.
    scores = model(dl.tensor(tokens[:, :-1]))[:, COUNT - 1 :]
    loss = F.cross_entropy(scores.reshape(-1, 10), dl.tensor(tokens[:, COUNT:].ravel()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

new = batch(200)
known = new[:, :COUNT]
with dl.no_grad():
    for _ in range(COUNT):  # greedily, a digit at a time
        following = model(dl.tensor(known))[:, -1].argmax(axis=1).numpy()
        known = np.concatenate([known, following[:, None]], axis=1)
print(f"loss {loss:.2f}; {(known[:, COUNT:] == new[:, COUNT:]).mean():.0%} of new digits in place")
print(f"{new[0, :COUNT].tolist()} sorted is {known[0, COUNT:].tolist()}")
