"""The rows of samples.py for random numbers and dropout."""

from __future__ import annotations

from functools import cache
from math import erfc
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.ops.random import sampling
from support.table.rows import Domain, Sample, Shape, case, product, refuse

SEED = 0x0123456789ABCDEF
BELOW = 0.5 * erfc(2 * 0.5**0.5)  # the probability of less than -2 deviations

# ---- formulas ----


def philox_words(step: int, node: int, block: int) -> list[int]:
    """The four words of a block, in Python's integers, from the paper's description."""
    low = 0xFFFFFFFF
    c = [block & low, block >> 32, step & low, node & low]
    key = [SEED & low, SEED >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ key[0], second & low, first >> 32 ^ c[3] ^ key[1], first & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return c


@cache
def words(shape: Shape) -> np.ndarray:
    n = int(np.prod(shape))
    made = [w for block in range((n + 3) // 4) for w in philox_words(0, 0, block)]
    return np.array(made[:n], np.float64).reshape(shape)


def keeps(shape: Shape, probability: float) -> np.ndarray:
    return (words(shape) < probability * 2.0**32).astype(np.float64)


def quantile(p: np.ndarray) -> np.ndarray:
    """The inverse of the normal distribution by halving intervals."""
    distribution = np.vectorize(lambda x: 0.5 * erfc(-x * 0.5**0.5), otypes=[float])
    low, high = np.full(p.shape, -9.0), np.full(p.shape, 9.0)
    for _ in range(70):
        middle = (low + high) / 2
        below = distribution(middle) < p
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low


def build(make: Any) -> Any:
    """The node that `make` builds with a generator of its own."""
    return lambda *inputs, **attrs: make(*inputs, **attrs, generator=sampling.Generator(SEED))


def of_step(op: Any) -> Any:
    return lambda **attrs: op(ad.Parameter(np.int64(0)), seed=SEED, node=0, **attrs)


def dropped(x: np.ndarray, p: float) -> np.ndarray:
    return x * keeps(x.shape, 1 - p) / (1 - p)


def of_draw(draw: int) -> int:
    """The offset that draw `draw` adds to a step below 2^32: its bits, the lowest first, as an
    int64.
    """
    high = sum(((draw >> bit) & 1) << (63 - bit) for bit in range(32))
    return high - (high >> 63 << 64)


def number(value: int) -> Domain:
    return lambda rng, shape: np.full(shape, value, np.int64)


# ---- rows ----

SIZES = ((), (1,), (5,), (0,), (3, 7), (1031,))
MADE = tuple(case(shape=s) for s in SIZES)
DROPPED = tuple(case(s, p=p) for s in SIZES for p in (0.75, 0.5, 0.125))

RANDOM = (
    Sample(
        "step_of_draw", sampling.step_of_draw_op,
        lambda step, draws: np.int64(step) + of_draw(int(draws)),
        tuple(case((), (), domain=(number(7), number(n))) for n in (0, 1, 6, 2**32 - 1)),
        ulps=0, differentiable=(), specials=False,
        refusals=(
            refuse(r"a step of one int64, got int64 \(3,\)", (3,), (), dtypes=("int64",) * 2),
            refuse("a number of draws of one int64, got", (), (), dtypes=("int64", "float32")),
        ),
    ),
    Sample(
        "random_uniform", sampling.random_uniform,
        lambda shape, low, high: low + (high - low) * (words(shape) // 256) / 2**24,
        product(MADE, {"low": 0.0, "high": 1.0}, {"low": -1.25, "high": 3.5}),
        build=build(sampling.random_uniform), ulps=0.5, differentiable=(),
    ),
    Sample(
        "uniform", sampling.uniform_op,
        lambda shape, low, range: low + range * (words(shape) // 256) / 2**24,
        (case(shape=(9,), low=0.5, range=2.0),), build=of_step(sampling.uniform_op),
        differentiable=(),
    ),
    Sample(
        "random_bernoulli", sampling.random_bernoulli, keeps,
        product(MADE, *({"probability": p} for p in (0.0, 0.25, 0.6, 1.0))),
        build=build(sampling.random_bernoulli), ulps=0, differentiable=(),
    ),
    Sample(
        "bernoulli", sampling.bernoulli_op, lambda shape,
        threshold: keeps(shape, threshold / 2**32),
        (case(shape=(9,), threshold=1 << 30),), build=of_step(sampling.bernoulli_op), ulps=0,
        differentiable=(),
    ),
    Sample(
        "random_normal", sampling.random_normal,
        lambda shape, mean, deviation: mean + deviation * quantile((words(shape) + 0.5) / 2**32),
        product(MADE, {"mean": 0.0, "deviation": 1.0}, {"mean": 2.5, "deviation": 0.25}),
        build=build(sampling.random_normal), ulps=1, differentiable=(),
    ),
    Sample(
        "random_truncated_normal", sampling.random_truncated_normal,
        lambda shape: quantile(BELOW + (words(shape) + 0.5) / 2**32 * (1 - 2 * BELOW)),
        MADE, build=build(sampling.random_truncated_normal), ulps=4, differentiable=(),
        scale=lambda shape: np.full(shape, 1.0),  # the probabilities are given in float32
    ),
    Sample(
        "normal", sampling.normal_op,
        lambda shape, **rest: quantile((words(shape) + 0.5) / 2**32),
        (
            case(
                shape=(9,), mean=0.0, deviation=1.0, below=0.0, within=1.0, low=-np.inf,
                high=np.inf,
            ),
        ),
        build=of_step(sampling.normal_op), ulps=1, differentiable=(),
    ),
    Sample(
        "dropout", sampling.dropout, dropped, DROPPED, build=build(sampling.dropout), ulps=1,
        specials=False, integers="float",
    ),
    Sample(
        "dropout_op", sampling.dropout_op, dropped, DROPPED[::3], build=build(sampling.dropout),
        ulps=1,
        specials=False,
    ),
    Sample(
        "masked", sampling.masked_op,
        lambda x, threshold, scale: x * keeps(x.shape, threshold / 2**32) * scale,
        (case((3, 7), threshold=1 << 31, scale=2.0),), ulps=0, specials=False,
        build=lambda x, **attrs: sampling.masked_op(
            x, ad.Parameter(np.int64(0)), seed=SEED, node=0, **attrs
        ),
    ),
)  # fmt: skip
