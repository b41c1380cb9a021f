"""Parts of a data set, and weights that make its classes equally frequent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from ..ops.random.device_batch import epoch_order
from .dataset import Array
from .samples import AnySet, as_samples


def split(
    dataset: Any, fractions: float | Sequence[float], *, seed: int = 0, stratify: Any = None
) -> tuple[AnySet, ...]:
    """Parts of a data set without a common sample, in an order that the seed says.

    fractions: 0.9 is 90 % and the rest; (0.8, 0.1, 0.1) are three parts, which add up to 1.
    stratify: True has each class in the same shares, by the set's labels; or the class of each
    sample, (n,). Nothing is decoded or copied before it is needed. dataset: anything that a
    `Loader` takes.

    DataError for fractions that are no parts of one, and for a part without any sample.

    >>> known = data.Dataset(np.zeros((10, 3), np.float32), np.arange(10) % 2)
    >>> [len(part) for part in data.split(known, (0.8, 0.2))]
    [8, 2]
    """
    samples = as_samples(dataset)
    shares = _shares(fractions)
    count = len(samples)
    if stratify is None or stratify is False:
        groups = [np.arange(count)]
    else:
        labels = _class_of_each(samples.labels if stratify is True else stratify, count)
        groups = [np.flatnonzero(labels == kind) for kind in np.unique(labels)]
    pieces: list[list[Array]] = [[] for _ in shares]
    for number, group in enumerate(groups):
        mixed = group[epoch_order(len(group), seed, number)]
        ends = np.rint(np.cumsum(shares)[:-1] * len(group)).astype(np.int64)
        for piece, part in zip(pieces, np.split(mixed, ends)):
            piece.append(part)
    chosen = [np.sort(np.concatenate(piece)) for piece in pieces]
    if min(map(len, chosen)) == 0:
        raise DataError(
            f"split: {count} samples in the shares {fractions} leave a part without any; take "
            "more samples or larger shares"
        )
    return tuple(samples.subset(part) for part in chosen)


def balanced_weights(labels: Any) -> Array:
    """A weight a sample, (n,) float64, with which each class is drawn equally often:
    `Loader(…, weights=balanced_weights(dataset.labels))`. labels: (n,), of any kind.
    """
    given = np.asarray(labels)
    _, kinds, counts = np.unique(
        _class_of_each(given, len(given)), return_inverse=True, return_counts=True
    )
    return 1.0 / (len(counts) * counts[kinds])


def _shares(fractions: Any) -> Array:
    given = np.atleast_1d(np.asarray(fractions, np.float64))
    shares = np.append(given, 1 - given[0]) if given.size == 1 else given
    if shares.ndim != 1 or not (shares > 0).all() or abs(shares.sum() - 1) > 1e-6:
        raise DataError(
            f"split: shares {fractions}, expected one between 0 and 1, or several that add up to 1"
        )
    return shares


def _class_of_each(labels: Any, count: int) -> Array:
    given = np.asarray(labels)
    if given.shape != (count,) or given.dtype.kind == "f":
        raise DataError(
            f"expected the class of each of {count} samples, got {given.dtype} {given.shape}; "
            "labels of a regression have no classes"
        )
    return given
