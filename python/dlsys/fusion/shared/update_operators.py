"""Operators of updates that make their gradients, and what the fusions that make them share: which
node makes a gradient of an update for nobody else, and the nodes in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...graph.lines import attributed_to
from ...graph.node import Node, Op
from ...graph.spec import Spec
from ...ops.matmul import precision_number
from ...ops.optim.apply import RuleOp, options_of, several
from ...ops.optim.rules import Attrs, Rule
from ...runtime.interface import interface
from .body import Body, Fused, with_uint8
from .rewrite import Graph, value_of

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
    values are the parameters' new ones. Attributes: body, sums, those of the rule, and where it
    sums the gradients of all ranks (`over_ranks`) their group.
    """

    has_precision = True

    def __init__(
        self, update: RuleOp, products: int, uint8: tuple[str, ...] = (), over_ranks: bool = False
    ) -> None:
        super().__init__(f"matmul_{update.name}", update, 2 * products, int(bool(uint8)))
        self.products = products
        self.uint8 = uint8
        self.communicates = over_ranks

    def with_uint8(self, node: Node, positions: Sequence[int]) -> tuple[Op, dict[str, Any]] | None:
        found = [found for found in map(self.operand, positions) if found is not None]
        of = dict(found)
        if self.uint8 or not len(positions) == len(found) == len(of):
            return None
        if any(node.attrs["sums"][product] == word for product, word in found):
            return None
        words = tuple(of.get(product, "") for product in range(self.products))
        body = with_uint8(node.attrs["body"], [k - len(self.writes) for k in positions])
        op = fused_update(self.update, self.products, self.outputs, words, self.communicates)
        return op, node.attrs | {"body": body}

    def operand(self, position: int) -> tuple[int, str] | None:
        """The product that an input is an operand of, and a word of OPERANDS; None for another."""
        if position not in range(self._operands.start, self._operands.stop):
            return None
        right, product = divmod(position - self._operands.start, self.products)
        return product, OPERANDS[1 + right]

    def scalars(self, node: Node) -> tuple[Any]:
        sums, precision = node.attrs["sums"], precision_number(node)
        ranks = node.attrs["group"].handle if self.communicates else 0
        return (argument(self.update.rule, node.attrs, sums, self.uint8, precision, ranks),)

    def lists(self, node: Node) -> tuple[int, ...]:
        states, _, *options = self.update.lists(node)
        return states, self.products, self.products, *options, self._last


@lru_cache
def fused_update(
    update: RuleOp,
    products: int,
    parameters: int,
    uint8: tuple[str, ...] = (),
    over_ranks: bool = False,
) -> FusedUpdate:
    """The operator for so many products and parameters under the rule of `update`."""
    return FusedUpdate(several(update, parameters), products, uint8, over_ranks)


def argument(
    rule: Rule,
    attrs: Attrs,
    sums: Sequence[str],
    uint8: Sequence[str],
    precision: int,
    ranks: int = 0,
) -> Any:
    """The argument of a rule's kernel that is the same in every run, with the words of OPERANDS.
    ranks: the communicator of those that sum their gradients, or 0.
    """
    codes = {"sums": sums, "u8": uint8}
    by_gemm = {name: tuple(map(OPERANDS.index, words)) for name, words in codes.items()}
    return _Options(update=options_of(rule, attrs), precision=precision, ranks=ranks, **by_gemm)


def _unsteady(update: RuleOp) -> tuple[int, ...]:
    """Of the states that are written those that jump where a gradient passes zero, so that its
    rounding decides: a rule that divides by a gradient's size, or takes its sign, moves them by the
    full rate.
    """
    if update.rule.steady:
        return ()
    names = [name for name in ("", *update.rule.slots) for _ in range(update.outputs)]
    return tuple(k for k, name in enumerate(names) if name in ("", "velocity"))


# ---- what the patterns share ----


def source_of(graph: Graph, gradient: Node, makers: Sequence[Op | str]) -> tuple[Node, int] | None:
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


def changed_by(node: Node) -> bool:
    """True where an operand may be a state, which an update changes."""
    while node.op.view:
        node = node.inputs[0]
    return node.op.leaf == "state" or bool(node.op.writes)


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


def _values(node: Node, taken: Sequence[int], old: dict[int, Node]) -> dict[int, Node]:
    if len(taken) == 1:
        node.stand_for(old.get(taken[0], node))
        return {taken[0]: node}
    return {k: value_of(node, index, old.get(k)) for index, k in enumerate(taken)}


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
