"""Philox4x32-10 as in src/math/philox.h, and the uniform and normal values of its words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = 0xFFFFFFFF

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def philox(counter: Sequence[np.ndarray | int], key: tuple[int, int]) -> Words:
    """The four words of Philox4x32-10 for each counter of four words; all values are below 2^32,
    and arrays are uint64.
    """
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    mask, half = np.uint64(_MASK), np.uint64(32)
    for turn in range(10):
        key0 = np.uint64((key[0] + turn * 0x9E3779B9) & _MASK)
        key1 = np.uint64((key[1] + turn * 0xBB67AE85) & _MASK)
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> half) ^ c1 ^ key0
        c2 = (product0 >> half) ^ c3 ^ key1
        c1 = product1 & mask
        c3 = product0 & mask
    return c0, c1, c2, c3


def words(seed: int, step: int, node: int, first: int, count: int) -> np.ndarray:
    """The words (uint64, below 2^32) of `count` elements from `first`, a multiple of 4, on. `step`
    is below 2^64; its high half tells apart the draws of runs that leave the step as it is.
    """
    blocks = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)
    made = _of_blocks(seed, step, node, blocks)
    return np.stack(made, axis=1).reshape(-1)[:count]


def words_of(seed: int, step: int, node: int, elements: np.ndarray) -> np.ndarray:
    """The words of any elements, as `words` has them."""
    made = _of_blocks(seed, step, node, elements.astype(np.uint64) >> np.uint64(2))
    return np.choose(elements & 3, made)


def _of_blocks(seed: int, step: int, node: int, blocks: np.ndarray) -> Words:
    """The words of blocks of four elements."""
    high = blocks >> np.uint64(32) ^ np.uint64(step >> 32 & _MASK)
    counter = (blocks & np.uint64(_MASK), high, step & _MASK, node & _MASK)
    return philox(counter, (seed & _MASK, seed >> 32 & _MASK))


def step_of_draw(step: int, draw: int) -> int:
    """The step of the draw of a number, by OfDraw of src/math/philox.h."""
    return step ^ int(f"{draw & _MASK:032b}"[::-1], 2) << 32


def unit(words: np.ndarray) -> np.ndarray:
    """24 bits of each word as float64 in [0, 1)."""
    return (words >> np.uint64(8)) * 2.0**-24


def wide_unit(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """53 bits of two words as float64 in [0, 1)."""
    return (high << np.uint64(21) | low >> np.uint64(11)) * 2.0**-53


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """The inverse of the standard normal distribution in float64: algorithm AS 241, PPND16, of
    Wichura (1988).
    """
    q = p - 0.5
    inner = 0.180625 - q * q
    y = q * _horner(_A, inner) / _horner(_B, inner)
    tail = np.abs(q) > 0.425
    side = q[tail]
    r = np.sqrt(-np.log(np.where(side < 0, p[tail], 1 - p[tail])))
    far = np.where(
        r <= 5, _horner(_C, r - 1.6) / _horner(_D, r - 1.6), _horner(_E, r - 5) / _horner(_F, r - 5)
    )
    y[tail] = np.copysign(far, side)
    return y


def _horner(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    y = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        y = y * x + c
    return y


# Numerators and denominators near the middle, in the tails and far out, constants first.
_A = (
    3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
    1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
    3.3430575583588128105e4, 2.5090809287301226727e3,
)  # fmt: skip
_B = (
    1.0, 4.2313330701600911252e1, 6.8718700749205790830e2,
    5.3941960214247511077e3, 2.1213794301586595867e4, 3.9307895800092710610e4,
    2.8729085735721942674e4, 5.2264952788528545610e3,
)  # fmt: skip
_C = (
    1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
    3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
    2.27238449892691845833e-2, 7.74545014278341407640e-4,
)  # fmt: skip
_D = (
    1.0, 2.05319162663775882187e0, 1.67638483018380384940e0,
    6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
    5.47593808499534494600e-4, 1.05075007164441684324e-9,
)  # fmt: skip
_E = (
    6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
    2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
    2.71155556874348757815e-5, 2.01033439929228813265e-7,
)  # fmt: skip
_F = (
    1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1,
    1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5,
    1.42151175831644588870e-7, 2.04426310338993978564e-15,
)  # fmt: skip
