"""Functions that ONNX lacks or that lose digits in its form: log1p, expm1, other bases, division
with a remainder, atan2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....graph.node import Node
from ....ops.comparison import equal_op, isinf_op, minimum_op, where_op
from ....ops.elementwise import abs_op, cast_op, clip_op, exp_op, log_op, sign_op, sqrt_op
from ....ops.math.power import const_pow_op
from ....ops.math.rounding import floor_op
from ....ops.math.transcendental import atan_op
from ..registry import rule
from ..trace import Emitter
from .elementwise import computed_in, operands


def _float(node: Node, k: int = 0) -> Node:
    """An input in the node's own dtype, a float."""
    return cast_op(node.inputs[k], node.spec.dtype)


@rule("rsqrt")
def _rsqrt(g: Emitter, node: Node, name: str) -> Node:
    return 1 / sqrt_op(_float(node))


@rule("log1p")
def _log1p(g: Emitter, node: Node, name: str) -> Node:
    """log(u) · x / (u - 1) with u = 1 + x, where rounding leaves 1 + x other than 1 (Goldberg,
    "What every computer scientist should know about floating-point arithmetic", theorem 4).
    """
    x = _float(node)
    u, small = 1 + x, minimum_op(x, 1e30)
    rest = (1 + small) - 1
    unit = equal_op(rest, 0)
    return where_op(unit, x, log_op(u) * (small / where_op(unit, 1.0, rest)))


@rule("expm1")
def _expm1(g: Emitter, node: Node, name: str) -> Node:
    """(u - 1) · x / log(u) with u = exp(x) near 0, after Kahan (Higham, "Accuracy and stability of
    numerical algorithms", section 1.14.1), else u - 1.
    """
    x = _float(node)
    near = clip_op(x, -1.0, 1.0)
    u = exp_op(near)
    unit = equal_op(u, 1)
    close = (u - 1) * near / where_op(unit, 1.0, log_op(u))
    return where_op(abs_op(x) < 1, where_op(unit, x, close), exp_op(x) - 1)


@rule("exp2")
def _exp2(g: Emitter, node: Node, name: str) -> Node:
    return const_pow_op(_float(node), 2.0)


@rule("log2")
def _log2(g: Emitter, node: Node, name: str) -> Node:
    return log_op(_float(node)) * (1 / math.log(2))


@rule("log10")
def _log10(g: Emitter, node: Node, name: str) -> Node:
    return log_op(_float(node)) * (1 / math.log(10))


@rule("trunc")
def _trunc(g: Emitter, node: Node, name: str) -> Node | None:
    x = node.inputs[0]
    return sign_op(x) * floor_op(abs_op(x)) if node.spec.dtype.kind == "f" else None


@rule("atan2")
def _atan2(g: Emitter, node: Node, *names: str) -> Node:
    """atan(a / b), moved by π to the side of a where b is negative; zeros have signs."""
    a, b = _float(node, 0), _float(node, 1)
    both = isinf_op(a) & isinf_op(b)
    a, b = where_op(both, sign_op(a), a), where_op(both, sign_op(b), b)
    angle = where_op(a == 0, a, atan_op(a / b))
    below = (a < 0) | ((a == 0) & (1 / a < 0))
    left = (b < 0) | ((b == 0) & (1 / b < 0))
    angle = where_op((a == 0) & left, 0.0, angle)
    return where_op(left, angle + where_op(below, -math.pi, 0.0 * angle + math.pi), angle)


# ---- division with a remainder ----


def _divisor(g: Emitter, node: Node, b: str) -> tuple[str, Any]:
    """b without zeros, and where they were: ONNX leaves the division of integers by 0 open."""
    dtype = computed_in(node.spec.dtype)
    zero = g("Equal", b, np.array(0, dtype))
    return g("Where", zero, np.array(1, dtype), b), zero


def _integers(g: Emitter, node: Node, inputs: tuple[str, ...], op_type: str, fmod: int) -> str:
    dtype = computed_in(node.spec.dtype)
    a, b = operands(g, node, inputs, dtype)
    b, zero = _divisor(g, node, b)
    y = g("Mod", a, b, fmod=fmod)
    if op_type == "Div":
        y = g("Div", g("Sub", a, y), b)
    y = g("Where", zero, np.array(0, dtype), y)
    return g.cast(y, dtype, node.spec.dtype)


def _remainder_of_floats(g: Emitter, a: str, b: str, dtype: np.dtype) -> str:
    """fmod, plus b where the two differ in their signs: the sign of b."""
    zero = np.array(0, dtype)
    m = g("Mod", a, b, fmod=1)
    differ = g("Xor", g("Less", m, zero), g("Less", b, zero))
    moved = g("And", differ, g("Not", g("Equal", m, zero)))
    return g("Where", moved, g("Add", m, b), m)


@rule("remainder", "Mod, Where")
def _remainder(g: Emitter, node: Node, *inputs: str) -> str:
    if node.spec.dtype.kind != "f":
        return _integers(g, node, inputs, "Mod", fmod=0)
    a, b = operands(g, node, inputs, node.spec.dtype)
    return _remainder_of_floats(g, a, b, node.spec.dtype)


@rule("fmod", "Mod")
def _fmod(g: Emitter, node: Node, *inputs: str) -> str:
    if node.spec.dtype.kind != "f":
        return _integers(g, node, inputs, "Mod", fmod=1)
    return g("Mod", *operands(g, node, inputs, node.spec.dtype), fmod=1)


@rule("floor_divide", "Mod, Div, Round")
def _floor_divide(g: Emitter, node: Node, *inputs: str) -> str:
    """(a - a mod b) / b, which is integral but for rounding; a / b itself where that is infinite or
    NaN.
    """
    if node.spec.dtype.kind != "f":
        return _integers(g, node, inputs, "Div", fmod=0)
    a, b = operands(g, node, inputs, node.spec.dtype)
    rest = _remainder_of_floats(g, a, b, node.spec.dtype)
    exact = g("Round", g("Div", g("Sub", a, rest), b))
    by_zero = g("Equal", b, np.array(0, node.spec.dtype))
    return g("Where", by_zero, g("Div", a, b), exact)
