"""The rows of samples.py for normalization."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops.norm import batch_norm, layer_norm
from support.table.rows import Sample, case, positive, product, refuse, signed

# ---- formulas ----


def column(values: np.ndarray, ndim: int) -> np.ndarray:
    return values.reshape(-1, *[1] * (ndim - 2))


def over(x: np.ndarray) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def batch_moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = x.mean(axis=over(x))
    return mean, ((x - column(mean, x.ndim)) ** 2).mean(axis=over(x))


def fixed(
    x: np.ndarray, mean: Any, variance: Any, scale: Any, bias: Any, eps: float, **_: Any
) -> Any:
    mean, variance, scale, bias = (column(v, x.ndim) for v in (mean, variance, scale, bias))
    return (x - mean) * (scale / np.sqrt(variance + eps)) + bias


def fixed_scale(x: Any, mean: Any, variance: Any, scale: Any, bias: Any, **attrs: Any) -> Any:
    """The scale of rounding: x, the mean and the bias, each as large as it stands in the result."""
    return fixed(np.abs(x), -np.abs(mean), variance, np.abs(scale), np.abs(bias), **attrs)


def batch(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return fixed(x, *batch_moments(x), scale, bias, eps)


def batch_scale(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float = 1e-5) -> Any:
    """The mean is a sum of values of both signs, of which each has been rounded."""
    size, variance = np.abs(x).mean(axis=over(x)), batch_moments(x)[1]
    return fixed_scale(x, size, variance, scale, bias, eps=eps)


def sums(x: Any, mean: Any, variance: Any, dy: Any, eps: float, training: bool) -> np.ndarray:
    one = np.ones_like(mean)
    xhat = fixed(x, mean, variance, one, 0 * one, eps)
    return 2 * (dy * xhat).sum(axis=over(x)) + dy.sum(axis=over(x))


def sums_scale(x: Any, mean: Any, variance: Any, dy: Any, eps: float, training: bool) -> np.ndarray:
    return sums(np.abs(x), -np.abs(mean), variance, np.abs(dy), eps, training)


def batch_gradient(x: np.ndarray, scale: np.ndarray, dy: np.ndarray, eps: float) -> np.ndarray:
    """By the matrix of the derivative: dx_j = Σ_i dy_i ∂y_i/∂x_j, channel by channel."""
    x_, dy_ = (np.moveaxis(v, 1, 0).reshape(x.shape[1], -1) for v in (x, dy))
    n = x_.shape[1]
    moved = x_ - x_.mean(axis=1, keepdims=True)
    r = ((moved**2).mean(axis=1) + eps) ** -0.5
    by_mean = np.eye(n) - 1 / n
    matrix = r[:, None, None] * by_mean - (r**3)[:, None, None] * (
        moved[:, :, None] * moved[:, None, :] / n
    )
    dx = np.einsum("c,ci,cij->cj", scale, dy_, matrix)
    outer = np.moveaxis(x, 1, 0).shape
    return np.moveaxis(dx.reshape(outer), 0, 1)


def build_batch_gradient(x: Any, scale: Any, dy: Any, eps: float) -> Any:
    mean, variance = batch_norm.batch_statistics_op(x)
    by_scale, by_bias = batch_norm.batch_normalize_sums_op(
        x, mean, variance, dy, eps=eps, training=True
    )
    return batch_norm.batch_normalize_gradient_op(
        x, mean, variance, scale, by_scale, by_bias, dy, eps=eps
    )


def both(node: Any) -> Any:
    """Two outputs as one number a channel."""
    return 2 * node[0] + node[1]


def as_rows(x: np.ndarray, scale: np.ndarray, groups: int | None) -> tuple[np.ndarray, np.ndarray]:
    """x as (rows, values), and numbers of which `scale` has the shape as numbers of x's shape."""
    if groups is None:
        lead = x.shape[: x.ndim - scale.ndim]
        return x.reshape(int(np.prod(lead)), scale.size), scale + np.zeros(x.shape)
    rows = x.reshape(x.shape[0] * (groups or x.shape[1]), -1)
    return rows, column(scale, x.ndim) + np.zeros(x.shape)


def normalized(x: np.ndarray, scale: np.ndarray, groups: Any, centered: bool, eps: float) -> Any:
    rows, _ = as_rows(x, scale, groups)
    if centered:
        rows = rows - rows.mean(axis=1, keepdims=True)
    return (rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps)).reshape(x.shape)


