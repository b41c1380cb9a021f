"""Batches that are a function of their number alone: what loaders that draw them share."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from ..describe import described
from ..graph.node import Node
from ..ops.leaf import Variable
from .loader import check_shares

Array = np.ndarray[Any, Any]
Field = tuple[tuple[int, ...], Any]  # the shape of a sample, and its dtype
Self = TypeVar("Self", bound="NumberedBatches")


class NumberedBatches:
    """The base of loaders for `train.fit` that make any batch from its number since the first
    epoch's beginning, so that resumed runs, and ranks that share batches, see the same ones. A
    subclass defines `batch`.

    steps: batches in an epoch. fields: a sample's arrays by name, each with its shape and dtype.
    """

    __repr__ = described
    targets, names = 1, None

    def __init__(self, batch_size: int, steps: int, fields: Mapping[str, Field]) -> None:
        self.batch_size = batch_size
        self._steps, self._fields, self._share = steps, fields, (0, 1)
        self._inputs = self._variables()

    def batch(self, number: int) -> tuple[Array, ...]:
        """The arrays of a batch."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._steps

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return self._steps * self.batch_size

    def shard(self: Self, rank: int, size: int) -> Self:
        """A loader of one of `size` equal shares of each batch, as of `Loader.shard`. rank: from 0
        on. DataError for a batch_size that does not divide.
        """
        made = copy.copy(self)
        made._share = check_shares(self.batch_size, 0, rank, size)
        made._inputs = made._variables()
        return made

    def inputs(self) -> tuple[Node, ...]:
        """The Variables that batches are fed to."""
        return self._inputs

    def epoch(self, number: int, start: int = 0) -> Generator[dict[Node, Any], None, None]:
        """The feeds of each batch of an epoch, from batch `start` on."""
        for k in range(start, self._steps):
            yield dict(zip(self._inputs, self._part(number * self._steps + k)))

    def __iter__(self) -> Iterator[tuple[Array, ...]]:
        """The batches of the first epoch."""
        return (self._part(k) for k in range(self._steps))

    def _variables(self) -> tuple[Node, ...]:
        rows = self.batch_size // self._share[1]
        return tuple(Variable(name, (rows, *s), dtype) for name, (s, dtype) in self._fields.items())

    def _part(self, number: int) -> tuple[Array, ...]:
        rank, size = self._share
        rows = self.batch_size // size
        return tuple(x[rank * rows : (rank + 1) * rows] for x in self.batch(number))
