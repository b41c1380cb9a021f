"""Drawing a directed graph in layers, after Sugiyama, Tagawa and Toda (1981): ranks by the longest
path, orders within ranks by barycenters, coordinates as in coordinates.py.

It knows no graph of operators: vertices are 0 … n - 1 with widths, and edges between them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .coordinates import Columns

Edge = tuple[int, int]

_GAP = 18.0  # between vertices of a rank
_BEND_WIDTH = 11.0  # that an edge takes in a rank that it passes
_SWEEPS = 8


class Layout(NamedTuple):
    """`ranks[v]` is a vertex's layer, `x[v]` its center; `bends[k]` are the centers at which edge k
    passes the layers between its ends, downwards. `width` is that of the drawing.
    """

    ranks: list[int]
    x: list[float]
    bends: list[list[float]]
    width: float


def layout(widths: Sequence[float], edges: Sequence[Edge]) -> Layout:
    """Places the vertices of an acyclic graph; every edge leads to a higher rank.

    Costs about the number of edges times the ranks that they span, in time and memory.
    """
    ranks = rank(len(widths), edges)
    layers = _Layers([width + _GAP for width in widths], edges, ranks)
    layers.order()
    layers.place()
    left = min((x - w / 2 for x, w in zip(layers.x, layers.widths)), default=0.0)
    right = max((x + w / 2 for x, w in zip(layers.x, layers.widths)), default=0.0)
    x = [value - left for value in layers.x]
    bends = [[x[v] for v in chain[1:-1]] for chain in layers.chains]
    return Layout(ranks, x[: len(widths)], bends, right - left)


def rank(count: int, edges: Sequence[Edge]) -> list[int]:
    """The length of the longest path to each vertex, but sources right above their first user."""
    users: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in edges:
        users[source].append(target)
        missing[target] += 1
    sources = [v for v in range(count) if not missing[v]]
    ranks = [0] * count
    ready = list(sources)
    for v in ready:
        for user in users[v]:
            ranks[user] = max(ranks[user], ranks[v] + 1)
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    assert len(ready) == count, "the graph has a cycle"
    for v in sources:
        ranks[v] = min((ranks[user] for user in users[v]), default=1) - 1
    return ranks


@dataclass
class _Layers:
    """The graph with every edge cut into pieces from rank to rank, its bends vertices like all."""

    widths: list[float]
    edges: Sequence[Edge]
    ranks: Sequence[int]
    chains: list[list[int]] = field(default_factory=list)
    x: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._real = len(self.widths)
        self._rows: list[list[int]] = [[] for _ in range(max(self.ranks, default=-1) + 1)]
        for v, r in enumerate(self.ranks):
            self._rows[r].append(v)
        for source, target in self.edges:
            chain = [source]
            for r in range(self.ranks[source] + 1, self.ranks[target]):
                chain.append(len(self.widths))
                self._rows[r].append(chain[-1])
                self.widths.append(_BEND_WIDTH)
            self.chains.append([*chain, target])
        self._above: list[list[int]] = [[] for _ in self.widths]
        self._below: list[list[int]] = [[] for _ in self.widths]
        for chain in self.chains:
            for upper, lower in zip(chain, chain[1:]):
                self._below[upper].append(lower)
                self._above[lower].append(upper)

    def order(self) -> None:
        """Sweeps down and up, ranks sorted by their neighbors' mean position; keeps the order with
        the fewest crossings.
        """
        best, fewest = [list(row) for row in self._rows], self._crossings()
        for sweep in range(_SWEEPS):
            downwards = sweep % 2 == 0
            neighbors = self._above if downwards else self._below
            position = self._positions()
            for row in self._rows if downwards else reversed(self._rows):
                mean = {v: _mean([position[n] for n in neighbors[v]], position[v]) for v in row}
                row.sort(key=mean.__getitem__)
                position.update(_spread(row))
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(row) for row in self._rows], crossings
        self._rows = best
        self._swap()

    def _swap(self) -> None:
        """Exchanges neighbors in a rank while that leaves fewer crossings."""
        position = {v: k for row in self._rows for k, v in enumerate(row)}

        def crossings(left: int, right: int) -> int:
            sides = (self._above, self._below)
            return sum(position[a] > position[b] for n in sides for a in n[left] for b in n[right])

        swapped, sweep = True, 0
        while swapped and sweep < _SWEEPS:
            swapped, sweep = False, sweep + 1
            for row in self._rows:
                for k in range(len(row) - 1):
                    u, v = row[k], row[k + 1]
                    if crossings(v, u) < crossings(u, v):
                        row[k], row[k + 1] = v, u
                        position[v], position[u] = k, k + 1
                        swapped = True

    def place(self) -> None:
        """Computes the coordinate of every vertex in its rank."""
        columns = Columns(self._rows, self._above, self._below, self.widths, self._real)
        self.x = columns.centers()

    def _positions(self) -> dict[int, float]:
        return {v: at for row in self._rows for v, at in _spread(row)}

    def _crossings(self) -> int:
        """Pairs of pieces of edges that cross, found by insertion into a sorted list."""
        count = 0
        for row, below in zip(self._rows, self._rows[1:]):
            position = {v: k for k, v in enumerate(below)}
            seen: list[int] = []
            for v in row:
                ends = sorted(position[n] for n in self._below[v])
                count += sum(len(seen) - bisect.bisect_right(seen, end) for end in ends)
                for end in ends:
                    bisect.insort(seen, end)
        return count


def _spread(row: Sequence[int]) -> list[tuple[int, float]]:
    """Places between 0 and 1, so that short and long ranks compare."""
    return [(v, (k + 0.5) / len(row)) for k, v in enumerate(row)]


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
