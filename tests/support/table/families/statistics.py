"""The rows of samples.py for max, min, prod, var, argmax, argmin, logsumexp and cumsum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys.ops import reduce, scan
from support.table.rows import WIDE, Sample, Shape, case, extreme, product, refuse

FULL = tuple(case(s) for s in [(7,), (), (1,), (3, 4, 5), (2003, 7)])
AXES = (
    *FULL,
    *(case((3, 4, 5), axis=axis) for axis in (0, 1, -1, (0, 2), (-1, 0), (0, 1, 2), ())),
    *product((case((3, 1, 5)),), {"axis": 1}, {"axis": (0, 1), "keepdims": True}),
    *product((case(WIDE),), {"axis": (0, 2, 5)}, {"axis": (1, 6), "keepdims": True}, {"axis": 7}),
    *product((case((131, 67)),), {"axis": 0}, {"axis": 1}, {"keepdims": True}),
    *product((case((20_003, 9)), case((3, 70_001)), case((70_001,))), {"axis": 0}),
    *product((case((5, 20_003)), case((400, 600)), case((17, 65, 129))), {"axis": 1}),
    *product((case((17, 65, 129)),), {"axis": (0, 2)}),
    # few columns that are long, short rows, and few columns that are short
    *product((case((9001, 2)), case((2003, 40))), {"axis": 0}),
    *product((case((3001, 3)), case((301, 50)), case((101, 300))), {"axis": 1}),
    *product((case((301, 3, 4)), case((41, 7, 31)), case((3, 1501, 5))), {"axis": 1}),
    case((0, 4), axis=1), case((4, 0), axis=0), case((2, 0, 3), axis=(0, 2)),
)  # fmt: skip
EMPTY = (case((0,)), case((0, 4), axis=0), case((3, 0), axis=1, keepdims=True))
BAD_AXES = tuple(
    refuse(rf"axes \({axes}\) do not fit an array of 2 dimensions", (3, 4), axis=axis)
    for axes, axis in [("2,", 2), ("-3,", -3), ("0, 0", (0, 0))]
)
NOTHING = (refuse(r"\(3, 0\) has no elements along axes \(1,\)", (3, 0), axis=1),)


def distinct(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Numbers 1/64 apart, so that no small step changes which one is the largest."""
    count = int(np.prod(shape))
    return (rng.permutation(count).reshape(shape) - count // 2) / 64


def tied(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(np.float64)


def near_one(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Factors whose product is neither 0 nor infinite, with both signs."""
    sizes = rng.uniform(0.99, 1.01, shape).astype(np.float32).astype(np.float64)
    return sizes * rng.choice([-1.0, 1.0], shape)


def count(x: np.ndarray, y: np.ndarray) -> float:
    return max(x.size / max(np.size(y), 1), 1)


def reduced(name: str) -> Callable:
    function = getattr(np, name)
    return lambda x, axis=None, keepdims=False: function(x, axis=axis, keepdims=keepdims)


def prod_scale(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    y = np.prod(x, axis=axis, keepdims=keepdims)
    return np.abs(y) * np.sqrt(count(x, y)) + np.finfo(np.float32).tiny


def flattened(x: np.ndarray, axis: Any) -> np.ndarray:
    """x with the reduced axes as one, the last."""
    axes = range(x.ndim) if axis is None else np.atleast_1d(np.array(axis, int)) % max(x.ndim, 1)
    axes = sorted(axes)
    kept = [k for k in range(x.ndim) if k not in axes]
    shape = [x.shape[k] for k in kept]
    length = int(np.prod([x.shape[k] for k in axes], dtype=int))
    return x.transpose(kept + axes).reshape(*shape, length)


def kept_dims(y: np.ndarray, x: np.ndarray, axis: Any, keepdims: bool) -> np.ndarray:
    if not keepdims:
        return y
    return y.reshape(np.sum(x, axis=axis, keepdims=True).shape)


def position(name: str) -> Callable:
    def formula(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> np.ndarray:
        flat = flattened(x, axis)
        y = getattr(np, name)(flat, axis=-1) if flat.size else np.zeros(flat.shape[:-1], int)
        return kept_dims(np.asarray(y), x, axis, keepdims)

    return formula


def logsumexp(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    y = np.logaddexp.reduce(flattened(x, axis), axis=-1)
    return kept_dims(np.asarray(y), x, axis, keepdims)


def logsumexp_scale(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    """x - max(x) is rounded before exp sees it, and the sum of exp once a term."""
    y = logsumexp(x, axis, keepdims)
    return 1 + np.abs(y) + np.sqrt(count(x, y)) / 4


def var(x: np.ndarray, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> np.ndarray:
    mean = np.mean(x, axis=axis, keepdims=True)
    total = np.sum((x - mean) ** 2, axis=axis, keepdims=keepdims)
    return total / np.float64(x.size // max(mean.size, 1) - ddof)


def var_scale(x: np.ndarray, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> np.ndarray:
    y = var(x, axis, keepdims, ddof)
    return y * np.sqrt(count(x, y))


def cumsum(x: np.ndarray, axis: int = -1, reverse: bool = False) -> np.ndarray:
    flip = (lambda z: np.flip(z, axis)) if reverse else (lambda z: z)
    return flip(np.cumsum(flip(x), axis=axis))


def cumsum_scale(x: np.ndarray, axis: int = -1, reverse: bool = False) -> np.ndarray:
    return np.sqrt(max(x.shape[axis], 1)) * cumsum(np.abs(x), axis, reverse)


RUNNING = product(
    tuple(case(s) for s in [(7,), (1,), (0,), (3, 5), (0, 4), (131, 67), (3, 70_001)]),
    {}, {"reverse": True}, {"axis": 0}, {"axis": 0, "reverse": True},
)  # fmt: skip
RUNNING += product((case(WIDE), case((70_001, 3)), case((17, 65, 129))), {"axis": 0}, {"axis": -2})
RUNNING += product(
    tuple(case(s) for s in [(201, 5, 2), (31, 7, 4), (9, 4, 5), (3, 2, 300)]),
    {"axis": 1}, {"axis": 1, "reverse": True},
)  # fmt: skip

# Extremes are exact. prod is rounded once a factor on the GPU; numpy and the CPU are exact to the
# last digit, which test_operator_limits.py holds them to.
STATISTICS = (
    Sample(
        "max", reduce.max_op, reduced("max"), AXES, distinct, ulps=0, integers="same",
        refusals=BAD_AXES + NOTHING,
    ),
    Sample(
        "min", reduce.min_op, reduced("min"), AXES, distinct, ulps=0, integers="same",
        refusals=BAD_AXES + NOTHING,
    ),
    Sample(
        "argmax", reduce.argmax_op, position("argmax"), AXES, tied, differentiable=(),
        integers="moved", refusals=BAD_AXES + NOTHING,
    ),
    Sample(
        "argmin", reduce.argmin_op, position("argmin"), AXES, tied, differentiable=(),
        integers="moved", refusals=BAD_AXES + NOTHING,
    ),
    Sample(
        "prod", reduce.prod_op, reduced("prod"), AXES + EMPTY, near_one, scale=prod_scale,
        ulps=2, gradient_ulps=256, integers="same", refusals=BAD_AXES,
    ),
    Sample(
        "logsumexp", reduce.logsumexp_op, logsumexp,
        (
            *AXES, *EMPTY, case((7, 10), axis=1, domain=extreme),
            case((10, 7), axis=0, domain=extreme),
        ),
        scale=logsumexp_scale, ulps=4, integers="float", refusals=BAD_AXES,
    ),
    Sample(
        "var", reduce.var_op, var, (*AXES, case((3, 4, 5), axis=1, ddof=1), case((7,), ddof=2)),
        scale=var_scale, ulps=8, integers="float", refusals=BAD_AXES, storages=(),
    ),
    Sample(
        "cumsum", scan.cumsum_op, cumsum, RUNNING, scale=cumsum_scale, ulps=1,
        integers="same",
        refusals=(refuse(r"axes \(2,\) do not fit an array of 2 dimensions", (3, 4), axis=2),),
    ),
)  # fmt: skip
