"""Rounding to integers, and division with a remainder.

Floats stay floats and integers are integers already. `//` and `%` follow Python and numpy: the
quotient is rounded down and the remainder has the sign of the divisor; `fmod_op`'s has that of the
dividend. Division of floats by 0 gives what `/` and NaN are there, that of integers 0.

Roundings and quotients are constant between their jumps and have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...graph.node import Node
from ..comparison import OfOperands
from ..elementwise import Elementwise, cast_op

__all__ = [
    "ceil_op", "floor_divide_op", "floor_op", "fmod_op", "remainder_op", "round_op", "trunc_op",
]  # fmt: skip


class Rounding(Elementwise):
    """A float rounded to an integer, still a float; integers as they are."""

    def __init__(self, name: str, numpy: Callable) -> None:
        super().__init__(name, numpy, lambda x, y, dy: None)

    def simplify(self, node: Node) -> Node | None:
        integral = node.spec.dtype.kind != "f"
        return cast_op(node.inputs[0], node.spec.dtype) if integral else None


floor_op = Rounding("floor", np.floor)
ceil_op = Rounding("ceil", np.ceil)
trunc_op = Rounding("trunc", np.trunc)
round_op = Rounding("round", np.rint)

floor_divide_op: OfOperands = OfOperands(
    "floor_divide", np.floor_divide, lambda a, b, y, dy: (None, None)
)
remainder_op = OfOperands(
    "remainder", np.remainder, lambda a, b, y, dy: (dy, -dy * floor_divide_op(a, b))
)
fmod_op = OfOperands("fmod", np.fmod, lambda a, b, y, dy: (dy, -dy * trunc_op(a / b)))

# The docstrings of the operators.
for _op, _text in (
    (floor_op, "The largest integer up to x, in x's dtype."),
    (ceil_op, "The smallest integer from x on, in x's dtype."),
    (trunc_op, "x without its fraction, in x's dtype."),
    (round_op, "The integer nearest to x, of two the even one, in x's dtype."),
    (floor_divide_op, "a / b rounded down, broadcast, as Python's `//`."),
    (remainder_op, "a - b · (a // b), broadcast, as Python's `%`: with the sign of b."),
    (fmod_op, "a - b · trunc(a / b), broadcast, as C's fmod: with the sign of a."),
):
    _op.doc = _text
