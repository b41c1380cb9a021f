"""Weight updates: the GEMMs that make gradients of weights, with the optimizer's rule as their
epilogue.

Pattern: an update, and the products Aᵀ B, perhaps with the sums of an operand over K, whose values
are gradients of that update and nothing else. A GPU makes all gradients of a few dense layers in
one launch and updates the parameters where their gradients are made: nothing is written and read
again, and small products run beside large ones.

Where all gradients of an update are sums over the ranks of one host, and few bytes, the same launch
makes these too: a tile goes to the other ranks from where it is made, and no collective follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..errors import KernelError
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..ops.matmul import matmul_op
from ..ops.optim.apply import RuleOp
from ..passes.pipeline import Options, Pass
from ..runtime.interface import interface
from ..runtime.target import Target
from .shared.body import close
from .shared.rewrite import Graph, exchange
from .shared.update_operators import (
    FusedUpdate,
    changed_by,
    fused_update,
    replaced_update,
    source_of,
    states_of,
)

MOST_PRODUCTS = interface.limits["weight_update_gemms"]  # that a launch has room for


# ---- the pattern ----

# Operations of a launch's products. Far beyond these the launches that are saved are a small part
# of the time, and a library's tiles, or those that tuning finds for one product, save more.
MOST_OPERATIONS = 1_500_000_000

# Bytes that a rank has for the others in such a launch, where each takes twice its room: a sum of
# 2 MiB between two H200 takes 13 µs so, and 27 by a collective; more was not measured.
MOST_SENT = 2 << 20


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose updates make their gradients. The graph must be the executor's
    own, with its updates grouped: its nodes change.

    A product joins if its values are gradients of one update and nothing else. No cycle arises: the
    new nodes depend on what the update and its products depended on, and only what depended on the
    update depends on them.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if isinstance(node.op, RuleOp) and _is_served(node, options.target):
            gradients = node.inputs[len(node.op.writes) :][: node.op.outputs]
            total = _sum_over_ranks(graph, node, gradients)
            if total is not None:
                own = [total.inputs[x.attrs["index"] if x.op.projection else 0] for x in gradients]
                members = list(_members(graph, own))
                taken = sum(1 + (member.of_sums is not None) for member in members)
                if taken < len(own) or len(_groups(members)) > 1:
                    continue
            else:
                members = list(_members(graph, gradients))
            made = _fused_groups(node, node.op, members, total)
            if made and (total is None or all(_runs_together(x, options.target) for x, _ in made)):
                replaced.update(replaced_update(graph, node, node.op, made))
    return exchange(fetches, replaced)


def _is_served(update: Node, target: Target) -> bool:
    """True where the kernel is for parameters of this storage type."""
    return target.has(f"matmul_{update.op.name}", update.inputs[0].spec.dtype)


def _sum_over_ranks(graph: Graph, update: Node, gradients: Sequence[Node]) -> Node | None:
    """The sum over ranks whose values all gradients of an update are, and nothing else is, where
    the kernel can make it. It must be all that ranks exchange in the graph: a kernel that waits for
    other ranks must not run beside another one that does.
    """
    sums = {x.inputs[0] if x.op.projection else x for x in gradients}
    total = sums.pop()
    if sums or total.op.kernel != "all_reduce" or total.attrs["op"] != "sum":
        return None
    group, arrays = total.attrs["group"], total.op.outputs
    nbytes = sum(x.spec.nbytes for x in total.inputs[:arrays])
    few = (group.size - 1) * nbytes <= MOST_SENT
    alone = sum(node.op.communicates for node in graph.order) == 1
    plain = len(total.inputs) == arrays == len(gradients) == len(graph.users[total])
    read = all(graph.only_user(x) is update for x in gradients)
    return total if group.sums_in_kernels and few and alone and plain and read else None


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


def _members(graph: Graph, gradients: Sequence[Node]) -> Iterator[_Member]:
    """The products that can join the update of these gradients, by the first that they make."""
    found: dict[Node, dict[int, int]] = {}  # of each product the gradient that each value is
    for k, gradient in enumerate(gradients):
        source = _source(graph, gradient)
        if source is not None:
            product, index = source
            found.setdefault(product, {})[index] = k
    for product, made in found.items():
        complete = product.op is matmul_op or len(graph.users[product]) == len(made)
        if complete and 0 in made and _fits(product):
            member = _Member(product, made[0], made.get(1))
            if member.operations <= MOST_OPERATIONS:
                yield member


def _source(graph: Graph, gradient: Node) -> tuple[Node, int] | None:
    """The product that makes a gradient and nothing for anybody else, and which of its values the
    gradient shows.
    """
    return source_of(graph, gradient, (matmul_op, "matmul_sums"))


def _fits(product: Node) -> bool:
    """True where the kernel makes it: Aᵀ B of float32 by no rung of its own, with no operand that
    may be a state, which the kernel would change while it reads it.
    """
    float32 = all(x.spec.dtype == np.float32 for x in product.inputs)
    transposed = product.attrs["trans_A"] and not product.attrs["trans_B"]
    free = "algo" not in product.attrs
    return free and float32 and transposed and not any(map(changed_by, product.inputs))


def _fused_groups(
    update: Node, op: RuleOp, members: Sequence[_Member], total: Node | None
) -> list[tuple[Node, list[int]]]:
    """The nodes that take the place of an update, and which parameters are whose. total: the sum
    over ranks that they make, too.
    """
    made: list[tuple[Node, list[int]]] = []
    with attributed_to(update):
        for group in _groups(members):
            taken = [member.gradient for member in group]
            taken += [member.of_sums for member in group if member.of_sums is not None]
            made.append((_fused(update, op, group, taken, total), taken))
    return made


def _runs_together(update: Node, target: Target) -> bool:
    """True where all blocks of a launch that sums over ranks can run at once, as they must."""
    assert isinstance(update.op, FusedUpdate) and update.op.kernel is not None
    specs = iter([x.spec for x in update.inputs])
    lists = [list(islice(specs, count)) for count in update.op.lists(update)]
    try:
        target.workspace(update.op.kernel, *lists, *update.op.scalars(update))
    except KernelError:
        return False
    return True


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


def _fused(
    update: Node, op: RuleOp, group: Sequence[_Member], taken: Sequence[int], total: Node | None
) -> Node:
    left = [member.product.inputs[0] for member in group]
    right = [member.product.inputs[1] for member in group]
    first = len(op.writes)
    body = close([*left, *right], [update.inputs[first + k] for k in taken])
    made = fused_update(op, len(group), len(taken), over_ranks=total is not None)
    inputs = [*states_of(update, op, taken), *left, *right, *update.inputs[first + op.outputs :]]
    attrs = {**update.attrs, "body": body, "sums": tuple(member.sums for member in group)}
    if total is not None:
        attrs["group"] = total.attrs["group"]
    node = Node(made, inputs, attrs, f"{made.name} of {len(taken)}")
    node.stand_for(update)
    return node


FUSION = Pass("weight_update", fuse, position=80, needs=("matmul_sgd_update",))
