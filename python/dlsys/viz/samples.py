"""Loaders and data sets where pictures take data: samples, labels, and a model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError


class Labeled(NamedTuple):
    """Samples (n, …) as a data set has them, their classes (n,), and the names of the classes."""

    samples: Any
    labels: np.ndarray
    classes: Sequence[str] | None


def is_set(data: Any) -> bool:
    """True for a loader or a data set, of whatever kind."""
    return hasattr(data, "dataset") or (hasattr(data, "images") and hasattr(data, "classes"))


def labeled(what: str, data: Any) -> Labeled:
    """The samples of a loader or a data set in the order of the set; rows of probabilities as
    labels count as the likeliest class. DataError, naming `what`, for one of several fields.
    """
    dataset = getattr(data, "dataset", data)
    if not (is_set(dataset) and hasattr(dataset, "labels")):
        raise DataError(
            f"{what}: expected a Loader or a Dataset of samples with labels, got one of "
            f"{type(dataset).__name__}: pass arrays"
        )
    labels = np.asarray(dataset.labels)
    labels = labels.argmax(axis=1) if labels.ndim == 2 and labels.shape[1] > 1 else labels
    return Labeled(dataset.images, labels.reshape(-1), tuple(dataset.classes) or None)


def probabilities(model: Any, data: Any) -> np.ndarray:
    """Of each class (n, classes), as a model answers for a loader or a data set: the softmax of its
    scores, or the sigmoid of one that decides between classes 0 and 1.
    """
    predict = import_module("dlsys.train.evaluation").predict  # on a floor above this one
    scores = np.asarray(predict(model, data), np.float64).reshape(len(labeled("viz", data)[1]), -1)
    if scores.shape[1] == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
