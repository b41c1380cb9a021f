"""The rows of samples.py for products by groups of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops import grouped
from support.table.rows import Case, Domain, Sample, case, refuse, signed


def given(sizes: tuple[int, ...], dtype: Any = np.int32) -> Domain:
    return lambda rng, shape: np.array(sizes, dtype).reshape(shape)


def by_groups(x: np.ndarray, w: np.ndarray, sizes: np.ndarray, trans_w: bool = False) -> Any:
    """By einsum over rows, each with the matrix of its group; the rest with zeros."""
    rows = np.repeat(w, sizes.astype(np.int64), axis=0)
    y = np.zeros((len(x), w.shape[1 if trans_w else 2]))
    end = len(rows)
    y[:end] = np.einsum("mk,mnk->mn" if trans_w else "mk,mkn->mn", x[:end], rows)
    return y


def by_groups_scale(x: np.ndarray, w: np.ndarray, sizes: np.ndarray, trans_w: bool = False) -> Any:
    return np.sqrt(max(x.shape[1], 1)) * by_groups(np.abs(x), np.abs(w), sizes, trans_w)


def contracted(x: np.ndarray, y: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    ends = np.cumsum(sizes, dtype=np.int64)
    rows = [slice(end - int(size), end) for size, end in zip(sizes, ends)]
    parts = [np.einsum("mk,mn->kn", x[one], y[one]) for one in rows]
    return np.array(parts).reshape(len(sizes), x.shape[1], y.shape[1])


def contracted_scale(x: np.ndarray, y: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    most = max(1, *sizes) if len(sizes) else 1
    return np.sqrt(most) * contracted(np.abs(x), np.abs(y), sizes)


# Rows, K, N and the sizes of the groups: primes, empty groups at the ends and between, one row, all
# rows in one group, rows behind all groups, tiles filled and not, nothing at all.
GROUPS: tuple[tuple[int, int, int, tuple[int, ...]], ...] = (
    (13, 3, 5, (2, 0, 5)), (7, 3, 5, (0, 3, 4)), (5, 4, 2, (5,)), (1, 1, 1, (0, 1)),
    (6, 2, 3, (0, 0)), (3, 2, 4, ()), (0, 3, 2, (0, 0)), (4, 0, 3, (1, 2)), (4, 3, 0, (1, 2)),
    (131, 67, 33, (17, 0, 101, 1)), (129, 64, 72, (0, 129, 0)), (300, 40, 136, (13, 130, 64, 5)),
)  # fmt: skip


def products() -> tuple[Case, ...]:
    return tuple(
        case(
            (m, k), (len(sizes), n, k) if trans_w else (len(sizes), k, n), (len(sizes),),
            domain=(signed, signed, given(sizes, np.int64 if trans_w else np.int32)),
            trans_w=trans_w,
        )
        for m, k, n, sizes in GROUPS
        for trans_w in (False, True)
    )  # fmt: skip


def contractions() -> tuple[Case, ...]:
    return tuple(
        case((m, k), (m, n), (len(sizes),), domain=(signed, signed, given(sizes)))
        for m, k, n, sizes in GROUPS
    )


WITH_SIZES = ("float32", "float32", "int32")
GROUPED = (
    Sample(
        "grouped_matmul", grouped.grouped_matmul_op, by_groups, products(), scale=by_groups_scale,
        ulps=1, integers="same", differentiable=(0, 1), specials=False,
        refusals=(
            refuse(
                r"inner dimensions differ: .*; did you mean trans_w=True\?",
                (7, 3), (2, 5, 3), (2,), dtypes=WITH_SIZES,
            ),
            refuse(r"numbers of groups differ", (7, 3), (2, 3, 5), (3,), dtypes=WITH_SIZES),
            refuse(r"a matrix for each group", (7, 3), (3, 5), (3,), dtypes=WITH_SIZES),
            refuse(r"expected group sizes", (7, 3), (2, 3, 5), (2, 1), dtypes=WITH_SIZES),
            refuse(
                r"group sizes must be int32 or int64, got \S+ of float32; declare or cast them",
                (7, 3), (2, 3, 5), (2,), dtypes=("float32",) * 3,
            ),
        ),
    ),
    Sample(
        "grouped_contraction", grouped.grouped_contraction_op, contracted, contractions(),
        scale=contracted_scale, ulps=1, integers="same", differentiable=(0, 1), specials=False,
        refusals=(
            refuse(r"two matrices of the same rows", (7, 3), (6, 5), (2,), dtypes=WITH_SIZES),
            refuse(
                r"group sizes must be int32 or int64", (7, 3), (7, 5), (2,),
                dtypes=("float32",) * 3,
            ),
        ),
    ),
)  # fmt: skip