def by_row(
    x: np.ndarray, scale: np.ndarray, bias: Any = 0.0, groups: int | None = None,
    centered: bool = True, eps: float = 1e-5,
) -> np.ndarray:  # fmt: skip
    bias = np.zeros(scale.shape) + bias
    wide, wide_bias = (as_rows(x, v, groups)[1] for v in (scale, bias))
    return normalized(x, scale, groups, centered, eps) * wide + wide_bias


def by_row_scale(
    x: np.ndarray, scale: np.ndarray, bias: Any = 0.0, groups: int | None = None,
    centered: bool = True, eps: float = 1e-5,
) -> np.ndarray:  # fmt: skip
    """The largest of the row's values has been rounded in the mean."""
    one, zero = np.abs(scale), np.abs(bias + np.zeros(scale.shape))
    size = np.abs(normalized(x, scale, groups, centered, eps))
    rows, _ = as_rows(x, scale, groups)
    moved = rows - rows.mean(axis=1, keepdims=True) * centered
    deviation = ((moved**2).mean(axis=1, keepdims=True) + eps) ** 0.5
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0) / deviation
    size = size + np.broadcast_to(largest, rows.shape).reshape(x.shape)
    wide, wide_bias = (as_rows(x, v, groups)[1] for v in (one, zero))
    return size * wide + wide_bias


def row_gradient(
    x: np.ndarray, scale: np.ndarray, dy: np.ndarray, groups: Any, centered: bool, eps: float
) -> np.ndarray:
    """By the matrix of the derivative of each row."""
    rows, wide = as_rows(x, scale, groups)
    d = (dy * wide).reshape(rows.shape)
    n = max(rows.shape[1], 1)
    moved = rows - rows.mean(axis=1, keepdims=True) * centered
    r = ((moved**2).mean(axis=1) + eps) ** -0.5
    by_mean = np.eye(n) - centered / n
    matrix = r[:, None, None] * by_mean - (r**3)[:, None, None] * (
        moved[:, :, None] * moved[:, None, :] / n
    )
    return np.einsum("ri,rij->rj", d, matrix).reshape(x.shape)


def row_sums(
    x: np.ndarray, scale: np.ndarray, dy: np.ndarray, groups: Any, centered: bool, eps: float
) -> np.ndarray:
    terms = dy * (2 * normalized(x, scale, groups, centered, eps) + 1)
    axes = tuple(range(x.ndim - scale.ndim)) if groups is None else over(x)
    return terms.sum(axis=axes)


def row_sums_scale(
    x: np.ndarray, scale: np.ndarray, dy: np.ndarray, groups: Any, centered: bool, eps: float
) -> np.ndarray:
    size = by_row_scale(x, 0 * scale + 1, 0.0, groups, centered, eps)
    axes = tuple(range(x.ndim - scale.ndim)) if groups is None else over(x)
    return (np.abs(dy) * (2 * size + 1)).sum(axis=axes)


def running(
    mean: Any, variance: Any, new: Any, new_variance: Any, momentum: float, correction: float
) -> Any:
    moved = []
    for old, value, weight in (
        (mean, new, momentum),
        (variance, new_variance, momentum * correction),
    ):
        kept = old if weight == 0 else 0 * value if momentum == 1 else (1 - momentum) * old
        moved.append(kept + weight * value if weight else kept)
    return tuple(moved)


# ---- rows ----

CHANNELS = (
    (9, 3),
    (4, 2, 5),
    (3, 5, 4, 5),
    (12, 1),
    (130, 40),
    (5, 3, 1, 1, 3),
    (7, 513),
    (2, 65, 9, 11),
)
LARGE = ((3, 33, 61, 67), (70, 3, 16, 16))
PARTS = ((4001, 5), (1, 2, 300, 301))
BATCH = tuple(case(s, (s[1],), (s[1],)) for s in (*CHANNELS, *LARGE))
FIXED = tuple(case(s, *[(s[1],)] * 4) for s in (*CHANNELS, (0, 3, 2), (3, 0), (2, 3, 0)))
SETTINGS = dict(eps=1e-3, training=False)
POSITIVE_VARIANCE = (signed, signed, positive, signed, signed)
LAYERS = tuple(
    case(x, scale, scale, groups=groups, centered=centered, eps=1e-3)
    for x, scale, groups in [
        ((4, 9), (9,), None), ((7,), (7,), None), ((2, 3, 40), (40,), None),
        ((5, 4, 6), (4, 6), None), ((0, 7), (7,), None), ((33, 130), (130,), None),
        ((2, 1500), (1500,), None),
        ((3, 4, 5), (4,), 2), ((2, 6, 3, 5), (6,), 3), ((3, 2, 4, 3), (2,), 0), ((4, 24), (24,), 3),
        ((2, 64, 7, 7), (64,), 8), ((2, 3, 41, 43), (3,), 1),
    ]
    for centered in (True, False)
)  # fmt: skip
NO_CHANNELS = refuse(r"expected an array of \(N, C, …\), got \(3,\)", (3,))
BAD_CHANNELS = (
    refuse(r"expected 3 channels as x \(4, 3\) has them, got \(4,\)", (4, 3), (4,), (3,)),
    refuse(r"expected an array of \(N, C, …\), got \(3,\)", (3,), (3,), (3,)),
)

