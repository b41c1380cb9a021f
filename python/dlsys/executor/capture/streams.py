"""Assigns the tasks of a captured graph to graph streams, the parallel branches of the graph.

Tasks of one stream run in order; a task waits besides for those of its dependencies that are in
other streams. It is list scheduling by the longest path: a stream goes on with the dependent task
that has the longest path behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .hazards import Access, Range

_READY_INPUTS = 63  # inputs of a step whose readiness is told to its kernel
_EARLY = 1 << _READY_INPUTS  # the successor's ready inputs are so from the start of the graph
_ROOTS = 2  # tasks without dependencies; each further one lengthens every launch by over 1 µs


@dataclass(frozen=True)
class GraphStreams:
    """The graph stream of each task; pairs (task, earlier task that it waits for) in the order of
    the tasks; the number of tasks on the longest path; and, where they are known, each task's ready
    inputs as `ready_inputs` finds them.
    """

    stream: list[int]
    waits: list[tuple[int, int]]
    longest: int
    ready_inputs: list[int] | None = None

    @property
    def count(self) -> int:
        """The number of streams."""
        return max(self.stream, default=-1) + 1

    def padded(self, before: int, after: int) -> GraphStreams:
        """A copy with `before` and `after` empty tasks at its ends."""
        waits = [(k + before, earlier + before) for k, earlier in self.waits]
        stream = [0] * before + self.stream + [0] * after
        ready = self.ready_inputs and [0] * before + self.ready_inputs + [0] * after
        return GraphStreams(stream, waits, self.longest, ready)


def ready_inputs(
    stream: Sequence[int], inputs: Sequence[Sequence[Range]], accesses: Sequence[Access]
) -> list[int]:
    """For each task the inputs, as bits, that its predecessor in its stream does not write: a
    kernel that PDL sets up while the predecessor ends may read them at once. Bit 63 is set where no
    task at all writes those of its successor, so that this may be set up before its own
    predecessor has ended.
    """
    found: list[int] = []
    is_constant = _constant(accesses)
    predecessor: dict[int, int] = {}
    for k, own in enumerate(stream):
        before = predecessor.get(own)
        bits = 0
        if before is not None:
            written, early = accesses[before].writes, True
            for index, (begin, end) in enumerate(inputs[k][:_READY_INPUTS]):
                ready = all(end <= first or last <= begin for first, last in written)
                bits |= ready << index
                early = early and (not ready or is_constant((begin, end)))
            found[before] |= early << _READY_INPUTS
        found.append(bits)
        predecessor[own] = k
    return found


def _constant(accesses: Sequence[Access]) -> Callable[[Range], bool]:
    """What tells whether no task writes a range."""
    begins: list[int] = []  # of all that is written, apart and ascending
    ends: list[int] = []
    for begin, end in sorted(written for access in accesses for written in access.writes):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)

    def is_constant(read: Range) -> bool:
        k = bisect_left(begins, read[1])  # that many begin before its end
        return k == 0 or ends[k - 1] <= read[0]

    return is_constant


def one_stream(tasks: int) -> GraphStreams:
    """All tasks in one stream."""
    return GraphStreams([0] * tasks, [], tasks)


def chained(dependencies: Sequence[list[int]], tasks: Sequence[int]) -> list[list[int]]:
    """Adds a dependency of each of these tasks on the one before it: ranks that communicate must do
    so in one order.
    """
    ordered = list(dependencies)
    for before, k in zip(tasks, tasks[1:]):
        if before not in ordered[k]:
            ordered[k] = sorted([*ordered[k], before], reverse=True)
    return ordered


def wait_for_all(dependencies: list[list[int]], tasks: Sequence[int]) -> None:
    """Adds dependencies of each of these tasks on all tasks before it."""
    for k in tasks:
        last = set(range(k)).difference(*dependencies[:k])
        dependencies[k] = sorted(last.union(dependencies[k]), reverse=True)


def assign_streams(
    dependencies: Sequence[Sequence[int]],
    limit: int,
    apart: Sequence[int] = (),
    nbytes: Sequence[int] = (),
) -> GraphStreams:
    """Puts tasks into at most `limit` streams, given the dependencies of each; and those `apart`,
    each of which depends on the one before, into one more, which has nothing else. `nbytes`, where
    they are given, are those that each task touches.
    """
    heirs = _heirs(dependencies, apart, nbytes)
    separate = set(apart)
    own_stream = -1
    stream: list[int] = []
    waits: list[tuple[int, int]] = []
    tails: list[int] = []  # the last task of each stream
    ancestors: list[int] = []  # of each task, with the order that streams add
    depth: list[int] = []
    roots: list[int] = []
    for k, wanted in enumerate(dependencies):
        if not wanted and len(roots) == _ROOTS:
            wanted = roots[:1]
        elif not wanted:
            roots.append(k)
        if k in separate:
            own = own_stream = len(tails) if own_stream < 0 else own_stream
        else:
            own = _stream_of(k, wanted, tails, heirs, ancestors, depth, limit, own_stream)
        before = tails[own : own + 1]
        covered = ancestors[before[0]] if before else 0
        for earlier in wanted:
            if not covered >> earlier & 1:
                before.append(earlier)
                waits.append((k, earlier))
                covered |= ancestors[earlier]
        stream.append(own)
        tails[own : own + 1] = [k]
        ancestors.append(covered | 1 << k)
        depth.append(1 + max((depth[earlier] for earlier in before), default=0))
    return GraphStreams(stream, waits, max(depth, default=0))


def _heirs(
    dependencies: Sequence[Sequence[int]], apart: Sequence[int], nbytes: Sequence[int]
) -> list[int]:
    """For each task the one that continues its stream: of its dependents, but for those `apart`,
    the one with the longest path behind it, of equals the one that touches the most bytes or else
    the first; -1 without any.
    """
    separate = set(apart)
    heirs = [-1] * len(dependencies)
    height = [1] * len(dependencies)
    most = [0] * len(dependencies)  # bytes of the heir
    for k in reversed(range(len(dependencies))):  # so that of equals the first is taken
        own = nbytes[k] if nbytes else 0
        for earlier in dependencies[k]:
            if (height[k] + 1, own) >= (height[earlier], most[earlier]):
                height[earlier] = height[k] + 1
                if k not in separate:
                    heirs[earlier], most[earlier] = k, own
    return heirs


def _stream_of(
    k: int,
    wanted: Sequence[int],
    tails: Sequence[int],
    heirs: Sequence[int],
    ancestors: Sequence[int],
    depth: Sequence[int],
    limit: int,
    taken: int,
) -> int:
    """The stream of task k: that of the task whose heir it is; else one that adds no wait, a new
    one where there is none; else the one with the shortest path so far. The stream `taken`, if any,
    is that of the tasks apart.
    """
    streams = [one for one in range(len(tails)) if one != taken]
    inherited = [one for one in streams if heirs[tails[one]] == k and tails[one] in wanted]
    if inherited:
        return max(inherited, key=lambda one: depth[tails[one]])
    before = 0
    for earlier in wanted:
        before |= ancestors[earlier]
    open_streams = [one for one in streams if heirs[tails[one]] < k]  # no heir waits for them
    free = [one for one in open_streams if before >> tails[one] & 1]
    if free:
        return max(free, key=lambda one: depth[tails[one]])
    if len(streams) < limit:
        return len(tails)
    return min(open_streams or streams, key=lambda one: depth[tails[one]])
