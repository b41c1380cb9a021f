"""The rows of samples.py for joining, splitting, padding and tiling."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dlsys.ops import concat, pad
from support.table.formulas.layout import joined, padded, part_of, unpadded, untiled
from support.table.rows import WIDE, Case, Sample, Shape, case, product, refuse

JOINS = tuple(
    Case(shapes, {"axis": axis})
    for shapes, axis in [
        (((3,),), 0),
        (((2,), (3,)), 0),
        (((2, 3), (2, 0), (2, 4)), 1),
        (((0, 3), (0, 3)), -2),
        (((2, 1, 3),) * 8, 1),
        (((1, 2),) * 9, 0),
        (((2, 2),) * 17, -1),
        ((WIDE, WIDE), 3),
        (((61, 130), (61, 71)), 1),
        (((97, 130), (13, 130)), 0),
    ]
)
PADDINGS = tuple(
    Case((shape,), {"paddings": paddings})
    for shape, paddings in [
        ((5,), ((2, 3),)),
        ((5,), ((0, 4),)),
        ((5,), ((4, 0),)),
        ((4, 3), ((1, 0), (2, 2))),
        ((), ()),
        ((2, 3, 5), ((0, 0), (2, 1), (0, 0))),
        ((2, 3, 4, 5), ((0, 0), (0, 0), (1, 1), (2, 2))),
        ((3, 2), ((0, 0), (0, 0))),
        ((0, 3), ((0, 0), (1, 2))),
        ((31, 65), ((9, 30), (64, 3))),
        ((1, 3), ((0, 0), (1, 1))),
    ]
)
WIDE_EDGES = (case((1,), paddings=((3, 4),)), case((2, 3), paddings=((5, 0), (7, 9))))
TILES = tuple(
    Case((shape,), {"reps": reps})
    for shape, reps in [
        ((3,), (2,)),
        ((3,), 4),
        ((), (2, 3)),
        ((2, 3), (1, 1)),
        ((2, 3), (2,)),
        ((2, 3), (2, 1, 3)),
        ((2, 3), (0, 2)),
        ((0, 3), (2, 2)),
        ((2, 1, 3), (3, 4, 1)),
        ((2, 1, 2, 3), (2, 3, 1, 2)),
        ((1, 2, 1, 2, 1, 2), (2, 1, 2, 1, 2, 2)),
        ((2, 1, 2, 1, 2, 1, 1, 2), (1, 2, 2, 2, 1, 2, 2, 2)),
        ((37, 41), (5, 6)),
    ]
)


def tuples(reps: Any) -> Shape:
    return (reps,) if isinstance(reps, int) else reps


FILLS = (
    ("uint8", -1), ("uint8", 256), ("int32", 2**31), ("int64", 1.5), ("bool", 2),
    ("float32", 1e39), ("int32", float("inf")),
)  # fmt: skip


def pad_rows(mode: str, cases: tuple[Case, ...]) -> tuple[Sample, Sample]:
    forward = tuple(c for c in cases if mode == "edge" or c.shapes != ((1, 3),))
    backward = tuple(
        Case((padded(np.zeros(c.shapes[0]), mode=mode, **c.attrs).shape,), c.attrs) for c in forward
    )
    return (
        Sample(
            f"pad_{mode}",
            pad.pad_ops[mode],
            lambda x, paddings: padded(x, paddings, mode),
            forward,
            ulps=0,
            integers="moved",
        ),
        Sample(
            f"pad_{mode}_gradient",
            pad.pad_gradient_ops[mode],
            lambda dy, paddings: unpadded(dy, paddings, mode),
            backward,
            ulps=8,
            scale=lambda dy, paddings: unpadded(np.abs(dy), paddings, mode),
            roundings=2,
            refusals=(
                refuse(r"dy \(3,\) is not padded by \(\(2, 2\),\)", (3,), paddings=((2, 2),)),
            ),
        ),
    )


JOIN = (
    Sample(
        "concat",
        concat.concat,
        joined,
        JOINS,
        ulps=0,
        integers="moved",
        build=lambda *nodes, axis: concat.concat(nodes, axis),
        refusals=(
            refuse(
                r"concat: shapes differ beside axis 0: \S+ \(2, 3\) and \S+ \(2, 4\)",
                (2, 3),
                (2, 4),
                axis=0,
            ),
            refuse(r"concat: axis 2 does not fit \S+ \(2, 3\)", (2, 3), (2, 3), axis=2),
            refuse(r"concat: expected at least one node", axis=0),
            refuse(
                r"concat: \S+ is float32 and \S+ is float64",
                (3,),
                (3,),
                dtypes=("float32", "float64"),
                axis=0,
            ),
        ),
    ),
    Sample(
        "concat_two",
        concat.concat_op,
        joined,
        (*(c for c in JOINS if len(c.shapes) == 2), case((2, 3), (1, 3))),
        ulps=0,
        integers="moved",
    ),
    Sample(
        "concat_gradient",
        concat.concat_gradient_op,
        part_of,
        (
            case((5, 2), (2, 2), (3, 2), index=1, axis=0),
            *product(
                (case((2, 9), (2, 2), (2, 0), (2, 7)),),
                *({"index": k, "axis": axis} for k in range(3) for axis in (1, -1)),
            ),
        ),
        ulps=0,
        differentiable=(0,),
        integers="moved",
    ),
    Sample(
        "stack",
        concat.stack,
        lambda *arrays, axis: joined(*(np.expand_dims(a, axis) for a in arrays), axis=axis),
        tuple(
            Case((shape,) * count, {"axis": axis})
            for shape, count, axis in [
                ((), 3, 0),
                ((4,), 2, 0),
                ((4,), 2, 1),
                ((4, 3), 10, -1),
                ((0,), 2, -2),
            ]
        ),
        ulps=0,
        integers="moved",
        build=lambda *nodes, axis: concat.stack(nodes, axis),
        refusals=(refuse(r"concat: shapes differ beside axis 0", (3,), (4,), axis=0),),
    ),
    Sample(
        "split_equal",
        concat.split,
        lambda x, sections, axis: np.array_split(x, sections, axis)[1],
        tuple(
            Case((shape,), {"sections": sections, "axis": axis})
            for shape, sections, axis in [
                ((6,), 3, 0),
                ((4, 6), 2, 1),
                ((4, 6, 2), 3, -2),
                ((0, 3), 2, 0),
            ]
        ),
        ulps=0,
        integers="moved",
        build=lambda x, **attrs: concat.split(x, **attrs)[1],
        refusals=(
            refuse(r"axis 0 of \S+ \(5,\) does not divide into 2 parts", (5,), sections=2, axis=0),
            refuse(r"split: expected at least one part, got 0", (5,), sections=0, axis=0),
        ),
    ),
    Sample(
        "split_sizes",
        concat.split,
        lambda x, sections, axis: np.take(x, range(2, 2 + sections[1]), axis),
        tuple(
            Case((shape,), {"sections": sections, "axis": axis})
            for shape, sections, axis in [
                ((6,), (2, 4), 0),
                ((4, 6), (2, 0, 4), -1),
                ((4, 6), (2, 1, 1), 0),
            ]
        ),
        ulps=0,
        integers="moved",
        build=lambda x, **attrs: concat.split(x, **attrs)[1],
        refusals=(
            refuse(
                r"sizes add up to 4, not to axis 0 of \S+ \(5,\)", (5,), sections=(2, 2), axis=0
            ),
            refuse(r"split: sizes must not be negative", (5,), sections=(7, -2), axis=0),
        ),
    ),
    Sample(
        "constant_pad",
        pad.constant_pad_op,
        lambda x, paddings, value: padded(x, paddings, constant_values=value),
        product(PADDINGS, {"value": 0}, {"value": -1.5}),
        ulps=0,
        refusals=tuple(
            refuse(
                rf"pad: {dtype} cannot hold the fill {re.escape(str(value))}; cast \S+ before",
                (4,),
                dtypes=(dtype,),
                paddings=((1, 1),),
                value=value,
            )
            for dtype, value in FILLS
        ),
    ),
    Sample(
        "pad",
        pad.pad_op,
        padded,
        (
            *product(
                (case((4, 3)),),
                *(
                    {"paddings": p, "mode": m}
                    for p in [((1, 2), (2, 0)), (1, 2)]
                    for m in ("constant", "edge", "REFLECT")
                ),
            ),
            case((4,), paddings=((1, 1),), constant_values=3),
        ),
        ulps=0,
        refusals=(
            refuse(
                r"\S+ \(4, 3\) has 2 axes and paddings are given for 1", (4, 3), paddings=((1, 1),)
            ),
            refuse(r"pad: paddings must not be negative", (4,), paddings=((-1, 1),)),
            refuse(
                r"pad: mode must be constant, edge or reflect, got 'wrap'",
                (4,),
                paddings=(1,),
                mode="wrap",
            ),
            refuse(
                r"axis 1 of \S+ \(4, 3\) is too short to be padded by \(0, 3\)",
                (4, 3),
                paddings=(0, (0, 3)),
                mode="reflect",
            ),
            refuse(
                r"axis 0 of \S+ \(0,\) is too short to be padded by \(1, 0\)",
                (0,),
                paddings=((1, 0),),
                mode="edge",
            ),
        ),
    ),
    *pad_rows("edge", PADDINGS + WIDE_EDGES),
    *pad_rows("reflect", PADDINGS),
    Sample(
        "tile",
        concat.tile,
        np.tile,
        TILES,
        ulps=0,
        integers="moved",
        refusals=(refuse(r"tile: repetitions must not be negative, got \(-1,\)", (3,), reps=-1),),
    ),
    Sample(
        "tile_op",
        concat.tile_op,
        np.tile,
        tuple(c for c in TILES if c.attrs["reps"] != 4),
        ulps=0,
        integers="moved",
    ),
    Sample(
        "tile_gradient",
        concat.tile_gradient_op,
        untiled,
        tuple(
            Case((np.tile(np.zeros(c.shapes[0]), reps).shape, *c.shapes), {"reps": reps})
            for c in TILES
            for reps in [tuples(c.attrs["reps"])]
        ),
        ulps=4,
        scale=lambda dy, x, reps: untiled(np.abs(dy), x, reps),
        differentiable=(0,),
        refusals=(refuse(r"do not fit the repetitions \[2\]", (5,), (3,), reps=(2,)),),
    ),
)
