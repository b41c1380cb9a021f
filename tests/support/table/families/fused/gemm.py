"""The rows of samples.py for the operators that passes make of several.

Their nodes are built as `fusion/gemm_epilogue.py` and `fusion/cross_entropy.py` build them: around
the nodes that they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.dtypes import is_narrow
from dlsys.fusion import cross_entropy, gemm_epilogue, gemm_residual, linear_cross_entropy
from dlsys.fusion.shared.body import ACTIVATIONS, GRADIENTS, close
from dlsys.ops import activation, elementwise
from dlsys.ops.leaf import constant_op
from dlsys.ops.loss import cross_entropy as loss
from support.table.formulas import (
    dense_gradient,
    dense_gradient_scale,
    dense_loss,
    dense_scale,
    matmul_reference,
    matmul_scale,
    rows_of,
)
from support.table.rows import Case, Sample, case, classes, extreme, one_hot, signed, weights

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(x / 2))


def normal_cdf(x: Array) -> Array:
    return np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes=[float])(x)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, Callable[[Array], Array]] = {
    "": lambda x: x,
    "relu": lambda x: np.where(x <= 0, 0, x),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * normal_cdf(x),
    "gelu_tanh": gelu_tanh,
    "softplus": lambda x: np.logaddexp(0, x),
    "hard_sigmoid": lambda x: np.clip((x + 3) / 6, 0, 1),
    "hard_swish": lambda x: x * np.clip((x + 3) / 6, 0, 1),
}


def gelu_dact(x: Array) -> Array:
    return normal_cdf(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh_dact(x: Array) -> Array:
    k = math.sqrt(2 / math.pi)
    t = np.tanh(k * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)


# What each gradient multiplies by, of its first input.
DACTS: dict[str, Callable[[Array], Array]] = {
    "relu_gradient": lambda y: (y > 0).astype(np.float64),
    "silu_gradient": lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x))),
    "gelu_gradient": gelu_dact,
    "gelu_tanh_gradient": gelu_tanh_dact,
    "softplus_gradient": lambda y: 1 - np.exp(-y),
    "hard_swish_gradient": lambda x: np.where(abs(x) < 3, (2 * x + 3) / 6, x >= 3),
}


def operator(name: str) -> Any:
    found = getattr(elementwise, f"{name}_op", None)
    return found if found is not None else getattr(activation, f"{name}_op")


def flags_of(attrs: dict) -> dict:
    return {name: attrs[name] for name in ("trans_A", "trans_B")}


def linear(a: Any, b: Any, bias: Any, **attrs: Any) -> Any:
    y = ad.matmul_op(a, b, **flags_of(attrs)) + bias
    y = operator(attrs["activation"])(y) if attrs["activation"] else y
    return gemm_epilogue.matmul_bias_op(a, b, bias, body=close((a, b, bias), (y,)), **attrs)


def linear_both(a: Any, b: Any, bias: Any, part: int, **attrs: Any) -> Any:
    y = ad.matmul_op(a, b, **flags_of(attrs)) + bias
    body = close((a, b, bias), (y, operator(attrs["activation"])(y)))
    return gemm_epilogue.matmul_bias_both_op(a, b, bias, body=body, **attrs)[part]


def linear_slope(a: Any, b: Any, bias: Any, part: int, **attrs: Any) -> Any:
    y = ad.matmul_op(a, b, **flags_of(attrs)) + bias
    name = attrs["activation"]
    slope = gemm_epilogue.quantized_slope(operator(f"{name}_gradient")(y, ad.oneslike_op(y)))
    body = close((a, b, bias), (slope, operator(name)(y)))
    return gemm_epilogue.matmul_bias_slope_op(a, b, bias, body=body, **attrs)[part]


def matmul_map(a: Any, b: Any, **attrs: Any) -> Any:
    y = operator(attrs["activation"])(ad.matmul_op(a, b, **flags_of(attrs)))
    return gemm_epilogue.matmul_map_op(a, b, body=close((a, b), (y,)), **attrs)


def matmul_gradient(a: Any, b: Any, side: Any, **attrs: Any) -> Any:
    y = ad.matmul_op(a, b, **flags_of(attrs))
    quantized = attrs["gradient"] == "mul_quantized"
    dx = (
        gemm_epilogue.times_quantized(side, y)
        if quantized
        else operator(attrs["gradient"])(side, y)
    )
    return gemm_epilogue.matmul_gradient_op(a, b, side, body=close((a, b, side), (dx,)), **attrs)


def matmul_add(a: Any, b: Any, *others: Any, **attrs: Any) -> Any:
    *bias, residual = others
    y = ad.matmul_op(a, b, **flags_of(attrs))
    for other in others:
        y = y + other
    y = ad.relu_op(y) if attrs["activation"] else y
    op = gemm_residual.matmul_bias_add_op if bias else gemm_residual.matmul_add_op
    return op(a, b, *others, body=close((a, b, *others), (y,)), **attrs)


def matmul_sums(a: Any, b: Any, part: int, of_A: bool, **flags: Any) -> Any:
    total = ad.sum_op(a if of_A else b, axis=0, dtype=np.float32)
    outputs = ad.matmul_op(a, b, **flags), total
    body = close((a, b), outputs)
    return gemm_epilogue.matmul_sums_op(a, b, body=body, of_A=of_A, **flags)[part]


def loss_and_gradient(op: Any, x: Any, labels: Any, part: int, mean: bool) -> Any:
    sparse = op is cross_entropy.fused_sparse_cross_entropy_op
    rows_op = loss.sparse_cross_entropy_rows_op if sparse else loss.cross_entropy_rows_op
    gradient_op = (
        loss.sparse_cross_entropy_gradient_op if sparse else loss.cross_entropy_gradient_op
    )
    rows = rows_op(x, labels)
    count = rows.spec.size
    scale = (1 / count if count else math.nan) if mean else 1.0
    total = ad.mean_op(rows) if mean else ad.sum_op(rows)
    dx = gradient_op(x, labels, ad.full_op(rows.spec.shape, 0.5 * scale, x.spec.dtype))
    body = close((x, labels), (total, dx))
    return op(x, labels, body, scale=scale, dy=0.5 * scale)[part]


def linear_loss(x: Any, w: Any, labels: Any, part: int, **factors: float) -> Any:
    workspace = constant_op(np.zeros(cross_entropy.WORKSPACE, np.int32))
    made = linear_cross_entropy.linear_cross_entropy(x, w, labels, workspace, **factors)
    parts = (made[0], made[1] * made[2], made[3] / made[2])
    return parts[part]


def linear_loss_formula(
    x: Array, w: Array, labels: Array, part: int, scale: float, dy: float
) -> Array:
    logits = x @ w.T
    dense = rows_of(labels, logits)
    if part == 0:
        return scale * dense_loss(logits, dense, "sum")
    if part == 2:
        return x
    return dense_gradient(logits, dense, np.full(len(x), dy))


def linear_loss_scale(
    x: Array, w: Array, labels: Array, part: int, scale: float, dy: float
) -> Array:
    """A logit's rounding is an error of the loss, and a relative one of its exponential."""
    if part == 2:
        return np.abs(x)
    rounding = matmul_scale(x, w.T, trans_A=False, trans_B=False).max(axis=1)
    if part == 0:
        return scale * (rounding.sum() + dense_scale(x @ w.T, rows_of(labels, x @ w.T), "sum"))
    return np.broadcast_to((dy * (1 + rounding))[:, None], (len(x), len(w)))


