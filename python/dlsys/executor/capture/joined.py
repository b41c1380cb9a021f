"""Joined buckets: what ranks exchange in one step lies side by side in the arena, inputs and
results alike, so that the library that moves it gets one array for many. And windows: what kernels
of other ranks read lies side by side in memory that they share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ...graph.node import Node
from ..plan.arena import aligned
from ..plan.memory import Buffer, Plan, Value

_Moved = dict[Buffer, tuple[Buffer, int]]  # to which buffer each goes, and to which byte of it


def join_buckets(plan: Plan) -> None:
    """Replaces the buffers of each step that exchanges several arrays by one for its inputs and one
    for its results, where each of these has a buffer of the arena for itself. For a plan whose
    buffers have no offsets yet.
    """
    moved: _Moved = {}
    for step in plan.steps:
        count = len(step.outputs)
        if not step.node.op.communicates or count < 2:
            continue
        sides = step.inputs[:count], step.outputs
        buffers = [value.buffer for side in sides for value in side]
        whole = all(_fills(value) for side in sides for value in side)
        if whole and len({*buffers}) == 2 * count and moved.keys().isdisjoint(buffers):
            for side in sides:
                moved |= _joined([value.buffer for value in side], "arena", side[0].node)
            step.node.attrs = {**step.node.attrs, "joined": True}
            step.arguments = None
    if moved:
        _repoint(plan, moved)


def share_windows(plan: Plan) -> None:
    """Replaces the buffers of gradients that an update reads on all ranks by one for each group,
    which is not of the arena: its `node` is an update that reads them. For a plan whose buffers
    have no offsets yet.
    """
    found: dict[Any, tuple[Node, dict[Buffer, None]]] = {}
    for step in plan.steps:
        node = step.node
        if node.op.communicates and node.op.gradient_inputs:
            buffers = [step.inputs[k].buffer for k in node.op.gradient_inputs]
            _, shared = found.setdefault(node.attrs["group"], (node, {}))
            shared.update(dict.fromkeys(x for x in buffers if x.kind == "arena" and x.nbytes))
            step.arguments = None
    moved: _Moved = {}
    for node, shared in found.values():
        if shared:
            moved |= _joined([*shared], "window", node)
    if moved:
        _repoint(plan, moved)


def _fills(value: Value) -> bool:
    buffer = value.buffer
    return buffer.kind == "arena" and not value.offset and value.spec.nbytes == buffer.nbytes > 0


def _joined(buffers: Sequence[Buffer], kind: str, node: Node) -> _Moved:
    places = [0, *itertools.accumulate(aligned(buffer.nbytes) for buffer in buffers)]
    first, last = min(b.first for b in buffers), max(b.last for b in buffers)
    joint = Buffer(kind, places[-1], first, last, node)
    joint.unshared = sum(buffer.unshared for buffer in buffers)
    return {buffer: (joint, place) for buffer, place in zip(buffers, places)}


def _repoint(plan: Plan, moved: _Moved) -> None:
    values = {id(value): value for several in plan.values.values() for value in several}
    for step in plan.steps:
        for value in (*step.inputs, *step.outputs):
            values[id(value)] = value
    for value in values.values():
        if value.buffer in moved:
            value.buffer, place = moved[value.buffer]
            value.offset += place // value.spec.dtype.itemsize
    joints = dict.fromkeys(joint for joint, _ in moved.values())
    plan.buffers = [buffer for buffer in plan.buffers if buffer not in moved] + [*joints]
