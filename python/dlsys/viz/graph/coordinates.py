"""Horizontal coordinates in a layered drawing, after Brandes and Köpf, "Fast and simple horizontal
coordinate assignment" (2001): long edges bend at most twice.

Vertices are aligned with a median neighbor into vertical blocks, once from each of four corners;
blocks are pushed together; a vertex's coordinate is the mean of the middle two of the four. That
leaves wide gaps, so in the end vertices move toward their neighbors, each straight part of an edge
as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SWEEPS = 24
Rows = Sequence[Sequence[int]]
Neighbors = Sequence[Sequence[int]]


@dataclass
class Columns:
    """Rows of vertices from left to right, with the neighbors of each in the rows above and below.

    Vertices from number `real` on are bends of edges. Widths include the room between vertices.
    """

    rows: Rows
    above: Neighbors
    below: Neighbors
    widths: Sequence[float]
    real: int

    def centers(self) -> list[float]:
        """The center of each vertex."""
        self._marked = self._conflicts()
        found = []
        for neighbors, rows in ((self.above, self.rows), (self.below, self.rows[::-1])):
            found.append(self._from_left(rows, neighbors))
            mirrored = self._from_left([row[::-1] for row in rows], neighbors)
            found.append([-x for x in mirrored])
        self._line_up(found)
        x = [(xs[1] + xs[2]) / 2 for xs in map(sorted, zip(*found))]
        self._draw_together(x)
        return x

    def _draw_together(self, x: list[float]) -> None:
        """Moves each straight part toward the mean of its neighbors, as far as there is room."""
        left: dict[int, int] = {}
        right: dict[int, int] = {}
        for row in self.rows:
            left.update(zip(row[1:], row))
            right.update(zip(row, row[1:]))
        parts = self._straight(x)
        for sweep in range(_SWEEPS):
            for part in parts if sweep % 2 == 0 else reversed(parts):
                near = [*self.above[part[0]], *self.below[part[-1]]]
                if not near:
                    continue
                wanted = sum(x[n] for n in near) / len(near)
                ends = [x[left[v]] + self._distance(left[v], v) for v in part if v in left]
                wanted = max([wanted, *ends])
                ends = [x[right[v]] - self._distance(v, right[v]) for v in part if v in right]
                wanted = min([wanted, *ends])
                for v in part:
                    x[v] = wanted

    def _straight(self, x: Sequence[float]) -> list[list[int]]:
        """Bends right below each other on one edge together, every other vertex alone; from the
        top.
        """
        part_of: dict[int, list[int]] = {}
        parts = []
        for v in (v for row in self.rows for v in row):
            upper = self.above[v][0] if v >= self.real else -1
            if upper >= self.real and abs(x[v] - x[upper]) < 0.5:
                part_of[v] = part_of[upper]
                part_of[v].append(v)
            else:
                part_of[v] = [v]
                parts.append(part_of[v])
        return parts

    def _distance(self, u: int, v: int) -> float:
        return (self.widths[u] + self.widths[v]) / 2

    def _conflicts(self) -> set[tuple[int, int]]:
        """Pieces of edges (upper, lower) that cross a piece between two bends: these stay straight
        and the others give way.
        """
        marked = set()
        for upper, lower in zip(self.rows, self.rows[1:]):
            position = {v: k for k, v in enumerate(upper)}
            first, waiting = 0, 0
            for k, v in enumerate(lower):
                inner = [u for u in self.above[v] if v >= self.real and u >= self.real]
                if not inner and k + 1 < len(lower):
                    continue
                last = position[inner[0]] if inner else len(upper) - 1
                for w in lower[waiting : k + 1]:
                    for u in self.above[w]:
                        within = first <= position[u] <= last
                        if not within and (u < self.real or w < self.real):
                            marked.add((u, w))
                first, waiting = last, k + 1
        return marked

    def _from_left(self, rows: Rows, neighbors: Neighbors) -> list[float]:
        """Places when blocks are formed and pushed together from the left, row after row."""
        block = list(range(len(self.widths)))  # each vertex's block, named by its first vertex
        for before, row in zip(rows, rows[1:]):
            self._align(before, row, neighbors, block)
        return self._compact(rows, block)

    def _align(
        self, before: Sequence[int], row: Sequence[int], neighbors: Neighbors, block: list[int]
    ) -> None:
        """Joins each vertex of a row to the block of a median neighbor, where no line between the
        two rows would be crossed by that.
        """
        position = {v: k for k, v in enumerate(before)}
        taken = -1
        for v in row:
            known = sorted(neighbors[v], key=position.__getitem__)
            for u in known[(len(known) - 1) // 2 : len(known) // 2 + 1]:
                free = (u, v) not in self._marked and (v, u) not in self._marked
                if free and position[u] > taken:
                    block[v] = block[u]
                    taken = position[u]
                    break

    def _compact(self, rows: Rows, block: Sequence[int]) -> list[float]:
        """The leftmost coordinate of each block, then each as far right as leaves its neighbors."""
        room: dict[int, dict[int, float]] = {b: {} for b in block}  # block → block to its right
        for row in rows:
            for u, v in zip(row, row[1:]):
                wanted = self._distance(u, v)
                known = room[block[u]].get(block[v], 0.0)
                room[block[u]][block[v]] = max(wanted, known)
        order = _topological(room)
        x = dict.fromkeys(order, 0.0)
        for b in order:
            for right, distance in room[b].items():
                x[right] = max(x[right], x[b] + distance)
        for b in reversed(order):
            if room[b]:
                x[b] = max(x[b], min(x[right] - distance for right, distance in room[b].items()))
        return [x[b] for b in block]

    def _line_up(self, found: list[list[float]]) -> None:
        """Shifts the four so that all begin (the mirrored ones: end) where the narrowest does."""
        spans = [self._span(x) for x in found]
        left, right = min(spans, key=lambda span: span[1] - span[0])
        for k, (x, span) in enumerate(zip(found, spans)):
            shift = right - span[1] if k % 2 else left - span[0]
            found[k] = [value + shift for value in x]

    def _span(self, x: Sequence[float]) -> tuple[float, float]:
        left = min((a - w / 2 for a, w in zip(x, self.widths)), default=0.0)
        right = max((a + w / 2 for a, w in zip(x, self.widths)), default=0.0)
        return left, right


def _topological(users: dict[int, dict[int, float]]) -> list[int]:
    missing = dict.fromkeys(users, 0)
    for targets in users.values():
        for target in targets:
            missing[target] += 1
    order = [v for v, count in missing.items() if not count]
    for v in order:
        for target in users[v]:
            missing[target] -= 1
            if not missing[target]:
                order.append(target)
    assert len(order) == len(users), "blocks cross"
    return order
