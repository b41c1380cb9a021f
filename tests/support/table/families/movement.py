"""The rows of samples.py for slices, gather and scatter, and reshapes of other names."""

from __future__ import annotations

import numpy as np

from dlsys.ops import indexing, movement
from support.table.formulas.layout import gathered_back, grown, one_hot, scattered, taken, undone
from support.table.rows import WIDE, Case, Domain, Sample, case, classes, refuse, signed

ALL = slice(None)
BACK = slice(None, None, -1)


KEYS = tuple(
    Case((shape,), {"key": key})
    for shape, key in [
        ((7,), slice(1, 3)),
        ((7,), slice(None, None, 2)),
        ((7,), BACK),
        ((7,), slice(-2, None, -3)),
        ((7,), 3),
        ((7,), -1),
        ((7,), slice(5, 2)),
        ((7,), slice(2, 100)),
        ((7,), None),
        ((), ...),
        ((7,), (slice(6, None, -7), None)),
        ((0, 4), (ALL, 1)),
        ((3, 4), (slice(1, 3), slice(None, None, 2))),
        ((3, 4), (..., None)),
        ((3, 4), (None, 0, ..., None, slice(1, 3))),
        ((3, 4), (BACK, BACK)),
        ((3, 4), (ALL, ALL)),
        ((3, 4), ()),
        ((3, 4), (slice(3, 3),)),
        ((4, 3, 5), (..., -1)),
        ((4, 3, 5), (slice(3, 0, -2), ..., slice(None, None, 3))),
        ((4, 3, 5), (2, 1, 0)),
        ((4, 3, 5), (slice(1, 3), ALL, ALL)),
        ((4, 3, 5), (0, slice(1, 2))),
        (WIDE, (1, 0, BACK, ..., slice(1, None))),
        ((97, 801), (slice(1, None, 2), slice(3, -3))),
        ((97, 401), (ALL, slice(None, None, -2))),
        ((40_001,), slice(-1, 0, -1)),
    ]
)
SPANS = tuple(
    Case((shape,), {"begin": begin, "size": size})
    for shape, begin, size in [
        ((7,), (2,), (3,)),
        ((7,), (2,), (-1,)),
        ((7,), (-3,), (2,)),
        ((7,), (7,), (0,)),
        ((), (), ()),
        ((3, 4, 5), (0, 1, 2), (3, 2, -1)),
        ((3, 4), (1,), (2,)),
        ((0, 3), (0, 1), (0, 1)),
    ]
)
PLACES = tuple(
    Case((x,), {"shape": shape, "starts": starts, "steps": steps, "value": value})
    for x, shape, starts, steps, value in [
        ((3,), (5,), (1,), (1,), 0),
        ((3,), (9,), (8,), (-4,), 2.5),
        ((), (), (), (), 1),
        ((2, 3), (5, 7), (1, 5), (3, -2), -1),
        ((0, 3), (2, 3), (0, 0), (1, 1), 7),
        ((37, 129), (41, 390), (4, 2), (1, 3), 0.5),
        ((2, 3), (2, 3), (1, 2), (-1, -1), 9),
    ]
)


def indexed(floats: Domain = signed, *counts: int) -> tuple[Domain, Domain]:
    return floats, classes(counts[0], np.int32 if len(counts) > 1 else np.int64)


GATHERS = tuple(
    Case((x, indices), {"axis": axis}, indexed(signed, x[axis], *narrow))
    for x, indices, axis, narrow in [
        ((5,), (), 0, ()),
        ((5,), (7,), 0, (1,)),
        ((4, 3), (2, 5), 0, ()),
        ((4, 3), (2, 5), 1, (1,)),
        ((4, 3, 2), (6,), -2, ()),
        ((4, 3), (0,), 1, ()),
        ((4, 0), (3,), 0, (1,)),
        ((1, 6), (9,), 0, ()),
        ((501, 33), (70,), 0, ()),
        ((3, 65, 5), (4, 9), 1, (1,)),
        ((301, 70), (129,), 1, (1,)),
        ((301, 70), (129,), 1, ()),
    ]
)
BACK_GATHERS = tuple(
    Case(
        (taken(np.zeros(c.shapes[0]), np.zeros(c.shapes[1]), **c.attrs).shape, *c.shapes[::-1]),
        c.attrs,
        (signed, c.domain[1], signed),
    )  # type: ignore[index]
    for c in GATHERS
)
SCATTERS = tuple(
    Case((updates, indices), {"size": size, "axis": axis}, indexed(signed, max(size, 1), *narrow))
    for updates, indices, size, axis, narrow in [
        ((), (), 3, 0, ()),
        ((7,), (7,), 5, 0, (1,)),
        ((2, 5, 3), (2, 5), 4, 0, ()),
        ((4, 2, 5), (2, 5), 3, 1, (1,)),
        ((2, 30, 68), (30,), 9, 1, (2,)),
        ((150, 132), (150,), 40, 0, (1,)),
        ((4, 6), (6,), 2, -1, ()),
        ((0, 3), (0,), 4, 0, ()),
        ((70, 33), (70,), 501, 0, (1,)),
        ((3, 40, 5), (40,), 3, 1, ()),
        ((300, 2), (300,), 2, 0, ()),
    ]
)
BAD_INDICES = (
    refuse(r"indices must be int32 or int64, got \S+ of float32", (4, 3), (2,)),
    refuse(
        r"indices must be int32 or int64, got \S+ of uint8",
        (4, 3),
        (2,),
        dtypes=("float32", "uint8"),
    ),
)
INT = ("float32", "int64", "float32")

