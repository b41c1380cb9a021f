"""Data sets: images with their labels, in memory or decoded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..describe import described
from ..errors import DataError

Array = np.ndarray[Any, Any]


class Split(NamedTuple):
    """Images (n, …), or other inputs, and their labels (n, …), int64 or float32.

    images, labels: the two.
    """

    images: Array
    labels: Array

    def __repr__(self) -> str:
        return described(self)


class Images(Protocol):
    """The source of a data set's images: an array (n, …), or an object that decodes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, …)"""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 for pixels, floating, or other integers, such as tokens."""

    def __getitem__(self, chosen: Any, /) -> Any:
        """The images at these indices as an array."""


class Dataset:
    """Images, or other inputs, with labels.

    images: (n, …), an array or whatever decodes on demand (`image_folder`): uint8 pixels, floats,
    or other integers, such as tokens, which nothing converts. labels: (n, …) integers, which are
    classes or tokens, or floats: weights (n, classes), or what a regression aims at. classes: the
    labels' names, if they have any.

    Raises DataError for arrays that do not fit each other.

    >>> known = data.Dataset(np.zeros((10, 3), np.float32), np.arange(10) % 2)
    >>> len(known), known.images.shape
    (10, (10, 3))
    """

    def __init__(self, images: Images, labels: Any, classes: Sequence[str] = ()) -> None:
        given = _array("labels", labels)
        is_class = given.dtype.kind in "iub"
        if not given.ndim or not (is_class or given.dtype.kind == "f"):
            raise DataError(
                f"labels are {given.dtype} {given.shape}, expected integers or floats (n, …), one "
                "row a sample"
            )
        if not len(given) or images.shape[:1] != given.shape[:1]:
            raise DataError(
                f"images {tuple(images.shape)} and labels {given.shape} are no set of samples: "
                "one label an image, and at least one image"
            )
        if images.dtype.kind not in "fiu":
            raise DataError(
                f"images are {images.dtype}, expected uint8 pixels, floats, or integers as tokens"
            )
        self.images = images
        self.labels: Array = given.astype(np.int64 if is_class else np.float32, copy=False)
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        kinds = f", {len(self.classes)} classes" if self.classes else ""
        what = "images" if len(self.sample_shape) > 1 else "samples"
        return f"Dataset({len(self)} {what} {self.sample_shape} {self.dtype}{kinds})"

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return tuple(self.images.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the images."""
        return self.images.dtype

    def take(self, indices: Any) -> Split:
        """The samples at these indices, a copy or a view.

        Raises DataError, with the file, where an image cannot be decoded.
        """
        return Split(self.images[indices], self.labels[indices])

    def subset(self, indices: Any) -> Dataset:
        """The set of these samples, by indices or a slice; nothing is decoded yet."""
        part = getattr(self.images, "part", self.images.__getitem__)
        return Dataset(part(indices), self.labels[indices], self.classes)

    def in_memory(self) -> Dataset:
        """This set with all of its images decoded."""
        return Dataset(*self.take(slice(None)), self.classes)


class Sets(NamedTuple):
    """The sets to train on, to choose by, and to look at once at the end.

    train, validation, test: the three.
    """

    train: Dataset
    validation: Dataset
    test: Dataset


def as_dataset(samples: Any) -> Dataset:
    """A Dataset as it is, or one of a Split or another pair of images and labels."""
    if isinstance(samples, Dataset):
        return samples
    try:
        images, labels = samples
    except (TypeError, ValueError):
        raise DataError(
            f"expected a Dataset or a pair (images, labels), got {type(samples).__name__}; images "
            "may be an object of yours with shape, dtype and images[indices]: Dataset(images, "
            "labels)"
        ) from None
    return Dataset(_array("images", images), labels)


def is_tokens(dtype: np.dtype[Any]) -> bool:
    """True for integers that are no pixels: they reach a model as they are."""
    return dtype.kind in "iu" and dtype != np.uint8


def _array(name: str, given: Any) -> Array:
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} are no array: {error}") from None
