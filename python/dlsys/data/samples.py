"""Data sets of any fields: several inputs and targets, by position or by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..describe import described
from ..errors import DataError
from .dataset import Array, Dataset, _array, as_dataset

Batch = tuple[Array, ...] | dict[str, Array]


class Samples:
    """Samples of several fields, the last `targets` of which are what a model should say.

    fields: a tuple of arrays (n, …), or a dictionary of them, whose names `train.fit` gives to the
    model as keywords: `model(words=…, lengths=…)`. Floats become float32, integers stay what they
    are. targets: how many of the last fields are targets; 0 where there are only inputs.

    Raises DataError for fields of different lengths, or of no numbers.
    """

    __repr__ = described

    def __init__(self, fields: Any, targets: int | None = None) -> None:
        self.names = tuple(fields) if isinstance(fields, Mapping) else None
        if not isinstance(fields, (Mapping, tuple, list)):
            raise DataError(f"fields are {fields!r}, expected a tuple or a dictionary of arrays")
        values = tuple(fields.values()) if isinstance(fields, Mapping) else tuple(fields)
        shown = self.names or tuple(f"field {k}" for k in range(len(values)))
        self.arrays = tuple(_in_numbers(n, v) for n, v in zip(shown, values))
        lengths = {len(array) for array in self.arrays}
        if len(lengths) != 1 or 0 in lengths:
            told = ", ".join(f"{n} {array.shape}" for n, array in zip(shown, self.arrays))
            raise DataError(f"fields need one length, at least 1, got {told or 'none'}")
        self.targets = _target_count(targets, len(values))

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def labels(self) -> Array | None:
        """The last target, None where there is none."""
        return self.arrays[-1] if self.targets else None

    def take(self, indices: Any) -> tuple[Array, ...]:
        """The fields of the samples at these indices, in their order."""
        return tuple(array[indices] for array in self.arrays)

    def subset(self, indices: Any) -> Samples:
        """The set of these samples, by indices or a slice."""
        return Samples(_named(self.names, self.take(indices)), self.targets)


class SampleSequence:
    """Samples that are asked for one by one: any object with `len(samples)` and `samples[k]`, an
    array or a number, or a tuple or dictionary of them. A batch has them stacked.

    targets: as for Samples. chosen: the indices of a part of them, all where it is None. Raises
    DataError for an empty sequence, and, naming the sample, where samples do not have the fields
    and shapes of the first.
    """

    labels = None
    __repr__ = described

    def __init__(self, samples: Any, targets: int | None = None, chosen: Any = None) -> None:
        self._samples = samples
        self._chosen = np.arange(len(samples)) if chosen is None else chosen
        if not len(self._chosen):
            raise DataError("a data set needs at least one sample, this one is empty")
        first = samples[int(self._chosen[0])]
        self.names = tuple(first) if isinstance(first, Mapping) else None
        self._shapes = [np.shape(value) for value in self._values(first)]
        self.targets = _target_count(targets, len(self._shapes))

    def __len__(self) -> int:
        return len(self._chosen)

    def take(self, indices: Any) -> tuple[Array, ...]:
        """The fields of the samples at these indices, stacked."""
        rows = [self._row(int(k)) for k in self._chosen[indices]]
        names = self.names or [f"field {k}" for k in range(len(self._shapes))]
        return tuple(_in_numbers(name, np.stack(part)) for name, part in zip(names, zip(*rows)))

    def subset(self, indices: Any) -> SampleSequence:
        """The set of these samples, by indices or a slice; none is made yet."""
        return SampleSequence(self._samples, self.targets, self._chosen[indices])

    def _row(self, k: int) -> list[Any]:
        values = self._values(self._samples[k])
        shapes = [np.shape(value) for value in values]
        if shapes != self._shapes:
            raise DataError(f"sample {k} has the shapes {shapes}, the first one {self._shapes}")
        return values

    def _values(self, sample: Any) -> list[Any]:
        if isinstance(sample, Mapping):
            lacking = [name for name in self.names or () if name not in sample]
            if lacking or self.names is None:
                raise DataError(f"a sample is a dictionary without {lacking or 'known names'}")
            return [sample[name] for name in self.names]
        return list(sample) if isinstance(sample, tuple) else [sample]


AnySet = Dataset | Samples | SampleSequence


def as_samples(given: Any, targets: int | None = None) -> AnySet:
    """The data set that something is: a Dataset or one of this file as it is; a pair (images,
    labels) of arrays a Dataset; a tuple, a list or a dictionary of arrays, or an array alone,
    Samples; anything else with a length and items a sequence of samples. DataError for the rest.

    given: what it is made of. targets: as for Samples.
    """
    if isinstance(given, (Dataset, Samples, SampleSequence)):
        return given
    if isinstance(given, np.ndarray):
        return Samples((given,), 0)
    if isinstance(given, Mapping):
        return Samples(given, targets)
    of_arrays = isinstance(given, list) and all(isinstance(x, np.ndarray) for x in given)
    if isinstance(given, tuple) or of_arrays:
        pair = len(given) == 2 and targets in (None, 1)
        return as_dataset(given) if pair else Samples(given, targets)
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, str):
        return SampleSequence(given, targets)
    return as_dataset(given)


def in_fields(names: tuple[str, ...] | None, arrays: tuple[Array, ...]) -> Batch:
    """A batch as its set was given: a dictionary where fields have names, else a tuple."""
    return _named(names, arrays)


def _named(names: tuple[str, ...] | None, arrays: tuple[Array, ...]) -> Batch:
    return arrays if names is None else dict(zip(names, arrays))


def _target_count(targets: int | None, fields: int) -> int:
    count = min(1, fields - 1) if targets is None else targets
    if not 0 <= count <= fields:
        raise DataError(f"targets={count}, expected 0 to {fields}, the number of fields")
    return count


def _in_numbers(name: str, given: Any) -> Array:
    array = _array(name, given)
    if not array.ndim or array.dtype.kind not in "fiub":
        raise DataError(f"{name}: expected numbers (n, …), got {array.dtype} {array.shape}")
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array
