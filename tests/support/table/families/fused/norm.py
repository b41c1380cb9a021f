"""The rows of samples.py for batch normalization with its surroundings, as
`fusion/norm/batch_norm.py` builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.fusion.shared import norm_operators as fused
from dlsys.fusion.shared.body import ACTIVATIONS, GRADIENTS, close
from dlsys.ops.norm import batch_norm as norm
from support.table.families.fused.gemm import DACTS, FORMULAS, operator
from support.table.families.norm import (
    CHANNELS,
    FIXED,
    PARTS,
    batch_moments,
    both,
    column,
    fixed,
    fixed_scale,
    over,
    sums,
    sums_scale,
)
from support.table.rows import Case, Sample, case, classes, positive, signed

Array = np.ndarray
EPS = 1e-3
OF_OUTPUT = ("relu_gradient", "softplus_gradient")  # gradients by what the activation made


# ---- nodes ----


def statistics(x: Any) -> Any:
    body = close((x,), tuple(norm.batch_statistics_op(x)))
    return both(fused.batch_statistics_single_pass_op(x, body=body))


def plain_sums(*inputs: Any) -> Any:
    made = norm.batch_normalize_sums_op(*inputs, eps=EPS, training=True)
    body = close(inputs, tuple(made))
    return both(fused.batch_normalize_sums_single_pass_op(*inputs, body=body, eps=EPS))


def mapped(*inputs: Any, activation: str) -> Any:
    """activation(normalized x + addend), where the addend may come with what normalizes it."""
    y = norm.batch_normalize_op(*inputs[:5], eps=EPS, training=False)
    if len(inputs) == 10:
        y = y + norm.batch_normalize_op(*inputs[5:], eps=EPS, training=False)
    elif len(inputs) > 5:
        y = y + inputs[5]
    return operator(activation)(y) if activation else y


def normalize_map(*inputs: Any, activation: str) -> Any:
    body = close(inputs, (mapped(*inputs, activation=activation),))
    return fused.batch_normalize_map_op(*inputs, body=body, eps=EPS, activation=activation)


def map_with_bits(*inputs: Any, part: int) -> Any:
    """relu(…), or again by its bits."""
    y = mapped(*inputs, activation="relu")
    body = close(inputs, (y, fused.positive_bits_op(y)))
    made = fused.batch_normalize_relu_bits_op(*inputs, body=body, eps=EPS)
    return fused.keep_by_bits_op(made[1], made[0]) if part else made[0]


def bits_sums(*inputs: Any, part: int) -> Any:
    """The sums, or relu's gradient, of the dys by bits."""
    x, mean, variance, bits, *dys = inputs
    dz = fused.keep_by_bits_op(bits, dys[0] if len(dys) == 1 else dys[0] + dys[1])
    made = norm.batch_normalize_sums_op(x, mean, variance, dz, eps=EPS, training=True)
    body = close(inputs, (*made, dz))
    node = fused.relu_bits_sums_ops[len(dys)](*inputs, body=body, eps=EPS)
    return node[2] if part else both(node)


def dact(x: Any, mean: Any, variance: Any, scale: Any, bias: Any, dy: Any, gradient: str) -> Any:
    """The activation gradient at the normalized x."""
    z = norm.batch_normalize_op(x, mean, variance, scale, bias, eps=EPS, training=False)
    side = operator(gradient.removesuffix("_gradient"))(z) if gradient in OF_OUTPUT else z
    return operator(gradient)(side, dy)


def map_sums(*inputs: Any, gradient: str) -> Any:
    dz = dact(*inputs, gradient)
    made = norm.batch_normalize_sums_op(*inputs[:3], dz, eps=EPS, training=True)
    body = close(inputs, tuple(made))
    op = fused.batch_normalize_map_sums_op
    return both(op(*inputs, body=body, eps=EPS, gradient=gradient))


def map_gradient(*inputs: Any, gradient: str) -> Any:
    x, mean, variance, scale, bias, dscale, dbias, dy = inputs
    dz = dact(x, mean, variance, scale, bias, dy, gradient)
    dx = norm.batch_normalize_gradient_op(x, mean, variance, scale, dscale, dbias, dz, eps=EPS)
    body = close(inputs, (dx,))
    op = fused.batch_normalize_map_gradient_op
    return op(*inputs, body=body, eps=EPS, gradient=gradient)


def relu_sums(output: bool, count: int) -> Callable[..., Any]:
    """The sums, or relu's gradient, of `count` dys; relu's output is given or recomputed."""

    def build(*inputs: Any, part: int) -> Any:
        dy = inputs[-1] if count == 1 else inputs[-2] + inputs[-1]
        if output:
            dz = ad.relu_gradient_op(inputs[3], dy)
        else:
            dz = dact(*inputs[:5], dy, "relu_gradient")
        made = norm.batch_normalize_sums_op(*inputs[:3], dz, eps=EPS, training=True)
        body = close(inputs, (*made, dz))
        node = fused.relu_sums_ops[output, count](*inputs, body=body, eps=EPS)
        return node[2] if part else both(node)

    return build


