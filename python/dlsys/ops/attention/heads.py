"""Heads that stand side by side in the features of (N, positions, heads · size) arrays, as a
projection makes them, and as arrays (N, heads, positions, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...arguments.kinds import Int, Ints
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
        heads, first, count = (node.attrs[key] for key in ("heads", "first", "count"))
        counts = first, count, heads - first - count
        before, _, after = split_heads(node.inputs[0], counts)
        parts = zeroslike_op(before), output_grad, zeroslike_op(after)
        return [join_heads_op(*parts, counts=counts)]


class JoinHeadsOp(Op):
    """Arrays (N, counts[k], L, size) as one of all their heads: (N, L, heads · size)."""

    name = "join_heads"
    vocabulary = False
    movement = True
    autocast = "follow"
    signature = Signature("*parts", counts=Ints())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        first, counts = specs[0].shape, node.attrs["counts"]
        wanted = [(*first[:1], count, *first[2:]) for count in counts]
        if len(first) != 4 or [x.shape for x in specs] != wanted:
            raise node.error(
                f"expected arrays (N, heads, positions, size) of {counts} heads, else alike, got "
                f"{', '.join(str(x.shape) for x in specs)}"
            )
        shape = (first[0], first[2], sum(counts) * first[3])
        return Spec(shape, promote(node, *specs), any(x.declared for x in specs))

    def simplify(self, node: Node) -> Node:
        flat = [
            reshape_op(
                transpose_op(x, _SWAPPED), (*node.spec.shape[:2], x.spec.shape[1] * x.spec.shape[3])
            )
            for x in node.inputs
            if x.spec.shape[1]
        ]
        return concat(flat, axis=2) if len(flat) > 1 else flat[0]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return list(split_heads(output_grad, node.attrs["counts"]))


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
    heads = sum(counts)
    by_head = x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(_SWAPPED)
    return np.split(by_head, list(accumulate(counts))[:-1], axis=1)
