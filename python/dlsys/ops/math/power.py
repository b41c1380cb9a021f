"""Powers, of arrays and of Python numbers: a^b, x^c and c^x.

Their gradients choose by comparisons, which is why they stand above `elementwise.py`.
"""

from __future__ import annotations

import math

import numpy as np

from ...dtypes import INT64, is_integral
from ...graph.node import Node
from ...graph.spec import Spec
from ..comparison import (
    equal_op,
    greater_equal_op,
    greater_op,
    logical_and_op,
    logical_or_op,
    not_equal_op,
    where_op,
)
from ..elementwise import (
    Elementwise,
    FloatElementwise,
    WithConst,
    abs_op,
    cast_op,
    joined,
    log_op,
)
from ..leaf import constant_op, oneslike_op

__all__ = ["const_pow_op", "pow_byconst_op", "pow_op"]


def _pow(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """a^b; of -0 and -infinity to the power 0.5 as of all others, where numpy takes the square root
    in some of its versions and for some shapes.
    """
    half = np.equal(b, 0.5)
    if not half.any():
        np.power(a, b, out=y)
        return
    lowest, zero = half & np.isneginf(a), half & np.equal(a, 0)  # y may be the memory of either
    np.power(a, b, out=y)
    np.copyto(y, np.inf, where=lowest)
    np.copyto(y, 0.0, where=zero)


def _power(x: np.ndarray, c: float, y: np.ndarray) -> None:
    """x to the power c. The power 0.5 is the square root on every device: -0 of -0 and NaN of
    -infinity, unlike pow. Negative floats to an integral power go by their absolute values: the C
    library, which numpy asks for each element, takes a hundred times as long for them.
    """
    if c == 0.5:
        np.sqrt(x, out=y)
    elif y.dtype.kind != "f" or not abs(c) < 2**24 or c != int(c):
        np.power(x, c, out=y)
    elif c == 2:
        np.square(x, out=y)
    elif c == 3:
        np.multiply(np.square(x), x, out=y)
    elif c % 2:
        np.copysign(np.power(np.absolute(x), c), x, out=y)
    else:
        np.power(np.absolute(x), c, out=y)


def _pow_gradients(a: Node, b: Node, y: Node, dy: Node) -> tuple[Node, Node]:
    """b · a^(b - 1) and y · log(a), with 0 for the first at a^0 and for the second at 0^b, b >= 0,
    the conventions of PyTorch. What would be infinite there is replaced before it is multiplied by
    0, so that derivatives of these have no NaN for it either.
    """
    inverse_fits = greater_op(abs_op(a), 2.0**-127)  # beside that a is 0, too small or NaN
    less = where_op(logical_or_op(not_equal_op(b, 0), inverse_fits), b - oneslike_op(a), 0.0)
    base = where_op(logical_and_op(equal_op(a, 0), greater_equal_op(b, 0)), 1.0, a)
    if a.dtype is not None and a.dtype.kind != "f" and y.dtype is not None:
        base = cast_op(base, y.dtype)  # else the logarithm of integers is float64
    return dy * b * pow_op(a, less), dy * y * log_op(base)


def _power_gradient(x: Node, c: float, dy: Node) -> Node | None:
    return dy * (c * pow_byconst_op(x, c - 1)) if c != 0 else None


def _exponential_gradient(x: Node, c: float, y: Node, dy: Node) -> Node:
    """c^x · log(c); of 0^x 0 for x >= 0, where it is constant but for the jump at 0."""
    if c == 0:
        return dy * -where_op(greater_equal_op(x, 0), 0.0, y)
    return dy * y * (math.log(c) if c > 0 else math.nan)


class PowerOfConst(WithConst):
    """x to the power of a number, in floats; to an integral one from 0 integers stay integers."""

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype, const = specs[0].dtype, node.attrs["const"]
        if is_integral(dtype) and isinstance(const, int) and const >= 0:
            return specs[0]._replace(dtype=INT64 if dtype.kind == "b" else dtype)
        return super().infer(node, *specs)

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        if is_integral(node.spec.dtype) and node.attrs["const"] != 1 and not x.op.constant_fill:
            return _integer_power(x, constant_op(node.attrs["const"], dtype=node.spec.dtype))
        return super().simplify(node)


_integer_power = Elementwise("integer_power", np.power, lambda a, b, y, dy: (None, None))
pow_op = FloatElementwise("pow", _pow, _pow_gradients)
pow_byconst_op = PowerOfConst(
    "pow_const", _power, lambda x, c, y, dy: _power_gradient(x, c, dy), identity=1
)
const_pow_op = WithConst(
    "rpow_const", lambda x, c, y: np.power(c, x, y),
    lambda x, c, y, dy: _exponential_gradient(x, c, y, dy),
)  # fmt: skip

for _op in (pow_op, pow_byconst_op, const_pow_op):
    _op.autocast = "float32"  # a relative error of x grows
pow_op.doc = "a to the power b in floats, broadcast against each other."
pow_byconst_op.doc = (
    "x to the power const, in floats; to an integral one from 0 integers stay integers, and wrap."
)
const_pow_op.doc = "const to the power x, in floats."

power = joined("a to the power b element by element", pow_op, pow_byconst_op, const_pow_op)
