"""Recomputation: activations that backward reads are computed again just before it does, where
storing them would take more memory than an executor may (Chen et al., "Training deep nets with
sublinear memory cost", 2016).

It works on the order of a plan, behind all rewrites, so that a node that runs again is the same
kernel on the same inputs: losses and gradients keep their bits, dropout makes its mask again from
the same counter, and updates, such as those of running statistics, run once.

What is stored is chosen in two stages. First all *cuts* are: activations behind which later forward
nodes read no earlier one, such as the residual stream between blocks. Of the rest, those go
that free the most bytes for a FLOP of computing them again, as few as will do. Where all of them do
not, only every second cut is stored, every third and so on. A cut and what is between two of them
are computed again together, when backward first asks for something there. The fusion weight_update,
which makes the weights of several small layers in one kernel, needs all their activations at once:
leave it out where such layers are to take less.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import NamedTuple

from ..errors import GraphError, OutOfMemoryError
from ..graph.node import Node
from .plan.memory import Plan, is_step
from .plan.schedule import storage_of

MakePlan = Callable[[list[Node], list[Node]], Plan]


class Recomputed(NamedTuple):
    """What a plan computes twice: how many steps, and their floating-point operations."""

    steps: int
    flops: int
    budget: int  # bytes of the arena

    def __str__(self) -> str:
        return (
            f"{self.steps} steps run again in backward ({self.flops / 1e6:,.3f} MFLOP) to stay "
            f"within {self.budget:,} bytes"
        )


_UNITS = {"": 1, "B": 1} | {
    unit: size**k
    for size, units in ((1000, ("KB", "MB", "GB", "TB")), (1024, ("KiB", "MiB", "GiB", "TiB")))
    for k, unit in enumerate(units, 1)
}


def byte_count(memory: int | str) -> int:
    """A number of bytes of an integer, or of a text such as "12 GiB" or "500 MB". GraphError for
    anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(memory))
    if found is None or found[2] not in _UNITS or isinstance(memory, bool) or not float(found[1]):
        raise GraphError(
            f'Executor: memory is {memory!r}, expected a number of bytes or a text such as "12 GiB"'
        )
    return int(float(found[1]) * _UNITS[found[2]])


def fit(order: list[Node], fetches: list[Node], budget: int | None, plan_of: MakePlan) -> Plan:
    """The plan of a scheduled graph whose arena has at most `budget` bytes, where there is one.
    OutOfMemoryError names the least that was found where none is within it.
    """
    plan = least = plan_of(order, fetches)
    if budget is None or plan.arena_nbytes <= budget:
        return plan
    activations = Activations(order, fetches)

    def attempt(dropped: Collection[Node]) -> Plan | None:
        nonlocal least
        made = activations.plan_without(dropped, budget, plan_of)
        if made is not None and made.arena_nbytes < least.arena_nbytes:
            least = made
        return made if made is not None and made.arena_nbytes <= budget else None

    between = sorted(activations.between, key=activations.flops_a_byte)
    found = attempt(between)
    if found is not None:
        low, high = 0, len(between)  # too few, and enough
        while high - low > 1:
            middle = (low + high) // 2
            fewer = attempt(between[:middle])
            low, high = (low, middle) if fewer else (middle, high)
            found = fewer or found
        return found
    for distance in range(2, len(activations.cuts) + 2):
        thinned = [node for k, node in enumerate(activations.cuts) if k % distance != distance - 1]
        found = attempt([*between, *thinned])
        if found is not None:
            return found
    raise OutOfMemoryError(
        f"Executor: a memory of {budget:,} bytes is too little for this graph, which takes "
        f"{plan.arena_nbytes:,} without recomputation and at least {least.arena_nbytes:,} with it; "
        "allow that much, or feed smaller batches"
    )


