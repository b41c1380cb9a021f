"""fuse_update: products that make gradients of weights, and the update that uses these up, as one
node.

A GPU makes all gradients of a few dense layers in one launch and updates the parameters where their
gradients are made: nothing is written and read again, and small products run beside large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..graph.lines import attributed_to
from ..graph.node import Node
from ..ops.matmul import matmul_op
from ..ops.optim.apply import RuleOp, several
from ..passes.rewrite import Graph, exchange, value_of
from .body import close, matmul_sums_op
from .weight_update_op import MOST_PRODUCTS, fused_update

# Operations of a launch's products. Far beyond these the launches that are saved are a small part
# of the time, and a library's tiles, or those that tuning finds for one product, save more.
MOST_OPERATIONS = 1_500_000_000


def fuse_updates(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph whose updates make their gradients, for a GPU. The graph must be the
    executor's own, with its updates grouped: its nodes change.

    A product joins if its values are gradients of one update and nothing else. No cycle arises: the
    new nodes depend on what the update and its products depended on, and only what depended on the
    update depends on them.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if isinstance(node.op, RuleOp):
            members = list(_members(graph, node, node.op))
            if members:
                replaced.update(_replaced(graph, node, node.op, members))
    return exchange(fetches, replaced)


class _Member(NamedTuple):
    """A product, and which gradients of an update its values are."""

    product: Node
    gradient: int
    of_sums: int | None = None

    @property
    def operations(self) -> int:
        return 2 * self.product.inputs[0].spec.size * self.product.inputs[1].spec.shape[1]

    @property
    def sums(self) -> str:
        return "" if self.of_sums is None else "A" if self.product.attrs["of_A"] else "B"


def _members(graph: Graph, update: Node, op: RuleOp) -> Iterator[_Member]:
    """The products that can join an update, by the first gradient that they make."""
    found: dict[Node, dict[int, int]] = {}  # of each product the gradient that each value is
    for k in range(op.outputs):
        source = _source(graph, update.inputs[len(op.writes) + k])
        if source is not None:
            product, index = source
            found.setdefault(product, {})[index] = k
    for product, gradients in found.items():
        whole = product.op is matmul_op or len(graph.users[product]) == len(gradients)
        if whole and 0 in gradients and _fits(product):
            member = _Member(product, gradients[0], gradients.get(1))
            if member.operations <= MOST_OPERATIONS:
                yield member


def _source(graph: Graph, gradient: Node) -> tuple[Node, int] | None:
    """The product that makes a gradient and nothing for anybody else, and which of its values the
    gradient shows.
    """
    node, index = gradient, 0
    while graph.only_user(node) is not None:
        if node.op is matmul_op:
            return node, 0
        if not node.op.view or "offset" in node.attrs:
            return None
        if node.op.projection:
            made, index = node.inputs[0], node.attrs["index"]
            return (made, index) if made.op is matmul_sums_op else None
        node = node.inputs[0]
    return None


def _fits(product: Node) -> bool:
    """Whether the kernel makes it: Aᵀ B of float32, with no factor that may be a state, which the
    kernel would change while it reads it.
    """
    float32 = all(x.spec.dtype == np.float32 for x in product.inputs)
    transposed = product.attrs["trans_A"] and not product.attrs["trans_B"]
    return float32 and transposed and not any(map(_is_state, product.inputs))


def _is_state(node: Node) -> bool:
    while node.op.view:
        node = node.inputs[0]
    return node.op.leaf == "state" or bool(node.op.writes)


def _replaced(
    graph: Graph, update: Node, op: RuleOp, members: Sequence[_Member]
) -> dict[Node, Node]:
    """The values of an update by those of the nodes that take its place."""
    made: dict[int, Node] = {}  # the new value of each parameter
    values = {x.attrs["index"]: x for x in graph.users[update]} if op.outputs > 1 else {0: update}
    with attributed_to(update):
        for group in _groups(members):
            taken = [member.gradient for member in group]
            taken += [member.of_sums for member in group if member.of_sums is not None]
            made.update(_values(_fused(update, op, group, taken), taken, values))
        left = [k for k in range(op.outputs) if k not in made]
        if left:
            made.update(_values(_smaller(update, op, left), left, values))
    return {value: made[k] for k, value in values.items()}


def _groups(members: Sequence[_Member]) -> list[list[_Member]]:
    groups: list[list[_Member]] = []
    room = 0
    for member in members:
        if not groups or len(groups[-1]) == MOST_PRODUCTS or member.operations > room:
            groups.append([])
            room = MOST_OPERATIONS
        groups[-1].append(member)
        room -= member.operations
    return groups


def _values(node: Node, taken: Sequence[int], old: dict[int, Node]) -> dict[int, Node]:
    if len(taken) == 1:
        node.stand_for(old.get(taken[0], node))
        return {taken[0]: node}
    return {k: value_of(node, index, old.get(k)) for index, k in enumerate(taken)}


def _fused(update: Node, op: RuleOp, group: Sequence[_Member], taken: Sequence[int]) -> Node:
    left = [member.product.inputs[0] for member in group]
    right = [member.product.inputs[1] for member in group]
    first = len(op.writes)
    body = close([*left, *right], [update.inputs[first + k] for k in taken])
    made = fused_update(op, len(group), len(taken))
    inputs = [*_states(update, op, taken), *left, *right, *update.inputs[first + op.outputs :]]
    attrs = {**update.attrs, "body": body, "sums": tuple(member.sums for member in group)}
    node = Node(made, inputs, attrs, f"{made.name} of {len(taken)}")
    node.stand_for(update)
    return node


def _smaller(update: Node, op: RuleOp, left: Sequence[int]) -> Node:
    """The update of some of its parameters only."""
    first = len(op.writes)
    gradients = [update.inputs[first + k] for k in left]
    inputs = [*_states(update, op, left), *gradients, *update.inputs[first + op.outputs :]]
    node = Node(several(op, len(left)), inputs, update.attrs, f"{op.name} of {len(left)}")
    node.stand_for(update)
    return node


def _states(update: Node, op: RuleOp, taken: Sequence[int]) -> list[Node]:
    return [update.inputs[j + k] for j in range(0, len(op.writes), op.outputs) for k in taken]
