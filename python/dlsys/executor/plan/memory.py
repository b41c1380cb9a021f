"""The planner: a pure function from an order of nodes to buffers, lifetimes and one arena.

A *value* is one output of a node; values that share memory (views, in-place results, updated state)
share a *buffer*. A buffer either lives outside (a feed, a Parameter, a constant, a fetch) or has an
offset in the arena, where buffers whose lifetimes do not meet share bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...describe import drawn_by, told_by
from ...dtypes import is_integral, storage_dtype
from ...graph.node import Node
from ...graph.spec import Spec
from .arena import aligned, largest_live_sum, pack


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one or more values: `kind` is arena, window, feed, state, constant or fetch."""

    kind: str
    nbytes: int
    first: int  # the step that writes it
    last: int  # the last step that reads it
    node: Node  # what made it, for texts
    unshared: int = 0  # bytes of its values, had each memory of its own
    offset: int = -1  # in the arena


@dataclass(eq=False, slots=True)
class Value:
    """One output of a node, and the buffer that holds it, from element `offset` on."""

    node: Node
    spec: Spec
    buffer: Buffer = field(repr=False)
    offset: int = 0

    @property
    def skipped_nbytes(self) -> int:
        """The bytes of the buffer before the value."""
        return self.offset and self.offset * self.spec.dtype.itemsize


@dataclass(eq=False, slots=True)
class Step:
    """One call: of a kernel, a numpy form or a user's `compute`."""

    node: Node
    inputs: list[Value] = field(repr=False)
    outputs: list[Value] = field(repr=False)
    workspace: list[Value] = field(repr=False)
    dtype: Any  # that its kernel is chosen by, see `kernel_dtype`
    arguments: list[Any] | None = field(default=None, repr=False)  # of a kernel (run/tables.py)


Workspace = Callable[[Step], Sequence[Spec]]


@dataclass(eq=False, repr=False)
class Plan:
    """The steps of a run and their memory. Print it to see the lifetimes."""

    steps: list[Step] = field(default_factory=list)
    values: dict[Node, list[Value]] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    feeds: list[Value] = field(default_factory=list)
    states: list[Value] = field(default_factory=list)
    constants: list[Value] = field(default_factory=list)
    fetches: list[Value | None] = field(default_factory=list)  # None: a group, whose value is None
    arena_nbytes: int = 0
    unshared_nbytes: int = 0  # what the arena's buffers would take if each value had its own memory
    live_nbytes: int = 0  # the largest sum of bytes alive at one step: no arena can be smaller
    recomputed: Any = None  # what runs twice: Recomputed of ../recompute.py, or None

    __str__ = told_by("dlsys.executor.debug.report", "plan_text")
    __repr__ = told_by("dlsys.executor.debug.report", "plan_line")
    _repr_html_ = drawn_by("plan_html")


class Lifetimes(Protocol):
    """Stricter lifetimes, for a device that runs steps in parallel (capture/hazards.py)."""

    def add(self, step: Step) -> None:
        """Takes note of what the next step reads and writes."""

    def in_use(self, buffer: Buffer, inputs: Sequence[Buffer]) -> bool:
        """True where a step that touched a buffer may still run when these inputs are there."""

    def extend(self, plan: Plan) -> None:
        """Extends the lives of buffers before they get their offsets."""


def make_plan(
    order: Sequence[Node],
    fetches: Sequence[Node],
    workspace: Workspace,
    reuse: bool = True,
    lifetimes: Lifetimes | None = None,
) -> Plan:
    """Plans the memory of a scheduled graph.

    `workspace` gives the scratch that a step wants, by its node, inputs and outputs. With
    `reuse=False` every buffer gets bytes of its own and nothing is done in place, which memory
    checkers and tests compare against.
    """
    plan = Plan()
    last_use = _last_uses(order, fetches)
    for node in order:
        if node.op.leaf:
            _place_leaf(plan, node)
        elif node.op.view:
            _place_view(plan, node, last_use)
        elif is_step(node):
            _place_step(plan, node, last_use, workspace, reuse, lifetimes)
        else:
            plan.values[node] = []
    _mark_fetches(plan, fetches)
    if lifetimes is not None:
        lifetimes.extend(plan)
    plan.unshared_nbytes = sum(b.unshared for b in plan.buffers if b.kind == "arena")
    inside = [buffer for buffer in plan.buffers if buffer.kind == "arena" and buffer.nbytes]
    spans = [(buffer.nbytes, buffer.first, buffer.last) for buffer in inside]
    offsets, plan.arena_nbytes = pack(spans, share=reuse)
    for buffer, offset in zip(inside, offsets):
        buffer.offset = offset
    plan.live_nbytes = largest_live_sum(spans)
    return plan