def widened(x: Any) -> Any:
    return ad.cast_op(x, np.float32) if is_narrow(x.spec.dtype) else x


def narrow_losses(x: Any, labels: Any) -> Any:
    rows = loss.sparse_cross_entropy_rows_op(widened(x), labels)
    return cross_entropy.narrow_losses_op(x, labels, body=close((x, labels), (rows,)))


def narrow_gradient(x: Any, labels: Any, dy: Any) -> Any:
    dx = loss.sparse_cross_entropy_gradient_op(widened(x), labels, dy)
    dx = ad.cast_op(dx, x.spec.dtype) if is_narrow(x.spec.dtype) else dx
    body = close((x, labels, dy), (dx,))
    return cross_entropy.narrow_gradient_op(x, labels, dy, body=body)


def linear_formula(a: Array, b: Array, bias: Array, activation: str, **flags: Any) -> Array:
    return FORMULAS[activation](matmul_reference(a, b, **flags) + bias)


def linear_scale(a: Array, b: Array, bias: Array, activation: str, **flags: Any) -> Array:
    rounding = matmul_scale(a, b, **flags) + np.abs(bias)
    return 1.2 * rounding + np.abs(linear_formula(a, b, bias, activation, **flags))


def both_formula(
    a: Array, b: Array, bias: Array, part: int, activation: str, **flags: Any
) -> Array:
    return linear_formula(a, b, bias, activation if part else "", **flags)


