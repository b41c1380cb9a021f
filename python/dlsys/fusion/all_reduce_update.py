"""Updates that sum over ranks: an all_reduce of gradients with the optimizer's rule as epilogue.

Pattern: updates whose gradients are sums over the ranks of one host, which nothing but updates of
this kind reads. Each GPU reads the gradients of the others where they lie, while its update waits
for its own memory anyway: no sum is written, and no collective runs. Updates that differ in their
Parameters, gradients' dtypes and buckets only become one, so that ranks wait for each other once
before it and once behind it. The planner puts the gradients into memory that ranks share
(executor/capture/joined.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..dtypes import FLOAT32, bfloat16
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..ops.optim.apply import RuleOp, options_of, several
from ..passes.pipeline import Options, Pass
from ..runtime.interface import interface
from .shared.body import close
from .shared.rewrite import Graph, exchange, value_of
from .shared.update_operators import UpdateOfBody

_Options = interface.struct("AllReduceUpdateOptions")

# Ranks from which on each sums a share of the gradients for all: (n - 1) / n of their bytes come
# over NVLink twice, instead of n - 1 times.
SHARES_FROM = 3


class AllReduceUpdate(UpdateOfBody):
    """A rule applied to parameters by the sums over ranks of their gradients.

    Inputs: those of RuleOp. The body is the all_reduce of the gradients. The values are the
    parameters' new ones. Attributes: body, group, and those of the rule.
    """

    communicates = True

    def __init__(self, update: RuleOp) -> None:
        super().__init__(f"all_reduce_{update.name}", update, update.outputs)
        self.gradient_inputs = update.gradient_inputs

    def scalars(self, node: Node) -> tuple[Any]:
        group = node.attrs["group"]
        shares = group.size == 1 or group.size >= SHARES_FROM
        update = options_of(self.update.rule, node.attrs)
        return (_Options(update=update, ranks=group.handle, shares=shares),)

    def lists(self, node: Node) -> tuple[int, ...]:
        return self.update.lists(node)


@lru_cache
def all_reduce_update(update: RuleOp, parameters: int) -> AllReduceUpdate:
    """The operator for so many parameters under the rule of `update`."""
    return AllReduceUpdate(several(update, parameters))


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose updates sum over ranks. The graph must be the executor's own,
    with its updates grouped: its nodes change.

    A sum whose values are read by several updates is left to all of them or to none.
    """
    graph = Graph(fetches)
    found: dict[Node, list[Node]] = {}
    for node in graph.order:
        if isinstance(node.op, RuleOp) and options.target.has(f"all_reduce_{node.op.name}"):
            own = _own_gradients(graph, node)
            if own is not None:
                found[node] = own
    while left := [update for update in found if not _sums_are_of(graph, update, found)]:
        for update in left:
            del found[update]
    replaced: dict[Node, Node] = {}
    for updates in _alike(found):
        replaced.update(_fused(graph, {update: found[update] for update in updates}))
    return exchange(fetches, replaced)


def _own_gradients(graph: Graph, update: Node) -> list[Node] | None:
    """This rank's gradients of an update that reads nothing but their sums over the ranks of one
    host, where the kernel can make these.
    """
    own = []
    for k in update.op.gradient_inputs:
        total, index = _sum_of(update.inputs[k])
        if total.op.kernel != "all_reduce" or len(total.inputs) > total.op.outputs:
            return None
        within = total.attrs["group"].sums_in_kernels and total.attrs["behind"]
        if not within or total.attrs["op"] != "sum":
            return None
        own.append(total.inputs[index])
    stored = update.inputs[0].spec.dtype == FLOAT32
    stored = stored and {x.spec.dtype for x in own} in ({FLOAT32}, {bfloat16})
    return own if stored and all(_memory(graph, x) is not None for x in own) else None


def _sum_of(gradient: Node) -> tuple[Node, int]:
    """The node that has a value, and which of its values that is."""
    return (
        (gradient.inputs[0], gradient.attrs["index"]) if gradient.op.projection else (gradient, 0)
    )


