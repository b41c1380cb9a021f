"""Batches for training: shuffled, augmented and normalized on the host, ahead of their use."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from ..describe import described
from ..errors import DataError, ShapeError
from ..graph.node import Node
from ..ops.leaf import Variable
from ..ops.random.device_batch import epoch_order
from .augment import Augment, Compose
from .dataset import Array, Split, as_dataset
from .normalize import Normalization, normalization_of, normalized
from .prefetch import ordered_map
from .sample_rng import SampleRng

_AHEAD = 2  # batches a worker makes before they are asked for


class Loader:
    """The batches of a data set, epoch after epoch.

    dataset: a Dataset, or a pair of images and labels. shuffle: each epoch in an order of its own.
    drop_last: leaves out the last batch where it is smaller. workers: threads that make batches
    ahead; 0 makes each when it is asked for. augment: a list of augmentations, and shape: the
    (channels, height, width) in which they see flattened images. normalize: a mean and a deviation
    of pixels in [0, 1], as scalars or one a channel, such as Normalization.of(training set);
    without it uint8 images are brought to [0, 1] and floats stay as they are, unless the model that
    `fit` or `evaluate` reads them for was trained with another one: then it is theirs.

    The content of a batch is a function of (seed, epoch, samples) alone: the same for any number of
    workers, and after a start in the middle. Raises DataError for arguments that do not fit.
    """

    __repr__ = described

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        augment: Sequence[Augment] = (),
        shape: tuple[int, int, int] | None = None,
        normalize: Any = None,
    ) -> None:
        self.dataset = as_dataset(dataset)
        if batch_size < 1 or workers < 0:
            raise DataError(
                f"Loader: expected batch_size >= 1 and workers >= 0, got {batch_size} and {workers}"
            )
        if drop_last and batch_size > len(self.dataset):
            raise DataError(
                f"Loader: {len(self.dataset)} samples make no full batch of {batch_size}; take a "
                "smaller one or drop_last=False"
            )
        self.batch_size = int(batch_size)
        self.shuffle, self.seed, self.drop_last = shuffle, int(seed), drop_last
        self.workers = workers
        self._augment = Compose(augment, shape) if augment else None
        self.normalization = normalization_of(normalize, self.dataset.sample_shape)
        self.normalization_given = normalize is not None
        self._inputs: tuple[Node, ...] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.samples // self.batch_size)

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        full = len(self.dataset) // self.batch_size * self.batch_size
        return full if self.drop_last else len(self.dataset)

    def normalized_by(self, normalization: Normalization) -> Loader:
        """A loader of these batches with another normalization."""
        made = copy.copy(self)
        made.normalization = normalization_of(normalization, self.dataset.sample_shape)
        made.normalization_given = True
        return made

    def inputs(self) -> tuple[Node, ...]:
        """The Variables that batches are fed to: images (batch, …) float32 and labels, (batch,)
        int64 or (batch, classes) float32; the same ones at each call.
        """
        if self._inputs is None:
            batch = self._make(0, np.zeros(1, np.int64))
            names = ("images", "labels")
            self._inputs = tuple(
                Variable(name, (None, *array.shape[1:]), array.dtype)
                for name, array in zip(names, batch)
            )
        return self._inputs

    def epoch(self, number: int, start: int = 0) -> Generator[dict[Node, Any], None, None]:
        """The feeds of each batch of an epoch, from batch `start` on."""
        inputs = self.inputs()
        with closing(self.batches(number, start)) as batches:
            for batch in batches:
                yield dict(zip(inputs, batch))

    def batches(self, number: int, start: int = 0) -> Generator[Split, None, None]:
        """The images and labels of each batch of an epoch, from batch `start` on.

        Closing or forgetting the iterator ends its threads. Raises DataError where a batch cannot
        be made, with the reason as its cause.
        """
        order = self._order(number)
        parts = [order[at : at + self.batch_size] for at in range(0, self.samples, self.batch_size)]
        make = partial(self._make, number)
        if not self.workers:
            yield from map(make, parts[start:])
            return
        yield from ordered_map(make, parts[start:], self.workers, _AHEAD * self.workers)

    def _order(self, number: int) -> Array:
        count = len(self.dataset)
        return epoch_order(count, self.seed, number) if self.shuffle else np.arange(count)

    def _make(self, number: int, indices: Array) -> Split:
        try:
            images, labels = self._take(indices)
            scale, shift = self.normalization.affine(images.dtype)
            if self._augment is not None:
                rng = SampleRng(self.seed, number, indices)
                images, labels = self._augment(images, labels, rng)
            return Split(normalized(images, scale, shift), labels)
        except DataError:
            raise  # says what and where
        except Exception as error:
            raise DataError(
                f"a batch of epoch {number} cannot be made{self._culprit(indices)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _take(self, indices: Array) -> Split:
        taken = self.dataset.take(indices)
        images, wanted = taken.images, (len(indices), *self.dataset.sample_shape)
        is_uint8, declared = (dtype == np.uint8 for dtype in (images.dtype, self.dataset.dtype))
        if images.shape != wanted or is_uint8 != declared:
            raise ShapeError(
                f"images are {images.dtype} {images.shape}, where the set says {self.dataset.dtype}"
                f" {wanted}"
            )
        return taken

    def _culprit(self, indices: Array) -> str:
        """The sample of a batch that cannot be taken, if it is one, as text."""
        for index in indices:
            try:
                self._take(np.array([index]))
            except Exception:
                return f", for sample {index}"
        return ""
