"""Random cases of the rows of samples.py, by the rows' names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from support.table.families.conv import convolved
from support.table.families.loss.composed import class_loss, largest
from support.table.families.pooling import of_gradient, with_indices
from support.table.families.statistics import distinct
from support.table.formulas.layout import resized
from support.table.rows import Case, Domain, Shape, classes, extreme, signed


class Draw:
    """Random attributes, in the types that scripts use."""

    def __init__(self, *seeds: int) -> None:
        self.rng = np.random.default_rng(seeds)

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def flag(self) -> bool:
        return self.number(0, 1) == 1

    def one(self, *options: Any) -> Any:
        return options[self.number(0, len(options) - 1)]

    def pair(self, low: int, high: int) -> tuple[int, int]:
        return self.number(low, high), self.number(low, high)

    def sixteenths(self, low: int, high: int) -> float:
        """A number that is exact in float32."""
        return self.number(16 * low, 16 * high) / 16

    def shape(self, least: int, most: int) -> Shape:
        """A shape of `least` to `most` dimensions, extents of 1 and odd ones among them."""
        largest = (90, 24, 9, 6, 4, 3)
        ndim = self.number(least, most)
        high = largest[max(ndim - 1, 0)]
        return tuple(self.one(1, 2, 3, high, self.number(1, high)) for _ in range(ndim))

    def axes(self, ndim: int) -> Any:
        """None, an axis or several, counted from either end."""
        chosen = self.rng.permutation(ndim)[: self.number(0, ndim)].tolist()
        signed_axes = tuple(k - ndim * self.number(0, 1) for k in chosen)
        return self.one(None, signed_axes, signed_axes[0] if chosen else ())

    def axis(self, ndim: int) -> int:
        return self.number(-ndim, ndim - 1)

    def broadcasting(self, count: int, most: int = 4) -> list[Shape]:
        """Shapes that broadcast to one, some of them shorter or with extents of 1."""
        whole = self.shape(0, most)
        found = []
        for _ in range(count):
            part = whole[self.number(0, len(whole)) if self.flag() else 0 :]
            found.append(tuple(self.one(1, n, n) for n in part))
        return found


# ---- windows ----


def paddings(d: Draw, most: Shape) -> Any:
    """Padding up to `most` along each axis, in one of the forms that it has."""
    sides = tuple((d.number(0, n), d.number(0, n)) for n in most)
    return d.one("same", "valid", d.number(0, min(most)), tuple(s[0] for s in sides), sides)


def image_for(d: Draw, extents: Any, padding: Any, most: int = 9) -> Shape:
    """An image into which at least one window fits."""
    pads = [(0, 0)] * 2
    if not isinstance(padding, str):
        each = (padding, padding) if isinstance(padding, int) else padding
        pads = [(p, p) if isinstance(p, int) else p for p in each]
    return tuple(max(1, e - sum(p)) + d.number(0, most) for e, p in zip(extents, pads))


def convolution(d: Draw) -> Case:
    groups = d.one(1, 1, 2, 3, 5)
    channels = groups * d.one(1, 1, 2, d.number(1, 12))
    filters = groups * d.one(1, 2, d.number(1, 12))
    size, dilation = d.pair(1, 4), d.one(1, d.pair(1, 3))
    spread = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    padding = paddings(d, (3, 4))
    image = image_for(d, [(k - 1) * s + 1 for k, s in zip(size, spread)], padding)
    attrs = dict(
        stride=d.one(1, 2, d.pair(1, 4)), padding=padding, dilation=dilation, groups=groups
    )
    return Case(((d.number(1, 3), channels, *image), (filters, channels // groups, *size)), attrs)


def with_bias(d: Draw) -> Case:
    one = convolution(d)
    return Case((*one.shapes, one.shapes[1][:1]), one.attrs)


def convolution_gradient(for_data: bool) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        one = convolution(d)
        x, f = one.shapes
        dy = convolved(np.zeros(x), np.zeros(f), **one.attrs).shape
        return Case((f, dy, x) if for_data else (x, dy, f), one.attrs)

    return draw


def transposed_convolution(d: Draw) -> Case:
    groups, stride = d.one(1, 1, 2, 3), d.pair(1, 3)
    channels, filters = groups * d.number(1, 6), d.number(1, 6)
    size, dilation = d.pair(1, 4), d.pair(1, 2)
    padding = tuple((d.number(0, k // 2), d.number(0, k // 2)) for k in size)
    attrs = dict(
        stride=stride, padding=padding, dilation=dilation, groups=groups,
        output_padding=tuple(d.number(0, s - 1) for s in stride),
    )  # fmt: skip
    x = (d.number(1, 3), channels, *d.pair(2, 7))
    return Case((x, (channels, filters, *size)), attrs)


def row_convolution(d: Draw) -> Case:
    groups, size, dilation = d.one(1, 2, 3), d.number(1, 4), d.number(1, 3)
    padding = d.one("same", "valid", d.number(0, 3), d.pair(0, 3))
    channels = groups * d.number(1, 4)
    length = (size - 1) * dilation + d.number(1, 12)
    attrs = dict(stride=d.number(1, 3), padding=padding, dilation=dilation, groups=groups)
    shapes = (d.number(1, 3), channels, length), (groups * d.number(1, 4), channels // groups, size)
    return Case(shapes, attrs)


def pooling(d: Draw) -> Case:
    window = d.pair(1, 4)
    padding = paddings(d, (window[0] - 1, window[1] - 1))
    attrs: dict[str, Any] = dict(window=window, padding=padding, ceil_mode=d.flag())
    if d.flag():
        attrs["stride"] = d.one(d.number(1, 3), d.pair(1, 5))
    return Case(((d.number(1, 3), d.number(1, 9), *image_for(d, window, padding)),), attrs)


def max_pooling(d: Draw) -> Case:
    """Dilated in half of all cases, on images and with padding that leave no window blind."""
    one = pooling(d)
    dilation = d.pair(1, 3)
    if d.flag():
        return one
    window = one.attrs["window"]
    padding = tuple(d.number(0, (k - 1) * n // 2) for k, n in zip(window, dilation))
    image = tuple((k - 1) * n + d.number(1, 7) for k, n in zip(window, dilation))
    attrs = {**one.attrs, "dilation": dilation, "padding": padding}
    return Case(((*one.shapes[0][:2], *image),), attrs)


def mean_pooling(d: Draw) -> Case:
    one = pooling(d)
    return Case(one.shapes, {**one.attrs, "count_include_pad": d.flag()})


# ---- axes and layout ----


def reduction(d: Draw, domain: Domain | None = None) -> Case:
    shape = d.shape(0, 5)
    return Case((shape,), dict(axis=d.axes(len(shape)), keepdims=d.flag()), domain)


def running(d: Draw) -> Case:
    shape = d.shape(1, 4)
    return Case((shape,), dict(axis=d.axis(len(shape)), reverse=d.flag()))


def transposition(d: Draw) -> Case:
    shape = d.shape(1, 6)
    axes = d.rng.permutation(len(shape)).tolist()
    return Case((shape,), {"axes": tuple(k - len(shape) * d.number(0, 1) for k in axes)})


def broadcasting(count: int) -> Callable[[Draw], Case]:
    return lambda d: Case(tuple(d.broadcasting(count)))


def concatenation(d: Draw) -> Case:
    shape = d.shape(1, 4)
    axis = d.axis(len(shape))
    at = axis % len(shape)
    extents = [d.number(0, 9) for _ in range(d.one(1, 2, 3, 9))]
    return Case(tuple((*shape[:at], n, *shape[at + 1 :]) for n in extents), {"axis": axis})


def parts(d: Draw) -> Case:
    shape, sections = d.shape(1, 4), (2, d.number(0, 5), d.number(0, 5))
    axis = d.axis(len(shape))
    at = axis % len(shape)
    shape = (*shape[:at], sum(sections), *shape[at + 1 :])
    return Case((shape,), {"sections": sections, "axis": axis})


def padding_of(mode: str) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        shape = d.shape(1, 4)
        most = [n - 1 if mode == "reflect" else 5 for n in shape]
        around = tuple((d.number(0, n), d.number(0, n)) for n in most)
        more = {"value": d.sixteenths(-2, 2)} if mode == "constant" else {}
        return Case((shape,), {"paddings": around, **more})

    return draw


def key_of(d: Draw, shape: Shape) -> Any:
    """A key of integers and slices, with new axes, for some of the dimensions."""
    key: list[Any] = []
    for n in shape[: d.number(0, len(shape))]:
        ends = [d.one(None, d.number(-n - 1, n + 1)) for _ in range(2)]
        step = d.one(None, 1, 2, 3, -1, -2)
        key.append(d.one(d.number(-n, n - 1), *[slice(*ends, step)] * 3))
    if d.flag():
        key.insert(d.number(0, len(key)), None)
    return (*key, ...) if d.flag() else tuple(key)


def indexed(d: Draw) -> Case:
    shape = d.shape(1, 4)
    return Case((shape,), {"key": key_of(d, shape)})


def indexed_gradient(d: Draw) -> Case:
    shape = d.shape(1, 4)
    key = key_of(d, shape)
    return Case((np.zeros(shape)[key].shape, shape), {"key": key})


def tiling(d: Draw) -> Case:
    shape = d.shape(1, 3)
    return Case((shape,), {"reps": tuple(d.number(1, 3) for _ in range(d.number(1, 4)))})


def gathering(d: Draw, order: str = "xi") -> Case:
    """x and indices in the order asked for, with u for updates of the gathered shape."""
    x, indices = d.shape(1, 3), d.shape(0, 2)
    axis = d.axis(len(x))
    at = axis % len(x)
    shapes = {"x": x, "i": indices, "u": (*x[:at], *indices, *x[at + 1 :])}
    numbers = classes(x[at], d.one(np.int32, np.int64))
    domains = tuple(numbers if k == "i" else signed for k in order)
    return Case(tuple(shapes[k] for k in order), {"axis": axis}, domains)


# ---- products, normalization, losses, images ----


def product(d: Draw, lead: tuple[Shape, Shape] = ((), ())) -> Case:
    m, k, n = (d.one(1, 2, d.number(1, 20), d.number(1, 70)) for _ in range(3))
    trans_A, trans_B = d.flag(), d.flag()
    a, b = (k, m) if trans_A else (m, k), (n, k) if trans_B else (k, n)
    return Case(((*lead[0], *a), (*lead[1], *b)), dict(trans_A=trans_A, trans_B=trans_B))


def batched_product(d: Draw) -> Case:
    lead = [tuple(min(n, 3) for n in shape) for shape in d.broadcasting(2, 3)]
    return product(d, (lead[0], lead[1]))


def linear(d: Draw) -> Case:
    inner, outer, trans_B = d.number(1, 40), d.number(1, 40), d.flag()
    f = (outer, inner) if trans_B else (inner, outer)
    return Case(((*d.shape(1, 2), inner), f, (outer,)), {"trans_B": trans_B})


def rows(d: Draw) -> Case:
    return Case((d.shape(1, 4),), {}, d.one(None, extreme))


def class_losses(d: Draw) -> Case:
    lead, count = d.shape(0, 2), d.number(1, 40)
    labels = classes(count, d.one(np.int32, np.int64, np.uint8))
    attrs = dict(reduction=d.one("mean", "sum", "none"), label_smoothing=d.sixteenths(0, 1))
    if d.flag():
        attrs["weights"] = [d.sixteenths(0, 2) + 0.25 for _ in range(count)]
    return Case(((*lead, count), lead), attrs, (d.one(signed, extreme), labels))


def eps_for(d: Draw, values: int) -> float:
    """Few values may lie so near to each other that only eps keeps the slope small."""
    return d.one(0.125, 0.5) if values < 12 else d.one(1e-6, 1e-5, 1e-3, 0.125)


def batch_norm(d: Draw) -> Case:
    batch, *rest = d.shape(1, 4)
    shape = (batch, d.number(1, 40), *rest)
    count = batch * int(np.prod(rest))
    return Case((shape, shape[1:2], shape[1:2]), {"eps": eps_for(d, count)})


def fixed_norm(d: Draw) -> Case:
    shape = (d.number(1, 9), d.number(1, 40), *d.shape(0, 2))
    return Case((shape, *[shape[1:2]] * 4), {"eps": d.one(1e-5, 0.125), "training": False})


def last_axes_norm(count: int) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        shape = d.shape(1, 4)
        scale = shape[-d.number(1, len(shape)) :]
        return Case((shape, *[scale] * count), {"eps": eps_for(d, int(np.prod(scale)))})

    return draw


def channel_norm(d: Draw, instance: bool = False) -> Case:
    groups, part, rest = d.number(1, 5), d.number(1, 5), d.shape(0, 3)
    channels = groups * part
    values = int(np.prod(rest)) * (1 if instance else part)
    attrs = {} if instance else {"groups": groups}
    shape = (d.number(1, 4), channels, *rest)
    return Case((shape, (channels,), (channels,)), {**attrs, "eps": eps_for(d, values)})


def resizing(d: Draw) -> Case:
    shape = (*d.shape(0, 2), *d.pair(1, 12))
    return Case((shape,), dict(size=d.pair(1, 25), align_corners=d.flag()))


def scaling(d: Draw) -> Case:
    scale = d.one(2, 3, (d.sixteenths(1, 3), d.sixteenths(1, 3)))
    attrs = dict(mode=d.one("nearest", "bilinear"), align_corners=d.flag(), scale=scale)
    return Case(((d.number(1, 3), *d.pair(1, 12)),), attrs)


def to_space(d: Draw) -> Case:
    block = d.number(1, 4)
    shape = (d.number(1, 3), d.number(1, 4) * block**2, *d.pair(1, 6))
    return Case((shape,), dict(block=block, mode=d.one("DCR", "CRD")))


def to_depth(d: Draw) -> Case:
    block = d.number(1, 4)
    image = (block * n for n in d.pair(1, 5))
    return Case(((*d.pair(1, 4), *image),), dict(block=block, mode=d.one("DCR", "CRD")))


DRAWS: dict[str, Callable[[Draw], Case]] = {
    "conv2d": convolution,
    "conv2d_bias": with_bias,
    "conv2d_data_gradient_like": convolution_gradient(for_data=True),
    "conv2d_filter_gradient_like": convolution_gradient(for_data=False),
    "conv_transpose2d": transposed_convolution,
    "conv1d": row_convolution,
    "max_pool2d": max_pooling,
    "max_pool2d_gradient_like": lambda d: with_indices((max_pooling(d),), "dix")[0],
    "avg_pool2d": mean_pooling,
    "avg_pool2d_gradient_like": lambda d: of_gradient((mean_pooling(d),), like=True)[0],
    **dict.fromkeys(("sum", "mean", "max", "min", "argmax", "argmin", "logsumexp"), reduction),
    "prod": reduction,
    "var": lambda d: reduction(d, distinct),
    "cumsum": running,
    "transpose": transposition,
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "minimum", "maximum"), broadcasting(2)),
    **dict.fromkeys(("less", "equal", "logical_xor"), broadcasting(2)),
    "where": broadcasting(3),
    "concat": concatenation,
    "split_sizes": parts,
    "constant_pad": padding_of("constant"),
    "pad_edge": padding_of("edge"),
    "pad_reflect": padding_of("reflect"),
    "getitem": indexed,
    "slice_gradient": indexed_gradient,
    "tile": tiling,
    "gather": gathering,
    "scatter_add": lambda d: gathering(d, "xiu"),
    "matmul": product,
    "batched_matmul": batched_product,
    "linear": linear,
    "softmax": rows,
    "log_softmax": rows,
    "softmax_cross_entropy_options": class_losses,
    "batch_normalization": batch_norm,
    "batch_normalize": fixed_norm,
    "layer_normalization": last_axes_norm(2),
    "rms_normalization": last_axes_norm(1),
    "group_normalization": channel_norm,
    "instance_normalization": lambda d: channel_norm(d, instance=True),
    "resize_nearest": resizing,
    "resize_bilinear": resizing,
    "resize": scaling,
    "depth_to_space": to_space,
    "space_to_depth": to_depth,
}


def resized_scale(x: np.ndarray, **attrs: Any) -> np.ndarray:
    """A weight is a float32 and 1 less it another: next to 0 it has lost digits."""
    return resized(np.abs(x), **attrs) + np.abs(x).max() / 4


SCALES: dict[str, Callable[..., Any]] = {  # where that of the row is only good for its own cases
    "resize_bilinear": lambda x, **attrs: resized_scale(x, mode="bilinear", **attrs),
    "resize": resized_scale,
    "softmax_cross_entropy_options": largest(class_loss),
}
