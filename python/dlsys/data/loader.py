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
from .dataset import Array, Dataset, Split, is_tokens
from .prefetch import ordered_map
from .sample_rng import SampleRng
from .samples import as_samples, in_fields
from .transforms.augment import Augment, Compose
from .transforms.normalize import Normalization, normalization_of, normalized

_AHEAD = 2  # batches a worker makes before they are asked for


class Loader:
    """The batches of a data set, epoch after epoch: `for x, y in Loader((images, labels), 100)`,
    in which each such loop is the next epoch, from epoch 0 on.

    dataset: a Dataset, or a pair of images and labels; a tuple or a dictionary of more arrays; an
    array; or a sequence of samples, see `samples.as_samples`. Batches are numpy arrays, in a tuple,
    or in a dictionary where the set was one. Integers other than uint8 images stay what they are.
    targets: how many of the last fields are targets, by default one. shuffle: each epoch in an
    order of its own. weights: how often each sample comes, (n,) numbers of any sum: an epoch has as
    many as the set, drawn with replacement. drop_last: leaves out the last batch where it is
    smaller. workers: threads that make batches ahead; 0 makes each when it is asked for. augment: a
    list of augmentations, and shape: the (channels, height, width) in which they see flattened
    images. normalize: a mean and a deviation of pixels in [0, 1], as scalars or one a channel, such
    as Normalization.of(training set); without it uint8 images are brought to [0, 1] and floats stay
    as they are, unless the model that `fit` or `evaluate` reads them for was trained with another
    one: then it is theirs. batch_size: how many samples a batch has.

    The content of a batch is a function of (seed, epoch, samples) alone: the same for any number of
    workers, and after a start in the middle. Raises DataError for arguments that do not fit.

    >>> loader = data.Loader((np.zeros((10, 3), np.float32), np.arange(10)), 4)
    >>> [(x.shape, y.tolist()) for x, y in loader]
    [((4, 3), [0, 1, 2, 3]), ((4, 3), [4, 5, 6, 7]), ((2, 3), [8, 9])]
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
        targets: int | None = None,
        weights: Any = None,
    ) -> None:
        self.dataset = as_samples(dataset, targets)
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
        self.weights = None if weights is None else np.asarray(weights)
        self._bounds = None if weights is None else _bounds(self.weights, len(self.dataset))
        self._augment = Compose(augment, shape) if augment else None
        self.normalization = self._normalization_of(normalize)
        self.normalization_given = normalize is not None
        self._inputs: tuple[Node, ...] | None = None
        self._looped = 0  # epochs that loops over this loader have begun
        self._share = (0, 1)  # the number of its share of each batch, and how many there are

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.samples // self.batch_size)

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        full = len(self.dataset) // self.batch_size * self.batch_size
        return full if self.drop_last else len(self.dataset)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the fields of a batch, None where they are told by position."""
        return getattr(self.dataset, "names", None)

    @property
    def targets(self) -> int:
        """The number of last fields that are targets."""
        return getattr(self.dataset, "targets", 1)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one image as a model gets it, after augmentation."""
        return tuple(self.inputs()[0].attrs["shape"][1:])

    def __iter__(self) -> Generator[Any, None, None]:
        """The batches of the next epoch."""
        self._looped += 1
        return self.batches(self._looped - 1)

    def in_order(self) -> Loader:
        """A loader of every sample once, in the order of the set and not augmented."""
        made = copy.copy(self)
        made.shuffle, made.drop_last, made._augment = False, False, None
        made.weights = made._bounds = None
        return made

    def normalized_by(self, normalization: Normalization) -> Loader:
        """A loader of these batches with another normalization."""
        made = copy.copy(self)
        made.normalization = made._normalization_of(normalization)
        made.normalization_given = True
        return made

    def shard(self, rank: int, size: int) -> Loader:
        """A loader of one of `size` equal shares of each batch, for a rank that trains with others.

        The shares of all ranks are the batch that this loader has, so that batches are the same for
        any number of ranks. Of a smaller last batch, samples that do not divide into equal shares,
        at most `size` - 1 of them, are left out. rank: from 0 on. DataError for a batch_size that
        does not divide.
        """
        made = copy.copy(self)
        made._share = check_shares(self.batch_size, self.samples % self.batch_size, rank, size)
        return made

    def inputs(self) -> tuple[Node, ...]:
        """The Variables that batches are fed to: images (batch, …) float32 (tokens in their own
        dtype) and labels (batch, …), int64 or float32; or the fields of the set in their order. The
        same ones at each call.
        """
        if self._inputs is None:
            batch = self._make(0, np.zeros(1, np.int64))
            pair = isinstance(self.dataset, Dataset)
            names = ("images", "labels") if pair else self.names or _numbered(len(batch))
            self._inputs = tuple(
                Variable(name, (None, *array.shape[1:]), array.dtype)
                for name, array in zip(names, batch)
            )
        return self._inputs

    def epoch(self, number: int, start: int = 0) -> Generator[dict[Node, Any], None, None]:
        """The feeds of each batch of an epoch, from batch `start` on."""
        inputs = self.inputs()
        with closing(self._parts(number, start)) as batches:
            for batch in batches:
                yield dict(zip(inputs, batch))

    def batches(self, number: int, start: int = 0) -> Generator[Any, None, None]:
        """The images and labels of each batch of an epoch, or its fields as they were given, from
        batch `start` on.

        Closing or forgetting the iterator ends its threads. Raises DataError where a batch cannot
        be made, with the reason as its cause.
        """
        with closing(self._parts(number, start)) as parts:
            for part in parts:
                yield part if isinstance(part, Split) else in_fields(self.names, part)

    def _parts(self, number: int, start: int) -> Generator[tuple[Array, ...], None, None]:
        order = self._order(number)
        parts = [order[at : at + self.batch_size] for at in range(0, self.samples, self.batch_size)]
        rank, size = self._share
        if size > 1:
            parts = [part[: len(part) // size * size] for part in parts]
            parts = [np.split(part, size)[rank] for part in parts]
        make = partial(self._make, number)
        if not self.workers:
            yield from map(make, parts[start:])
            return
        yield from ordered_map(make, parts[start:], self.workers, _AHEAD * self.workers)

    def _order(self, number: int) -> Array:
        count = len(self.dataset)
        if self._bounds is not None:
            drawn = SampleRng(self.seed, number, np.arange(count)).uniform()
            return np.searchsorted(self._bounds, drawn, side="right")
        return epoch_order(count, self.seed, number) if self.shuffle else np.arange(count)

    def _normalization_of(self, given: Any) -> Normalization | None:
        """None for fields that are not normalized."""
        if isinstance(self.dataset, Dataset) and not is_tokens(self.dataset.dtype):
            return normalization_of(given, self.dataset.sample_shape)
        if given is not None or self._augment is not None:
            raise DataError(
                "Loader: normalize and augment are for images, this set has tokens or several "
                "fields; change its arrays before"
            )
        return None

    def _make(self, number: int, indices: Array) -> tuple[Array, ...]:
        try:
            taken = self._take(indices)
            if self.normalization is None:
                return taken
            images, labels = taken
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

    def _take(self, indices: Array) -> tuple[Array, ...]:
        """The samples as the set has them. ShapeError for images other than it says."""
        dataset, taken = self.dataset, self.dataset.take(indices)
        if not isinstance(dataset, Dataset):
            return taken
        images, wanted = taken[0], (len(indices), *dataset.sample_shape)
        is_uint8, declared = (dtype == np.uint8 for dtype in (images.dtype, dataset.dtype))
        if images.shape != wanted or is_uint8 != declared:
            raise ShapeError(
                f"images are {images.dtype} {images.shape}, where the set says {dataset.dtype}"
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


def check_shares(batch: int, last: int, rank: int, size: int) -> tuple[int, int]:
    """A share's number and how many there are. DataError unless batches have so many, the last one
    of an epoch, of another size, too.
    """
    if not 0 <= rank < size:
        raise DataError(f"shard: there is no rank {rank} of {size}; ranks count from 0")
    if batch % size or 0 < last < size:
        what = f"batches of {batch}" if batch % size else f"a last batch of {last}"
        raise DataError(
            f"shard: {what} samples have no {size} equal shares: take a batch_size that {size} "
            "ranks divide, or drop_last=True for a last one that is too small"
        )
    return rank, size


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"field{k}" for k in range(count))


def _bounds(weights: Any, count: int) -> Array:
    """The ends of the samples' parts of [0, 1), but for the last."""
    given = np.asarray(weights)
    fits = given.shape == (count,) and given.dtype.kind in "fiu"
    if not fits or not np.isfinite(given).all() or (given < 0).any() or not given.any():
        raise DataError(
            f"Loader: weights {given.dtype} {given.shape}, expected a number of 0 or more for each "
            f"of {count} samples, and not all 0"
        )
    return np.cumsum(given / given.sum(dtype=np.float64))[:-1]
