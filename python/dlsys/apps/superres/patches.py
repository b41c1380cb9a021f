"""Batches of patches of photographs, drawn at random, for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...data.numbered import NumberedBatches
from ...errors import DataError
from .planes import Array


class Pair(NamedTuple):
    """What a network takes, (h, w), and what it should make of it, (h · factor, w · factor)."""

    given: Array
    wanted: Array


class PatchLoader(NumberedBatches):
    """Batches for `train.fit`: patches (batch_size, 1, side, side) float32 of what a network takes,
    and the middles (batch_size, 1, inner, inner) of what it should make of them, inner = (side - 2
    · margin) · factor: less what depends on pixels that a patch does not have.

    Each patch is drawn from all positions in all photos alike, and turned and mirrored in one of
    the eight ways. What a batch has is a function of (seed, its number) alone, for resumed runs
    too. steps: batches in an epoch. DataError for a photo that is smaller than a patch.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        side: int,
        margin: int,
        batch_size: int,
        steps: int,
        seed: int = 0,
    ) -> None:
        smallest = min((min(pair.given.shape) for pair in pairs), default=0)
        if smallest < side or side <= 2 * margin:
            raise DataError(
                f"PatchLoader: patches of {side} pixels are no part of a photo that is {smallest} "
                f"pixels small, or have no middle behind margins of {margin}: use another --patch, "
                "or larger photos"
            )
        self._side, self._margin = side, margin
        self._pairs, self._seed = pairs, seed
        self._factor = pairs[0].wanted.shape[0] // pairs[0].given.shape[0]
        rooms = [[n - side + 1 for n in pair.given.shape] for pair in pairs]
        self._ends = np.cumsum([rows * columns for rows, columns in rooms])
        self._columns = [columns for _, columns in rooms]
        inner = (side - 2 * margin) * self._factor
        fields = {
            name: ((1, extent, extent), np.float32)
            for name, extent in (("given", side), ("wanted", inner))
        }
        super().__init__(batch_size, steps, fields)

    def batch(self, number: int) -> tuple[Array, Array]:
        """The patches of a batch, by its number since the first epoch's beginning."""
        rng = np.random.default_rng((self._seed, number))
        positions = rng.integers(self._ends[-1], size=self.batch_size)
        ways = rng.integers(8, size=self.batch_size)
        pairs = [self._patch(int(at), int(way)) for at, way in zip(positions, ways)]
        given, wanted = (np.stack(part)[:, None] for part in zip(*pairs))
        return given, wanted

    def _patch(self, position: int, way: int) -> tuple[Array, Array]:
        k = int(np.searchsorted(self._ends, position, side="right"))
        row, column = divmod(position - int(self._ends[k - 1] if k else 0), self._columns[k])
        f, margin = self._factor, self._margin
        a, b = row + margin, column + margin
        inner = self._side - 2 * margin
        given = self._pairs[k].given[row : row + self._side, column : column + self._side]
        wanted = self._pairs[k].wanted[a * f : (a + inner) * f, b * f : (b + inner) * f]
        return _turned(given, way), _turned(wanted, way)


def _turned(plane: Array, way: int) -> Array:
    """A plane in one of the eight ways to turn and mirror a square."""
    return np.rot90(plane if way < 4 else plane[:, ::-1], way % 4)