INDEX = (
    Sample(
        "getitem",
        indexing.getitem_op,
        lambda x, key: x[key],
        KEYS,
        ulps=0,
        integers="moved",
        refusals=(
            refuse(
                r"slice: index 3 is out of range for axis 1 of \S+ \(4, 3\)", (4, 3), key=(ALL, 3)
            ),
            refuse(r"slice: index -5 is out of range for axis 0", (4, 3), key=-5),
            refuse(r"slice: 3 indices are too many for \S+ \(4, 3\)", (4, 3), key=(0, ALL, ..., 1)),
            refuse(r"slice: cannot index a node with ndarray", (4, 3), key=np.array([1])),
            refuse(r"slice: cannot index a node with bool", (4, 3), key=True),
            refuse(r"slice: a key has at most one \.\.\.", (4, 3), key=(..., ...)),
            refuse(r"slice: a step must not be 0", (4, 3), key=slice(0, 2, 0)),
        ),
    ),
    Sample(
        "window",
        indexing.window_op,
        lambda x, offset, shape: np.array(list(x.flat)[offset:])[: int(np.prod(shape))].reshape(
            shape
        ),
        (
            case((5,), offset=1, shape=(3,)),
            case((3, 4), offset=5, shape=(2, 3)),
            case((0, 3), offset=0, shape=(0,)),
        ),
        ulps=0,
        integers="moved",
        refusals=(
            refuse(
                r"window: \(2, 2\) from element 3 on is not within \S+ \(6,\)",
                (6,),
                offset=3,
                shape=(2, 2),
            ),
        ),
    ),
    Sample(
        "slice",
        indexing.slice_op,
        lambda x, begin, size: x[
            tuple(
                slice(b % (n + 1), None if s == -1 else b % (n + 1) + s)
                if b >= 0
                else slice(b + n, None if s == -1 else b + n + s)
                for b, s, n in zip(begin, size, x.shape)
            )
        ],
        SPANS,
        ulps=0,
        integers="moved",
        refusals=(
            refuse(
                r"slice: 4 positions from 1 on do not lie in axis 0 of \S+ \(4, 3\)",
                (4, 3),
                begin=(1,),
                size=(4,),
            ),
            refuse(r"slice: 1 positions from -5 on do not lie", (4, 3), begin=(-5,), size=(1,)),
            refuse(
                r"slice: begin \(1,\) and size \(1, 2\) differ", (4, 3), begin=(1,), size=(1, 2)
            ),
        ),
    ),
    Sample(
        "slice_gradient",
        indexing.slice_gradient_op,
        undone,
        tuple(
            Case((np.zeros(c.shapes[0])[c.attrs["key"]].shape, *c.shapes), c.attrs) for c in KEYS
        ),
        ulps=0,
        differentiable=(0,),
        integers="moved",
        refusals=(refuse(r"the key chooses \(2,\) in", (3,), (7,), key=slice(2)),),
    ),
    Sample(
        "place",
        indexing.place_op,
        grown,
        PLACES,
        ulps=0,
        differentiable=(),
        integers="moved",
        refusals=(
            refuse(
                r"place: \S+ \(3,\) from \(2,\) on in steps of \(2,\) does not lie in \(6,\)",
                (3,),
                shape=(6,),
                starts=(2,),
                steps=(2,),
            ),
        ),
    ),
    Sample(
        "gather",
        indexing.gather_op,
        taken,
        GATHERS,
        ulps=0,
        differentiable=(0,),
        refusals=(
            *BAD_INDICES,
            refuse(r"axis 2 does not fit \(4, 3\)", (4, 3), (2,), dtypes=INT, axis=2),
        ),
    ),
    Sample(
        "gather_gradient",
        indexing.gather_gradient_op,
        gathered_back,
        BACK_GATHERS,
        ulps=2,
        scale=lambda dy, i, x, axis: gathered_back(np.abs(dy), i, x, axis),
        differentiable=(0,),
        refusals=(
            refuse(r"shapes do not fit along axis 0", (2, 4), (2,), (4, 3), dtypes=INT, axis=0),
        ),
    ),
    Sample(
        "scatter",
        indexing.scatter_op,
        scattered,
        SCATTERS,
        ulps=4,
        differentiable=(0,),
        scale=lambda u, i, size, axis: scattered(np.abs(u), i, size, axis),
        refusals=(
            refuse(r"indices must be int32 or int64", (4, 3), (4,), size=3),
            refuse(r"updates need the indices' shape", (4, 3), (3,), dtypes=INT, size=3),
            refuse(
                r"size must be an integer that is not negative, got -1",
                (4, 3),
                (4,),
                dtypes=INT,
                size=-1,
            ),
        ),
    ),
    Sample(
        "scatter_add",
        indexing.scatter_add_op,
        lambda x, i, u, axis=0: x + scattered(u, i, x.shape[axis], axis),
        tuple(
            Case((c.shapes[2], c.shapes[1], c.shapes[0]), c.attrs, c.domain) for c in BACK_GATHERS
        ),
        scale=lambda x, i, u, axis: np.abs(x) + scattered(np.abs(u), i, x.shape[axis], axis),
        ulps=2,
        differentiable=(0, 2),
        roundings=2,
    ),
    Sample(
        "one_hot",
        indexing.one_hot_op,
        one_hot,
        tuple(
            Case((shape,), {"depth": depth, **more}, classes(max(depth, 1), dtype))
            for shape, depth, dtype, more in [
                ((), 3, np.int64, {}),
                ((7,), 4, np.int32, {}),
                ((2, 3), 1, np.int64, {}),
                ((0,), 3, np.int32, {}),
                ((0,), 0, np.int32, {}),
                ((301,), 129, np.int64, {}),
                ((5,), 6, np.int64, {"dtype": "int64"}),
                ((5,), 6, np.int32, {"dtype": "bool"}),
                ((5, 3), 6, np.int32, {"dtype": "float16"}),
            ]
        ),
        ulps=0,
        differentiable=(),
        refusals=(
            refuse(r"indices must be int32 or int64, got \S+ of float32", (4,), depth=3),
            refuse(
                r"depth must be an integer that is not negative, got -1",
                (4,),
                dtypes=("int32",),
                depth=-1,
            ),
        ),
    ),
    Sample(
        "embedding",
        indexing.embedding_op,
        taken,
        tuple(Case(c.shapes, {}, c.domain) for c in GATHERS if c.attrs["axis"] == 0),
        ulps=0,
        differentiable=(0,),
        refusals=BAD_INDICES,
    ),
)