class Activations:
    """The forward nodes of a scheduled graph whose values backward reads.

    between: those that may be computed again, but for the `cuts`, which are in their order.
    """

    def __init__(self, order: Sequence[Node], fetches: Sequence[Node]) -> None:
        self._order, self._fetches = order, fetches
        self._late = _late(order)
        self._backward = _backward_order(order, self._late)
        fixed = _fixed(order)
        fixed |= self._late | {storage_of(node) for node in fetches}
        read = {storage_of(x) for node in self._late for x in node.inputs}
        self._again = {node for node in order if is_step(node) and node not in fixed}
        found = read & self._again
        self.cuts = [node for node in _cuts(order, self._late) if node in found]
        found.difference_update(self.cuts)
        self.between = [node for node in order if node in found]
        self._stored = read

    def flops_a_byte(self, node: Node) -> float:
        """What computing a node again costs while all others are stored."""
        needed, stack = {node}, [node]
        while stack:
            for x in map(storage_of, stack.pop().inputs):
                if x in self._again and x not in self._stored and x not in needed:
                    needed.add(x)
                    stack.append(x)
        return sum(map(_flops, needed)) / max(_nbytes(node), 1)

    def plan_without(
        self, dropped: Collection[Node], budget: int, plan_of: MakePlan
    ) -> Plan | None:
        """The plan that stores none of these nodes' values for backward; None where an update of
        state that is read again cannot wait.
        """
        again = Again(self._again - (self._stored - set(dropped)), self._late)
        order = [node for node in self._order if node not in self._late]
        for node in [*self._backward, *self._fetches]:
            if node in self._late and node not in again.of:
                order += again.rewritten(node)
        fetches = [again.of.get(node, node) for node in self._fetches]
        sorted_order = _updates_last(order)
        if sorted_order is None:
            return None
        plan = plan_of(sorted_order, fetches)
        flops = sum(map(_flops, again.steps))
        plan.recomputed = Recomputed(len(again.steps), flops, budget)
        return plan


class Again:
    """The late nodes of an order over copies of the nodes `dropped`."""

    def __init__(self, dropped: Set[Node], late: Set[Node]) -> None:
        self._dropped, self._late = dropped, late
        self.of: dict[Node, Node] = {}  # what stands for a node among late ones
        self.steps: list[Node] = []

    def rewritten(self, node: Node) -> Iterator[Node]:
        """What runs in place of a late node: first what it reads and is not there yet."""
        stack = [node]
        while stack:
            top = stack[-1]
            waits = [x for x in top.inputs if x not in self.of and self._changes(x)]
            if waits:
                stack += waits
                continue
            stack.pop()
            if top in self.of:
                continue
            made = top.derive([self.of.get(x, x) for x in top.inputs], top.spec)
            self.of[top] = made
            self._count(top, made)
            yield made

    def _count(self, node: Node, made: Node) -> None:
        if node not in self._late:
            made.name = f"{node.name}.again"
            self.steps += [made] if is_step(made) else []

    def _changes(self, x: Node) -> bool:
        """True for a late node, for what is computed again, and for what shows such a value."""
        return x in self._late or (not x.op.writes and storage_of(x) in self._dropped)


def _late(order: Sequence[Node]) -> set[Node]:
    """The nodes of the backward pass and all that reads their values."""
    late: set[Node] = set()
    for node in order:
        if not node.op.leaf and (node.backward or not late.isdisjoint(node.inputs)):
            late.add(node)
    return late


def _backward_order(order: Sequence[Node], late: Set[Node]) -> list[Node]:
    """The late nodes in their order, but for two kinds. What nothing of backward reads but updates,
    such as gradients of weights, runs as soon as it can, since it ends the lives of activations.
    What could run long before it is read, such as the derivative of an activation, is left out: it
    runs when somebody reads it.
    """
    waiting = _early(order, late)
    anchors = [node for node in order if node in late and node not in waiting]
    steps = [node for node in anchors if is_step(node) and not node.op.writes]
    read = {storage_of(x) for node in steps for x in node.inputs}
    done = set(order) - set(anchors)
    ends: dict[Node, list[Node]] = {}
    for node in steps:
        last = [x for x in node.inputs if x not in done]
        if node not in read and len(last) == 1:
            ends.setdefault(last[0], []).append(node)
    moved = {node for found in ends.values() for node in found}
    return [one for node in anchors if node not in moved for one in (node, *ends.get(node, ()))]


