"""The rows of samples.py for convolutions fused with relu and max-pool, and with kept filters.

Their nodes are built as `fusion/` builds them: around the nodes that they stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import DlsysError
from dlsys.fusion.conv import conv_pool_chain, kept_filters
from dlsys.fusion.shared import conv_pool_operators as fused_conv
from dlsys.fusion.shared.body import close
from dlsys.fusion.shared.conv_pool_operators import CUT, Geometry
from dlsys.ops.conv import convolution, pooling
from dlsys.ops.conv.tiles import Layer
from dlsys.runtime.device import cpu
from dlsys.runtime.target import target_of
from support.table.families.conv import around, convolved, data_gradient, filter_gradient, sizes_of
from support.table.rows import Case, Sample, case, signed

Array = np.ndarray


# ---- nodes ----


def geometry_of(x: tuple, f: tuple, padding: Any, window: int) -> Geometry:
    (top, bottom), (left, right) = around(padding, x[2:], f[2:], (1, 1), (1, 1))
    between = x[2] + top + bottom - f[2] + 1, x[3] + left + right - f[3] + 1
    out = between[0] // window, between[1] // window
    return Geometry(x[1], f[0], x[2:], f[2:], (top, left), between, window, out)


def conv_pool(x: Any, f: Any, *bias: Any, part: int, relu: bool, window: int, padding: Any) -> Any:
    y = ad.conv2d(x, f, *bias, padding=padding)
    pool = pooling.max_pool_op(ad.relu_op(y) if relu else y, window=window)
    geometry = geometry_of(x.spec.shape, f.spec.shape, padding, window)
    inputs = x, f, *bias
    node = fused_conv.conv_pool_op(*inputs, body=close(inputs, tuple(pool)), geometry=geometry,
                                   relu=relu)  # fmt: skip
    return node[part]


def gradient(op: Any, first: Any, dy: Any, code: Any, geometry: Geometry, make: Any) -> Any:
    """`make` gives the outputs of the body from the gradient of what is pooled."""
    argmax = ad.Variable("argmax", shape=code.spec.shape, dtype=np.int32)
    attrs = {"window": geometry.window, "image": geometry.between}
    unpooled = pooling.max_pool_gradient_op(dy, argmax, **attrs)
    body = close((first, dy, argmax), make(unpooled))
    return op(first, dy, code, body=body, geometry=geometry)


def of_data(f: Any, dy: Any, code: Any, plane: Any, window: int, padding: Any) -> Any:
    x = (dy.spec.shape[0], f.spec.shape[1], *plane)
    geometry = geometry_of(x, f.spec.shape, padding, window)
    make = lambda g: [convolution.data_gradient_op(f, g, padding=padding)]  # noqa: E731
    return gradient(fused_conv.conv_pool_data_gradient_op, f, dy, code, geometry, make)


def of_filter(x: Any, dy: Any, code: Any, size: Any, window: int, padding: Any) -> Any:
    f = (dy.spec.shape[1], x.spec.shape[1], *size)
    geometry = geometry_of(x.spec.shape, f, padding, window)
    make = lambda g: [convolution.filter_gradient_op(x, g, padding=padding, size=size)]  # noqa: E731
    return gradient(fused_conv.conv_pool_filter_gradient_op, x, dy, code, geometry, make)


def of_filter_and_bias(
    x: Any, dy: Any, code: Any, size: Any, window: int, padding: Any, part: int
) -> Any:
    f = (dy.spec.shape[1], x.spec.shape[1], *size)
    geometry = geometry_of(x.spec.shape, f, padding, window)
    op = fused_conv.conv_pool_filter_bias_gradient_op

    def make(g: Any) -> list:
        df = convolution.filter_gradient_op(x, g, padding=padding, size=size)
        return [df, ad.sum_op(g, axis=(0, 2, 3))]

    return gradient(op, x, dy, code, geometry, make)[part]


def chain(x: Any, *weights: Any, relu: bool, window: int, padding: Any) -> Any:
    """Layers of a filter and a bias each."""
    y, layers = x, []
    for f, bias in zip(weights[::2], weights[1::2]):
        g = geometry_of(y.spec.shape, f.spec.shape, padding, window)
        sizes = g.channels, g.filters, g.plane, g.size, g.before, g.window, g.out
        layers.append(Layer(*sizes, relu, True))
        y = ad.conv2d(y, f, bias, padding=padding)
        y = pooling.max_pool_op(ad.relu_op(y) if relu else y, window=window)[0]
    inputs = x, *weights
    body = close(inputs, (y,))
    return conv_pool_chain.conv_pool_chain_op(*inputs, body=body, layers=tuple(layers))[0]


def kept(x: Any, f: Any, *rest: Any, bias: bool, adds: bool, relu: bool, padding: Any) -> Any:
    """The store is that of the CPU, which has the largest; a GPU reads the filters themselves."""
    conv = ad.conv2d(x, f, *rest[:bias], padding=padding)
    last = conv + rest[-1] if adds else conv
    last = ad.relu_op(last) if relu else last
    try:
        numel = kept_filters.store_numel(conv, target_of(cpu(0)))
    except DlsysError:  # there is no native library
        numel = 0
    return kept_filters.made(conv, rest[-1] if adds else None, relu, last, numel)


# ---- formulas, window by window ----


def convolved_and_kept(
    x: Array, f: Array, *rest: Array, bias: bool, adds: bool, relu: bool, padding: Any
) -> Array:
    y = convolved(x, f, *rest[:bias], padding=padding)
    y = y + rest[-1] if adds else y
    return np.maximum(y, 0) if relu else y


def kept_scale(*inputs: Array, relu: bool, **attrs: Any) -> Array:
    of_sizes = convolved_and_kept(*map(np.abs, inputs), relu=False, **attrs)
    return np.sqrt(np.prod(inputs[1].shape[1:])) * of_sizes


def pooled(x: Array, f: Array, *bias: Array, part: int, relu: bool, window: int, padding: Any):
    y = convolved(x, f, *bias, padding=padding)
    y = np.where(y <= 0, 0, y) if relu else y
    n, o, h, w = y.shape
    tiles = y[:, :, : h // window * window, : w // window * window]
    tiles = tiles.reshape(n, o, h // window, window, w // window, window)
    tiles = tiles.transpose(0, 1, 2, 4, 3, 5).reshape(n, o, h // window, w // window, window**2)
    largest = tiles.max(axis=-1)
    if part == 0:
        return largest
    place = np.isnan(tiles).argmax(axis=-1)
    place = np.where(np.isnan(largest), place, tiles.argmax(axis=-1))
    return np.where(relu & ~(largest > 0), CUT, place).astype(np.uint8)


def pooled_scale(x: Array, f: Array, *bias: Array, window: int, padding: Any, **rest: Any):
    sizes = [np.abs(a) for a in (x, f, *bias)]
    depth = np.prod(f.shape[1:])
    attrs = {"part": 0, "relu": False, "window": window, "padding": padding}
    return np.sqrt(depth) * pooled(*sizes, **attrs)


def chained(x: Array, *weights: Array, **attrs: Any) -> Array:
    for f, bias in zip(weights[::2], weights[1::2]):
        x = pooled(x, f, bias, part=0, **attrs)
    return x


def chained_scale(*inputs: Array, **attrs: Any) -> Array:
    depth = np.sum([np.prod(f.shape[1:]) for f in inputs[1::2]])
    return np.sqrt(depth) * chained(*map(np.abs, inputs), **(attrs | {"relu": False}))


def spread(dy: Array, code: Array, between: Any, window: int) -> Array:
    """dy in the plane that was pooled."""
    to = np.zeros((*dy.shape[:2], *between))
    for at in np.ndindex(dy.shape):
        if code[at] != CUT:
            i, j = at[2] * window + code[at] // window, at[3] * window + code[at] % window
            to[at[0], at[1], i, j] = dy[at]
    return to


def data_formula(f: Array, dy: Array, code: Array, plane: Any, window: int, padding: Any) -> Array:
    shape = (len(dy), f.shape[1], *plane)
    between = geometry_of(shape, f.shape, padding, window).between
    return data_gradient(f, spread(dy, code, between, window), np.zeros(shape), padding=padding)


def filter_formula(
    x: Array, dy: Array, code: Array, size: Any, window: int, padding: Any, part: int = 0
) -> Array:
    shape = (dy.shape[1], x.shape[1], *size)
    between = geometry_of(x.shape, shape, padding, window).between
    full = spread(dy, code, between, window)
    if part:
        return full.sum(axis=(0, 2, 3))
    return filter_gradient(x, full, np.zeros(shape), padding=padding)


def sizes(formula: Any, terms: Any) -> Any:
    """The scale of errors; codes have none."""

    def scale(first: Array, dy: Array, code: Array, **attrs: Any) -> Array:
        def of_sizes(first: Array, dy: Array, **rest: Any) -> Array:
            return formula(first, dy, code, **rest)

        return sizes_of(of_sizes, terms)(first, dy, **attrs)

    return scale


# ---- rows ----

# x, f, and how they are padded and pooled
LAYERS = (
    ((2, 3, 6, 9), (4, 3, 3, 2), 0, 2),
    ((1, 1, 3, 40), (1, 1, 2, 3), 0, 2),
    ((3, 1, 28, 28), (6, 1, 5, 5), 2, 2),
    ((5, 6, 14, 14), (16, 6, 5, 5), 0, 2),
    ((9, 2, 11, 10), (7, 2, 3, 3), 1, 3),
    ((2, 3, 12, 13), (5, 3, 4, 7), ((3, 0), (2, 6)), 2),
    ((2, 5, 7, 7), (19, 5, 1, 1), "valid", 3),
    ((2, 2, 4, 2), (1, 2, 2, 1), 0, 2),
    ((3, 3, 20, 20), (5, 3, 2, 7), 0, 2),
    ((0, 3, 6, 6), (4, 3, 3, 3), 0, 2),
)
FORWARD = tuple(
    Case(
        (x, f, (f[0],)) if bias else (x, f),
        {"part": part, "relu": relu, "window": window, "padding": padding},
    )
    for x, f, padding, window in LAYERS
    for part, relu, bias in ((0, True, True), (1, True, True), (0, False, False), (1, False, True))
)


CHAINS = tuple(
    Case((x, *(a for f in filters for a in (f, f[:1]))), dict(relu=relu, window=w, padding=padding))
    for x, filters, padding, w in (
        ((3, 1, 28, 28), ((6, 1, 5, 5), (16, 6, 5, 5)), 2, 2),
        ((70, 2, 13, 10), ((5, 2, 3, 2), (3, 5, 2, 2)), 0, 2),
        ((5, 3, 29, 30), ((17, 3, 3, 3), (4, 17, 1, 1)), ((1, 0), (0, 1)), 3),
        ((1, 1, 16, 17), ((2, 1, 1, 3), (3, 2, 2, 1), (1, 3, 1, 1)), 0, 2),
        ((0, 3, 6, 6), ((4, 3, 3, 3),), 0, 2),
    )
    for relu in (True, False)
)


def codes(window: int) -> Any:
    return lambda rng, shape: rng.choice([*range(window**2), CUT], shape).astype(np.uint8)


def backward(for_data: bool, **more: Any) -> tuple[Case, ...]:
    cases = []
    for x, f, padding, window in LAYERS:
        dy = (x[0], f[0], *geometry_of(x, f, padding, window).out)
        attrs = {"plane": x[2:]} if for_data else {"size": f[2:]}
        domain = (signed, signed, codes(window))
        shapes = (f if for_data else x, dy, dy)
        cases.append(case(*shapes, domain=domain, window=window, padding=padding, **attrs, **more))
    return tuple(cases)


def of_data_terms(f: Array, dy: Array) -> float:
    return f.shape[0] * f.shape[2] * f.shape[3]


def of_filter_terms(x: Array, dy: Array) -> float:
    return dy.size / max(dy.shape[1], 1)


# By Winograd's tiles of 2 by 2 and of 4 by 4, and by packed products; on a GPU by slices of K, with
# rows of quads and without.
KEPT = tuple(
    Case(
        (x, f, *([(f[0],)] if bias else []), *([y] if adds else [])),
        {"bias": bias, "adds": adds, "relu": relu, "padding": padding},
    )
    for x, f, y, padding in (
        ((1, 32, 7, 7), (48, 32, 3, 3), (1, 48, 7, 7), 1),
        ((2, 32, 30, 30), (48, 32, 3, 3), (2, 48, 30, 30), 1),
        ((1, 48, 9, 5), (32, 48, 1, 1), (1, 32, 9, 5), 0),
        ((2, 64, 6, 6), (40, 64, 1, 1), (2, 40, 6, 6), 0),
        ((3, 20, 9, 9), (70, 20, 5, 5), (3, 70, 5, 5), 0),
    )
    for bias, adds, relu in ((True, True, True), (False, True, False), (True, False, False))
)

FUSED_CONV = (
    Sample(
        "conv2d_kept", kept_filters.kept_convolution_op, convolved_and_kept, KEPT,
        scale=kept_scale, ulps=4, differentiable=(), specials=False, storages=(), build=kept,
    ),
    Sample(
        "conv2d_pool", fused_conv.conv_pool_op, pooled, FORWARD, scale=pooled_scale, ulps=2,
        differentiable=(), specials=False, build=conv_pool,
    ),
    Sample(
        "conv2d_pool_data_gradient", fused_conv.conv_pool_data_gradient_op, data_formula,
        backward(True), scale=sizes(data_formula, of_data_terms), ulps=2, differentiable=(),
        specials=False, build=of_data,
    ),
    Sample(
        "conv2d_pool_chain", conv_pool_chain.conv_pool_chain_op, chained, CHAINS,
        scale=chained_scale, ulps=2, differentiable=(), specials=False, build=chain, fused=True,
    ),
    Sample(
        "conv2d_pool_filter_gradient", fused_conv.conv_pool_filter_gradient_op, filter_formula,
        backward(False), scale=sizes(filter_formula, of_filter_terms), ulps=2, differentiable=(),
        specials=False, build=of_filter,
    ),
    Sample(
        "conv2d_pool_filter_bias_gradient", fused_conv.conv_pool_filter_bias_gradient_op,
        filter_formula, (*backward(False, part=0), *backward(False, part=1)),
        scale=sizes(filter_formula, of_filter_terms), ulps=2, differentiable=(), specials=False,
        build=of_filter_and_bias,
    ),
)  # fmt: skip
