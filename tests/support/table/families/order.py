"""The rows of samples.py for sorting, elements along an axis, running products and
triangles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops import reduce, scan, sorting
from dlsys.ops import triangle as triangles
from support.table.families.statistics import BAD_AXES, RUNNING, distinct, near_one, tied, var
from support.table.rows import Case, Sample, Shape, case, product, refuse, signed

SHAPES = tuple(case(s) for s in [(7,), (1,), (0,), (3, 5), (0, 4), (2, 3, 4), (5, 700)])
SORTED = (
    *product(SHAPES, {}, {"descending": True}),
    *product((case((3, 5)), case((600, 3)), case((2, 5, 3))), {"axis": 0}, {"axis": -2}),
)
FEW = (
    *product((case((7,)), case((3, 5)), case((3, 1100))), {"k": 3}, {"k": 1, "largest": False}),
    *product((case((600, 2)),), {"k": 600, "axis": 0}, {"k": 0, "axis": 0}, {"k": 5, "axis": 0}),
)
AXIS_2 = refuse(r"axes \(2,\) do not fit an array of 2 dimensions", (3, 4), axis=2)


def order(x: np.ndarray, axis: int = -1, descending: bool = False) -> np.ndarray:
    """Each element's place is the number of those that come before it."""
    x = np.moveaxis(x, axis, -1)
    n = x.shape[-1]
    a, b = (-x, -x) if descending else (x, x)
    a, b = a[..., :, None], b[..., None, :]  # b is before a
    earlier = np.arange(n) < np.arange(n)[:, None]
    places = ((b < a) | ((b == a) & earlier)).sum(axis=-1)
    found = np.zeros(x.shape, np.int64)
    np.put_along_axis(found, places, np.broadcast_to(np.arange(n), x.shape), -1)
    return np.moveaxis(found, -1, axis)


def ordered(x: np.ndarray, axis: int = -1, descending: bool = False) -> np.ndarray:
    return np.take_along_axis(x, order(x, axis, descending), axis)


def best(x: np.ndarray, k: int, axis: int = -1, largest: bool = True) -> np.ndarray:
    return np.take(ordered(x, axis, largest), np.arange(k), axis)


def best_at(x: np.ndarray, k: int, axis: int = -1, largest: bool = True) -> np.ndarray:
    return np.take(order(x, axis, largest), np.arange(k), axis)


def taken(x: np.ndarray, indices: np.ndarray, axis: int = -1) -> np.ndarray:
    found = np.empty(indices.shape)
    for at in np.ndindex(indices.shape):
        place = list(at)
        place[axis] = indices[at]
        found[at] = x[tuple(place)]
    return found


def put(updates: np.ndarray, indices: np.ndarray, x: np.ndarray, axis: int, distinct: bool) -> Any:
    found = np.zeros(x.shape)
    for at in np.ndindex(indices.shape):
        place = list(at)
        place[axis] = indices[at]
        found[tuple(place)] += updates[at]
    return found


def places(n: int, dtype: Any = np.int64) -> Any:
    return lambda rng, shape: rng.integers(0, n, shape).astype(dtype)


def permuted(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)


def along(x: Shape, indices: Shape, axis: int, dtype: Any = np.int64) -> Case:
    return case(x, indices, axis=axis, domain=(signed, places(x[axis], dtype)))


ALONG = (
    along((7,), (3,), 0), along((3, 5), (3, 9), 1), along((3, 5), (2, 5), 0, np.int32),
    along((2, 3, 4), (2, 5, 4), -2), along((3, 5), (3, 0), 1), along((40, 50), (40, 7), -1),
)  # fmt: skip
PUT = tuple(
    Case((c.shapes[1], c.shapes[1], c.shapes[0]), c.attrs | {"distinct": False},
         (signed, c.domain[1], signed))
    for c in ALONG
)  # fmt: skip


def cumprod(x: np.ndarray, axis: int = -1, reverse: bool = False) -> np.ndarray:
    flip = (lambda z: np.flip(z, axis)) if reverse else (lambda z: z)
    return flip(np.cumprod(flip(x), axis=axis))


def cumprod_scale(x: np.ndarray, axis: int = -1, reverse: bool = False) -> np.ndarray:
    return np.abs(cumprod(x, axis, reverse)) * np.sqrt(max(x.shape[axis], 1))


def recurrence(
    a: np.ndarray, b: np.ndarray, axis: int = -1, reverse: bool = False, initial: float = 0.0
) -> np.ndarray:
    """y[k] is the sum over j of b[j] times the product of a behind j, and initial times all."""
    flip = (lambda z: np.flip(z, axis)) if reverse else (lambda z: z)
    a, b = (np.moveaxis(flip(x), axis, -1) for x in (a, b))
    found = np.zeros(a.shape)
    for k in range(a.shape[-1]):
        weights = np.ones((*a.shape[:-1], k + 2))
        for j in range(k, -1, -1):
            weights[..., j] = weights[..., j + 1] * a[..., j]
        terms = np.concatenate([np.full((*a.shape[:-1], 1), initial), b[..., : k + 1]], -1)
        found[..., k] = (weights * terms).sum(-1)
    return flip(np.moveaxis(found, -1, axis))


def recurrence_scale(a: np.ndarray, b: np.ndarray, initial: float = 0.0, **attrs: Any) -> Any:
    return recurrence(np.abs(a), np.abs(b), initial=abs(initial), **attrs)