RESHAPES = (
    Sample(
        "squeeze",
        movement.squeeze_op,
        lambda x, axis=None: np.squeeze(x, axis),
        (
            case((1, 3, 1)),
            case((1, 3, 1), axis=0),
            case((1, 3, 1), axis=(-1, 0)),
            case(()),
            case((2, 3)),
        ),
        ulps=0,
        integers="moved",
        refusals=(
            refuse(r"axes \(1,\) of \S+ \(1, 3\) are not all 1", (1, 3), axis=1),
            refuse(r"axes \(2,\) do not fit an array of 2 dimensions", (1, 3), axis=2),
        ),
    ),
    Sample(
        "expand_dims",
        movement.expand_dims_op,
        np.expand_dims,
        (case((3,), axis=0), case((3, 2), axis=-1), case((3, 2), axis=(0, 2)), case((), axis=0)),
        ulps=0,
        integers="moved",
        refusals=(refuse(r"axes \(3,\) do not fit an array of 2 dimensions", (3,), axis=3),),
    ),
    Sample(
        "flatten",
        movement.flatten_op,
        lambda x, axis=1: (
            np.array(list(x.flat)).reshape(*x.shape[:axis], -1)
            if x.size
            else np.zeros((*x.shape[:axis], int(np.prod(x.shape[axis:]))))
        ),
        (
            case((3, 2, 4)),
            case((3,), axis=0),
            case((3, 2, 4), axis=0),
            case((3, 2, 4), axis=-1),
            case((0, 2)),
            case((5,)),
        ),
        ulps=0,
        integers="moved",
        refusals=(refuse(r"axis 2 does not fit \S+ \(3,\)", (3,), axis=2),),
    ),
)
