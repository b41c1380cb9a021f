"""Classifiers whose answers can be explained: runs, checkpoints, and one with public weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import train
from ...errors import DataError
from ...nn import Module
from .. import trained
from ..pictures import read_pictures
from .photos import square

Array = np.ndarray[Any, Any]

EFFICIENTNET = "efficientnet"


class Classifier(NamedTuple):
    """A model, the names of its classes, and how a photo becomes its image (C, H, W) uint8."""

    model: Module
    classes: tuple[str, ...]
    read: Callable[[Path], Array]


def load(source: Path) -> Classifier:
    """The classifier of a run's folder or a checkpoint, or EfficientNet-Lite0 with its weights of
    ImageNet for the word "efficientnet". DataError for what is none, or takes no images.
    """
    if str(source) == EFFICIENTNET and not source.exists():
        return _of(source, train.load_efficientnet_lite())
    best = source / "best.safetensors"
    file = best if best.exists() else source
    states = train.load(file).header.get("callbacks") or []
    if any(isinstance(s, dict) and s.get("name") == trained.Chosen.__name__ for s in states):
        setup, model = trained.load_model(file)
        digits = setup.dataset == "mnist"
        return Classifier(model, setup.classes, lambda path: read_pictures(path, digits)[0])
    return _of(file, train.load_model(file))


def _of(what: Path, model: Module) -> Classifier:
    about = model.trained_on
    shape: tuple[int, ...] = () if about is None else about.shape
    if about is None or len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2]:
        raise DataError(
            f"{what} takes no square images of one or three channels, or does not say what it was "
            "trained on: use dlsys.explain on its arrays"
        )
    channels, side, _ = shape
    return Classifier(model, about.classes, lambda path: square(path, side, channels))
