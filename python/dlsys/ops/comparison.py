"""Comparisons, which give bool, the operators on truth values, and what chooses by them: where,
minimum, maximum.

Comparisons with NaN are False, except `not_equal`, which is True. Truth values have no gradient.
Natively a bool is a byte of 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import Number
from ..arguments.signature import Signature, declared
from ..errors import GraphError
from ..graph.lines import where
from ..graph.node import Node, Op, hooks, same_nodes
from ..graph.spec import Spec, broadcast, floating, promote
from .elementwise import (
    Elementwise,
    abs_op,
    as_node,
    cast_op,
    choose,
    holding,
    is_number,
    number_of,
)
from .leaf import Operand, constant_op

__all__ = [
    "equal_op", "greater_equal_op", "greater_op", "isfinite_op", "isinf_op", "isnan_op",
    "less_equal_op", "less_op", "logical_and_op", "logical_not_op", "logical_or_op",
    "logical_xor_op", "masked_fill_op", "maximum_op", "minimum_op", "not_equal_op", "where_op",
]  # fmt: skip

BOOL = np.dtype(np.bool_)


class NumberLikeOp(Op):
    """One number in the dtype that it takes beside x: a Python number adapts to its partner."""

    name = "number_like"
    signature = Signature("x", value=Number(nan=True))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype, value = specs[0].dtype, node.attrs["value"]
        wanted = holding(dtype, value) if isinstance(value, int) else floating(dtype)
        return Spec((), wanted, declared=False)

    def simplify(self, node: Node) -> Node:
        return constant_op(np.array(node.attrs["value"]), dtype=node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


class Compare(Elementwise):
    """A comparison of two inputs of any dtype, broadcast against each other, as bool."""

    any_dtype = True

    def __init__(self, name: str, numpy: Callable, swapped: Compare | None = None) -> None:
        super().__init__(name, numpy, _no_gradients)
        self._swapped = swapped  # the comparison that gives the same with its inputs exchanged
        self.signature = Signature(a=Operand(), b=Operand())
        self.doc = (
            f"True where a is {name.replace('_', ' ')} to b, as numpy's `{name}`: bool, broadcast."
        )

    def make(self, inputs: Sequence[Any], attrs: dict[str, Any], name: str | None) -> Node:
        return Node(self, as_nodes(self.name, *inputs), attrs, name)

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
        self.signature = Signature("x") if name == "logical_not" else Signature("a", "b")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return Spec(broadcast(node, *specs), BOOL, False)

    def simplify(self, node: Node) -> Node | None:
        return _with_inputs(node, BOOL)


class Truth(Op):
    """The operators `&`, `|`, `^` and `~`: on truth values alone, because in Python these
    signs mean bits where they join numbers.
    """

    def __init__(self, sign: str, logical: Logical) -> None:
        self.name = sign
        self._logical = logical
        names = ("x",) if sign == "~" else ("a", "b")
        self.signature = Signature(**{key: Operand() for key in names})
        self.doc = f"`{sign}` of truth values, as ad.{logical.name}_op; numbers are refused."

    def make(self, inputs: Sequence[Any], attrs: dict[str, Any], name: str | None) -> Node:
        return Node(self, [as_node(x) for x in inputs], attrs, name)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        for x, spec in zip(node.inputs, specs):
            if spec.dtype is not None and spec.dtype != BOOL:
                raise node.error(
                    f"expected truth values, got {x.name} of {spec.dtype}; compare it first, as in "
                    f"(x != 0), or call ad.{self._logical.name}_op"
                )
        return self._logical.infer(node, *specs)

    def simplify(self, node: Node) -> Node:
        return self._logical(*node.inputs)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None] * len(node.inputs)


class WhereOp(Elementwise):
    """a where the condition is True (not 0), else b, with all three broadcast against each other.

    a and b have one dtype or promote to one; the condition may have any. The gradient goes to the
    one that was chosen, and the other gets exact zeros, whatever it holds.
    """

    any_dtype = True

    def __init__(self) -> None:
        super().__init__("where", _where, _no_gradients, scratch=True)
        self.signature = Signature(condition=Operand(), a=Operand(), b=Operand())

    def make(self, inputs: Sequence[Any], attrs: dict[str, Any], name: str | None) -> Node:
        condition, a, b = inputs
        if not isinstance(condition, Node):
            condition = constant_op(np.asarray(condition))
        if is_number(a) and is_number(b):
            a = constant_op(a)
        return Node(self, (condition, *as_nodes(self.name, a, b)), attrs, name)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype = promote(node, specs[0]._replace(dtype=BOOL), *specs[1:])
        return Spec(broadcast(node, *specs), dtype, any(spec.declared for spec in specs[1:]))

    def simplify(self, node: Node) -> Node | None:
        return _with_inputs(node, BOOL, node.spec.dtype, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        condition, a, b = node.inputs
        da = hooks["sum_to_like"](where_op(condition, output_grad, 0.0), a)
        return [None, da, hooks["sum_to_like"](where_op(condition, 0.0, output_grad), b)]


class OfOperands(Elementwise):
    """Of two inputs, each of which may be a number, which takes its partner's dtype."""

    def __init__(self, name: str, numpy: Callable, gradient: Callable) -> None:
        super().__init__(name, numpy, gradient)
        self.signature = Signature(a=Operand(), b=Operand())

    def make(self, inputs: Sequence[Any], attrs: dict[str, Any], name: str | None) -> Node:
        return Node(self, as_nodes(self.name, *inputs), attrs, name)


