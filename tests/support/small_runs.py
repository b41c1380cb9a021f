"""Small training runs that several tests make: data, a model, an optimizer, what came of them."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np

from dlsys import nn, optim, train
from dlsys.data import Loader

CLASSES = 3
TIMES = ("seconds", "samples_per_second")  # the figures of a record that no two runs share


def points(count: int = 70, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points of a plane in three sectors, with some in the wrong one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 4)).astype(np.float32)
    labels = x[:, :CLASSES].argmax(axis=1)
    wrong = rng.random(count) < 0.05
    return x, np.where(wrong, rng.integers(0, CLASSES, count), labels)


def loader(count: int = 70, seed: int = 0, batch_size: int = 16, **options: Any) -> Loader:
    """Batches of points, shuffled; the last of an epoch is smaller."""
    return Loader(points(count, seed), batch_size, seed=5, **({"shuffle": True} | options))


def model(dropout: float = 0.25) -> nn.Module:
    """A small network with dropout and running statistics, always with the same weights."""
    rng = np.random.default_rng(11)
    return nn.Sequential(
        nn.Linear(4, 8, rng=rng),
        nn.ReLU(),
        nn.Dropout(dropout, rng=rng),
        nn.LayerNorm(8),
        nn.Linear(8, CLASSES, rng=rng),
    )


def sgd() -> Any:
    return optim.SGD(lr=0.1, momentum=0.9)


def final(net: nn.Module, optimizer: Any) -> dict[str, np.ndarray]:
    """Everything that training changed."""
    state = {f"model.{name}": p.asnumpy() for name, p in net.named_state()}
    return state | {f"optimizer.{name}": p.asnumpy() for name, p in optimizer.named_state()}


def timeless(history: train.History) -> dict[str, Any]:
    """A history without the figures that depend on the clock."""
    text = history.as_dict()
    for record in text["epochs"]:
        for name in TIMES:
            record.pop(name, None)
    return text


class OnStep(train.Callback):
    """Calls a function with the run after each step."""

    def __init__(self, act: Any) -> None:
        self.on_step = act


class InFolder(unittest.TestCase):
    """A folder for each test, and runs of the small model."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def fit(self, *callbacks: train.Callback, **options: Any) -> train.History:
        options = {"epochs": 10, "metrics": (), "quiet": True} | options
        net, data = options.pop("net", None) or model(), options.pop("data", None) or loader(20)
        optimizer = options.pop("optimizer", None) or sgd()
        return train.fit(net, data, optimizer, callbacks=callbacks, **options)


class Scripted(train.Callback):
    """Gives every epoch's record a figure from a list."""

    def __init__(self, name: str, values: Any) -> None:
        self.name, self.values = name, values

    def on_epoch_end(self, run: train.Run, record: Any) -> None:
        record[self.name] = self.values[record["epoch"] - 1]
