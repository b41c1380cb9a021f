"""einsum: sums of products in Einstein's notation, lowered to transposes, reshapes, batched matrix
products and sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..arguments.kinds import Bool, Instance, Kind, shown
from ..arguments.signature import Signature
from ..errors import GraphError
from ..graph.lines import where
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe, promote
from .elementwise import mul_op
from .matmul import batched_matmul_op
from .movement import broadcast_to_op, reshape_op, transpose_op
from .reduce import sum_op

__all__ = ["einsum"]

SYNTAX = "expected letters, commas and one ->, such as 'ij,jk->ik'"


class Words(Kind):
    """A tuple of strings."""

    expected = "a tuple of strings"

    def take(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not all(isinstance(word, str) for word in value):
            raise TypeError
        return tuple(value)


class EinsumOp(Op):
    """Each letter of `operands` names an axis; letters that `result` lacks are summed over.

    With `like` set the last input only gives its shape, which is the result's: letters that no
    operand has repeat it.
    """

    name = "einsum"
    signature = Signature("*inputs", operands=Words(), result=Instance(str), like=Bool(False))

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        count = len(attrs["operands"]) + attrs["like"]
        if len(inputs) != count:
            raise _refusal(f"expected {count} inputs, got {len(inputs)}")
        return Node(self, inputs, attrs, name)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        attrs = node.attrs
        operands = specs[:-1] if attrs["like"] else specs
        extents: dict[str, int] = {}
        for letters, spec in zip(attrs["operands"], operands):
            if len(letters) != len(spec.shape):
                raise node.error(f"{equation(node)} does not fit {describe(node, operands)}")
            for letter, extent in zip(letters, spec.shape):
                if extents.setdefault(letter, extent) != extent:
                    raise node.error(
                        f"{letter} of {equation(node)} is both {extents[letter]} and {extent}: "
                        f"{describe(node, operands)}"
                    )
        if attrs["like"]:
            extents |= dict(zip(attrs["result"], specs[-1].shape))
        dtype = operands[0].dtype if len(operands) == 1 else promote(node, *operands)
        shape = tuple(extents[letter] for letter in attrs["result"])
        return Spec(shape, dtype, any(spec.declared for spec in operands))

    def simplify(self, node: Node) -> Node:
        operands = list(zip(node.inputs, node.attrs["operands"]))
        result = node.attrs["result"]
        x, letters = operands[0]
        for k, (y, others) in enumerate(operands[1:], 2):
            needed = set(result).union(*[rest for _, rest in operands[k:]])
            x, letters = _contract(x, letters, y, others, needed)
        x, letters = _sum_out(x, letters, set(result))
        present = [letter for letter in result if letter in letters]
        x = transpose_op(x, [letters.index(letter) for letter in present])
        shape = node.spec.shape
        kept = tuple(n if letter in letters else 1 for letter, n in zip(result, shape))
        return broadcast_to_op(reshape_op(x, kept), shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        attrs = node.attrs
        operands = node.inputs[: len(attrs["operands"])]
        grads: list[Node | None] = []
        for k, x in enumerate(operands):
            others = [y for j, y in enumerate(operands) if j != k]
            letters = [s for j, s in enumerate(attrs["operands"]) if j != k]
            grads.append(
                einsum_op(
                    output_grad, *others, x, operands=(attrs["result"], *letters),
                    result=attrs["operands"][k], like=True,
                )
            )  # fmt: skip
        return grads + [None] * attrs["like"]


def _contract(x: Node, left: str, y: Node, right: str, needed: set[str]) -> tuple[Node, str]:
    """The product of two operands, summed over the letters that nothing else needs."""
    x, left = _sum_out(x, left, needed | set(right))
    y, right = _sum_out(y, right, needed | set(left))
    summed = "".join(c for c in left if c in right and c not in needed)
    batch = "".join(c for c in left if c in right and c in needed)
    rows = "".join(c for c in left if c not in right)
    columns = "".join(c for c in right if c not in left)
    extents = dict(zip(left, x.spec.shape)) | dict(zip(right, y.spec.shape))
    letters = batch + rows + columns
    if not summed:
        a = _arranged(
            x, left, batch + rows, [extents[c] for c in batch + rows] + [1] * len(columns)
        )
        b_shape = [extents[c] for c in batch] + [1] * len(rows) + [extents[c] for c in columns]
        return mul_op(a, _arranged(y, right, batch + columns, b_shape)), letters
    sizes = {part: math.prod(extents[c] for c in part) for part in (batch, rows, columns, summed)}
    lead = [sizes[batch]] if batch else []
    a = _arranged(x, left, batch + rows + summed, [*lead, sizes[rows], sizes[summed]])
    trans_B = right.endswith(summed) and not right.startswith(batch + summed)
    order, shape = columns + summed, [sizes[columns], sizes[summed]]
    if not trans_B:
        order, shape = summed + columns, [sizes[summed], sizes[columns]]
    b = _arranged(y, right, batch + order, [*lead, *shape])
    product = batched_matmul_op(a, b, trans_B=trans_B)
    return reshape_op(product, [extents[c] for c in letters]), letters


def _arranged(x: Node, letters: str, order: str, shape: Sequence[int]) -> Node:
    """x with its axes in another order, then in another shape."""
    return reshape_op(transpose_op(x, [letters.index(c) for c in order]), shape)


def _sum_out(x: Node, letters: str, needed: set[str]) -> tuple[Node, str]:
    """x summed over the axes whose letters are not needed."""
    axes = [axis for axis, letter in enumerate(letters) if letter not in needed]
    kept = "".join(letter for letter in letters if letter in needed)
    return (sum_op(x, axis=axes) if axes else x), kept


def equation(node: Node) -> str:
    """The equation of an einsum node as its user would write it."""
    return f"{','.join(node.attrs['operands'])}->{node.attrs['result']}"


einsum_op = EinsumOp()


def einsum(text: str, *operands: Node) -> Node:
    """A sum of products in Einstein's notation, such as einsum("bij,bjk->bik", x, y).

    Without "->" the result has the letters that occur once, in alphabetical order, as numpy has it.
    Products are taken from left to right. text: the letters of each operand's axes. operands:
    nodes. GraphError for what is not supported: an ellipsis, a letter twice in one operand (a
    diagonal) or in the result; ShapeError when a letter would have two extents.
    """
    if not isinstance(text, str):
        raise _refusal(f"{SYNTAX}, got {shown(text)}")
    compact = text.replace(" ", "")
    left, arrow, result = compact.partition("->")
    parts = left.split(",")
    if not arrow:
        result = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    _check(text, parts, result, len(operands))
    return einsum_op(*operands, operands=tuple(parts), result=result, like=False)


def _check(text: str, parts: list[str], result: str, count: int) -> None:
    if "..." in text:
        raise _refusal(f"an ellipsis is not supported: {text!r}; name each axis")
    if not all(part.isalpha() or not part for part in (*parts, result)):
        raise _refusal(f"cannot read {text!r}; {SYNTAX}")
    if len(parts) != count:
        raise _refusal(f"{text!r} names {len(parts)} operands, got {count}")
    for part in parts:
        if len(set(part)) < len(part):
            raise _refusal(f"{part!r} of {text!r} repeats a letter; diagonals are not supported")
    if len(set(result)) < len(result) or not set(result) <= set("".join(parts)):
        raise _refusal(f"the result of {text!r} must have letters of the operands, each once")


def _refusal(message: str) -> GraphError:
    """An error that names the user's line, ready to raise."""
    return GraphError(f"einsum: {message} [{where()}]")