def both_scale(a: Array, b: Array, bias: Array, part: int, activation: str, **flags: Any) -> Array:
    return linear_scale(a, b, bias, activation if part else "", **flags)


def gradient_formula(a: Array, b: Array, side: Array, gradient: str, **flags: Any) -> Array:
    quantized = gradient == "mul_quantized"
    slope = (side.astype(np.float64) - 27) / 200 if quantized else DACTS[gradient](side)
    return slope * matmul_reference(a, b, **flags)


def gradient_scale(a: Array, b: Array, side: Array, gradient: str, **flags: Any) -> Array:
    return 1.2 * matmul_scale(a, b, **flags)


def residual_formula(a: Array, b: Array, *others: Array, activation: str, **flags: Any) -> Array:
    return FORMULAS[activation](matmul_reference(a, b, **flags) + sum(others))


def residual_scale(a: Array, b: Array, *others: Array, activation: str, **flags: Any) -> Array:
    rounding = matmul_scale(a, b, **flags) + sum(map(np.abs, others))
    return 1.2 * rounding + np.abs(residual_formula(a, b, *others, activation=activation, **flags))


def sums_formula(a: Array, b: Array, part: int, of_A: bool, **flags: Any) -> Array:
    return (a if of_A else b).sum(axis=0) if part else matmul_reference(a, b, **flags)


def sums_scale(a: Array, b: Array, part: int, of_A: bool, **flags: Any) -> Array:
    summed = np.abs(a if of_A else b)
    root = math.sqrt(max(len(summed), 1))
    return root * summed.sum(axis=0) if part else matmul_scale(a, b, **flags)


def loss_formula(x: Array, labels: Array, part: int, mean: bool) -> Array:
    dense = labels if labels.shape == x.shape else rows_of(labels, x)
    if part == 0:
        return dense_loss(x, dense, "mean" if mean else "sum")
    rows = x.shape[:-1]
    with np.errstate(all="ignore"):
        dy = 0.5 / np.float64(math.prod(rows)) if mean else 0.5
    return dense_gradient(x, dense, np.full(rows, dy))


def loss_scale(x: Array, labels: Array, part: int, mean: bool) -> Array:
    dense = labels if labels.shape == x.shape else rows_of(labels, x)
    rows = x.shape[:-1]
    count = max(math.prod(rows), 1)
    if part == 0:
        return dense_scale(x, dense, "sum") / (count if mean else 1)
    return dense_gradient_scale(x, dense, np.full(rows, 0.5 / count if mean else 0.5))


SIZES = (
    (3, 5, 4), (1, 1, 1), (0, 3, 2), (2, 0, 3), (3, 2, 0), (17, 31, 13), (64, 64, 64),
    (131, 67, 97), (5, 1031, 3), (200, 784, 10), (129, 100, 256), (257, 300, 129),
)  # fmt: skip
FLAGS = tuple((trans_A, trans_B) for trans_A in (False, True) for trans_B in (False, True))


def products(third: Callable[[int, int], tuple] | None, **attrs: Any) -> list[Case]:
    """Every size with every pair of flags."""
    made = []
    for rows, inner, columns in SIZES:
        for trans_A, trans_B in FLAGS:
            a = (inner, rows) if trans_A else (rows, inner)
            b = (columns, inner) if trans_B else (inner, columns)
            more = (third(rows, columns),) if third else ()
            made.append(case(a, b, *more, trans_A=trans_A, trans_B=trans_B, **attrs))
    return made


def one_product(third: Callable[[int, int], tuple] | None, **attrs: Any) -> Case:
    more = (third(19, 23),) if third else ()
    return case((19, 7), (7, 23), *more, trans_A=False, trans_B=False, **attrs)


def summed() -> list[Case]:
    """Products one of whose operands has the depth first, for both parts of the result."""
    plain = products(None)
    return [
        Case(one.shapes, {**one.attrs, "part": part, "of_A": of_A})
        for one in plain
        for part in (0, 1)
        for of_A in (False, True)
        if (one.attrs["trans_A"] if of_A else not one.attrs["trans_B"])
    ]


