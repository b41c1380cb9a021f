"""The description of the data that a model was trained on, which its inputs must fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import DataError, ShapeError
from .dataset import Array, Dataset, is_tokens
from .formats.folder import CHANNELS, FolderImages, image_files
from .transforms.normalize import PLAIN, Normalization, normalization_of, normalized


@dataclass(frozen=True)
class DataDescription:
    """The samples that a model was trained on. `fit` gives it to the model (`model.trained_on`),
    checkpoints keep it, and evaluation, prediction and pictures treat their inputs as it says.

    shape: of one sample. dtype: "uint8" for pixels that are divided by 255, a float's name, or
    that of other integers, tokens, which stay as they are.
    mean, std: a number a channel, or one, that normalize what is then there. classes: the names of
    the outputs, if they have any.
    """

    shape: tuple[int, ...]
    dtype: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Any) -> DataDescription | None:
        """The description of a loader's data set; None for a user's own loader, whose batches are
        made in ways that nobody else knows.
        """
        dataset, normalization = (getattr(data, k, None) for k in ("dataset", "normalization"))
        if not isinstance(dataset, Dataset):
            return None
        if is_tokens(dataset.dtype):
            normalization = PLAIN
        if not isinstance(normalization, Normalization):
            return None
        shape = tuple(map(int, getattr(data, "sample_shape", dataset.sample_shape)))
        dtype = np.dtype(dataset.dtype).name
        return cls(shape, dtype, *normalization, tuple(dataset.classes))

    @property
    def normalization(self) -> Normalization:
        """The mean and the deviation."""
        return Normalization(self.mean, self.std)

    def prepared(self, samples: Any) -> Array:
        """Samples (n, …) as the model takes them, normalized as in training: floats count as pixels
        in [0, 1] where it was trained on uint8, integers as pixels there and as floats
        elsewhere.

        DataError for uint8 where it was trained on floats, whose scale nobody knows, and for
        integers that are no pixels; ShapeError where the channels are other ones.
        """
        if is_tokens(np.dtype(self.dtype)):
            return self._as_tokens(np.asarray(samples))
        array = self._in_kind(np.asarray(samples))
        if array.dtype.kind == "f" and self.normalization.agrees(PLAIN):
            return array
        planes, size = len(self.mean), int(np.prod(array.shape[1:]))
        if planes > 1 and array.shape[1:2] != (planes,) and size != np.prod(self.shape):
            raise ShapeError(
                f"the model was trained on samples {self.shape}, normalized by channel, and got "
                f"samples {array.shape[1:]}"
            )
        return normalized(array, *self.normalization.affine(array.dtype))

    def images_in(self, paths: Any) -> FolderImages:
        """The images of a file, a list of files or a folder, in the size and with the channels of
        those that the model was trained on; DataError where these were no images (channels,
        height, width).

        paths: a path, or a list of them.
        """
        modes = {channels: mode for mode, channels in CHANNELS.items()}
        if len(self.shape) != 3 or self.shape[0] not in modes:
            raise DataError(
                f"image files are no samples of {self.shape}, which the model was trained on: read "
                "them as arrays and give those"
            )
        channels, height, width = self.shape
        return image_files(paths, (height, width), modes[channels])

    def _as_tokens(self, array: Array) -> Array:
        if array.dtype.kind not in "iu":
            raise DataError(f"the model was trained on {self.dtype} tokens and got {array.dtype}")
        return array.astype(self.dtype)

    def _in_kind(self, array: Array) -> Array:
        pixels = self.dtype == "uint8"
        if array.dtype.kind not in "fiub" or (array.dtype == np.uint8 and not pixels):
            raise DataError(
                f"the model was trained on {self.dtype} samples and got {array.dtype}: give it "
                "values scaled as those it was trained on"
            )
        if array.dtype.kind == "f" or (array.dtype == np.uint8 and pixels):
            return array
        if not pixels:
            return array.astype(np.float32)
        if array.size and not 0 <= array.min() <= array.max() <= 255:
            raise DataError(
                f"the model was trained on pixels and got integers from {array.min()} to "
                f"{array.max()}, expected 0 to 255"
            )
        return array.astype(np.uint8)

    # ---- in checkpoints ----
    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, what: str, values: Any) -> DataDescription:
        """The description that `as_dict` gave. DataError, naming `what`, for anything else."""
        try:
            if not isinstance(values, Mapping):
                raise TypeError
            made = dict(values)
            shape = tuple(int(extent) for extent in made.pop("shape"))
            kind = np.dtype(made.pop("dtype"))
            classes = tuple(str(name) for name in made.pop("classes"))
            mean, std = normalization_of((made.pop("mean"), made.pop("std")), shape)
            if made or min(shape, default=1) < 1 or kind.kind not in "fiu":
                raise ValueError
        except (TypeError, ValueError, KeyError, OverflowError):
            raise DataError(
                f"{what} does not say what its model was trained on: its data description is "
                "malformed"
            ) from None
        return cls(shape, kind.name, mean, std, classes)


def as_trained(data: Any, description: DataDescription | None) -> Any:
    """A loader's batches, normalized as those that a model was trained on unless the loader says
    how; a loader of one's own as it is. DataError where that does not fit the samples.
    """
    own = DataDescription.of(data)
    if own is None or description is None:
        return data
    if data.normalization_given or own.normalization.agrees(description.normalization):
        return data
    return data.normalized_by(description.normalization)
