"""The rows of samples.py for rounding, division with a remainder, and further functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys.ops import comparison
from dlsys.ops.math import rounding, transcendental
from support.table.families.activation import BAD_PAIR, bools
from support.table.rows import (
    WIDE,
    Sample,
    Shape,
    case,
    mixed,
    nonzero,
    positive,
    product,
    signed,
    uniform,
)

ONE = tuple(case(s) for s in [(), (7,), (0,), (3, 5), WIDE, (4003,)])
PAIRS = tuple(
    case(a, b)
    for a, b in [
        ((3, 5), (3, 5)), ((7,), ()), ((), (7,)), ((3, 1), (1, 5)), ((4, 1, 3), (2, 1)),
        ((0, 3), (3,)), ((67, 1), (67, 29)), ((4003,), (4003,)),
    ]
)  # fmt: skip
WITHIN = uniform(-0.9, 0.9)


def dividend(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Odd numbers and a little, so that no small step makes a multiple of a `divisor`."""
    return 2 * rng.integers(-3, 3, shape) + 1 + uniform(-0.1, 0.1)(rng, shape)


def divisor(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return uniform(1.9, 2.1)(rng, shape) * rng.choice([-1.0, 1.0], shape)


def rounded(name: str, formula: Callable) -> Sample:
    op = getattr(rounding, f"{name}_op")
    return Sample(
        name, op, formula, ONE, uniform(-9, 9), ulps=0, integers="same", differentiable=()
    )


def divided(name: str, formula: Callable, **more: Any) -> Sample:
    op = getattr(rounding, f"{name}_op")
    domain = dividend, divisor
    refusals = (*BAD_PAIR, *mixed(name))
    return Sample(name, op, formula, PAIRS, domain, integers="same", refusals=refusals, **more)


def function(name: str, formula: Callable, **more: Any) -> Sample:
    op = getattr(transcendental, f"{name}_op")
    return Sample(name, op, formula, ONE, integers="float", **({"ulps": 4} | more))


def tested(name: str, formula: Callable) -> Sample:
    op = getattr(comparison, f"{name}_op")
    return Sample(name, op, formula, ONE, differentiable=(), integers="moved")


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def erf(x: np.ndarray) -> np.ndarray:
    far = np.vectorize(math.erfc, otypes=[float])(np.abs(x))
    return np.copysign(1 - far, x)


def sizes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(a) + np.abs(b)


# Worst: tan 2.4, expm1 2.4, all others 1.5.
MATHEMATICS = (
    rounded("floor", lambda x: -np.ceil(-x)),
    rounded("ceil", lambda x: -np.floor(-x)),
    rounded("trunc", lambda x: np.where(x < 0, np.ceil(x), np.floor(x))),
    rounded("round", lambda x: x + 1.5 * 2.0**52 - 1.5 * 2.0**52),
    divided(
        "floor_divide", lambda a, b: np.floor(a / b), ulps=0, differentiable=(), specials=False
    ),
    divided("remainder", remainder, scale=sizes),
    divided("fmod", lambda a, b: a - np.trunc(a / b) * b, scale=sizes, specials=False),
    function("expm1", lambda x: 2 * np.exp(x / 2) * np.sinh(x / 2), specials=False),
    function("exp2", lambda x: np.exp(x * np.log(2))),
    function("log2", lambda x: np.log(x) / np.log(2), domain=positive, gradient_ulps=16),
    function("log10", lambda x: np.log(x) / np.log(10), domain=positive, gradient_ulps=16),
    function("erf", erf, domain=nonzero),
    function("tan", lambda x: np.sin(x) / np.cos(x), domain=uniform(-1.4, 1.4), gradient_ulps=32),
    function(
        "asin", lambda x: np.arctan(x / np.sqrt(1 - x * x)), domain=WITHIN, gradient_ulps=32
    ),
    function(
        "acos", lambda x: np.arctan2(np.sqrt(1 - x * x), x), domain=WITHIN, gradient_ulps=32
    ),
    function("atan", lambda x: np.arctan2(x, 1)),
    function("sinh", lambda x: 0.5 * (np.expm1(x) - np.expm1(-x))),
    function("cosh", lambda x: 0.5 * (np.exp(x) + np.exp(-x))),
    function(
        "asinh", lambda x: np.sign(x) * np.log(np.abs(x) + np.sqrt(x * x + 1)), domain=nonzero
    ),
    function(
        "acosh", lambda x: np.log(x + np.sqrt(x * x - 1)), domain=uniform(1.25, 4),
        gradient_ulps=32,
    ),
    function(
        "atanh", lambda x: 0.5 * (np.log1p(x) - np.log1p(-x)), domain=WITHIN, gradient_ulps=32
    ),
    Sample(
        "atan2", transcendental.atan2_op, lambda a, b: np.angle(b + 1j * a), PAIRS, nonzero,
        ulps=4, gradient_ulps=16, integers="float", specials=False,
        refusals=(*BAD_PAIR, *mixed("atan2")),
    ),
    function("reciprocal", lambda x: x**-1.0, domain=nonzero, ulps=0.5),
    tested("isnan", lambda x: ~(np.abs(x) >= 0)),
    tested("isinf", lambda x: np.abs(x) > np.finfo(np.float64).max),
    tested("isfinite", lambda x: np.abs(x) <= np.finfo(np.float64).max),
    Sample(
        "masked_fill", comparison.masked_fill_op,
        lambda x, mask, value: x * (1 - mask) + np.float64(value) * mask,
        product(
            tuple(case(*s) for s in [((7,), (7,)), ((3, 5), (5,)), ((5,), (3, 5)), ((0,), ())]),
            {"value": -2.5}, {"value": 3},
        ),
        (signed, bools), ulps=0, differentiable=(0,), specials=False,
    ),
)  # fmt: skip
