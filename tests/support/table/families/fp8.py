"""The rows of samples.py for products in floats of 8 bits. Matrices have whole numbers with 448 or
57,344 as the largest, so that their scale is 1 and codes are exact alike in float32 and float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops import fp8
from support.table.rows import Case, Sample, case, refuse

Array = np.ndarray


def values(wide: bool) -> Array:
    """What each of the 256 codes stands for, in float64."""
    mantissa, bias = (2, 15) if wide else (3, 7)
    found = []
    for code in range(256):
        exponent, fraction = divmod(code % 128, 2**mantissa)
        if exponent:
            size = (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)
        else:
            size = fraction / 2**mantissa * 2.0 ** (1 - bias)
        if wide and exponent == 31:
            size = np.nan if fraction else np.inf
        if not wide and code % 128 == 127:
            size = np.nan
        found.append(-size if code >= 128 else size)
    return np.array(found)


def nearest(x: Array, wide: bool) -> Array:
    """The codes of the nearest values, the even one of two; of the largest at most."""
    table = values(wide)[:128]
    table = table[np.isfinite(table)]
    above = np.clip(np.searchsorted(table, abs(x)), 1, len(table) - 1)
    low, high = abs(x) - table[above - 1], table[above] - abs(x)
    codes = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    return (codes + np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def filled(codes: Array) -> Array:
    """Codes with zeros up to a multiple of 16."""
    columns = max(-(-codes.shape[1] // 16), 1) * 16
    return np.pad(codes, ((0, 0), (0, columns - codes.shape[1])))


def rows(x: Array, wide: bool = False) -> Array:
    return filled(nearest(x, wide))


def columns(x: Array, wide: bool = False) -> Array:
    return filled(nearest(x, wide).T)


def wholes(wide: bool) -> Any:
    most = 57344 if wide else 448

    def draw(rng: np.random.Generator, shape: Any) -> Array:
        x = np.round(most * rng.uniform(-1, 1, shape) ** 5)
        x.flat[:1] = -most
        return x

    return draw


def codes(wide: bool) -> Any:
    finite = np.flatnonzero(np.isfinite(values(wide))).astype(np.uint8)
    return lambda rng, shape: rng.choice(finite, shape)


def units(rng: np.random.Generator, shape: Any) -> Array:
    return 2.0 ** rng.integers(-8, 8, shape)


def quantized(*shape: int, wide: bool = False) -> Case:
    return case(shape, domain=wholes(wide), wide=wide)


def multiplied(m: int, n: int, k: int, wide_A: bool = False, wide_B: bool = False) -> Case:
    domain = codes(wide_A), units, codes(wide_B), units
    return case((m, k), (1,), (n, k), (1,), domain=domain, wide_A=wide_A, wide_B=wide_B)


def product(
    a: Array, unit_a: Array, b: Array, unit_b: Array, wide_A: bool, wide_B: bool, of: Any = np.array
) -> Array:
    return of(values(wide_A)[a]) @ of(values(wide_B)[b]).T * (unit_a * unit_b)


MATRICES = (
    quantized(1, 1), quantized(3, 16), quantized(129, 65), quantized(70, 200, wide=True),
    quantized(0, 5), quantized(4, 0), quantized(300, 257), quantized(64, 128, wide=True),
)  # fmt: skip
REFUSED = (refuse("expected a matrix", (2, 3, 4)),)
NO_PARTS: dict[str, Any] = dict(differentiable=(), specials=False, storages=())
FP8 = (
    *(
        Sample(
            op.name, op, formula, MATRICES, refusals=REFUSED, ulps=0,
            build=lambda x, op=op, **attrs: op(x, **attrs)[0], **NO_PARTS,
        )
        for op, formula in (
            (fp8.fp8_rows_op, rows), (fp8.fp8_columns_op, columns), (fp8.fp8_both_op, rows),
        )
    ),
    # Tensor cores add with some 14 bits, and cut: 13,800 ulp of 128 terms that are all positive on
    # an H200, 2,100 of normal ones. Elsewhere it is 3.
    Sample(
        "fp8_matmul", fp8.fp8_matmul_op, product,
        (
            multiplied(1, 1, 16), multiplied(130, 70, 48), multiplied(64, 193, 256, wide_B=True),
            multiplied(65, 40, 144, wide_A=True), multiplied(200, 300, 640), multiplied(0, 4, 16),
            multiplied(16, 16, 32, wide_A=True, wide_B=True),
        ),
        scale=lambda *arrays, **attrs: product(*arrays, **attrs, of=np.abs), ulps=20_000,
        refusals=(
            refuse("expected codes", (2, 16), (1,), (3, 32), (1,),
                   dtypes=("uint8", "float32", "uint8", "float32")),
        ),
        **NO_PARTS,
    ),
)  # fmt: skip
