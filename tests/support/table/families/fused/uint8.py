"""The rows of samples.py for uint8 inputs, as `fusion/uint8_inputs.py` builds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.fusion import uint8_inputs as fused
from dlsys.fusion.shared.body import ACTIVATIONS, close, with_uint8
from dlsys.ops.random import device_batch
from support.table.families.device_batch import NEXT, chosen, pixels
from support.table.families.fused.gemm import SIZES, linear_formula, linear_scale, operator
from support.table.rows import Case, Sample, case, signed

Array = np.ndarray


def product(a: Any, b: Any, *rest: Any, activation: str, trans_B: bool) -> Any:
    """activation(scale · A op(B) + bias) of a, b, perhaps a bias, and the scale."""
    *bias, scale = rest
    x = ad.Variable("x", shape=a.spec.shape, dtype=b.spec.dtype)
    y = ad.matmul_op(x, b, trans_B=trans_B)
    y = y + bias[0] if bias else y
    y = operator(activation)(y) if activation else y
    body = with_uint8(close((x, b, *bias), (y,)), [0])
    op = fused.matmul_u8_bias_op if bias else fused.matmul_u8_op
    flags = {"trans_A": False, "trans_B": trans_B}
    return op(a, b, *bias, scale, body=body, activation=activation, **flags)


def formula(a: Array, b: Array, *rest: Array, **attrs: Any) -> Array:
    *bias, scale = rest
    return linear_formula(a * scale, b, bias[0] if bias else np.zeros(1), trans_A=False, **attrs)


def size(a: Array, b: Array, *rest: Array, **attrs: Any) -> Array:
    *bias, scale = rest
    return linear_scale(a * scale, b, bias[0] if bias else np.zeros(1), trans_A=False, **attrs)


def products(bias: bool) -> tuple[Case, ...]:
    domain = (pixels, signed, *([signed] if bias else []), lambda rng, shape: np.array(2.0**-8))
    settings = [(s, "relu", flag) for s in SIZES for flag in (False, True)]
    settings += [((19, 7, 23), name, False) for name in ("", *ACTIVATIONS)]
    return tuple(
        case(
            (rows, inner), (columns, inner) if trans_B else (inner, columns),
            *([(columns,)] if bias else []), (), activation=activation, trans_B=trans_B,
            domain=domain,
        )
        for (rows, inner, columns), activation, trans_B in settings
    )  # fmt: skip


def rows(part: int) -> Any:
    return lambda *inputs, **attrs: device_batch.shuffled_rows_op(*inputs, **attrs)[part]


ROWS = tuple(
    Case(one.shapes[:3], one.attrs, one.domain[:3])  # type: ignore[index]
    for one in NEXT
    if one.domain[0] is pixels  # type: ignore[index]
)
FUSED_UINT8 = (
    Sample(
        "matmul_u8", fused.matmul_u8_op, formula, products(False), scale=size, ulps=4,
        differentiable=(), specials=False, build=product,
    ),
    Sample(
        "matmul_u8_bias", fused.matmul_u8_bias_op, formula, products(True), scale=size, ulps=4,
        differentiable=(), specials=False, build=product,
    ),
    Sample(
        "shuffled_rows", device_batch.shuffled_rows_op,
        lambda samples, labels, step, **attrs: samples[chosen(step, len(samples), **attrs)],
        ROWS, ulps=0, differentiable=(), specials=False, fused=True, build=rows(0),
    ),
    Sample(
        "shuffled_rows_labels", device_batch.shuffled_rows_op,
        lambda samples, labels, step, **attrs: labels[chosen(step, len(samples), **attrs)],
        ROWS, ulps=0, differentiable=(), specials=False, fused=True, build=rows(1),
    ),
    Sample(
        "scaled", device_batch.scaled_op, lambda x, scale: x * scale,
        tuple(case(s, ()) for s in ((3, 4), (0, 2), (5, 1, 7, 3), (70_001,))),
        domain=(pixels, signed), ulps=0.5, differentiable=(), specials=False, fused=True,
    ),
)  # fmt: skip
