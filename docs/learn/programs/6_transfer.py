"""Chapter 6: transfer. A network that knows clean digits learns bad scans of them from a few.

python docs/learn/programs/6_transfer.py
"""

from pathlib import Path

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.data import mnist_sets

ROOT = Path(__file__).resolve().parents[3]
sets = mnist_sets(ROOT / "data" / "mnist")
STEPS = 300  # of each training on scans, however few there are


def digits(part, first, count):
    """Images (n, 1, 28, 28) from 0 to 1, and their labels."""
    images = part.images[first : first + count].astype(np.float32) / 255
    return dl.tensor(images), dl.tensor(part.labels[first : first + count].astype(np.int64))


def scans(part, first, count):
    """The same, shifted, on gray paper, with noise."""
    images, labels = digits(part, first, count)
    noise = np.random.default_rng(first).normal(0, 0.1, images.shape)
    gray = 0.1 + 0.8 * np.roll(images.numpy(), 1, axis=3) + noise
    return dl.tensor(gray.clip(0, 1).astype(np.float32)), labels


def body():
    """Images to 64 features."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2, rng=0), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2, rng=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(784, 64, rng=2), nn.ReLU(),
    )  # fmt: skip


def fitted(layers, data, steps, batch, lr):
    """Trains a new head on the layers, and the layers as far as they are not frozen."""
    images, labels = data
    head = nn.Linear(64, 10, rng=3)
    trained = [p for p in (*layers.parameters(), *head.parameters()) if p.trainable]
    optimizer = optim.Adam(lr, params=trained)
    for step in range(steps):
        start = step * batch % len(images)
        part = slice(start, start + batch)
        F.cross_entropy(head(layers(images[part])), labels[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return head


def accuracy(layers, head, data):
    """The share of images that are classified rightly."""
    with dl.no_grad():
        return (head(layers(data[0])).argmax(axis=1) == data[1]).mean().item()


learned = body()
head = fitted(learned, digits(sets.train, 0, 10_000), 200, 50, 1e-3)
test = scans(sets.test, 0, 1000)
print(f"trained on clean digits alone: {accuracy(learned, head, digits(sets.test, 0, 1000)):.2f} "
      f"on clean ones, {accuracy(learned, head, test):.2f} on scans")  # fmt: skip
state = learned.state_dict()
for count in (20, 50, 200):
    few = scans(sets.train, 10_000, count)
    frozen, tuned, fresh = body(), body(), body()
    frozen.load_state_dict(state)
    tuned.load_state_dict(state)
    frozen.freeze()
    shares = [accuracy(layers, fitted(layers, few, STEPS, 10, 3e-3), test)
              for layers in (frozen, tuned, fresh)]  # fmt: skip
    print(f"{count:3} scans: a new head {shares[0]:.2f}, all layers {shares[1]:.2f}, "
          f"from scratch {shares[2]:.2f}")  # fmt: skip
