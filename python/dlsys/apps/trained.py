"""Trained networks of MNIST and Fashion-MNIST: their checkpoints, and what they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import autodiff as ad
from .. import train
from ..data import DataDescription, Dataset, Loader, fashion_mnist_sets, mnist_sets, read_idx
from ..data.dataset import Sets
from ..data.transforms.normalize import PLAIN
from ..errors import DataError, printable
from ..nn import Module
from ..runtime.device import Context
from ..train.files.schema import CALLBACKS, check, fields
from . import streams
from .pictures import pictures_of, read_pictures
from .setup import Setup

HELD_BACK = ("validation", "test")
_EVALUATED = 1000  # images at a time


class Chosen(train.Callback):
    """Keeps the setup in checkpoints."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def state_dict(self) -> dict[str, Any]:
        return self._setup.as_dict()


# ---- checkpoints ----
def run_of(path: Path) -> tuple[Setup, int]:
    """The setup of the run that a checkpoint, or the last one of a folder, is of, and the epochs
    that it had then.
    """
    saved = train.load(path)
    done = saved.header.get("epoch")
    return _setup_in(str(path), saved), done if isinstance(done, int) else 0


def load_model(path: Path) -> tuple[Setup, Module]:
    """The setup and the trained model of a checkpoint; of a folder, of its best one."""
    if path.is_dir() and (path / "best.safetensors").exists():
        path = path / "best.safetensors"
    saved = train.load(path)
    setup = _setup_in(str(path), saved)
    model = setup.build_model()
    model.load_state_dict(saved.part("model"))
    if model.trained_on is None:  # before checkpoints said so, all of them were
        model.trained_on = DataDescription((1, 28, 28), "uint8", *PLAIN, setup.classes)
    return setup, model


def _setup_in(what: str, saved: train.Saved) -> Setup:
    states = saved.header.get("callbacks", [])
    check(what, {"callbacks": states}, fields(callbacks=CALLBACKS))
    own = [state["state"] for state in states if state["name"] == Chosen.__name__]
    setup = Setup.from_dict(what, own[0] if own else {})
    setup.check_weights(what, saved.part("model").values())
    return setup


# ---- questions ----
def load_sets(setup: Setup, data_dir: str | None) -> Sets:
    """The data set of a setup."""
    return {"mnist": mnist_sets, "fashion": fashion_mnist_sets}[setup.dataset](data_dir)


def in_order(samples: Dataset) -> Loader:
    """The images of a set in batches, in their order."""
    return Loader(samples, _EVALUATED)


def measured(model: Module, samples: Dataset, ctx: Context | None) -> dict[str, float]:
    """The loss and the accuracy."""
    return train.evaluate(model, in_order(samples), ctx=ctx)


def evaluate(
    checkpoint: Path, files: Sequence[Path], data_dir: str | None, ctx: Context | None
) -> None:
    """Prints the accuracies of a checkpoint on the validation and the test set, or on the images
    and labels of two IDX files.
    """
    setup, model = load_model(checkpoint)
    print(f"evaluating {setup.model} of {setup.dataset} on {ctx or 'numpy'}", flush=True)
    if not files:
        sets = load_sets(setup, data_dir)
        for name in HELD_BACK:
            accuracy = measured(model, getattr(sets, name), ctx)["accuracy"]
            print(f"{name} set accuracy={accuracy:f}", flush=True)
        return
    images, labels = files
    samples = Dataset(read_pictures(images, digits=False), read_idx(labels))
    if samples.labels.ndim != 1 or samples.labels.min() < 0 or samples.labels.max() > 9:
        raise DataError(f"{labels}: expected labels from 0 to 9, one an image")
    found = measured(model, samples, ctx)
    print(f"{len(samples):,} images  loss {found['loss']:.6f}  accuracy={found['accuracy']:f}")


def predict(checkpoint: Path, given: Iterable[Path], top: int, ctx: Context | None) -> int:
    """Prints, for each image of files and folders, the likeliest classes with their probabilities.

    What cannot be read is said on standard error, and the others are shown all the same. Returns
    the count of those that could not.
    """
    setup, model = load_model(checkpoint)
    names: list[str] = []
    pictures: list[np.ndarray] = []
    failed = 0
    for path in given:
        for file, images in pictures_of(path, digits=setup.dataset == "mnist"):
            if isinstance(images, DataError):
                streams.say(str(images))
                failed += 1
                continue
            pictures.append(images)
            one = len(images) == 1
            names += [str(file) if one else f"{file}[{k}]" for k in range(len(images))]
    if pictures:
        chances = probabilities(model, np.concatenate(pictures), ctx)
        _print_classes([printable(name) for name in names], setup.classes, chances, top)
    return failed


def _print_classes(
    names: Sequence[str], classes: Sequence[str], chances: np.ndarray, top: int
) -> None:
    """A line an image: its name, and the likeliest of its classes."""
    width = max(map(len, names))
    for name, row in zip(names, chances):
        best = np.argsort(-row, kind="stable")[:top]
        ranking = "  ".join(f"{classes[k]} {row[k]:.4f}" for k in best)
        print(f"{name:<{width}}  {ranking}")


def probabilities(model: Module, images: Any, ctx: Context | None) -> np.ndarray:
    """Of each class (n, 10), for images (n, 1, 28, 28) uint8."""
    return np.asarray(ad.softmax_func(train.predict(model, images, ctx)))
