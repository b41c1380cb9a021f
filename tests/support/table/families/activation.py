"""The rows of samples.py for activations, other elementwise functions, comparisons and choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys.ops import activation, comparison, elementwise
from support.table.rows import (
    WIDE,
    Case,
    Sample,
    Shape,
    case,
    extreme,
    mixed,
    nonzero,
    positive,
    product,
    refuse,
    signed,
    uniform,
)

# Errors of functions that multiply x by a number between 0 and 1, or by their sum with a small
# one, are measured against x: where that number is tiny its own relative error is larger.
SHAPES = ((), (1,), (7,), (0,), (3, 5), WIDE, (31, 33), (70_001,))
ONE = tuple(case(s) for s in SHAPES)
FEW = tuple(case(s) for s in [(7,), (0, 4), (37, 41)])
TAILS = (*ONE, case((1003,), domain=extreme), case((1003,), domain=uniform(-20, 20)))
SAME = tuple(case(s, s) for s in [(7,), (), (0, 4), (37, 41), (70_001,)])
PAIRS = tuple(
    case(a, b)
    for a, b in [
        ((3, 5), (3, 5)), ((7,), ()), ((), (7,)), ((3, 1), (1, 5)), ((4, 1, 3), (2, 1)),
        ((0, 3), (3,)), ((131, 67), (67,)), ((67, 1), (67, 129)), (WIDE, (1, 3, 1, 2, 1, 2, 1, 1)),
        ((300, 257), (300, 257)), ((70_001,), (70_001,)),
    ]
)  # fmt: skip
BAD_PAIR = (refuse(r"shapes do not broadcast: \S+ \(3, 4\) and \S+ \(3,\)", (3, 4), (3,)),)


# ---- formulas ----


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def phi(x: np.ndarray) -> np.ndarray:
    """The normal distribution function by the C library."""
    return 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))


def density(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_tanh_slope(x: np.ndarray) -> np.ndarray:
    k = math.sqrt(2 / math.pi)
    t = np.tanh(k * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0) + np.log1p(np.exp(-np.abs(x)))


def hard(x: np.ndarray) -> np.ndarray:
    return np.clip(x + 3, 0, 6) / 6


def size(x: np.ndarray, *rest: Any, **attrs: Any) -> np.ndarray:
    return np.abs(x)


def slope_size(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    return np.abs(g)


def bools(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.uniform(size=shape) < 0.5


def few_values(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """So few that many are equal."""
    return rng.integers(-2, 3, shape).astype(np.float64)


def apart(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return np.round(rng.uniform(-2, 2, shape) * 64) / 64


def between(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Never nearer than 1/128 to a number of `apart`."""
    return apart(rng, shape) + 1 / 128


# ---- rows ----


def function(name: str, formula: Callable, family: Any = activation, **more: Any) -> Sample:
    more = {"cases": TAILS, "integers": "float"} | more
    return Sample(name, getattr(family, f"{name}_op"), formula, **more)


def slope(name: str, formula: Callable, cases: tuple[Case, ...] = SAME, **more: Any) -> Sample:
    op = getattr(activation, f"{name}_gradient_op")
    return Sample(f"{name}_gradient", op, formula, cases, integers="float", **more)


def compared(name: str, formula: Callable) -> Sample:
    op = getattr(comparison, f"{name}_op")
    return Sample(
        name, op, formula, PAIRS, few_values, differentiable=(), integers="moved",
        refusals=(*BAD_PAIR, *mixed(name)),
    )  # fmt: skip


def logical(name: str, formula: Callable) -> Sample:
    op = getattr(comparison, f"{name}_op")
    return Sample(
        name, op, formula, PAIRS if name != "logical_not" else ONE, few_values, differentiable=(),
        integers="moved", refusals=BAD_PAIR if name != "logical_not" else (),
    )  # fmt: skip


def truth(name: str, sign: str, formula: Callable) -> Sample:
    """The operators of `&` and the like: they take truth values alone."""
    op, two = getattr(comparison, f"truth_{name}_op"), name != "not"
    return Sample(
        f"truth_{name}", op, formula, PAIRS if two else ONE, bools, differentiable=(), ulps=0,
        specials=False,
        refusals=(
            refuse(rf"{sign}: expected truth values, got \S+ of float32; compare it first",
                   *[(3,)] * (1 + two)),
        ),
    )  # fmt: skip


ALPHAS = ({"alpha": 0.1}, {"alpha": 0}, {"alpha": 1.5}, {"alpha": -0.5})