BATCH_ROWS = (
    Sample(
        "channels", batch_norm.channels_op,
        lambda x: x.reshape(*x.shape[:2], int(np.prod(x.shape[2:]))),
        tuple(case(s) for s in (*CHANNELS, (0, 3), (2, 0, 3))), ulps=0, refusals=(NO_CHANNELS,),
        integers="moved",
    ),
    Sample(
        "per_channel", batch_norm.per_channel, lambda x: x[:, None],
        tuple(case((n,)) for n in (1, 5, 0)), ulps=0, integers="moved",
    ),
    Sample(
        "batch_statistics", batch_norm.batch_statistics_op, lambda x: both(batch_moments(x)),
        tuple(case(s) for s in (*CHANNELS, *LARGE, *PARTS)),
        scale=lambda x: 2 * np.abs(x).max(axis=over(x)) + (x**2).max(axis=over(x)),
        build=lambda x: both(batch_norm.batch_statistics_op(x)), ulps=4, refusals=(NO_CHANNELS,),
    ),
    Sample(
        "batch_normalize", batch_norm.batch_normalize_op, fixed,
        tuple(case(*c.shapes, **SETTINGS) for c in FIXED), domain=POSITIVE_VARIANCE, ulps=4,
        gradient_ulps=64, scale=fixed_scale, wide=(1, 2),
        refusals=(
            refuse(
                r"expected 3 channels as x \(4, 3\) has them, got \(2,\)", (4, 3), (2,), (3,), (3,),
                (3,), dtypes=("float32",) * 5, **SETTINGS,
            ),
        ),
    ),
    Sample(
        "batch_normalize_sums", batch_norm.batch_normalize_sums_op, sums,
        tuple(case(s, (s[1],), (s[1],), s, **SETTINGS) for s in (*CHANNELS, *PARTS, (0, 3, 2))),
        domain=(signed, signed, positive, signed), scale=sums_scale, ulps=4, gradient_ulps=64,
        wide=(1, 2),
        build=lambda *inputs, **attrs: both(batch_norm.batch_normalize_sums_op(*inputs, **attrs)),
        refusals=(
            refuse(
                r"expected a gradient of shape \(4, 3\), got \S+ \(4, 2\)", (4, 3), (3,), (3,),
                (4, 2), **SETTINGS,
            ),
        ),
    ),
    Sample(
        "batch_normalize_gradient", batch_norm.batch_normalize_gradient_op, batch_gradient,
        tuple(case(s, (s[1],), s, eps=1e-3) for s in CHANNELS[:6]), build=build_batch_gradient,
        scale=lambda x, scale, dy, eps: 0 * x + 8, ulps=16, gradient_ulps=256, specials=False,
    ),
    Sample(
        "batch_normalization", batch_norm.batch_normalization, batch, product(BATCH, {"eps": 1e-3}),
        scale=batch_scale, ulps=4, gradient_ulps=64, refusals=BAD_CHANNELS, roundings=2,
    ),
    Sample(
        "batch_normalization_op", batch_norm.batch_normalization_op, batch, BATCH[:3],
        scale=batch_scale,
        ulps=4, gradient_ulps=64,
        build=lambda x, scale,
        bias: batch_norm.batch_normalization(x, scale, bias, None, None, 0.1),
    ),
    Sample(
        "running_update", batch_norm.running_update_op, running,
        (
            *(case(*[(n,)] * 4, momentum=0.1, correction=1.25) for n in (1, 7, 0, 513)),
            case(*[(5,)] * 4, momentum=1.0, correction=1.5),
            case(*[(5,)] * 4, momentum=0.1, correction=0.0),
            case(*[(5,)] * 4, momentum=0.0, correction=0.0),
        ),
        scale=lambda *states, **attrs: running(*map(np.abs, states), **attrs), ulps=1.5, states=2,
        differentiable=(), storages=(),  # running statistics are float32
    ),
    Sample(
        "running_statistics", batch_norm.running_statistics_op,
        lambda m, v, n, w, x, momentum: running(m, v, n, w, momentum, 15 / 14),
        (case((2,), (2,), (2,), (2,), (3, 2, 5), momentum=0.1),),
        scale=lambda *states, momentum: running(*map(np.abs, states[:4]), momentum, 15 / 14),
        ulps=1.5, states=2, differentiable=(), specials=False,
        refusals=(
            refuse(
                r"running_statistics: \S+ is no Parameter and cannot be written", (3,), (3,), (3,),
                (3,), (4, 3), dtypes=("float32",) * 5, momentum=0.1,
            ),
            refuse(
                r"running statistics are float32, got \S+ of float16; declare it float32",
                (3,), (3,), (3,), (3,), (4, 3), dtypes=("float16",) * 5, momentum=0.1, states=2,
            ),
        ), wide=(0, 1, 2, 3),
    ),
)  # fmt: skip

