"""Batches of a data set that lives on the device, taken there by the training step itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..describe import described
from ..errors import DataError
from ..graph.node import Node
from ..ops.leaf import Parameter, constant_op
from ..ops.random.device_batch import ordered, shuffled_batch_op
from ..ops.random.sampling import advance_step_op
from .dataset import Dataset, Split, as_dataset, is_tokens
from .loader import check_shares
from .transforms.normalize import Normalization, normalization_of, normalized


class DeviceLoader:
    """The batches of a data set that is resident where the graph runs, with Loader's methods.

    A step gathers and normalizes its batch with one kernel and needs no feed. uint8 images stay
    uint8. Which samples a batch has, the same on every device, is determined by a counter there: an
    effect of `inputs()` advances it in every training step, and `advance` is the node to fetch with
    a graph that does not train. batch_size: how many samples a batch has.

    Batches are always full: an epoch is as many as fit into the set, and what is left opens the
    next one, so that every sample comes once before any comes again. dataset, shuffle, seed and
    normalize are as for Loader, whose order it has too. Raises DataError for arguments that do not
    fit.
    """

    __repr__ = described

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        normalize: Any = None,
    ) -> None:
        self.dataset = _resident(as_dataset(dataset).in_memory())
        if batch_size < 1:
            raise DataError(f"DeviceLoader: expected batch_size >= 1, got {batch_size}")
        self.batch_size = int(batch_size)
        self.shuffle, self.seed = shuffle, int(seed)
        self.normalization = normalization_of(normalize, self.dataset.sample_shape)
        self.normalization_given = normalize is not None
        self._share = (0, 1)  # the number of its share of each batch, and how many there are
        self.step = Parameter(np.int64(0), "data.step", trainable=False)
        self.advance = advance_step_op(self.step, name="data.advance")
        self._set = (
            Parameter(self.dataset.images, "data.images", trainable=False),
            Parameter(self.dataset.labels, "data.labels", trainable=False),
        )
        self._batch = self._gather()

    def normalized_by(self, normalization: Normalization) -> DeviceLoader:
        """A loader over this resident set and counter with another normalization."""
        made = copy.copy(self)
        made.normalization = normalization_of(normalization, self.dataset.sample_shape)
        made.normalization_given = True
        made._batch = made._gather()
        return made

    def shard(self, rank: int, size: int) -> DeviceLoader:
        """A loader of one of `size` equal shares of each batch, over the same resident set and
        counter, as of Loader. rank: from 0 on. DataError for a batch_size that does not divide.
        """
        made = copy.copy(self)
        made._share = check_shares(self.batch_size, 0, rank, size)
        made._batch = made._gather()
        return made

    def _gather(self) -> Node:
        """The node that takes the batch that the counter is at: its share is a batch of an epoch of
        batches that are smaller by as many times as there are shares.
        """
        scale, shift = self.normalization.affine(self.dataset.dtype)
        rank, size = self._share
        batch = shuffled_batch_op(
            *self._set,
            self.step if size == 1 else self.step * size + rank,
            constant_op(scale),
            constant_op(shift),
            batch=self.batch_size // size,
            seed=self.seed,
            shuffle=self.shuffle,
            name="data.batch",
        )
        batch.effects = (self.advance,)
        return batch

    def __len__(self) -> int:
        """Batches in an epoch."""
        return max(1, len(self.dataset) // self.batch_size)

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return len(self) * self.batch_size

    def inputs(self) -> tuple[Node, ...]:
        """Images (batch_size, …) float32 and labels, (batch_size,) int64 or (batch_size, classes)
        float32: nodes that take the batch that the counter is at.
        """
        return self._batch[0], self._batch[1]

    def seek(self, step: int) -> None:
        """Makes `step`, counted from the first batch of epoch 0, the next one."""
        self.step.set(np.int64(step))

    def epoch(self, number: int, start: int = 0) -> Iterator[dict[Node, Any]]:
        """An empty feed for each batch of an epoch from batch `start` on, which it seeks first.

        number: of the epoch, from 0.
        """
        self.seek(number * len(self) + start)
        for _ in range(start, len(self)):
            yield {}

    def batches(self, number: int, start: int = 0) -> Iterator[Split]:
        """The batches of an epoch as arrays, made on the host.

        number: of the epoch, from 0. start: the first batch.
        """
        count = len(self.dataset)
        scale, shift = self.normalization.affine(self.dataset.dtype)
        rank, size = self._share
        share = self.batch_size // size
        first = rank * share
        for step in range(number * len(self) + start, (number + 1) * len(self)):
            positions = first + np.arange(share) + step * self.batch_size
            if self.shuffle:
                chosen = ordered(positions.astype(np.uint64), count, self.seed)
            else:
                chosen = positions % count
            images, labels = self.dataset.take(chosen)
            yield Split(normalized(images, scale, shift), labels)

    def named_state(self) -> Iterator[tuple[str, Parameter]]:
        """The state that a checkpoint keeps: the counter."""
        yield "step", self.step


def _resident(dataset: Dataset) -> Dataset:
    """uint8 stays, floats become what native devices compute in. DataError for tokens, and for
    labels that the kernel does not gather.
    """
    labels = dataset.labels
    if is_tokens(dataset.dtype) or labels.ndim != (2 if labels.dtype.kind == "f" else 1):
        raise DataError(
            f"DeviceLoader: images {dataset.dtype} with labels {labels.dtype} {labels.shape} do "
            "not live on a device; it takes uint8 or floats with labels (n,) or weights (n, "
            "classes): use a Loader"
        )
    if dataset.dtype == np.uint8:
        return dataset
    return Dataset(np.asarray(dataset.images, np.float32), dataset.labels, dataset.classes)
