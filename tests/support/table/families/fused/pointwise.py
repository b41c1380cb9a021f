"""The row of samples.py for pointwise fusions.

Their nodes are built as `fusion/pointwise.py` builds them: around the nodes that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dlsys import autodiff as ad
from dlsys.fusion.pointwise import pointwise_op
from dlsys.ops.elementwise import cast_op
from support.table.rows import Case, Sample, case, classes, positive, signed

Array = np.ndarray


class Recipe(NamedTuple):
    """An expression as nodes and as a formula."""

    nodes: Callable[..., Any]
    formula: Callable[..., Any]


def gelu(x: Any, tanh: Callable) -> Any:
    return 0.5 * x * (1 + tanh(0.79788456 * (x + 0.044715 * (x * x * x))))


def rate(step: Any, convert: Callable, whole: Callable, exp: Callable) -> Any:
    return 0.1 * exp(-0.5 * whole(convert(step) / 8)) + 1e-3


RECIPES = {
    "residual": Recipe(lambda x, y: ad.relu_op(x + y), lambda x, y: np.where(x + y <= 0, 0, x + y)),
    "affine": Recipe(
        lambda x, mean, scale, shift: (x - mean) * scale + shift,
        lambda x, mean, scale, shift: (x - mean) * scale + shift,
    ),
    "gelu": Recipe(lambda x: gelu(x, ad.tanh_op), lambda x: gelu(x, np.tanh)),
    "select": Recipe(
        lambda x, y: ad.where_op(ad.less_op(x, y), x / y, -x),
        lambda x, y: np.where(x < y, x / y, -x),
    ),
    "mask": Recipe(
        lambda x, y: ad.logical_xor_op(ad.less_equal_op(x, y), ad.not_equal_op(y, y)),
        lambda x, y: x <= y,
    ),
    "choose": Recipe(
        lambda mask, x, y: ad.where_op(ad.logical_not_op(mask), x, y) * x,
        lambda mask, x, y: np.where(mask, y, x) * x,
    ),
    "rate": Recipe(
        lambda step: rate(
            step,
            lambda x: cast_op(x, np.float32),
            lambda x: cast_op(cast_op(x, np.int64), np.float32),
            ad.exp_op,
        ),
        lambda step: rate(step, np.float64, np.trunc, np.exp),
    ),
    "images": Recipe(
        lambda x, mean: (cast_op(x, np.float32) - cast_op(mean, np.float32)) / 64,
        lambda x, mean: (x.astype(np.float64) - mean) / 64,
    ),
}


def pointwise(*inputs: Any, recipe: str) -> Any:
    return pointwise_op(*inputs, output=RECIPES[recipe].nodes(*inputs))


def size(*arrays: Array, recipe: str) -> Any:
    """What the terms of a result may be as large as."""
    return 1 + sum(np.abs(x.astype(np.float64)) for x in arrays) ** 3


def cases(recipe: str, *shapes: tuple, domain: Any = signed) -> tuple[Case, ...]:
    return tuple(case(*given, domain=domain, recipe=recipe) for given in shapes)


EQUAL = ((), (1,), (0, 3), (7,), (31, 33), (5, 4, 1, 9), (70_001,))
SPREAD = (
    ((6, 8), (6, 1), (8,), ()),
    ((37, 41), (37, 1), (1, 41), (1, 1)),
    ((0, 5), (0, 1), (5,), (1,)),
    ((2, 3, 5, 7), (3, 1, 1), (1, 3, 1, 1), (2, 3, 1, 1)),
    ((6, 4, 4, 8), (4, 8), (6, 4, 1, 1), (1, 4, 4, 1)),
    ((300, 128), (128,), (300, 1), (300, 128)),
    ((129, 150), (129, 1), (150,), ()),
)
POINTWISE = (
    Sample(
        "pointwise", pointwise_op, lambda *arrays, recipe: RECIPES[recipe].formula(*arrays),
        (
            *cases("residual", *((s, s) for s in EQUAL)),
            *cases("affine", *SPREAD),
            *cases("gelu", *((s,) for s in EQUAL)),
            *cases("select", *((s, s) for s in EQUAL), domain=(signed, positive)),
            *cases("mask", *((s, s) for s in EQUAL), ((31, 33), (33,))),
            *cases(
                "choose", *((s, s, s) for s in EQUAL), ((8, 12), (12,), (8, 12)),
                domain=(lambda rng, shape: rng.uniform(size=shape) < 0.5, signed, signed),
            ),
            *cases("rate", ((),), ((5,),), ((20_000,),), domain=classes(60, np.int64)),
            *cases(
                "images", ((3, 3, 8, 8), (3, 1, 1)), ((30, 28, 28), ()), ((9, 7), (9, 7)),
                domain=classes(256, np.uint8),
            ),
        ),
        scale=size, ulps=4, differentiable=(), specials=False, build=pointwise,
    ),
)  # fmt: skip
