"""The rows of samples.py for images."""

from __future__ import annotations

import numpy as np

from dlsys.ops import resize
from support.table.formulas.layout import resized, shrunk, to_depth, to_space
from support.table.rows import Case, Sample, case, product, refuse

BLOCKS = tuple({"block": block, "mode": mode} for block in (1, 2, 3) for mode in ("DCR", "CRD"))
SIZES = tuple(
    Case((shape,), {"size": size, "align_corners": align})
    for shape, size in [
        ((1, 1, 4, 4), (8, 8)),
        ((2, 3, 5, 7), (3, 4)),
        ((3, 5), (5, 3)),
        ((2, 4, 6), (1, 1)),
        ((1, 1, 1, 1), (3, 4)),
        ((2, 2, 3), (2, 3)),
        ((0, 2, 3), (4, 4)),
        ((3, 31, 29), (17, 64)),
        ((7, 9), (21, 27)),
        ((3, 6), (2, 60)),
    ]
    for align in (False, True)
)


def resize_rows(mode: str) -> tuple[Sample, Sample]:
    return (
        Sample(
            f"resize_{mode}",
            resize.resize_ops[mode],
            lambda x, **attrs: resized(x, mode=mode, **attrs),
            SIZES,
            ulps=0 if mode == "nearest" else 4,
            specials=mode == "nearest",
            integers="float",
            scale=lambda x, **attrs: resized(np.abs(x), mode=mode, **attrs),
            refusals=(
                refuse(
                    r"size must be one or two positive integers, got \(0, 3\)",
                    (2, 3),
                    size=(0, 3),
                    align_corners=False,
                ),
                refuse(
                    r"expected \(…, height, width\), got \S+ \(3,\)",
                    (3,),
                    size=(2, 3),
                    align_corners=True,
                ),
            ),
        ),
        Sample(
            f"resize_{mode}_gradient",
            resize.resize_gradient_ops[mode],
            lambda dy, **attrs: shrunk(dy, mode=mode, **attrs),
            tuple(
                Case(((*c.shapes[0][:-2], *c.attrs["size"]),), c.attrs | {"size": c.shapes[0][-2:]})
                for c in SIZES
            ),
            ulps=8,
            specials=False,
            scale=lambda dy, **attrs: shrunk(np.abs(dy), mode=mode, **attrs),
            refusals=(refuse(r"images do not fit", (3,), size=(3, 4), align_corners=False),),
        ),
    )


IMAGES = (
    Sample(
        "depth_to_space",
        resize.depth_to_space_op,
        to_space,
        product((case((2, 36, 3, 2)), case((1, 36, 1, 5)), case((0, 36, 2, 2))), *BLOCKS),
        ulps=0,
        integers="moved",
        refusals=(
            refuse(
                r"7 channels of \S+ \(1, 7, 2, 2\) do not divide by block² = 4",
                (1, 7, 2, 2),
                block=2,
            ),
            refuse(r"expected \(n, c, height, width\), got \S+ \(4, 2\)", (4, 2), block=2),
            refuse(
                r"block must be a positive integer, got 0",
                (1, 4, 2, 2),
                block=0,
            ),
        ),
    ),
    Sample(
        "space_to_depth",
        resize.space_to_depth_op,
        to_depth,
        product((case((2, 3, 6, 12)), case((1, 1, 6, 6))), *BLOCKS),
        ulps=0,
        integers="moved",
        refusals=(
            refuse(
                r"height and width of \S+ \(1, 1, 3, 4\) do not divide by block = 2",
                (1, 1, 3, 4),
                block=2,
            ),
        ),
    ),
    *resize_rows("nearest"),
    *resize_rows("bilinear"),
    Sample(
        "resize",
        resize.resize,
        resized,
        product(
            (case((2, 3, 4)),),
            *(
                {"mode": mode, "align_corners": align, **size}
                for mode in ("nearest", "bilinear")
                for align in (False, True)
                for size in ({"size": 5}, {"scale": 2}, {"scale": (0.5, 1.7)})
            ),
        ),
        ulps=4,
        specials=False,
        scale=lambda x, **attrs: resized(np.abs(x), **attrs),
        refusals=(
            refuse(
                r"resize: mode must be nearest or bilinear, got 'cubic'",
                (2, 3),
                size=4,
                mode="cubic",
            ),
            refuse(r"resize: expected either size or scale", (2, 3)),
            refuse(
                r"resize: size must be one or two positive integers, got \(1, 2, 3\)",
                (2, 3),
                size=(1, 2, 3),
            ),
        ),
    ),
)