def row_of(rows: int, columns: int) -> tuple:
    return (columns,)


def both() -> list[Case]:
    """Every activation, and sizes of one, for both parts; rows of C at multiples of 16 bytes are
    stored by the rung hopper.
    """
    cases = [one_product(row_of, activation=name) for name in ACTIVATIONS]
    cases += [
        case(
            (rows, inner), (inner, columns), (columns,),
            trans_A=False, trans_B=False, activation=name,
        )
        for rows, inner, columns in ((17, 31, 24), (131, 67, 136), (0, 3, 8), (3, 0, 8))
        for name in ("gelu_tanh", "relu")
    ]  # fmt: skip
    return [Case(one.shapes, {**one.attrs, "part": part}) for one in cases for part in (0, 1)]


def slopes() -> list[Case]:
    """The cases of `both` of activations whose gradients are of their input; rounding moves some
    of these by one, which test_narrow_gemm.py judges.
    """
    names = ("silu", "gelu", "gelu_tanh")
    return [one for one in both() if one.attrs["activation"] in names and one.attrs["part"]]


def quantized(rows: int, inner: int, columns: int) -> Case:
    """A product with quantized derivatives; rows of 16 columns are stored by the rung hopper."""
    domain = (signed, signed, classes(256, np.uint8))
    shapes = (rows, inner), (inner, columns), (rows, columns)
    return case(*shapes, domain=domain, trans_A=False, trans_B=False, gradient="mul_quantized")


def side_of(rows: int, columns: int) -> tuple:
    return (rows, columns)


def residuals(*, bias: bool) -> list[Case]:
    """Every size with every pair of flags, with relu and without."""
    made = []
    for one in (*products(side_of, activation=""), *products(side_of, activation="relu")):
        a, b, side = one.shapes
        made.append(Case((a, b, side[1:], side) if bias else one.shapes, one.attrs))
    return made


PARTS = tuple({"part": part, "mean": mean} for part in (0, 1) for mean in (True, False))
SHAPES = ((4, 3), (7, 10), (0, 3), (2, 3, 5), (33, 17), (5, 129), (3, 700), (9000, 3))
LOGITS = tuple(
    (shape, domain)
    for shape in ((4, 3), (2, 3, 5), (33, 17), (3, 700))
    for domain in (signed, extreme)
)
DENSE = tuple(
    case(shape, shape, domain=domain, **attrs)
    for shape in SHAPES
    for domain in ((signed, weights), (extreme, one_hot))
    for attrs in PARTS
    if math.prod(shape) or attrs["part"]
)
SPARSE = tuple(
    case(shape, shape[:-1], domain=(domain, classes(shape[-1], dtype)), **attrs)
    for shape in SHAPES
    for domain, dtype in ((signed, np.int64), (extreme, np.uint8))
    for attrs in PARTS
    if (math.prod(shape) or attrs["part"]) and (shape[-1] < 256 or dtype is not np.uint8)
)

