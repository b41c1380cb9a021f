"""Which elements a key such as `1:3, ::2` chooses in an array, by numpy's rules and some stricter
ones.
"""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from ..graph.node import Node
from ..graph.signature import Kind, Misfit

_MAX_NDIM = 8  # steps that the kernels take


class Span(NamedTuple):
    """`size` positions from `begin` on (-1: all that follow), all of which must exist."""

    begin: int
    size: int
    whole: int | None = None  # the extent that the axis must have


class Share(NamedTuple):
    """Part `number`, counted from 0, of an axis cut into `parts` equal ones."""

    number: int
    parts: int


Entry = int | slice | Span | Share | EllipsisType | None


class Region(NamedTuple):
    """The elements that a key chooses: of each axis `sizes[k]` positions from `starts[k]` on in
    steps. `shape` is what they are shown in.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as numpy takes it, without dropped or added axes."""
        ends = [a + n * step for a, step, n in zip(self.starts, self.steps, self.sizes)]
        return tuple(
            slice(start, end if end >= 0 else None, step)
            for start, end, step in zip(self.starts, ends, self.steps)
        )

    def contiguous(self, whole: tuple[int, ...]) -> bool:
        """Whether the elements are neighbours in an array of shape `whole`, in the same order."""
        inside = False  # behind the first axis of which more than one position is chosen
        for step, size, extent in zip(self.steps, self.sizes, whole):
            if step != 1 or (inside and size != extent):
                return False
            inside = inside or size > 1
        return 0 not in self.sizes

    def scalars(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The first element's number in an array of shape `whole`, and eight steps."""
        offset = 0
        for start, extent in zip(self.starts, whole):
            offset = offset * extent + start
        return (offset, *self.steps, *[1] * (_MAX_NDIM - len(self.steps)))


def region_of(node: Node, name: str, shape: tuple[int, ...]) -> Region:
    """What `node.attrs["key"]` chooses in an array of this shape, called `name` in errors."""
    key = node.attrs["key"]
    used = sum(entry is not None and entry is not Ellipsis for entry in key)
    if used > len(shape):
        raise node.error(f"{used} indices are too many for {name} {shape}")
    rest = (slice(None),) * (len(shape) - used)
    dots = next((k for k, entry in enumerate(key) if entry is Ellipsis), len(key))
    chosen: list[tuple[int, int, int]] = []
    kept = []
    for entry in (*key[:dots], *rest, *key[dots + 1 :]):
        if entry is None:
            kept.append(1)
            continue
        start, step, size = _positions(node, name, entry, len(chosen), shape)
        chosen.append((start, step if size > 1 else 1, size))
        if type(entry) is not int:
            kept.append(size)
    starts, steps, sizes = zip(*chosen) if chosen else ((), (), ())
    region = Region(starts, steps, sizes, tuple(kept))
    return region if 0 not in sizes else nowhere(sizes)._replace(shape=tuple(kept))


def nowhere(sizes: tuple[int, ...]) -> Region:
    """A region of no element."""
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    return Region(zeros, ones, sizes, sizes)


def _positions(
    node: Node, name: str, entry: Any, axis: int, shape: tuple[int, ...]
) -> tuple[int, int, int]:
    """The first position, the step and the number of positions that an entry chooses."""
    extent = shape[axis]
    if type(entry) is int:
        if not -extent <= entry < extent:
            raise node.error(f"index {entry} is out of range for axis {axis} of {name} {shape}")
        return entry % extent, 1, 1
    if type(entry) is slice:
        start, stop, step = entry.indices(extent)
        return start, step, len(range(start, stop, step))
    if type(entry) is Share:
        if extent % entry.parts:
            raise node.error(
                f"axis {axis} of {name} {shape} does not divide into {entry.parts} parts"
            )
        size = extent // entry.parts
        return entry.number * size, 1, size
    begin = entry.begin + extent if entry.begin < 0 else entry.begin
    size = extent - begin if entry.size == -1 else entry.size
    if entry.whole not in (None, extent):
        raise node.error(f"sizes add up to {entry.whole}, not to axis {axis} of {name} {shape}")
    if not 0 <= begin <= begin + size <= extent:
        raise node.error(
            f"{entry.size} positions from {entry.begin} on do not lie in axis {axis} of "
            f"{name} {shape}"
        )
    return begin, 1, size


class Key(Kind):
    """A key as a tuple of its entries."""

    def take(self, value: Any) -> tuple[Entry, ...]:
        entries = tuple(map(_entry, value if type(value) is tuple else (value,)))
        if entries.count(Ellipsis) > 1:
            raise Misfit("a key has at most one ...")
        return entries


def _entry(entry: Any) -> Entry:
    if entry is None or entry is Ellipsis or isinstance(entry, (Span, Share)):
        return entry
    try:
        if isinstance(entry, slice):
            parts = (entry.start, entry.stop, entry.step)
            if entry.step == 0:
                raise Misfit("a step must not be 0")
            return slice(*(None if part is None else operator.index(part) for part in parts))
        if not isinstance(entry, (bool, np.bool_)):
            return operator.index(entry)
    except TypeError:
        pass
    raise Misfit(
        f"cannot index a node with {type(entry).__name__}; expected integers, slices, None "
        "and ...; for indices in a node or an array use gather_op"
    )
