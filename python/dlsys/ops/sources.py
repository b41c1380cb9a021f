"""Arrays that numbers alone describe: ranges and the identity, which are constants of the graph;
and the triangles of a matrix, which are chosen by a mask that is one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dtypes import INT64
from ..errors import GraphError
from ..graph.kinds import DType, Int, Number
from ..graph.lines import where
from ..graph.node import Node, Op
from ..graph.signature import Signature, declared
from ..graph.spec import FLOAT32, Spec
from .comparison import where_op
from .leaf import constant_op, zeroslike_op

__all__ = ["arange_op", "eye_op", "linspace_op", "tril_op", "triu_op"]

_FINITE = Number(finite=True)


class TriangleOp(Op):
    """x with zeros on one side of diagonal k of its last two axes."""

    signature = Signature("x", k=Int(0))

    def __init__(self, name: str, lower: bool) -> None:
        self.name = name
        self._lower = lower
        kept, side = ("on and below", "above") if lower else ("on and above", "below")
        self.doc = (
            f"x {kept} diagonal k of its last two axes, 0 elsewhere: k counts from the main "
            f"diagonal, {side} which it leaves nothing, to the right."
        )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if len(specs[0].shape) < 2:
            raise node.error(
                f"expected at least two dimensions, got {node.inputs[0].name} {specs[0].shape}"
            )
        return specs[0]

    def simplify(self, node: Node) -> Node:
        x, k = node.inputs[0], node.attrs["k"]
        rows, columns = x.spec.shape[-2:]
        below = np.tri(rows, columns, k if self._lower else k - 1, dtype=np.bool_)
        return where_op(constant_op(below if self._lower else ~below), x, zeroslike_op(x))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [self(output_grad, k=node.attrs["k"])]


tril_op = TriangleOp("tril", lower=True)
triu_op = TriangleOp("triu", lower=False)


@declared(start=_FINITE, stop=_FINITE, step=_FINITE, dtype=DType())
def arange_op(start: float, stop: float | None = None, step: float = 1, dtype: Any = None) -> Node:
    """Numbers from `start` up to and without `stop` in steps, or from 0 up to the only one given.

    They are int64 where all of these are integers, else float32, or of the `dtype`. GraphError for
    a step of 0.
    """
    if step == 0:
        raise GraphError(f"arange: step is 0, expected another number [{where()}]")
    start, stop = (0, start) if stop is None else (start, stop)
    whole = all(isinstance(x, int) for x in (start, stop, step))
    count = max(-(-(stop - start) // step) if whole else math.ceil((stop - start) / step), 0)
    values: Any = np.arange(count, dtype=np.int64 if whole else np.float64)
    return constant_op(start + step * values, dtype=dtype or (INT64 if whole else FLOAT32))


@declared(start=_FINITE, stop=_FINITE, num=Int(low=0), dtype=DType())
def linspace_op(start: float, stop: float, num: int = 50, dtype: Any = FLOAT32) -> Node:
    """`num` numbers at equal distances from `start` to `stop`, both of which are among them."""
    return constant_op(np.linspace(start, stop, num), dtype=dtype)


@declared(n=Int(low=0), m=Int(low=0), k=Int(), dtype=DType())
def eye_op(n: int, m: int | None = None, k: int = 0, dtype: Any = FLOAT32) -> Node:
    """A matrix (n, m) with ones on diagonal k and zeros elsewhere; m is n where it is not given."""
    return constant_op(np.eye(n, m, k), dtype=dtype)