def as_nodes(name: str, a: Any, b: Any) -> tuple[Node, Node]:
    """Two operands of the operator `name` as nodes; a number takes its partner's dtype."""
    if is_number(a) and isinstance(b, Node):
        return _number_like(b, value=number_of(a)), b
    if is_number(b) and isinstance(a, Node):
        return a, _number_like(a, value=number_of(b))
    if is_number(a) and is_number(b):
        raise GraphError(f"{name}: expected at least one node, got {a!r} and {b!r} [{where()}]")
    return as_node(a), as_node(b)


def _no_gradients(*inputs: Node) -> tuple[None, ...] | None:
    return (None,) * (len(inputs) - 2) if len(inputs) > 3 else None


def _with_inputs(node: Node, *dtypes: np.dtype | None) -> Node | None:
    """The node over inputs of these dtypes (one for all of them, or one each), None as it is."""
    wanted = dtypes * len(node.inputs) if len(dtypes) == 1 else dtypes
    inputs = [
        x if x.spec.dtype == dtype else cast_op(x, dtype) for x, dtype in zip(node.inputs, wanted)
    ]
    return None if same_nodes(inputs, node.inputs) else node.derive(inputs, node.spec)


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

truth_and_op = Truth("&", logical_and_op)
truth_or_op = Truth("|", logical_or_op)
truth_xor_op = Truth("^", logical_xor_op)
truth_not_op = Truth("~", logical_not_op)

where_op = WhereOp()
# The gradient of a tie goes to the first operand; beside a NaN it goes to the second.
minimum_op = OfOperands(
    "minimum",
    lambda a, b, y: np.minimum(a, b, out=y),
    lambda a, b, y, dy: _to_first(less_equal_op(a, b), dy),
)
maximum_op = OfOperands(
    "maximum",
    lambda a, b, y: np.maximum(a, b, out=y),
    lambda a, b, y, dy: _to_first(greater_equal_op(a, b), dy),
)


@declared()
def isnan_op(x: Node) -> Node:
    """True where x is NaN, as bool."""
    return not_equal_op(x, x)


@declared()
def isinf_op(x: Node) -> Node:
    """True where x is infinite, as bool."""
    return equal_op(abs_op(x), math.inf)


@declared()
def isfinite_op(x: Node) -> Node:
    """True where x is neither infinite nor NaN, as bool."""
    return less_op(abs_op(x), math.inf)


@declared(value=Number(nan=True))
def masked_fill_op(x: Node, mask: Node, value: float) -> Node:
    """`value` where the mask is True (not 0), else x, broadcast against each other: the result and
    the gradient have no trace of what x holds there.
    """
    return where_op(mask, value, x)


# The docstrings of the operators.
for _op, _text in (
    (logical_and_op, "True where both a and b are."),
    (logical_or_op, "True where a or b is, or both are."),
    (logical_xor_op, "True where one of a and b is and the other is not."),
    (logical_not_op, "True where x is False, or 0."),
    (minimum_op, "The smaller of a and b, NaN where either is; of a tie the gradient goes to a."),
    (maximum_op, "The larger of a and b, NaN where either is; of a tie the gradient goes to a."),
):
    _op.doc = _text
