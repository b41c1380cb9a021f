"""The rows of samples.py for layer normalization with a residual stream, as
`fusion/norm/layer_norm.py` builds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.fusion.norm import layer_norm as fused
from dlsys.fusion.shared.body import close
from dlsys.ops import reduce
from dlsys.ops.norm import layer_norm as norm
from support.table.families.norm import (
    by_row,
    by_row_scale,
    normalized,
    row_gradient,
    row_sums,
    row_sums_scale,
)
from support.table.rows import Case, Sample, case

Array = np.ndarray
EPS = 1e-3
SHAPES = (  # rows of a warp, of a block, of few and of most elements, and without alignment
    ((4, 9), (9,)), ((7,), (7,)), ((5, 1), (1,)), ((2, 3, 40), (40,)), ((5, 4, 6), (4, 6)),
    ((0, 8), (8,)), ((33, 130), (130,)), ((3, 516), (516,)), ((2, 1000), (1000,)),
    ((1, 1501), (1501,)), ((2, 1504), (1504,)), ((1, 3000), (3000,)), ((1, 8192), (8192,)),
)  # fmt: skip


# ---- nodes ----


def forward(*inputs: Any, centered: bool, part: int) -> Any:
    """The sum of x and an addend, or the normalized rows."""
    *terms, scale, bias = inputs
    x = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    attrs = dict(centered=centered, eps=EPS)
    y = norm.row_normalize_op(x, scale, bias, groups=None, **attrs)
    outputs = [y] if len(terms) == 1 else [x, y]
    made = fused.forward_op(len(outputs))(*inputs, body=close(inputs, outputs), **attrs)
    return made[part] if len(outputs) > 1 else made


def backward(*inputs: Any, centered: bool, early: bool, part: int) -> Any:
    """The gradient of x, or the sums: of scale and bias, of the gradient."""
    x, scale, dy, *other = inputs
    dy = dy + other[0] if early else dy
    attrs = dict(centered=centered, eps=EPS)
    dx = norm.row_normalize_gradient_op(x, scale, dy, groups=None, **attrs)
    dx = dx + other[0] if other and not early else dx
    sums = norm.row_normalize_sums_op(x, scale, dy, groups=None, **attrs)
    lead = len(x.spec.shape) - len(scale.spec.shape)
    total = reduce.sum_op(dx, axis=tuple(range(lead)), dtype=np.float32)
    outputs = [dx, *sums, total]
    op = fused.backward_op(1, 3)
    made = op(*inputs, body=close(inputs, outputs), early=early, **attrs)
    return made[0] if part == 0 else 2 * made[1] + made[2] if part == 1 else made[3]


# ---- formulas ----


def forward_formula(*inputs: Array, centered: bool, part: int) -> Array:
    *terms, scale, bias = inputs
    x = sum(terms)
    adds = len(terms) > 1
    return x if adds and part == 0 else by_row(x, scale, bias, None, centered, EPS)


def forward_scale(*inputs: Array, centered: bool, part: int) -> Array:
    *terms, scale, bias = inputs
    if len(terms) > 1 and part == 0:
        return np.abs(sum(terms))
    return by_row_scale(sum(terms), scale, bias, None, centered, EPS)


def back_parts(*inputs: Array, early: bool) -> tuple[Array, ...]:
    x, scale, dy, *other = inputs
    return x, scale, dy + other[0] if early else dy, 0 if early or not other else other[0]


def backward_formula(*inputs: Array, centered: bool, early: bool, part: int) -> Array:
    x, scale, dy, more = back_parts(*inputs, early=early)
    if part == 1:
        return row_sums(x, scale, dy, None, centered, EPS)
    dx = row_gradient(x, scale, dy, None, centered, EPS) + more
    return dx if part == 0 else dx.sum(axis=tuple(range(x.ndim - scale.ndim)))


def backward_scale(*inputs: Array, centered: bool, early: bool, part: int) -> Array:
    x, scale, dy, _ = back_parts(*map(np.abs, inputs), early=early)
    if part == 1:
        return row_sums_scale(inputs[0], scale, dy, None, centered, EPS)
    size = 8 + 2 * np.abs(normalized(inputs[0], scale, None, centered, EPS))
    return size if part == 0 else size.sum(axis=tuple(range(x.ndim - scale.ndim)))


# ---- rows ----


def forwards() -> list[Case]:
    return [
        case(*[x] * terms, scale, scale, centered=centered, part=part)
        for x, scale in SHAPES
        for terms, part, centered in ((1, 0, False), (2, 0, True), (2, 1, True))
    ]


def backwards() -> list[Case]:
    plain = [
        case(x, scale, x, centered=bool(part), early=False, part=part)
        for x, scale in SHAPES
        for part in (0, 1)
        if part or scale[0] < 2000  # the formula has a matrix of each row
    ]
    added = [
        case(x, scale, x, x, centered=True, early=early, part=part)
        for x, scale in SHAPES[:10]
        for early, part in ((True, 0), (True, 1), (False, 0), (False, 2))
        if part < 2 or len(x) > len(scale)
    ]
    return [*plain, *added]


FUSED_LAYER_NORM = (
    Sample(
        "fused_row_normalize", fused.forward_op(1), forward_formula, tuple(forwards()),
        scale=forward_scale, ulps=4, differentiable=(), specials=False, build=forward,
        roundings=2,
    ),
    Sample(
        "fused_row_normalize_gradient", fused.backward_op(1, 3), backward_formula,
        tuple(backwards()), scale=backward_scale, ulps=16, differentiable=(), specials=False,
        build=backward, roundings=2,
    ),
)  # fmt: skip
