"""Weight updates: the GEMMs that make gradients of weights, with the optimizer's rule as their
epilogue.

Pattern: an update, and the products Aᵀ B, perhaps with the sums of an operand over K, whose values
are gradients of that update and nothing else. A GPU makes all gradients of a few dense layers in
one launch and updates the parameters where their gradients are made: nothing is written and read
again, and small products run beside large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..graph.lines import attributed_to
from ..graph.node import Node, Op
from ..graph.spec import Spec
from ..ops.matmul import matmul_op, precision_number
from ..ops.optim.apply import RuleOp, options_of, several
from ..ops.optim.rules import Attrs, Rule
from ..passes.pipeline import Options, Pass
from ..runtime.interface import interface
from ..runtime.target import Target
from .body import Body, Fused, close, with_uint8
from .rewrite import Graph, exchange, value_of

MOST_PRODUCTS = interface.limits["weight_update_gemms"]  # that a launch has room for
OPERANDS = ("", *interface.operands)  # by the kernel's codes
_Options = interface.struct("WeightUpdateOptions")


class UpdateOfBody(Fused):
    """A rule applied to parameters whose gradients the body makes.

    Inputs: the states of all parameters as RuleOp has them, the operands of the body, the rate and
    options of the rule, and those further operands of the body that `last` counts. The values are
    the parameters' new ones. Attributes: body, and those of the rule.
    """

    tolerance = 1e-4

    def __init__(self, name: str, update: RuleOp, operands: int, last: int = 0) -> None:
        super().__init__(name, update.outputs)
        self.update = update
        self.writes = update.writes
        self.discrete_outputs = _unsteady(update)
        self._last = last
        self._operands = slice(len(self.writes), len(self.writes) + operands)
        given = self._operands.stop + update.rule.takes_rate
        self.any_dtype = (given, given + 1)  # step and count

    def infer(self, node: Node, *specs: Spec) -> Any:
        made = super().infer(node, *self._read(specs))
        gradients = (made,) if isinstance(made, Spec) else made
        return self.update.infer(node, *self._as_update_has(specs, gradients))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        gradients = inputs[: self.outputs]  # are of the parameters' specs
        given = self._as_update_has(inputs, gradients)
        return [*gradients, *self.update.workspace(node, given, outputs)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        inputs, scratch = arrays[: len(node.inputs)], arrays[len(node.inputs) :]
        gradients, rest = scratch[: self.outputs], scratch[self.outputs :]
        super().numpy(node, *self._read(inputs), *gradients)
        self.update.numpy(node, *self._as_update_has(inputs, gradients), *rest)

    def _read(self, inputs: Sequence[Any]) -> list[Any]:
        """The body's inputs."""
        return [*inputs[self._operands], *inputs[len(inputs) - self._last :]]

    def _as_update_has(self, inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """The update's inputs, with gradients in place of their operands."""
        rest = inputs[self._operands.stop : len(inputs) - self._last]
        return [*inputs[: self._operands.start], *gradients, *rest]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        body: Body = node.attrs["body"]
        steps = [step for step in body.steps if not step.op.view]
        made = sum(s.op.cost(s, [x.spec for x in s.inputs], s.spec) for s in steps)
        return made + self.update.cost(node, inputs, output)


class FusedUpdate(UpdateOfBody):
    """A rule applied to parameters whose gradients are Aᵀ B, one of `products`, or the sums over K
    of an A or a B.

    Inputs: the states of all parameters as RuleOp has them, every A, every B, the rate and options
    of the rule, and where an operand is uint8 its scale. The parameters are those of the products,
    then those of the sums, which `sums` has for each product: a word of OPERANDS; `uint8` has the
    same for operands of uint8. The body makes the gradients of the operands and the scale. The
    values are the parameters' new ones. Attributes: body, sums, and those of the rule.
    """

    has_precision = True

    def __init__(self, update: RuleOp, products: int, uint8: tuple[str, ...] = ()) -> None:
        super().__init__(f"matmul_{update.name}", update, 2 * products, int(bool(uint8)))
        self.products = products
        self.uint8 = uint8

    def with_uint8(self, node: Node, positions: Sequence[int]) -> tuple[Op, dict[str, Any]] | None:
        found = [found for found in map(self.operand, positions) if found is not None]
        of = dict(found)
        if self.uint8 or not len(positions) == len(found) == len(of):
            return None
        if any(node.attrs["sums"][product] == word for product, word in found):
            return None
        words = tuple(of.get(product, "") for product in range(self.products))
        body = with_uint8(node.attrs["body"], [k - len(self.writes) for k in positions])
        op = fused_update(self.update, self.products, self.outputs, words)
        return op, node.attrs | {"body": body}

    def operand(self, position: int) -> tuple[int, str] | None:
        """The product that an input is an operand of, and a word of OPERANDS; None for another."""
        if position not in range(self._operands.start, self._operands.stop):
            return None
        right, product = divmod(position - self._operands.start, self.products)
        return product, OPERANDS[1 + right]

    def scalars(self, node: Node) -> tuple[Any]:
        sums = node.attrs["sums"]
        return (argument(self.update.rule, node.attrs, sums, self.uint8, precision_number(node)),)

    def lists(self, node: Node) -> tuple[int, ...]:
        states, _, *options = self.update.lists(node)
        return states, self.products, self.products, *options, self._last


@lru_cache
def fused_update(
    update: RuleOp, products: int, parameters: int, uint8: tuple[str, ...] = ()
) -> FusedUpdate:
    """The operator for so many products and parameters under the rule of `update`."""
    return FusedUpdate(several(update, parameters), products, uint8)


def argument(
    rule: Rule, attrs: Attrs, sums: Sequence[str], uint8: Sequence[str], precision: int
) -> Any:
    """The argument of a rule's kernel that is the same in every run, with the words of OPERANDS."""
    codes = {"sums": sums, "u8": uint8}
    by_gemm = {name: tuple(map(OPERANDS.index, words)) for name, words in codes.items()}
    return _Options(update=options_of(rule, attrs), precision=precision, **by_gemm)


def _unsteady(update: RuleOp) -> tuple[int, ...]:
    """Of the states that are written those that jump where a gradient passes zero, so that its
    rounding decides: a rule that divides by a gradient's size, or takes its sign, moves them by the
    full rate.
    """
    if update.rule.steady:
        return ()
    names = [name for name in ("", *update.rule.slots) for _ in range(update.outputs)]
    return tuple(k for k, name in enumerate(names) if name in ("", "velocity"))


# ---- the pattern ----

# Operations of a launch's products. Far beyond these the launches that are saved are a small part
# of the time, and a library's tiles, or those that tuning finds for one product, save more.
MOST_OPERATIONS = 1_500_000_000


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
            members = list(_members(graph, node, node.op))
            if members:
                replaced.update(_replaced(graph, node, node.op, members))
    return exchange(fetches, replaced)


def _is_served(update: Node, target: Target) -> bool:
    """True where the kernel is for parameters of this storage type."""
    return target.has(f"matmul_{update.op.name}", update.inputs[0].spec.dtype)


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
        complete = product.op is matmul_op or len(graph.users[product]) == len(gradients)
        if complete and 0 in gradients and _fits(product):
            member = _Member(product, gradients[0], gradients.get(1))
            if member.operations <= MOST_OPERATIONS:
                yield member


def _source(graph: Graph, gradient: Node) -> tuple[Node, int] | None:
    """The product that makes a gradient and nothing for anybody else, and which of its values the
    gradient shows.
    """
    return source_of(graph, gradient, (matmul_op, "matmul_sums"))


def source_of(
    graph: Graph, gradient: Node, makers: Sequence[Op | str]
) -> tuple[Node, int] | None:
    """The node of one of these operators, or kernels of several values, that makes a gradient and
    nothing for anybody else, and which of its values the gradient shows.
    """
    node, index = gradient, 0
    while graph.only_user(node) is not None:
        if node.op in makers:
            return node, 0
        if not node.op.view or "offset" in node.attrs:
            return None
        if node.op.projection:
            made, index = node.inputs[0], node.attrs["index"]
            return (made, index) if made.op in makers or made.op.kernel in makers else None
        node = node.inputs[0]
    return None


def _fits(product: Node) -> bool:
    """True where the kernel makes it: Aᵀ B of float32 by no rung of its own, with no operand that
    may be a state, which the kernel would change while it reads it.
    """
    float32 = all(x.spec.dtype == np.float32 for x in product.inputs)
    transposed = product.attrs["trans_A"] and not product.attrs["trans_B"]
    free = "algo" not in product.attrs
    return free and float32 and transposed and not any(map(changed_by, product.inputs))


def changed_by(node: Node) -> bool:
    """True where an operand may be a state, which an update changes."""
    while node.op.view:
        node = node.inputs[0]
    return node.op.leaf == "state" or bool(node.op.writes)


def _replaced(
    graph: Graph, update: Node, op: RuleOp, members: Sequence[_Member]
) -> dict[Node, Node]:
    """The values of an update by those of the nodes that take its place."""
    made: list[tuple[Node, list[int]]] = []
    with attributed_to(update):
        for group in _groups(members):
            taken = [member.gradient for member in group]
            taken += [member.of_sums for member in group if member.of_sums is not None]
            made.append((_fused(update, op, group, taken), taken))
    return replaced_update(graph, update, op, made)


def replaced_update(
    graph: Graph, update: Node, op: RuleOp, made: Sequence[tuple[Node, Sequence[int]]]
) -> dict[Node, Node]:
    """The values of an update by those of nodes that each update some of its parameters, which
    come with them, and of one for the parameters that are left.
    """
    found: dict[int, Node] = {}  # the new value of each parameter
    values = {x.attrs["index"]: x for x in graph.users[update]} if op.outputs > 1 else {0: update}
    with attributed_to(update):
        for node, taken in made:
            found.update(_values(node, taken, values))
        left = [k for k in range(op.outputs) if k not in found]
        if left:
            found.update(_values(_smaller(update, op, left), left, values))
    return {value: found[k] for k, value in values.items()}


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
    inputs = [*states_of(update, op, taken), *left, *right, *update.inputs[first + op.outputs :]]
    attrs = {**update.attrs, "body": body, "sums": tuple(member.sums for member in group)}
    node = Node(made, inputs, attrs, f"{made.name} of {len(taken)}")
    node.stand_for(update)
    return node


def _smaller(update: Node, op: RuleOp, left: Sequence[int]) -> Node:
    """The update of some of its parameters only."""
    first = len(op.writes)
    gradients = [update.inputs[first + k] for k in left]
    inputs = [*states_of(update, op, left), *gradients, *update.inputs[first + op.outputs :]]
    node = Node(several(op, len(left)), inputs, update.attrs, f"{op.name} of {len(left)}")
    node.stand_for(update)
    return node


def states_of(update: Node, op: RuleOp, taken: Sequence[int]) -> list[Node]:
    """The states of some parameters of an update, as RuleOp has them."""
    return [update.inputs[j + k] for j in range(0, len(op.writes), op.outputs) for k in taken]


FUSION = Pass("weight_update", fuse, position=80, needs=("matmul_sgd_update",))