# ---- formulas ----


def map_formula(x: Array, *rest: Array, activation: str) -> Array:
    y = fixed(x, *rest[:4], eps=EPS)
    if len(rest) == 9:
        y = y + fixed(*rest[4:], eps=EPS)
    elif len(rest) > 4:
        y = y + rest[4]
    return FORMULAS[activation](y)


def map_scale(x: Array, *rest: Array, activation: str) -> Array:
    """The activations' slopes are below 1.2, and they round their own values."""
    size = fixed_scale(x, *rest[:4], eps=EPS)
    if len(rest) == 9:
        size = size + fixed_scale(*rest[4:], eps=EPS)
    elif len(rest) > 4:
        size = size + np.abs(rest[4])
    return 1.2 * size + np.abs(map_formula(x, *rest, activation=activation))


def kept(bits: Array, x: Array) -> Array:
    """The elements of x whose bit is set."""
    at = np.arange(x.size).reshape(x.shape)
    return np.where(bits[at // 8].astype(int) >> at % 8 & 1, x, 0)


def bits_sums_formula(*inputs: Array, part: int) -> Array:
    dz = kept(inputs[3], sum(inputs[4:]))
    return dz if part else sums(*inputs[:3], dz, EPS, True)


def bits_sums_scale(*inputs: Array, part: int) -> Array:
    dz = sum(map(np.abs, inputs[4:]))
    return dz if part else sums_scale(*inputs[:3], dz, EPS, True)


def dact_formula(*inputs: Array, gradient: str) -> Array:
    *rest, dy = inputs
    z = fixed(*rest, eps=EPS)
    side = FORMULAS[gradient.removesuffix("_gradient")](z) if gradient in OF_OUTPUT else z
    return DACTS[gradient](side) * dy


def map_sums_formula(*inputs: Array, gradient: str) -> Array:
    return sums(*inputs[:3], dact_formula(*inputs, gradient=gradient), EPS, True)


def map_sums_scale(*inputs: Array, gradient: str) -> Array:
    return sums_scale(*inputs[:3], 1.2 * inputs[-1], EPS, True)


def map_gradient_formula(*inputs: Array, gradient: str) -> Array:
    x, mean, variance, scale, bias, dscale, dbias, dy = inputs
    dz = dact_formula(x, mean, variance, scale, bias, dy, gradient=gradient)
    mean, r, scale, dscale, dbias = (
        column(v, x.ndim) for v in (mean, (variance + EPS) ** -0.5, scale, dscale, dbias)
    )
    count = x.size / max(len(mean), 1)
    return scale * r * (dz - ((x - mean) * r * dscale + dbias) / max(count, 1))


def map_gradient_scale(*inputs: Array, gradient: str) -> Array:
    x, mean, variance, scale, bias, dscale, dbias, dy = inputs
    x, scale, dscale, dbias, dy = (np.abs(v) for v in (x, scale, dscale, dbias, dy))
    mean, r, scale, dscale, dbias = (
        column(v, x.ndim) for v in (np.abs(mean), (variance + EPS) ** -0.5, scale, dscale, dbias)
    )
    count = x.size / max(len(mean), 1)
    return scale * r * (1.2 * dy + ((x + mean) * r * dscale + dbias) / max(count, 1))


def relu_sums_formula(output: bool, count: int, of_sizes: bool = False) -> Callable[..., Array]:
    def formula(*inputs: Array, part: int) -> Array:
        dy = sum(np.abs(v) if of_sizes else v for v in inputs[len(inputs) - count :])
        z = inputs[3] if output else fixed(*inputs[:5], eps=EPS)
        dz = dy if of_sizes else np.where(z > 0, dy, 0)
        if part:
            return dz
        return (sums_scale if of_sizes else sums)(*inputs[:3], dz, EPS, True)

    return formula


# ---- rows ----

SHAPES = (*CHANNELS, *PARTS)
STATE = (signed, signed, positive, signed, signed)  # x, mean, variance, scale, bias


def over_channels(shape: tuple, count: int) -> tuple:
    """x, and values of each channel."""
    return (shape, *[shape[1:2]] * count)


def maps() -> list[Case]:
    plain = [case(*one.shapes, activation="relu", domain=STATE) for one in FIXED]
    every = [case(*over_channels((5, 3, 4), 4), activation=a, domain=STATE) for a in ACTIVATIONS]
    added = [
        case(*over_channels(s, 4), s, activation=name, domain=(*STATE, signed))
        for s in SHAPES
        for name in ("", "relu")
    ]
    twins = [
        case(*over_channels(s, 4), *over_channels(s, 4), activation=name, domain=STATE * 2)
        for s in SHAPES
        for name in ("", "relu")
    ]
    return [*plain, *every, *added, *twins]


def maps_with_bits() -> list[Case]:
    in_bytes = [  # the channels of every tile are whole bytes of bits, or, of the last, not
        case(*over_channels(s, 4), s, activation="relu", domain=(*STATE, signed))
        for s in ((37, 64), (300, 24), (70, 128), (37, 72))
    ]
    return [
        case(*one.shapes, part=part, domain=one.domain)
        for one in (*maps(), *in_bytes)
        if one.attrs["activation"] == "relu"
        for part in (0, 1)
    ]


def bit_cases(count: int) -> list[Case]:
    of_bytes = classes(256, np.uint8)
    return [
        case(
            *over_channels(s, 2), (-(-int(np.prod(s)) // 8),), *[s] * count, part=part,
            domain=(signed, signed, positive, of_bytes, *[signed] * count),
        )
        for s in (*SHAPES, (37, 72))
        for part in (0, 1)
    ]  # fmt: skip


def backs(more: int) -> list[Case]:
    """Gradients, with `more` values of each channel in front of dy."""
    domain = (*STATE, *[signed] * (more + 1))
    shapes = [(s, "relu_gradient") for s in SHAPES] + [((5, 3, 4), name) for name in GRADIENTS]
    return [case(*over_channels(s, 4 + more), s, gradient=n, domain=domain) for s, n in shapes]


def relu_rows() -> list[Sample]:
    made = []
    for output in (True, False):
        for count in (1, 2):
            state = (signed, signed, positive, *([signed] if output else [signed] * 2))
            cases = tuple(
                case(
                    *over_channels(s, 2), *([s] if output else [s[1:2]] * 2), *[s] * count,
                    part=part, domain=(*state, *[signed] * count),
                )
                for s in SHAPES
                for part in (0, 1)
            )  # fmt: skip
            name = f"batch_normalize_relu_sums_{'output' if output else 'recomputed'}_{count}"
            made.append(
                Sample(
                    name, fused.relu_sums_ops[output, count], relu_sums_formula(output, count),
                    cases, scale=relu_sums_formula(output, count, of_sizes=True), ulps=4,
                    differentiable=(), specials=False, build=relu_sums(output, count),
                    wide=(1, 2),
                )
            )  # fmt: skip
    return made


FUSED_NORM = (
    Sample(
        "batch_statistics_single_pass", fused.batch_statistics_single_pass_op,
        lambda x: both(batch_moments(x)), tuple(case(s) for s in SHAPES),
        scale=lambda x: 2 * np.abs(x).max(axis=over(x)) + (x**2).max(axis=over(x)), ulps=4,
        differentiable=(), specials=False, build=statistics,
    ),
    Sample(
        "batch_normalize_sums_single_pass", fused.batch_normalize_sums_single_pass_op,
        lambda *inputs: sums(*inputs, EPS, True),
        tuple(case(s, s[1:2], s[1:2], s) for s in SHAPES),
        domain=(signed, signed, positive, signed), ulps=4, differentiable=(), specials=False,
        scale=lambda *inputs: sums_scale(*inputs, EPS, True), build=plain_sums,
        wide=(1, 2),
    ),
    Sample(
        "batch_normalize_map", fused.batch_normalize_map_op, map_formula, tuple(maps()),
        scale=map_scale, ulps=4, differentiable=(), specials=False, build=normalize_map,
        wide=(1, 2, 6, 7),
    ),
    Sample(
        "batch_normalize_relu_bits", fused.batch_normalize_relu_bits_op,
        lambda *inputs, part: map_formula(*inputs, activation="relu"), tuple(maps_with_bits()),
        scale=lambda *inputs, part: map_scale(*inputs, activation="relu"), ulps=4,
        differentiable=(), specials=False, build=map_with_bits, wide=(1, 2, 6, 7),
    ),
    *(
        Sample(
            f"batch_normalize_relu_sums_bits_{count}", fused.relu_bits_sums_ops[count],
            bits_sums_formula, tuple(bit_cases(count)), scale=bits_sums_scale, ulps=4,
            differentiable=(), specials=False, build=bits_sums, wide=(1, 2),
        )
        for count in (1, 2)
    ),
    Sample(
        "positive_bits", fused.positive_bits_op,
        lambda x: np.packbits(x.ravel() > 0, bitorder="little"),
        tuple(case(s) for s in ((3, 5), (4, 8), (0, 3))), ulps=0, differentiable=(), fused=True,
    ),
    Sample(
        "keep_by_bits", fused.keep_by_bits_op, kept,
        tuple(case((-(-a * b // 8),), (a, b)) for a, b in ((3, 5), (4, 8), (0, 3))),
        domain=(classes(256, np.uint8), signed), ulps=0, differentiable=(), fused=True,
    ),
    Sample(
        "batch_normalize_map_sums", fused.batch_normalize_map_sums_op, map_sums_formula,
        tuple(backs(0)), scale=map_sums_scale, ulps=8, differentiable=(), specials=False,
        build=map_sums, wide=(1, 2),
    ),
    Sample(
        "batch_normalize_map_gradient", fused.batch_normalize_map_gradient_op,
        map_gradient_formula, tuple(backs(2)), scale=map_gradient_scale, ulps=16,
        differentiable=(), specials=False, build=map_gradient, wide=(1, 2, 5, 6),
    ),
    *relu_rows(),
)  # fmt: skip
