"""Hazards: which steps depend on which, by the memory that they read and write.

A step depends on an earlier one that wrote bytes that it reads (read after write), or that read or
wrote bytes that it writes (write after read, write after write). Bits of integers are sets of
steps.

Sharing bytes adds dependencies between steps. So that steps can still run side by side, small
buffers live on until the step that reuses their bytes depends on all their readers anyway.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from ...graph.node import Node
from ..plan.memory import Buffer, Plan, Step, is_step
from .joined import join_buckets, share_windows

LARGE = 8 << 20  # bytes from which a kernel fills the chip: a parallel one only slows both
# Steps of a program whose dependencies are analyzed, which takes as many bits as their square;
# longer programs run in one stream. ResNet-50's training step has about a thousand.
MAX_STEPS = 4096
_WINDOW = 16  # steps between two that should be able to run in parallel: few networks have more

Range = tuple[int, int]  # of addresses: the first byte, and the one behind the last
Key = TypeVar("Key", bound=Hashable)


class Access(NamedTuple):
    """The memory that a step reads and writes."""

    reads: Sequence[Range]
    writes: Sequence[Range]


class Order(Generic[Key]):
    """The partial order of steps by what they read and write; any key stands for memory."""

    def __init__(self) -> None:
        self.ancestors: list[int] = []  # of each step, itself among them
        self._written: dict[Key, int] = {}  # ancestors of the last writer
        self._touched: dict[Key, int] = {}  # of the last writer and of all readers since

    def add(self, reads: Iterable[Key], writes: Iterable[Key]) -> int:
        """Adds the next step and returns its ancestors."""
        reads, writes = list(reads), list(writes)
        before = self.before(reads)
        for key in writes:
            before |= self.touched(key)
        ancestors = before | 1 << len(self.ancestors)
        self.ancestors.append(ancestors)
        for key in reads:
            self._touched[key] = self.touched(key) | ancestors
        for key in writes:
            self._written[key] = self._touched[key] = ancestors
        return before

    def before(self, reads: Iterable[Key]) -> int:
        """The ancestors of a step that would read these keys now."""
        before = 0
        for key in reads:
            before |= self._written.get(key, 0)
        return before

    def touched(self, key: Key) -> int:
        """The steps after which this memory may be overwritten."""
        return self._touched.get(key, 0)


class ParallelLifetimes:
    """The lifetimes of a plan (see `plan.memory.Lifetimes`) whose steps should be able to run in
    parallel up to a distance of `window` steps.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._order: Order[Buffer] = Order()
        self._window = window

    def add(self, step: Step) -> None:
        """Takes note of what the next step reads and writes."""
        read = [value.buffer for value in step.inputs]
        made = [value.buffer for value in (*step.outputs, *step.workspace)]
        self._order.add(read, [*(read[k] for k in step.node.op.writes), *made])

    def in_use(self, buffer: Buffer, inputs: Sequence[Buffer]) -> bool:
        """True where a step that touched a buffer may still run when these inputs are there."""
        small = buffer.nbytes < LARGE
        return small and bool(self._order.touched(buffer) & ~self._order.before(inputs))

    def extend(self, plan: Plan) -> None:
        """Extends the lives of small buffers, within the window, up to the last step that makes
        something and could run before all that touched them are done; and joins those of buckets.
        """
        inside = [buffer for buffer in plan.buffers if buffer.kind == "arena"]
        begins = sorted({buffer.first for buffer in inside})
        for buffer in inside:
            if buffer.nbytes >= LARGE:
                continue
            touched = self._order.touched(buffer)
            after = bisect.bisect_right(begins, buffer.last)
            until = bisect.bisect_right(begins, buffer.last + self._window)
            for step in reversed(begins[after:until]):
                if touched & ~self._order.ancestors[step]:
                    buffer.last = step
                    break
        join_buckets(plan)
        share_windows(plan)


class InOrder:
    """The lifetimes of a plan whose steps run one after the other."""

    def add(self, step: Step) -> None:
        """Takes note of nothing."""

    def in_use(self, buffer: Buffer, inputs: Sequence[Buffer]) -> bool:
        """False: a step that touched a buffer is done."""
        return False

    def extend(self, plan: Plan) -> None:
        """Gives gradients that other ranks read the memory that these share."""
        share_windows(plan)


def lifetimes_of(order: Iterable[Node], window: int = _WINDOW) -> ParallelLifetimes | InOrder:
    """The lifetimes of a plan for parallel steps, if the program is not too long."""
    return ParallelLifetimes(window) if sum(map(is_step, order)) <= MAX_STEPS else InOrder()


def dependencies(accesses: Sequence[Access]) -> list[list[int]]:
    """The direct dependencies of each step, the latest first: the transitive reduction."""
    edges = sorted({edge for access in accesses for both in access for r in both for edge in r})
    order: Order[int] = Order()
    found = []
    for access in accesses:
        reads, writes = ([cell for r in side for cell in _cells(edges, r)] for side in access)
        before, direct = order.add(reads, writes), []
        while before:
            latest = before.bit_length() - 1
            direct.append(latest)
            before &= ~order.ancestors[latest]
        found.append(direct)
    return found


def serialize_large(
    direct: Sequence[list[int]], accesses: Sequence[Access], apart: Sequence[int] = ()
) -> list[list[int]]:
    """Adds a dependency between consecutive steps that touch at least LARGE bytes: two of them
    side by side gain nothing. Those `apart` wait for other hardware than the chip's memory.
    """
    ordered = list(direct)
    separate = set(apart)
    before = None
    for k, access in enumerate(accesses):
        if k in separate or all(end - begin < LARGE for side in access for begin, end in side):
            continue
        if before is not None and before not in ordered[k]:
            ordered[k] = sorted([*ordered[k], before], reverse=True)
        before = k
    return ordered


def _cells(edges: Sequence[int], part: Range) -> range:
    """The intervals between neighboring edges that a range covers, by index."""
    return range(bisect.bisect_left(edges, part[0]), bisect.bisect_left(edges, part[1]))
