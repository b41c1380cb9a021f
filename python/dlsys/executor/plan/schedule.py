"""The scheduler orders a simplified graph so that state is read before it is written.

Every read of a Parameter in a run sees the value from the run's start. Readers are ordered before
the update; where that is impossible (a reader that itself needs an update's result, or writes other
state) it reads a copy made before. Fetched state, feeds, constants and values fetched twice are
copied, so that results are never aliases. Among the steps that are ready, updates go first (they
end a gradient's life), operators of several values and those that are to run soon, then the oldest
node.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...errors import GraphError
from ...graph.lines import attributed_to
from ...graph.node import Node, find_topo_sort, hooks


def schedule(fetches: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes in running order, and the fetches as they are to be read after the run.

    Inputs of nodes may be replaced by copies in place: the graph must be the executor's own. Raises
    GraphError for two updates of one Parameter.
    """
    order = find_topo_sort(fetches)
    updates = _updates(order)
    values, copies = _unaliased(fetches)
    order += copies
    after = _read_before_written(order, updates) if updates else {}
    return _ordered(order, after), values


def storage_of(node: Node) -> Node:
    """The node whose memory a view or an update's result shows."""
    index = 0
    while True:
        if node.op.view:
            index, node = node.attrs["index"] if node.op.projection else 0, node.inputs[0]
        elif node.op.writes:
            node = node.inputs[node.op.writes[index]]
        else:
            return node


def _shows_part(node: Node) -> bool:
    """True when a view leaves out some of the memory that it shows."""
    while node.op.view:
        if "offset" in node.attrs:
            return True
        node = node.inputs[0]
    return False


def _updates(order: Sequence[Node]) -> dict[Node, Node]:
    """Each Parameter that is written, with the node that writes it."""
    updates: dict[Node, Node] = {}
    for node in order:
        for k in node.op.writes:
            target = node.inputs[k]
            other = updates.get(target)
            updates[target] = node
            if other is not None:
                raise GraphError(
                    f"{target.name} is updated twice in one graph, by {other.name} [{other.where}] "
                    f"and {node.name} [{node.where}]; make the two one update"
                )
    return updates


def _unaliased(fetches: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The fetches, with a copy wherever the result would share memory with something else; and
    the copies.
    """
    taken: set[Node] = set()
    values, copies = [], []
    for node in fetches:
        root = storage_of(node)
        aliased = root.op.leaf or root in taken or _shows_part(node)
        if node.op.outputs == 1 and aliased:
            node = root = _copy(node)
            copies.append(node)
        taken.add(root)
        values.append(node)
    return values, copies


def _copy(node: Node) -> Node:
    with attributed_to(node):
        copy = hooks["copy"](node, name=f"{node.name}.copy")
    copy.stand_for(node)
    return copy


def _read_before_written(order: list[Node], updates: dict[Node, Node]) -> dict[Node, list[Node]]:
    """For each update what must run before it; readers that cannot are given copies, added to
    `order`.
    """
    late: set[Node] = set()  # depends on an update, or is one
    after: dict[Node, list[Node]] = {update: [] for update in updates.values()}
    snapshots: dict[Node, Node] = {}
    early_fallible = []
    for node in order:
        if node.op.writes or not late.isdisjoint(node.inputs):
            late.add(node)
        elif node.op.fallible or _runs_python(node):
            early_fallible.append(node)
        if node.op.view:
            continue
        for k, x in enumerate(node.inputs):
            update = None if x in late else updates.get(storage_of(x))
            if update is None or k in node.op.writes:
                continue
            if node in late:
                if x not in snapshots:
                    snapshots[x] = _copy(x)
                node.inputs[k] = snapshots[x]
            else:
                after[update].append(node)
    for x, copy in snapshots.items():
        after[updates[storage_of(x)]].append(copy)
        order.append(copy)
    for waiting in after.values():
        waiting += early_fallible
    return after


def _runs_python(node: Node) -> bool:
    return node.op.kernel is None and not node.op.view and not node.op.leaf


def _ordered(nodes: Sequence[Node], after: dict[Node, list[Node]]) -> list[Node]:
    """Kahn's algorithm over the inputs and what `after` adds, the most urgent ready node first."""
    users: dict[Node, list[int]] = {node: [] for node in nodes}
    missing = []
    for k, node in enumerate(nodes):
        waits_for = [*node.inputs, *after[node]] if node in after else node.inputs
        missing.append(len(waits_for))
        for x in waits_for:
            users[x].append(k)
    urgency = [_urgency(node, k) for k, node in enumerate(nodes)]
    ready = [urgency[k] for k in range(len(nodes)) if not missing[k]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready) & _POSITION]
        order.append(node)
        for k in users[node]:
            missing[k] -= 1
            if not missing[k]:
                heapq.heappush(ready, urgency[k])
    assert len(order) == len(nodes), "an update waits for its own result"
    return order


_POSITION = (1 << 40) - 1


def _urgency(node: Node, position: int) -> int:
    """Smaller is sooner: updates, views, what is to run soon, and what has several values or none,
    then by age, last exchanges behind all else and updates by them; one integer compares faster.
    """
    op, sources = node.op, [x.inputs[0] if x.op.projection else x for x in (*node.inputs, node)]
    sent = [x.number for x in sources if x.attrs.get("behind") or (op.writes and x.op.communicates)]
    computes = not (op.writes or op.view or op.cache_local) and op.outputs == 1
    return (2 if sent else computes) << 100 | max(sent, default=node.number) << 40 | position
