"""Comparisons, which give bool, the operators on truth values, and what chooses by them: where,
minimum, maximum.

Comparisons with NaN are False, except `not_equal`, which is True. Truth values have no gradient.
Natively a bool is a byte of 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import GraphError
from ..graph.node import Node, Op, Spec
from ..graph.shapes import broadcast, floating, promote
from .elementwise import Elementwise, as_node, cast_op, choose, holding, is_number, number_of
from .source import constant_op

BOOL = np.dtype(np.bool_)


class NumberLikeOp(Op):
    """One number in the dtype that it takes beside x: a Python number adapts to its partner."""

    name = "number_like"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype, value = specs[0].dtype, node.attrs["value"]
        wanted = holding(dtype, value) if isinstance(value, int) else floating(dtype)
        return Spec((), wanted, declared=False)

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return constant_op(np.array(node.attrs["value"], node.spec.dtype))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


class Compare(Elementwise):
    """A comparison of two inputs of any dtype, broadcast against each other, as bool."""

    any_dtype = True

    def __init__(self, name: str, numpy: Callable, swapped: Compare | None = None) -> None:
        super().__init__(name, numpy, _no_gradients)
        self._swapped = swapped  # the comparison that gives the same with its inputs exchanged

    def __call__(self, a: Any, b: Any, name: str | None = None) -> Node:  # type: ignore[override]
        return Node(self, as_nodes(self.name, a, b), {}, name)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        promote(node, *specs)  # refuses float32 with float64
        return Spec(broadcast(node, *specs), BOOL, False)

    def simplify(self, node: Node) -> Node | None:
        if self._swapped is not None:
            return self._swapped(node.inputs[1], node.inputs[0])
        return _with_inputs(node, promote(node, *[x.spec for x in node.inputs]))


class Logical(Elementwise):
    """An operator on truth values; numbers count as True unless they are 0."""

    any_dtype = True

    def __init__(self, name: str, numpy: Callable) -> None:
        super().__init__(name, numpy, _no_gradients)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return Spec(broadcast(node, *specs), BOOL, False)

    def simplify(self, node: Node) -> Node | None:
        return _with_inputs(node, BOOL)


class WhereOp(Elementwise):
    """a where the condition is True (not 0), else b, with all three broadcast against each other.

    a and b have one dtype or promote to one; the condition may have any. The gradient goes to the
    one that was chosen, and the other gets exact zeros, whatever it holds.
    """

    any_dtype = True

    def __init__(self) -> None:
        super().__init__("where", _where, _no_gradients, scratch=True)

    def __call__(self, condition: Any, a: Any, b: Any, name: str | None = None) -> Node:  # type: ignore[override]
        if not isinstance(condition, Node):
            condition = constant_op(np.asarray(condition))
        if is_number(a) and is_number(b):
            a = constant_op(a)
        return Node(self, (condition, *as_nodes(self.name, a, b)), {}, name)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype = promote(node, specs[0]._replace(dtype=BOOL), *specs[1:])
        return Spec(broadcast(node, *specs), dtype, any(spec.declared for spec in specs[1:]))

    def simplify(self, node: Node) -> Node | None:
        assert node.spec is not None
        return _with_inputs(node, BOOL, node.spec.dtype, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        from .reduce import sum_to_like

        condition, a, b = node.inputs
        da = sum_to_like(where_op(condition, output_grad, 0.0), a)
        return [None, da, sum_to_like(where_op(condition, 0.0, output_grad), b)]


class Extreme(Elementwise):
    """The smaller or larger of two inputs; NaN where either is NaN."""

    def __call__(self, a: Any, b: Any, name: str | None = None) -> Node:  # type: ignore[override]
        return Node(self, as_nodes(self.name, a, b), {}, name)


def as_nodes(name: str, a: Any, b: Any) -> tuple[Node, Node]:
    """Two operands of the operator `name` as nodes; a number takes its partner's dtype."""
    if is_number(a) and isinstance(b, Node):
        return _number_like(b, value=number_of(a)), b
    if is_number(b) and isinstance(a, Node):
        return a, _number_like(a, value=number_of(b))
    if is_number(a) and is_number(b):
        raise GraphError(f"{name}: expected at least one node, got {a!r} and {b!r}")
    return as_node(a), as_node(b)


def _no_gradients(*inputs: Node) -> tuple[None, ...] | None:
    return (None,) * (len(inputs) - 2) if len(inputs) > 3 else None


def _with_inputs(node: Node, *dtypes: np.dtype | None) -> Node | None:
    """The node over inputs of these dtypes (one for all of them, or one each), None as it is."""
    wanted = dtypes * len(node.inputs) if len(dtypes) == 1 else dtypes
    inputs = [
        x if x.spec.dtype == dtype else cast_op(x, dtype) for x, dtype in zip(node.inputs, wanted)
    ]
    return None if inputs == node.inputs else node.derive(inputs, node.spec)


def _where(
    condition: np.ndarray, a: np.ndarray, b: np.ndarray, mask: np.ndarray, out: np.ndarray
) -> None:
    np.not_equal(condition, 0, out=mask)  # a byte may be another than 0 or 1
    choose(mask, a, b, out)


def _to_first(first: Node, dy: Node) -> tuple[Node, Node]:
    """dy to the first operand where `first` says so, else to the second."""
    return where_op(first, dy, 0.0), where_op(first, 0.0, dy)


_number_like = NumberLikeOp()

equal_op = Compare("equal", np.equal)
not_equal_op = Compare("not_equal", np.not_equal)
less_op = Compare("less", np.less)
less_equal_op = Compare("less_equal", np.less_equal)
greater_op = Compare("greater", np.greater, swapped=less_op)
greater_equal_op = Compare("greater_equal", np.greater_equal, swapped=less_equal_op)

logical_and_op = Logical("logical_and", np.logical_and)
logical_or_op = Logical("logical_or", np.logical_or)
logical_xor_op = Logical("logical_xor", np.logical_xor)
logical_not_op = Logical("logical_not", np.logical_not)

where_op = WhereOp()
# The gradient of a tie goes to the first operand; beside a NaN it goes to the second.
minimum_op = Extreme(
    "minimum",
    lambda a, b, y: np.minimum(a, b, out=y),
    lambda a, b, y, dy: _to_first(less_equal_op(a, b), dy),
)
maximum_op = Extreme(
    "maximum",
    lambda a, b, y: np.maximum(a, b, out=y),
    lambda a, b, y, dy: _to_first(greater_equal_op(a, b), dy),
)