# The product's rounding as in its own row, the activation's of up to 4 ulp on top.
FUSED = (
    Sample(
        "matmul_bias", gemm_epilogue.matmul_bias_op, linear_formula,
        (
            *products(row_of, activation="relu"), *products(row_of, activation=""),
            *(one_product(row_of, activation=name) for name in ACTIVATIONS),
        ),
        scale=linear_scale, ulps=4, differentiable=(), build=linear,
    ),
    Sample(  # where the activation is a step of its own, its input is rounded before
        "matmul_bias_both", gemm_epilogue.matmul_bias_both_op, both_formula, tuple(both()),
        scale=both_scale, ulps=4, differentiable=(), build=linear_both, roundings=2, fused=True,
    ),
    Sample(
        "matmul_bias_slope", gemm_epilogue.matmul_bias_slope_op, both_formula, tuple(slopes()),
        scale=both_scale, ulps=4, differentiable=(), build=linear_slope, roundings=2, fused=True,
    ),
    Sample(
        "matmul_map", gemm_epilogue.matmul_map_op,
        lambda a, b, activation, **flags: FORMULAS[activation](matmul_reference(a, b, **flags)),
        (
            *products(None, activation="relu"),
            *(one_product(None, activation=name) for name in ACTIVATIONS),
        ),
        scale=lambda a, b, **attrs: linear_scale(a, b, np.zeros(1), **attrs), ulps=4,
        differentiable=(), build=matmul_map,
    ),
    Sample(
        "matmul_gradient", gemm_epilogue.matmul_gradient_op, gradient_formula,
        (
            *products(side_of, gradient="relu_gradient"),
            *(one_product(side_of, gradient=name) for name in GRADIENTS),
            *(quantized(*sizes) for sizes in ((17, 31, 24), (131, 67, 144), (0, 3, 8), (3, 0, 8))),
        ),
        scale=gradient_scale, ulps=8, differentiable=(), specials=False, build=matmul_gradient,
    ),
    Sample(
        "matmul_add", gemm_residual.matmul_add_op, residual_formula,
        tuple(residuals(bias=False)),
        scale=residual_scale, ulps=4, differentiable=(), build=matmul_add,
    ),
    Sample(
        "matmul_bias_add", gemm_residual.matmul_bias_add_op, residual_formula,
        tuple(residuals(bias=True)),
        scale=residual_scale, ulps=4, differentiable=(), build=matmul_add,
    ),
    Sample(
        "matmul_sums", gemm_epilogue.matmul_sums_op, sums_formula, tuple(summed()),
        scale=sums_scale, ulps=1, differentiable=(), specials=False, build=matmul_sums,
    ),
    Sample(
        "fused_cross_entropy", cross_entropy.fused_cross_entropy_op, loss_formula, DENSE,
        scale=loss_scale, ulps=16, differentiable=(), specials=False,
        build=partial(loss_and_gradient, cross_entropy.fused_cross_entropy_op),
    ),
    Sample(
        "fused_sparse_cross_entropy", cross_entropy.fused_sparse_cross_entropy_op, loss_formula,
        SPARSE, scale=loss_scale, ulps=16, differentiable=(), specials=False,
        build=partial(loss_and_gradient, cross_entropy.fused_sparse_cross_entropy_op),
    ),
    Sample(
        "linear_cross_entropy", linear_cross_entropy.linear_cross_entropy_op, linear_loss_formula,
        tuple(
            case((rows, k), (n, k), (rows,), domain=(signed, signed, classes(n, np.int64)),
                 part=part, scale=0.25, dy=0.125)
            for rows, k, n in ((1, 1, 1), (5, 3, 8), (7, 16, 131))
            for part in (0, 1, 2)
        ),
        scale=linear_loss_scale, ulps=16, differentiable=(), specials=False, storages=(),
        build=linear_loss,
    ),
    Sample(
        "matmul_row_factors", linear_cross_entropy.matmul_row_factors_op,
        lambda a, b, factors: a @ b * factors,
        tuple(case((m, k), (k, n), (m, 1)) for m, k, n in ((1, 1, 1), (5, 3, 8), (7, 16, 131))),
        scale=lambda a, b, factors: (
            matmul_scale(a, b, trans_A=False, trans_B=False) * np.abs(factors)
        ),
        ulps=1.5, differentiable=(), specials=False, storages=(),
        build=linear_cross_entropy.matmul_row_factors,
    ),
    Sample(
        "narrow_cross_entropy", cross_entropy.narrow_losses_op,
        lambda x, labels: dense_loss(x, rows_of(labels, x), "none"),
        tuple(
            case(shape, shape[:-1], domain=(domain, classes(shape[-1], np.int64)))
            for shape, domain in LOGITS
        ),
        scale=lambda x, labels: dense_scale(x, rows_of(labels, x), "none"), ulps=16,
        differentiable=(), specials=False, build=narrow_losses, fused=True,
    ),
    Sample(
        "narrow_cross_entropy_gradient", cross_entropy.narrow_gradient_op,
        lambda x, labels, dy: dense_gradient(x, rows_of(labels, x), dy),
        tuple(
            case(
                shape, shape[:-1], shape[:-1],
                domain=(domain, classes(shape[-1], np.int64), signed),
            )
            for shape, domain in LOGITS
        ),
        scale=lambda x, labels, dy: dense_gradient_scale(x, rows_of(labels, x), dy), ulps=16,
        differentiable=(), specials=False, build=narrow_gradient, wide=(2,), fused=True,
    ),
)  # fmt: skip
