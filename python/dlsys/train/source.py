"""The inputs of predictions: arrays, data sets, loaders and image files, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..data.dataset import Dataset
from ..data.description import DataDescription
from ..data.loader import Loader
from ..data.resident import DeviceLoader
from ..data.samples import Samples, SampleSequence
from ..errors import DataError, ShapeError

Fields = list[np.ndarray]


class Source(NamedTuple):
    """Inputs of a model: `take(slice)` gives the fields of these samples, ready for it."""

    samples: int
    names: tuple[str, ...] | None
    take: Callable[[slice], Fields]


def source_of(inputs: Any, description: DataDescription | None) -> Source:
    """The inputs that `predict` was given, see there."""
    if _is_path(inputs) or (isinstance(inputs, list) and inputs and all(map(_is_path, inputs))):
        if description is None:
            raise DataError(
                "predict: image files are made to what the model was trained on, and nobody noted "
                "what that was: read them as arrays and give those"
            )
        inputs = description.images_in(inputs)
    if isinstance(inputs, (Dataset, Samples, SampleSequence)):
        inputs = Loader(inputs, 1)
    if isinstance(inputs, Loader):
        return _of_loader(inputs, description)
    if isinstance(inputs, DeviceLoader):
        given = inputs.normalization if inputs.normalization_given else None
        return _of_loader(Loader(inputs.dataset, 1, normalize=given), description)
    return _of_arrays(inputs, description)


def _of_arrays(inputs: Any, description: DataDescription | None) -> Source:
    names = tuple(inputs) if isinstance(inputs, Mapping) else None
    given = tuple(inputs.values()) if isinstance(inputs, Mapping) else inputs
    fields = given if isinstance(given, tuple) else (given,)
    arrays = [x if hasattr(x, "part") else np.asarray(x) for x in fields]
    lengths = {x.shape[0] if x.shape else 0 for x in arrays}
    if len(lengths) != 1 or 0 in lengths:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ShapeError(f"predict: expected arrays of one length, at least 1, got {shapes}")
    prepared = description is not None and len(arrays) == 1

    def take(part: slice) -> Fields:
        taken = [x[part] for x in arrays]
        return [description.prepared(taken[0])] if prepared and description else taken

    return Source(lengths.pop(), names, take)


def _of_loader(loader: Loader, description: DataDescription | None) -> Source:
    """Its samples in the order of the set, without their targets."""
    dataset = loader.dataset
    if not isinstance(dataset, Dataset):
        count = len(loader.inputs()) - loader.targets
        names = None if loader.names is None else loader.names[:count]
        return Source(len(dataset), names, lambda part: list(dataset.take(part)[:count]))
    if description is None or loader.normalization_given:
        description = DataDescription.of(loader)
    assert description is not None
    described = description
    return Source(len(dataset), None, lambda part: [described.prepared(dataset.images[part])])


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))