def shifted(x: np.ndarray, axis: int, value: float, reverse: bool) -> np.ndarray:
    y = np.roll(x, -1 if reverse else 1, axis)
    if x.shape[axis]:
        key = [slice(None)] * x.ndim
        key[axis] = -1 if reverse else 0
        y[tuple(key)] = value
    return y


def std(x: np.ndarray, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> np.ndarray:
    return np.sqrt(var(x, axis, keepdims, ddof))


def std_scale(x: np.ndarray, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Any:
    y = std(x, axis, keepdims, ddof)
    return y * np.sqrt(max(x.size / max(np.size(y), 1), 1))


def triangle(below: bool) -> Any:
    def formula(x: np.ndarray, k: int = 0) -> np.ndarray:
        rows, columns = np.indices(x.shape[-2:])
        return np.where(columns - rows <= k if below else columns - rows >= k, x, 0)

    return formula


MATRICES = product(
    tuple(case(s) for s in [(3, 5), (5, 3), (0, 4), (2, 3, 4)]), {}, {"k": 1}, {"k": -2}, {"k": 9}
)
FLAT = refuse(r"expected at least two dimensions, got \S+ \(3,\)", (3,))

# Sorts move elements and are exact. Worst: cumprod 0.5, recurrence 0.5, std 0.9.
ORDER = (
    Sample(
        "sort", sorting.sort_op, ordered, SORTED, distinct, ulps=0, integers="moved",
        build=lambda x, **attrs: sorting.sort_op(x, **attrs)[0], specials=False,
        refusals=(AXIS_2,),
    ),
    Sample(
        "argsort", sorting.argsort_op, order, SORTED, tied, differentiable=(), integers="moved",
        specials=False, refusals=(AXIS_2,),
    ),
    Sample(
        "topk", sorting.topk_op, best, FEW, distinct, ulps=0, integers="moved", specials=False,
        build=lambda x, **attrs: sorting.topk_op(x, **attrs)[0],
        refusals=(
            refuse(r"k is 5, and \S+ \(3, 4\) has 4 elements along axis 1", (3, 4), k=5),
            refuse(r"axes \(2,\) do not fit", (3, 4), k=1, axis=2),
        ),
    ),
    Sample(
        "topk_indices", sorting.topk_op, best_at, FEW, tied, differentiable=(), specials=False,
        build=lambda x, **attrs: sorting.topk_op(x, **attrs)[1],
    ),
    Sample(
        "take_along_axis", sorting.take_along_axis_op, taken, ALONG, ulps=0, differentiable=(0,),
        refusals=(
            refuse(r"indices must be int32 or int64, got \S+ of float32", (3,), (2,)),
            refuse(r"shapes differ beside axis 1: \S+ \(3, 4\) and \S+ \(2, 4\)", (3, 4), (2, 4),
                   dtypes=("float32", "int64")),
        ),
    ),
    Sample(
        "put_along_axis", sorting.put_along_axis_op, put,
        (*PUT, case((3, 9), (3, 9), (3, 9), axis=1, distinct=True,
                    domain=(signed, permuted, signed))),
        scale=lambda u, *rest, **attrs: 4 * put(np.abs(u), *rest, **attrs), ulps=1,
        differentiable=(0,), roundings=4, specials=False,
    ),
    Sample(
        "cumprod", scan.cumprod_op, cumprod, tuple(c for c in RUNNING if c.size < 2_000),
        near_one, scale=cumprod_scale, ulps=1, gradient_ulps=256, integers="same",
        refusals=(AXIS_2,),
    ),
    Sample(
        "recurrence", scan.recurrence_op, recurrence,
        (
            *product(
                (case((7,), (7,)), case((3, 5), (3, 5)), case((2, 4, 3), (2, 4, 3))),
                {}, {"axis": 0, "initial": 1.5}, {"axis": 0, "reverse": True, "initial": -2},
            ),
            case((0,), (0,)), case((0, 3), (0, 3), axis=0), case((41, 6), (41, 6), axis=0),
        ),
        scale=recurrence_scale, ulps=1, integers="float", specials=False,
        refusals=(
            refuse(r"recurrence: expected one shape, got \S+ \(3,\) and \S+ \(4,\)", (3,), (4,)),
        ),
    ),
    Sample(
        "shifted", scan.shifted_op, shifted,
        product(
            (case((7,)), case((3, 5)), case((0, 2))),
            {"axis": 0, "value": 1.5, "reverse": False},
            {"axis": 0, "value": 0, "reverse": True},
        ),
        ulps=0,
    ),
    Sample(
        "std", reduce.std_op, std,
        (
            case((7,)), case((3, 4, 5)), case((3, 4, 5), axis=(0, 2)), case((131, 67), axis=0),
            case((131, 67), keepdims=True), case((3, 4, 5), axis=1, ddof=1), case((7,), ddof=2),
        ),
        scale=std_scale, ulps=8, gradient_ulps=64, integers="float", refusals=BAD_AXES, storages=(),
    ),
    Sample(
        "tril", triangles.tril_op, triangle(True), MATRICES, ulps=0, integers="moved",
        refusals=(FLAT,),
    ),
    Sample(
        "triu", triangles.triu_op, triangle(False), MATRICES, ulps=0, integers="moved",
        refusals=(FLAT,),
    ),
)  # fmt: skip