def _memory(graph: Graph, gradient: Node) -> Node | None:
    """What makes a gradient in memory of its own, so that this can be where other ranks read it.
    What else reads it runs before any update that communicates (executor/plan/schedule.py).
    """
    while not graph.is_fetched(gradient) and "offset" not in gradient.attrs:
        if gradient.op.projection or not gradient.op.view:
            return None if gradient.op.leaf or gradient.op.writes else gradient
        gradient = gradient.inputs[0]
    return None


def _sums_are_of(graph: Graph, update: Node, found: Mapping[Node, Sequence[Node]]) -> bool:
    """True where nothing but these updates read the sums that one of them reads, and no other of
    them the memory of its gradients.
    """
    others = (x for other in found if other is not update for x in found[other])
    if not {_memory(graph, x) for x in found[update]}.isdisjoint(_memory(graph, x) for x in others):
        return False
    for k in update.op.gradient_inputs:
        total, _ = _sum_of(update.inputs[k])
        for value in graph.users[total] if total.op.outputs > 1 else [total]:
            if graph.is_fetched(value) or not found.keys() >= {*graph.users[value]}:
                return False
    return True


def _alike(updates: Iterable[Node]) -> list[list[Node]]:
    """The updates in groups that can be one: of one rule, one set of options and equal scalars.
    None of them needs what another makes, since no gradient does (dist/data_parallel.py). Those
    with gradients of 16 bits come first, for the gradients of a dtype are to lie side by side.
    """
    groups: dict[Hashable, list[Node]] = {}
    for update in updates:
        attrs = tuple(sorted(update.attrs.items()))
        scalars = map(_scalar, update.inputs[len(update.op.writes) + update.op.outputs :])
        groups.setdefault((update.op.name, attrs, *scalars), []).append(update)
    return [sorted(group, key=_itemsize) for group in groups.values()]


def _scalar(x: Node) -> Hashable:
    """What stands for an update's rate, step or scale: constants count by their values, since each
    bucket has its own.
    """
    return x.attrs["value"].tobytes() if x.op.leaf == "constant" else x


def _itemsize(update: Node) -> int:
    """The bytes of an element of its gradients."""
    return update.inputs[update.op.gradient_inputs[0]].spec.dtype.itemsize


def _fused(graph: Graph, found: Mapping[Node, Sequence[Node]]) -> dict[Node, Node]:
    """The values of updates by those of one update of all their Parameters."""
    first = next(iter(found))
    op, own = first.op, [gradient for each in found.values() for gradient in each]
    assert isinstance(op, RuleOp)
    count, states = op.outputs, len(op.writes)
    with attributed_to(first):
        made = all_reduce_update(op, len(own))
        inputs = [
            update.inputs[which * update.op.outputs + k]
            for which in range(states // count)
            for update in found
            for k in range(update.op.outputs)
        ]
        inputs += [*own, *first.inputs[states + count :]]
        total, _ = _sum_of(first.inputs[states])
        sums = [value for update, each in found.items() for value in _sums(update, each)]
        attrs = {**first.attrs, "body": close(own, sums), "group": total.attrs["group"]}
        node = Node(made, inputs, attrs, f"{made.name} of {len(own)}")
    node.stand_for(first)
    values = [value for update in found for value in _values(graph, update)]
    if len(own) == 1:
        return {value: node for value in values if value is not None}
    return {value: value_of(node, k, value) for k, value in enumerate(values) if value is not None}


def _sums(update: Node, own: Sequence[Node]) -> list[Node]:
    """The sums over ranks of its gradients, of which a bucket may have more."""
    total, _ = _sum_of(update.inputs[update.op.gradient_inputs[0]])
    attrs = {key: total.attrs[key] for key in ("group", "op")}
    summed = total.op.of(len(own))(*own, **attrs)  # type: ignore[attr-defined]
    return [summed] if len(own) == 1 else [summed[k] for k in range(len(own))]


def _values(graph: Graph, update: Node) -> list[Node | None]:
    """The values of an update, None for those that nobody reads."""
    if update.op.outputs == 1:
        return [update]
    found = {x.attrs["index"]: x for x in graph.users[update]}
    return [found.get(k) for k in range(update.op.outputs)]


FUSION = Pass("all_reduce_update", fuse, position=83, needs=("all_reduce_sgd_update",))
