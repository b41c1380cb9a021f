"""Updates that make their gradients themselves, by products whose epilogue is the optimizer's rule;
made by `fusion/weight_update.py` for GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..graph.node import Node
from ..graph.spec import Spec
from ..ops.matmul import precision_number
from ..ops.optim.apply import RuleOp, several
from .body import Body, Fused

MOST_PRODUCTS = 8  # that a launch has room for
OF = ("", "A", "B")  # which factor, by the kernel's numbers


class FusedUpdate(Fused):
    """A rule applied to parameters whose gradients are Aᵀ B, one of `products`, or the sums over
    the depth of an A or a B.

    Inputs: the states of all parameters as RuleOp has them, every A, every B, the rate and options
    of the rule, and where a factor is bytes the scale of those. The parameters are those of the
    products, then those of the sums, which `sums` has for each product: a word of OF; `of_bytes`
    has the same for factors of bytes. The body makes the gradients of the factors and the scale.
    The values are the parameters' new ones. Attributes: body, sums, and those of the rule.
    """

    tolerance = 1e-4
    has_precision = True

    def __init__(self, update: RuleOp, products: int, of_bytes: tuple[str, ...] = ()) -> None:
        super().__init__(f"matmul_{update.name}", update.outputs)
        self.update = update
        self.writes = update.writes
        self.discrete_outputs = _unsteady(update)
        self.products = products
        self.of_bytes = of_bytes
        self._scales = int(bool(of_bytes))  # inputs at the end
        self._factors = slice(len(self.writes), len(self.writes) + 2 * products)
        given = len(self.writes) + 2 * products + update.rule.takes_rate
        self.any_dtype = (given, given + 1)  # step and count

    def factor(self, number: int) -> tuple[int, str] | None:
        """Of which product an input is which factor, a word of OF; None where it is none."""
        if number not in range(self._factors.start, self._factors.stop):
            return None
        right, product = divmod(number - self._factors.start, self.products)
        return product, OF[1 + right]

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
        return [*inputs[self._factors], *inputs[len(inputs) - self._scales :]]

    def _as_update_has(self, inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """The update's inputs, with gradients in place of their factors."""
        rest = inputs[self._factors.stop : len(inputs) - self._scales]
        return [*inputs[: self._factors.start], *gradients, *rest]

    def scalars(self, node: Node) -> tuple[float, ...]:
        numbers = _numbers(node.attrs["sums"]), _numbers(self.of_bytes)
        return *numbers, precision_number(node), *self.update.scalars(node)

    def lists(self, node: Node) -> tuple[int, ...]:
        states, _, *options = self.update.lists(node)
        return states, self.products, self.products, *options, self._scales

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        body: Body = node.attrs["body"]
        steps = [step for step in body.steps if not step.op.view]
        made = sum(s.op.cost(s, [x.spec for x in s.inputs], s.spec) for s in steps)
        return made + self.update.cost(node, inputs, output)


@lru_cache
def fused_update(
    update: RuleOp, products: int, parameters: int, of_bytes: tuple[str, ...] = ()
) -> FusedUpdate:
    """The operator for so many products and parameters under the rule of `update`."""
    return FusedUpdate(several(update, parameters), products, of_bytes)


def _numbers(words: Sequence[str]) -> int:
    """Words of OF as the kernel reads them, two bits each."""
    return sum(OF.index(word) << 2 * k for k, word in enumerate(words))


def _unsteady(update: RuleOp) -> tuple[int, ...]:
    """Of the states that are written those that jump where a gradient passes zero, so that its
    rounding decides: a rule that divides by a gradient's size, or takes its sign, moves them by the
    whole rate.
    """
    if update.rule.steady:
        return ()
    names = [name for name in ("", *update.rule.slots) for _ in range(update.outputs)]
    return tuple(k for k, name in enumerate(names) if name in ("", "velocity"))