# Worst: log1p 1.5, rsqrt 0.8, silu 1.3, gelu 1.6, gelu_tanh 1, softplus 1.4, elu 1.8, others 0.9.
FUNCTIONS = (
    function(
        "log1p", lambda x: np.log1p(x), elementwise, domain=uniform(-0.9, 2), ulps=4,
        cases=(*ONE, case((999,), domain=uniform(0, 1e4))),
    ),
    function(
        "rsqrt", lambda x: 1 / np.sqrt(x), elementwise, cases=ONE, domain=positive, ulps=2,
        gradient_ulps=16,
    ),
    function("abs", lambda x: np.where(x < 0, -x, x) + 0.0, elementwise, domain=nonzero, ulps=0,
             cases=ONE, integers="same"),
    function("sign", lambda x: x / np.where(x == 0, 1, np.abs(x)) if np.isfinite(x).all()
             else np.sign(x), elementwise, domain=nonzero, ulps=0, cases=ONE, integers="same",
             differentiable=()),
    Sample(
        "clip", elementwise.clip_op, lambda x, low, high: np.minimum(np.maximum(x, low), high),
        product(ONE, {"low": -0.5, "high": 1.25}, {"low": 1, "high": 1}), nonzero, ulps=0,
        differentiable=(), refusals=(refuse(r"clip: low 2 is above high 1", (3,), low=2, high=1),),
    ),
    Sample(
        "clip_smooth", elementwise.clip_op,
        lambda x, low, high: np.minimum(np.maximum(x, low), high),
        product(FEW, {"low": -3, "high": 5.5}, {"low": 0, "high": 7}), nonzero, ulps=0,
    ),
    Sample(
        "clip_gradient", elementwise.clip_gradient_op,
        lambda x, g, low, high: np.where((x > low) & (x < high), g, 0),
        product(SAME, {"low": 0, "high": 3}), nonzero, ulps=0, differentiable=(1,),
    ),
    Sample(
        "cast_like", elementwise.cast_like_op, lambda x, like: x, (case((3, 4), (2,)),), ulps=0,
        differentiable=(0,), wide=(1,), integers="moved",
    ),
    Sample("as_node", elementwise.as_node, lambda x: x, FEW, ulps=0),
    function("relu6", lambda x: np.minimum(np.maximum(x, 0), 6), domain=nonzero, ulps=0, cases=ONE),
    Sample(
        "leaky_relu", activation.leaky_relu_op, lambda x, alpha: np.where(x > 0, x, alpha * x),
        product(ONE, *ALPHAS), nonzero, ulps=1, integers="float",
    ),
    Sample(
        "elu", activation.elu_op,
        lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.where(x > 0, 0, x))),
        product((*ONE, case((999,), domain=extreme)), *ALPHAS[:3]), nonzero, ulps=4,
        integers="float", refusals=(refuse(r"elu: expected alpha >= 0, got -1", (3,), alpha=-1),),
    ),
    function("silu", lambda x: x * logistic(x), scale=size, ulps=4),
    function("gelu", lambda x: x * phi(x), scale=size, ulps=4),
    function("gelu_tanh", gelu_tanh, scale=size, ulps=4),
    function("softplus", softplus, ulps=4),
    function("hard_sigmoid", hard, cases=ONE, scale=lambda x: 1 + 0 * x, ulps=1),
    function("hard_swish", lambda x: x * hard(x), cases=ONE, scale=size, ulps=2),
    slope(
        "leaky_relu", lambda x, g, alpha: np.where(x > 0, g, alpha * g), product(SAME, *ALPHAS),
        domain=nonzero, ulps=1, differentiable=(1,),
    ),
    slope(
        "elu", lambda y, g, alpha: np.where(y > 0, g, g * (y + alpha)), product(SAME, *ALPHAS[:3]),
        domain=nonzero, ulps=4, scale=lambda y, g, alpha: np.abs(g) * (1 + np.abs(y) + alpha),
    ),
    slope(
        "silu", lambda x, g: g * logistic(x) * (1 + x * (1 - logistic(x))), scale=slope_size,
        ulps=8,
    ),
    slope("gelu", lambda x, g: g * (phi(x) + x * density(x)), scale=slope_size, ulps=8),
    slope("gelu_tanh", lambda x, g: g * gelu_tanh_slope(x), scale=slope_size, ulps=8),
    slope("softplus", lambda y, g: -g * np.expm1(-y), ulps=4, domain=positive),
    slope(
        "hard_swish",
        lambda x, g: np.where(x <= -3, 0, np.where(x >= 3, g, g * (2 * x + 3) / 6)),
        scale=slope_size, ulps=4,
    ),
)  # fmt: skip

CHOICES = (
    compared("equal", lambda a, b: a == b),
    compared("not_equal", lambda a, b: a != b),
    compared("less", lambda a, b: a < b),
    compared("less_equal", lambda a, b: a <= b),
    compared("greater", lambda a, b: a > b),
    compared("greater_equal", lambda a, b: a >= b),
    logical("logical_and", lambda a, b: (a != 0) & (b != 0)),
    logical("logical_or", lambda a, b: (a != 0) | (b != 0)),
    logical("logical_xor", lambda a, b: (a != 0) ^ (b != 0)),
    logical("logical_not", lambda a: a == 0),
    truth("and", "&", lambda a, b: a & b),
    truth("or", r"\|", lambda a, b: a | b),
    truth("xor", r"\^", lambda a, b: a ^ b),
    truth("not", "~", lambda a: ~a),
    Sample(
        "where", comparison.where_op, lambda c, a, b: np.where(c != 0, a, b),
        tuple(
            case(*shapes)
            for shapes in [
                ((7,), (7,), (7,)), ((), (), ()), ((3, 5), (), (5,)), ((5,), (3, 5), (3, 1)),
                ((3, 1), (1, 5), (4, 1, 1)), ((0,), (1,), ()), ((131, 67), (131, 67), (67,)),
                (WIDE, (3, 1, 1, 1, 1, 1), WIDE), ((70_001,), (70_001,), (70_001,)),
            ]
        ),
        (bools, signed, signed), ulps=0, differentiable=(1, 2), integers="moved",
        refusals=(
            refuse(r"where: shapes do not broadcast: .*\(2,\)", (3,), (3,), (2,)),
            refuse(r"where: \S+ is float32 and \S+ is float64", (3,), (3,), (3,),
                   dtypes=("bool", "float32", "float64")),
        ),
    ),
    Sample(
        "minimum", comparison.minimum_op, np.minimum, PAIRS, (apart, between),
        ulps=0, integers="same", refusals=(*BAD_PAIR, *mixed("minimum")),
    ),
    Sample(
        "maximum", comparison.maximum_op, np.maximum, PAIRS, (apart, between),
        ulps=0, integers="same", refusals=(*BAD_PAIR, *mixed("maximum")),
    ),
)  # fmt: skip
