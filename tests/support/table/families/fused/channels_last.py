"""The rows of samples.py for operators over images with channels last.

Their nodes are built as `fusion/conv/channels_last.py` builds them: around the nodes that they
stand for, between transposes. Cases and formulas are those of the operators over (N, C, H, W).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.fusion.conv import channels_last as fused
from dlsys.fusion.conv.conv_statistics import conv2d_channels_last_statistics_op
from dlsys.fusion.shared.body import close
from dlsys.ops.conv import convolution, pooling
from dlsys.ops.norm.batch_norm import batch_statistics_op
from support.table.families import conv
from support.table.families import pooling as pools
from support.table.rows import Case, Sample, case


def last(x: Any) -> Any:
    """(N, C, H, W) as (N, H, W, C)."""
    return x.transpose(fused.LAST) if isinstance(x, np.ndarray) else ad.transpose_op(x, fused.LAST)


def first(x: Any) -> Any:
    """(N, H, W, C) as (N, C, H, W)."""
    array = isinstance(x, np.ndarray)
    return x.transpose(fused.FIRST) if array else ad.transpose_op(x, fused.FIRST)


def of_tf32(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that tensor cores take as they are: kernels of float32 are at tf32."""
    return np.round(rng.uniform(-2, 2, shape) * 256) / 256