def _early(order: Sequence[Node], late: Set[Node]) -> set[Node]:
    """The late nodes that read forward values alone, and could run before what their readers read
    besides: all but the first of the backward pass.
    """
    depth: dict[Node, int] = {}
    latest: dict[Node, int] = {}
    for node in order:
        if node in late:
            before = max((depth[x] for x in node.inputs if x in late), default=0)
            depth[node] = before + is_step(node)
    for node in reversed(order):
        if node in late:
            wanted = latest.setdefault(node, depth[node]) - is_step(node)
            for x in node.inputs:
                if x in late:
                    latest[x] = min(latest.get(x, wanted), wanted)
    early: set[Node] = set()
    for node, steps in depth.items():
        if latest[node] > steps and all(x not in late or x in early for x in node.inputs):
            early.add(node)
    return early


def _fixed(order: Sequence[Node]) -> set[Node]:
    """The nodes that run once: updates and what reads their results, exchanges with other ranks,
    and Python operators.
    """
    fixed: set[Node] = set()
    for node in order:
        op = node.op
        once = op.writes or op.communicates or (op.kernel is None and not op.view and not op.leaf)
        if once or not fixed.isdisjoint(node.inputs):
            fixed.add(node)
    return fixed


def _cuts(order: Sequence[Node], late: Set[Node]) -> list[Node]:
    """The forward steps behind which no other step's floats are read by later forward steps. Casts
    of weights count as leaves.
    """
    forward = [node for node in order if node not in late]
    last: dict[Node, int] = {}
    weights: set[Node] = set()
    for k, node in enumerate(forward):
        op = node.op
        if op.leaf in ("state", "constant"):
            weights.add(node)
        elif (op.casts or op.movement or op.view) and weights.issuperset(node.inputs):
            weights.add(node)
        if is_step(node) and not op.writes:
            for x in node.inputs:
                if x.spec.dtype.kind not in "iub":
                    last[storage_of(x)] = k
    cuts, live = [], set[Node]()
    for k, node in enumerate(forward):
        live = {x for x in live if last[x] > k}
        if is_step(node) and node not in weights and last.get(node, -1) > k:
            live.add(node)
            if live == {node}:
                cuts.append(node)
    return cuts


def _updates_last(order: Sequence[Node]) -> list[Node] | None:
    """The order with updates of state behind all that reads it from before; None where there is a
    circle.
    """
    position = {node: k for k, node in enumerate(order)}
    updates = {node.inputs[k]: node for node in order for k in node.op.writes}
    users: dict[Node, list[Node]] = {node: [] for node in order}
    missing = dict.fromkeys(order, 0)
    for node in order:
        before = [*node.inputs]
        for k, x in enumerate(node.inputs):
            update = updates.get(storage_of(x)) if not _reads_result(x) else None
            if update is not None and update is not node and k not in node.op.writes:
                users[node].append(update)
                missing[update] += 1
        for x in before:
            users[x].append(node)
            missing[node] += 1
    ready = [k for k, node in enumerate(order) if not missing[node]]
    heapq.heapify(ready)
    made = []
    while ready:
        node = order[heapq.heappop(ready)]
        made.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    return made if len(made) == len(order) else None


def _reads_result(x: Node) -> bool:
    """True for a view of an update's result."""
    while x.op.view:
        x = x.inputs[0]
    return bool(x.op.writes)


def _nbytes(node: Node) -> int:
    specs = [node.spec] if node.op.outputs == 1 else node.spec
    return sum(spec.nbytes for spec in specs)


def _flops(node: Node) -> int:
    output = node.spec if node.op.outputs == 1 else node.spec[0]
    return node.op.cost(node, [x.spec for x in node.inputs], output)
