"""Heads that stand side by side in the features of (N, positions, heads · size) arrays, as a
projection makes them, and as arrays (N, heads, positions, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...arguments.kinds import Int
from ...arguments.signature import Signature
from ...graph.node import Node, Op
from ...graph.spec import Spec, promote
from ..concat import concat
from ..indexing import getitem_op
from ..leaf import zeroslike_op
from ..movement import reshape_op, transpose_op

_SWAPPED = (0, 2, 1, 3)  # heads and positions


class SplitHeadsOp(Op):
    """`count` heads from `first` on of x (N, L, heads · size): (N, count, L, size)."""

    name = "split_heads"
    vocabulary = False
    movement = True
    autocast = "follow"
    signature = Signature("x", heads=Int(low=1), first=Int(low=0), count=Int(low=0))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        heads, first, count = (node.attrs[key] for key in ("heads", "first", "count"))
        shape = specs[0].shape
        if len(shape) != 3 or shape[2] % heads or first + count > heads:
            raise node.error(
                f"heads {first} to {first + count} of {heads} are not in {node.inputs[0].name} "
                f"{shape}; expected (N, positions, heads · size)"
            )
        return specs[0]._replace(shape=(shape[0], count, shape[1], shape[2] // heads))

    def simplify(self, node: Node) -> Node:
        x, heads = node.inputs[0], node.attrs["heads"]
        batch, count, length, size = node.spec.shape
        first = node.attrs["first"] * size
        part = getitem_op(x, (..., slice(first, first + count * size)))
        x = x if count == heads else part
        return transpose_op(reshape_op(x, (batch, length, count, size)), _SWAPPED)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, (heads, first, count) = node.inputs[0], node.attrs.values()
        rest = ((0, first), (first + count, heads - first - count))
        before, after = (
            zeroslike_op(self(x, heads=heads, first=at, count=many)) for at, many in rest
        )
        return [join_heads_op(before, output_grad, after)]


class JoinHeadsOp(Op):
    """Arrays (N, heads, L, size) as one of all their heads: (N, L, heads · size)."""

    name = "join_heads"
    vocabulary = False
    movement = True
    autocast = "follow"
    signature = Signature("*parts")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        first = specs[0].shape
        fit = all(len(x.shape) == 4 and x.shape[::2] == first[::2] for x in specs)
        if not fit or any(x.shape[3] != first[3] for x in specs):
            raise node.error(
                f"expected arrays (N, heads, positions, size) that differ in their heads alone, "
                f"got {[x.shape for x in specs]}"
            )
        heads = sum(x.shape[1] for x in specs)
        shape = (first[0], first[2], heads * first[3])
        return Spec(shape, promote(node, *specs), any(x.declared for x in specs))

    def simplify(self, node: Node) -> Node:
        flat = [
            reshape_op(transpose_op(x, _SWAPPED), (*node.spec.shape[:2], -1))
            for x in node.inputs
            if x.spec.shape[1]
        ]
        return concat(flat, axis=2) if len(flat) > 1 else flat[0]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        counts = [x.spec.shape[1] for x in node.inputs]
        return list(split_heads(output_grad, counts))


split_heads_op, join_heads_op = SplitHeadsOp(), JoinHeadsOp()


def split_heads(x: Node, counts: Sequence[int]) -> list[Node]:
    """Runs of so many heads of x (N, L, all heads · size), each (N, count, L, size)."""
    ends = accumulate(counts)
    return [
        split_heads_op(x, heads=sum(counts), first=end - count, count=count)
        for count, end in zip(counts, ends)
    ]


def heads_of(x: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """The same of an array: views of it."""
    by_head = x.reshape(*x.shape[:2], sum(counts), -1).transpose(_SWAPPED)
    return np.split(by_head, list(accumulate(counts))[:-1], axis=1)
