"""Regression on a CSV file: read, standardize, train, and compare with the mean.

    python examples/csv_regression.py [FILE] [--steps 300]

The last column is predicted from the others. Without a file it writes one: houses, whose price
depends on their size and age, and not linearly.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim


def write(path: Path) -> Path:
    """Four hundred houses."""
    rng = np.random.default_rng(0)
    size, age = rng.uniform(40, 200, 400), rng.uniform(0, 80, 400)
    price = 3 * size * np.exp(-age / 60) + rng.normal(0, 8, 400)
    rows = np.stack([size, age, price], 1)
    np.savetxt(path, rows, delimiter=",", header="size,age,price", comments="", fmt="%.2f")
    return path


parser = argparse.ArgumentParser()
parser.add_argument("file", nargs="?", type=Path)
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()
path = options.file or write(Path(tempfile.mkdtemp()) / "houses.csv")

rows = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32)
rows = np.random.default_rng(1).permutation(rows)
training, test = rows[:-80], rows[-80:]
# Networks learn best from columns of mean 0 and deviation 1. The test rows take the same scale,
# since at prediction time nobody knows theirs.
mean, deviation = training.mean(0), training.std(0)
x, y = np.split((training - mean) / deviation, [-1], axis=1)
x, y = dl.tensor(x), dl.tensor(y)

model = nn.Sequential(nn.Linear(x.shape[1], 32, rng=0), nn.Tanh(), nn.Linear(32, 1, rng=1))
optimizer = optim.Adam(0.02, params=model.parameters())
for _ in range(options.steps):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

scaled = dl.tensor(((test - mean) / deviation)[:, :-1])
predicted = model(scaled).numpy()[:, 0] * deviation[-1] + mean[-1]
error = np.abs(predicted - test[:, -1]).mean()
print(f"mean error {error:.1f}, of the mean as a guess {np.abs(mean[-1] - test[:, -1]).mean():.1f}")