ROW_ROWS = (
    Sample(
        "normalization_view", layer_norm.normalization_view_op,
        lambda x, scale, groups, rows: as_rows(x, scale, groups)[0],
        tuple(case(*c.shapes[:2], groups=c.attrs["groups"], rows=True) for c in LAYERS[::2]),
        ulps=0, differentiable=(0,),
    ),
    Sample(
        "row_normalize", layer_norm.row_normalize_op, by_row, LAYERS, scale=by_row_scale, ulps=4,
        gradient_ulps=64,
        refusals=(
            refuse(
                r"scale \(4,\) does not have the shape of the last axes of x \(4, 3\)", (4, 3),
                (4,), (4,), groups=None, centered=True, eps=1e-3,
            ),
            refuse(
                r"4 groups do not divide 6 channels", (2, 6), (6,), (6,), groups=4, centered=True,
                eps=1e-3,
            ),
            refuse(
                r"expected x \(N, C, …\) and a scale of \(C,\), got \(2, 6\) and \(5,\)", (2, 6),
                (5,), (5,), groups=2, centered=True, eps=1e-3,
            ),
            refuse(
                r"scale and bias differ: \S+ \(3,\) and \S+ \(4,\)", (2, 3), (3,), (4,),
                groups=None, centered=True, eps=1e-3,
            ),
        ),
    ),
    Sample(
        "row_normalize_gradient", layer_norm.row_normalize_gradient_op, row_gradient,
        tuple(case(c.shapes[0], c.shapes[1], c.shapes[0], **c.attrs) for c in LAYERS[:22]),
        scale=lambda x, *rest, **attrs: 0 * x + 8, ulps=16, gradient_ulps=256, specials=False,
        refusals=(
            refuse(
                r"the gradient is not of x's shape: \S+ \(2, 3\) and \S+ \(3, 2\)", (2, 3), (3,),
                (3, 2), groups=None, centered=True, eps=1e-3,
            ),
        ),
    ),
    Sample(
        "row_normalize_sums", layer_norm.row_normalize_sums_op, row_sums,
        tuple(case(c.shapes[0], c.shapes[1], c.shapes[0], **c.attrs) for c in LAYERS),
        scale=row_sums_scale, ulps=8, gradient_ulps=256, differentiable=(0, 2), specials=False,
        build=lambda *inputs, **attrs: both(layer_norm.row_normalize_sums_op(*inputs, **attrs)),
    ),
    Sample(
        "layer_normalization", layer_norm.layer_normalization, by_row,
        tuple(case(*c.shapes, eps=1e-3) for c in LAYERS if c.attrs["groups"] is None)[::2],
        scale=by_row_scale, ulps=4, gradient_ulps=64,
    ),
    Sample(
        "rms_normalization", layer_norm.rms_normalization,
        lambda x, scale, eps: by_row(x, scale, 0.0, None, False, eps),
        tuple(case(*c.shapes[:2], eps=1e-3) for c in LAYERS if c.attrs["groups"] is None)[::2],
        scale=lambda x, scale, eps: by_row_scale(x, scale, 0.0, None, False, eps), ulps=4,
        gradient_ulps=64,
    ),
    Sample(
        "group_normalization", layer_norm.group_normalization, by_row,
        tuple(
            case(*c.shapes, groups=c.attrs["groups"], eps=1e-3) for c in LAYERS if c.attrs["groups"]
        )[::2],
        scale=by_row_scale, ulps=4, gradient_ulps=64,
    ),
    Sample(
        "instance_normalization", layer_norm.instance_normalization,
        lambda x, scale, bias, eps: by_row(x, scale, bias, 0, True, eps),
        (case((3, 2, 4, 3), (2,), (2,), eps=1e-3),),
        scale=lambda x, scale, bias, eps: by_row_scale(x, scale, bias, 0, True, eps), ulps=4,
        gradient_ulps=64,
    ),
)  # fmt: skip

NORMALIZATION = (*BATCH_ROWS, *ROW_ROWS)