def served(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Those that the pass moves: of something, and of no groups of few channels but one."""
    return tuple(
        one
        for one in cases
        if all(map(np.prod, one.shapes))
        and (one.attrs.get("groups", 1) == 1 or {130, 1} & {shape[1] for shape in one.shapes})
    )


def moved(cases: Sequence[Case], images: Sequence[int], domain: Any = None) -> tuple[Case, ...]:
    """Cases whose inputs `images` have their channels last."""

    def shape(k: int, extents: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(extents[j] for j in fused.LAST) if k in images else extents

    return tuple(
        Case(tuple(shape(k, x) for k, x in enumerate(one.shapes)), one.attrs, domain)
        for one in cases
    )


def over(formula: Callable[..., Any], images: Sequence[int], is_image: bool) -> Callable[..., Any]:
    """A formula of (N, C, H, W), of arrays with channels last."""

    def moved_formula(*arrays: np.ndarray, **attrs: Any) -> Any:
        made = formula(*(first(x) if k in images else x for k, x in enumerate(arrays)), **attrs)
        return last(made) if is_image and np.ndim(made) == 4 else made

    return moved_formula


def build(op: Any, plain: Any, images: Sequence[int], is_image: bool) -> Callable[..., Any]:
    """A node of a convolution or a gradient of it."""

    def made(*inputs: Any, **attrs: Any) -> Any:
        seen = [first(x) if k in images else x for k, x in enumerate(inputs)]
        inner = plain(*seen, **attrs)
        windows = plain.windows(inner, *(x.spec for x in seen))
        body = close(inputs, [last(inner) if is_image else inner])
        return op(*inputs, body=body, windows=windows, groups=inner.attrs["groups"])

    return made


def build_statistics(x: Any, f: Any, part: int, **attrs: Any) -> Any:
    """A convolution, or the mean and variance of each filter's results."""
    inner = convolution.convolution_op(first(x), f, **attrs)
    windows = convolution.convolution_op.windows(inner, *(v.spec for v in inner.inputs))
    images = last(inner)
    moments = batch_statistics_op(ad.reshape_op(images, (-1, images.spec.shape[3])))
    body = close((x, f), (images, moments[0], moments[1]))
    groups = inner.attrs["groups"]
    made = conv2d_channels_last_statistics_op(x, f, body=body, windows=windows, groups=groups)
    return 2 * made[1] + made[2] if part else made[0]


def statistics_of(x: np.ndarray, f: np.ndarray, part: int, **attrs: Any) -> np.ndarray:
    y = last(conv.convolved(first(x), f, **attrs))
    return 2 * y.mean((0, 1, 2)) + y.var((0, 1, 2)) if part else y


def statistics_scale(x: np.ndarray, f: np.ndarray, part: int, **attrs: Any) -> np.ndarray:
    """A result is rounded to 16 bits before its statistics."""
    y = np.sqrt(conv.depth(x, f)) * last(conv.convolved(abs(first(x)), abs(f), **attrs))
    return 2 * y.max((0, 1, 2)) + 2 * (y**2).max((0, 1, 2)) if part else y


STATISTICS_CASES = tuple(
    Case(one.shapes, one.attrs | {"part": part}, of_tf32)
    for one in moved(served(conv.CASES), (0,))
    for part in (0, 1)
)


def build_pool(x: Any, **attrs: Any) -> Any:
    inner = pooling.max_pool_op(first(x), **attrs)
    windows = pooling.max_pool_op.windows(inner, inner.inputs[0].spec.shape[2:])
    body = close((x,), [last(inner[k]) for k in range(2)])
    return fused.max_pool_channels_last_op(x, body=body, windows=windows)[0]


def build_pool_gradient(x: Any, dy: Any, **attrs: Any) -> Any:
    """The gradient of dy, by the places of the largest elements of x."""
    places = build_pool(x, **attrs).inputs[0][1]
    image = first(x).spec.shape[2:]
    inner = pooling.max_pool_gradient_op(first(dy), first(places), image=image, **attrs)
    windows = pooling.max_pool_gradient_op.windows(inner, image)
    body = close((dy, places), [last(inner)])
    return fused.max_pool_gradient_channels_last_op(dy, places, body=body, windows=windows)


def pool_gradient(x: np.ndarray, dy: np.ndarray, **attrs: Any) -> np.ndarray:
    indices = pools.first_indices(first(x), **attrs)
    return last(pools.spread(first(dy), indices, x.shape[1:3]))


def convolved(name: str, op: Any, plain: Any, formula: Any, cases: Any, of: Any, at: Any) -> Sample:
    """A row of a convolution; `of` its terms a result, `at` the inputs that are images."""
    is_image = op is not fused.filter_gradient_channels_last_op
    row = conv.sample(name, op, formula, cases, of)
    scale: Any = row.scale
    return Sample(
        name, op, over(formula, at, is_image), moved(served(cases), at, of_tf32),
        scale=over(scale, at, is_image), ulps=row.ulps, differentiable=(), specials=False,
        build=build(op, plain, at, is_image),
    )  # fmt: skip


POOLED = (
    *pools.CASES[:4],
    case((2, 16, 7, 9), window=3, stride=2, padding=1),  # channels in vectors, by square and not
    case((1, 8, 5, 6), window=(3, 2), stride=1, padding=1),
    case((2, 8, 6, 5), window=2),
    case((1, 24, 6, 7), window=3, stride=1, padding=1),
    case((1, 8, 7, 6), window=5, stride=1, padding=2),
)
DY = tuple(
    Case((one.shapes[0], pools.max_pooled(np.zeros(one.shapes[0]), **one.attrs).shape), one.attrs)
    for one in POOLED
)
CHANNELS_LAST = (
    convolved(
        "conv2d_channels_last", fused.conv2d_channels_last_op, convolution.convolution_op,
        conv.convolved, conv.CASES, conv.depth, (0,),
    ),
    Sample(
        "conv2d_channels_last_statistics", conv2d_channels_last_statistics_op, statistics_of,
        STATISTICS_CASES, scale=statistics_scale, ulps=4, differentiable=(), specials=False,
        build=build_statistics,
    ),
    convolved(
        "conv2d_data_gradient_channels_last", fused.data_gradient_channels_last_op,
        convolution.data_gradient_op, conv.data_of_two, conv.plain(conv.OF_DATA), conv.of_data,
        (1,),
    ),
    convolved(
        "conv2d_filter_gradient_channels_last", fused.filter_gradient_channels_last_op,
        convolution.filter_gradient_op, conv.filter_of_two, conv.plain(conv.OF_FILTER),
        conv.of_filter, (0, 1),
    ),
    Sample(
        "max_pool2d_channels_last", fused.max_pool_channels_last_op,
        over(pools.max_pooled, (0,), True), moved(POOLED, (0,), pools.apart), differentiable=(),
        specials=False, build=build_pool,
    ),
    Sample(
        "max_pool2d_gradient_channels_last", fused.max_pool_gradient_channels_last_op,
        pool_gradient, moved(DY, (0, 1), pools.apart), ulps=8, differentiable=(), specials=False,
        build=build_pool_gradient,
    ),
)  # fmt: skip