def _last_uses(order: Sequence[Node], fetches: Sequence[Node]) -> dict[Node, int]:
    """For each node the number of the last step that reads it, views followed to what they show."""
    steps: dict[Node, int] = {}
    count = 0
    for node in order:
        if is_step(node):
            steps[node] = count
            count += 1
    last: dict[Node, int] = {node: count for node in fetches}
    for node in reversed(order):
        own = steps.get(node, last.get(node, -1))
        for x in node.inputs:
            last[x] = max(last.get(x, -1), own)
    return last


def is_step(node: Node) -> bool:
    """True for a node that is computed: no leaf, view or group."""
    return not (node.op.leaf or node.op.view or node.op.outputs == 0)


def _place_leaf(plan: Plan, node: Node) -> None:
    kind, now = node.op.leaf, len(plan.steps)
    assert kind is not None
    value = Value(node, node.spec, Buffer(kind, node.spec.nbytes, now, now, node))
    plan.buffers.append(value.buffer)
    plan.values[node] = [value]
    {"feed": plan.feeds, "state": plan.states, "constant": plan.constants}[kind].append(value)


def _place_view(plan: Plan, node: Node, last_use: dict[Node, int]) -> None:
    source = plan.values[node.inputs[0]][node.attrs.get("index", 0)]
    source.buffer.last = max(source.buffer.last, last_use.get(node, -1))
    offset = source.offset + node.attrs.get("offset", 0)
    plan.values[node] = [Value(node, node.spec, source.buffer, offset)]


def _place_step(
    plan: Plan,
    node: Node,
    last_use: dict[Node, int],
    workspace: Workspace,
    reuse: bool,
    lifetimes: Lifetimes | None,
) -> None:
    op, now = node.op, len(plan.steps)
    inputs = [plan.values[x][0] for x in node.inputs]
    for value in inputs:
        value.buffer.last = max(value.buffer.last, now)
    specs = [node.spec] if op.outputs == 1 else list(node.spec)
    if op.writes:
        outputs = [Value(node, spec, inputs[k].buffer) for k, spec in zip(op.writes, specs)]
    else:
        outputs = []
        for spec in specs:
            taken = _dying_input(node, spec, inputs, outputs, now, lifetimes) if reuse else None
            outputs.append(Value(node, spec, taken or _new_buffer(plan, node, spec, now)))
            if taken:
                taken.unshared += aligned(taken.nbytes)
    for output in outputs:  # one of several is read through a view of its own
        last = last_use.get(node, now) if op.outputs == 1 else now
        output.buffer.last = max(output.buffer.last, last)
    made = [] if op.writes else outputs
    step = Step(node, inputs, made, [], kernel_dtype(node, inputs, made))
    for spec in workspace(step):
        step.workspace.append(Value(node, spec, _new_buffer(plan, node, spec, now)))
    plan.values[node] = outputs
    plan.steps.append(step)
    if lifetimes is not None:
        lifetimes.add(step)


def kernel_dtype(node: Node, inputs: Sequence[Value], outputs: Sequence[Value]) -> Any:
    """The dtype that a step's kernel is chosen by: that of the result where it computes integers,
    else the storage type of its floats.
    """
    made = [value.spec.dtype for value in outputs]
    if len(made) == 1 and is_integral(made[0]) and node.op.any_dtype is not True:
        return made[0]
    return storage_dtype([*(value.spec.dtype for value in inputs), *made])


def _new_buffer(plan: Plan, node: Node, spec: Spec, now: int) -> Buffer:
    buffer = Buffer("arena", spec.nbytes, now, now, node)
    buffer.unshared = aligned(buffer.nbytes)
    plan.buffers.append(buffer)
    return buffer


def _dying_input(
    node: Node,
    spec: Spec,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    now: int,
    lifetimes: Lifetimes | None,
) -> Buffer | None:
    """The buffer of an input that nobody needs any more and that an output of this spec may
    overwrite, unless one of the earlier outputs does.
    """
    of = range(len(inputs)) if node.op.inplace is True else node.op.inplace or ()
    others = [x for k, x in enumerate(inputs) if k not in of]  # which are read to the end
    for value, buffer in [(inputs[k], inputs[k].buffer) for k in of]:
        if buffer.kind != "arena" or buffer.last > now:
            continue
        if any(x.buffer is buffer for x in (*outputs, *others)):
            continue
        if lifetimes is not None and lifetimes.in_use(buffer, [x.buffer for x in inputs]):
            continue
        covers = all(v.spec.nbytes == buffer.nbytes for v in inputs if v.buffer is buffer)
        if value.spec[:2] == spec[:2] and covers:
            return buffer
    return None


def _mark_fetches(plan: Plan, fetches: Sequence[Node]) -> None:
    for node in fetches:
        values = plan.values[node]
        plan.fetches.append(values[0] if values else None)
        if values:
            values[0].buffer.kind = "fetch"
            values[0].buffer.last = len(plan.steps)
