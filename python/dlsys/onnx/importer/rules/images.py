"""Convolution, pooling, resizing and sampling of images, in any number of axes on the host."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .... import functional as F
from ....eager.tensor import Tensor
from ..call import Call, key
from ..registry import Unfit, graph, host, values
from ..walk import guard
from .elementwise import wide

Pairs = tuple[tuple[int, int], ...]
MOST_EXTENT = 1 << 20  # of a window, its stride and its dilation: kernels count in int32


class Window:
    """Extents of a window over the spatial axes: kernel, strides, dilations, paddings."""

    def __init__(self, call: Call, spatial: tuple[int, ...], kernel: tuple[int, ...]) -> None:
        n = len(spatial)
        self.kernel = kernel
        self.strides = tuple(call.get("strides") or (1,) * n)
        self.dilations = tuple(call.get("dilations") or (1,) * n)
        self.span = tuple(d * (k - 1) + 1 for k, d in zip(kernel, self.dilations))
        if len(kernel) != n or min((*self.strides, *self.dilations, *kernel, 1)) < 1:
            raise call.error(f"kernel {kernel} and strides do not fit {n} spatial axes")
        if max((*self.strides, *self.dilations, *kernel, 1)) > MOST_EXTENT:
            raise call.error(f"kernel {kernel} or strides {self.strides} beyond {MOST_EXTENT}")
        pads, auto = call.get("pads") or (0,) * (2 * n), call.get("auto_pad", "NOTSET")
        self.pads: Pairs = tuple((int(a), int(b)) for a, b in zip(pads[:n], pads[n:]))
        if auto == "VALID":
            self.pads = ((0, 0),) * n
        elif auto.startswith("SAME"):
            self.pads = tuple(
                _same(size, span, stride, auto == "SAME_LOWER")
                for size, span, stride in zip(spatial, self.span, self.strides)
            )
        if self.pads and min(min(p) for p in self.pads) < 0:
            raise call.error(f"negative pads {self.pads}")
        guard(size + a + b for size, (a, b) in zip(spatial, self.pads))


def _same(size: int, span: int, stride: int, lower: bool) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    small = total // 2
    return (total - small, small) if lower else (small, total - small)


def _windows(x: np.ndarray, w: Window, pads: Pairs, fill: Any) -> np.ndarray:
    """Views of x's windows: (N, C, *outputs, *kernel)."""
    n = len(w.kernel)
    padded = np.pad(x, [(0, 0), (0, 0), *pads], constant_values=fill)
    views = sliding_window_view(padded, w.span, tuple(range(2, 2 + n)))
    steps = tuple(slice(None, None, s) for s in (*w.strides, *w.dilations))
    return views[key(slice(None), slice(None), *steps)]


def convolve(call: Call, x: np.ndarray, f: np.ndarray, bias: Any) -> np.ndarray:
    """The convolution of x (N, C, …) by f (O, C / groups, …) with the attributes of a node."""
    window = Window(call, x.shape[2:], f.shape[2:])
    groups, n = call.get("group", 1), x.ndim - 2
    views = _windows(x, window, window.pads, 0)
    channels, filters = f.shape[1], f.shape[0] // groups
    made = []
    for g in range(groups):
        part = views[:, g * channels : (g + 1) * channels]
        axes = [1, *range(2 + n, 2 + 2 * n)]
        y = np.tensordot(part, f[g * filters : (g + 1) * filters], (axes, [1, *range(2, 2 + n)]))
        made.append(np.moveaxis(y, -1, 1))
    y = np.concatenate(made, 1)
    return y if bias is None else y + bias.reshape((-1, *[1] * n))


@graph("Conv")
def convolve_nodes(call: Call, x: Any, f: Any, bias: Any = None) -> Any:
    """The convolution of x (N, C, …) by f (O, C / groups, …) with the attributes of a node."""
    rank = len(x.shape) - 2
    if rank not in (1, 2) or 0 in x.shape:
        raise Unfit
    w = Window(call, tuple(x.shape[2:]), tuple(f.shape[2:]))
    groups = call.get("group", 1)
    if rank == 1:
        return F.conv1d(x, f, bias, w.strides[0], w.pads[0], w.dilations[0], groups)
    return F.conv2d(x, f, bias, w.strides, w.pads, w.dilations, groups)


@host("Conv")
def _conv_arrays(call: Call, x: np.ndarray, f: np.ndarray, bias: Any = None) -> np.ndarray:
    b = None if bias is None else wide(bias)
    return convolve(call, wide(x), wide(f), b).astype(x.dtype)


@host("ConvTranspose")
def _conv_transpose(call: Call, x: np.ndarray, f: np.ndarray, bias: Any = None) -> np.ndarray:
    n, groups = x.ndim - 2, call.get("group", 1)
    w = Window(call, x.shape[2:], f.shape[2:])
    extra = call.get("output_padding") or (0,) * n
    full = [s * (e - 1) + span + o
            for s, e, span, o in zip(w.strides, x.shape[2:], w.span, extra)]  # fmt: skip
    pads, auto = w.pads, call.get("auto_pad", "NOTSET")
    wanted = call.get("output_shape")
    if auto.startswith("SAME") and not wanted:
        wanted = [e * s for e, s in zip(x.shape[2:], w.strides)]
    if wanted:
        totals = [max(size - want, 0) for size, want in zip(full, wanted[-n:])]
        halves = [t // 2 for t in totals]
        upper = auto != "SAME_LOWER"
        pads = tuple((h, t - h) if upper else (t - h, h) for t, h in zip(totals, halves))
        full = [max(size, want) for size, want in zip(full, wanted[-n:])]
    channels, filters = x.shape[1] // groups, f.shape[1]
    made = np.zeros((x.shape[0], groups * filters, *guard(full)), wide(x).dtype)
    for g in range(groups):
        part, weights = (
            x[:, g * channels : (g + 1) * channels],
            f[g * channels : (g + 1) * channels],
        )
        for at in itertools.product(*map(range, w.kernel)):
            strided = tuple(
                slice(k * d, k * d + s * (e - 1) + 1, s)
                for k, d, s, e in zip(at, w.dilations, w.strides, x.shape[2:])
            )
            y = np.tensordot(
                wide(part), wide(weights[key(slice(None), slice(None), *at)]), ([1], [0])
            )
            made[key(slice(None), slice(g * filters, (g + 1) * filters), *strided)] += np.moveaxis(
                y, -1, 1
            )
    cut = tuple(slice(a, size - b) for size, (a, b) in zip(full, pads))
    made = made[key(slice(None), slice(None), *cut)]
    made = made if bias is None else made + wide(bias).reshape((-1, *[1] * n))
    return made.astype(x.dtype)


@graph("ConvTranspose")
def _conv_transpose_nodes(call: Call, x: Any, f: Any, bias: Any = None) -> Any:
    if len(x.shape) != 4 or call.get("output_shape") or call.get("auto_pad", "NOTSET") != "NOTSET":
        raise Unfit
    w, extra = Window(call, tuple(x.shape[2:]), tuple(f.shape[2:])), call.get("output_padding")
    if extra and any(e >= s for e, s in zip(extra, w.strides)):
        raise Unfit
    return F.conv_transpose2d(
        x, f, bias, w.strides, w.pads, tuple(extra or (0, 0)), call.get("group", 1), w.dilations
    )


# ---- pooling ----
def _pool_pads(call: Call, w: Window, spatial: tuple[int, ...]) -> Pairs:
    """The paddings of a pool; ceil_mode adds what the last window needs behind."""
    if not call.get("ceil_mode", 0):
        return w.pads
    found = []
    for size, span, stride, (a, b) in zip(spatial, w.span, w.strides, w.pads):
        count = -(-(size + a + b - span) // stride) + 1
        if (count - 1) * stride >= size + a:
            count -= 1
        found.append((a, max((count - 1) * stride + span - size - a, b)))
    return tuple(found)


@graph("MaxPool")
def _max_pool(call: Call, x: Any) -> Any:
    if len(x.shape) != 4 or call.count > 1 or call.get("storage_order", 0):
        raise Unfit
    w = Window(call, tuple(x.shape[2:]), tuple(call.get("kernel_shape")))
    if any(p >= s for pair, s in zip(w.pads, w.span) for p in pair):
        raise Unfit
    ceil = bool(call.get("ceil_mode", 0))
    return F.max_pool2d(x, (w.kernel[0], w.kernel[1]), w.strides, w.pads, w.dilations, ceil)


@host("MaxPool")
def _max_pool_arrays(call: Call, x: np.ndarray) -> Any:
    w = Window(call, x.shape[2:], tuple(call.get("kernel_shape")))
    n, pads = x.ndim - 2, _pool_pads(call, w, x.shape[2:])
    low = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
    views = _windows(x, w, pads, low)
    flat = views.reshape((*views.shape[: 2 + n], -1))
    y = flat.max(-1)
    if call.count == 1:
        return y
    positions = np.arange(x.size).reshape(x.shape)
    if call.get("storage_order", 0):
        plane = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:][::-1]).T
        positions = positions.reshape((*x.shape[:2], -1))[..., :1].reshape(
            (*x.shape[:2], *[1] * n)) + plane  # fmt: skip
    at = _windows(positions, w, pads, -1)
    at = at.reshape((*at.shape[: 2 + n], -1))
    return y, np.take_along_axis(at, flat.argmax(-1)[..., None], -1)[..., 0].astype(np.int64)


@graph("AveragePool")
def _average_pool(call: Call, x: Any) -> Any:
    w = Window(call, tuple(x.shape[2:]), tuple(call.get("kernel_shape")))
    include = bool(call.get("count_include_pad", 0))
    plain = not call.get("ceil_mode", 0) and max(w.dilations) == 1
    if len(x.shape) != 4 or not plain or any(
        p >= s for pair, s in zip(w.pads, w.span) for p in pair
    ):  # fmt: skip
        raise Unfit
    return F.avg_pool2d(x, (w.kernel[0], w.kernel[1]), w.strides, w.pads, False, include)


def _counts(call: Call, w: Window, spatial: tuple[int, ...], pads: Pairs) -> np.ndarray:
    """The number of elements that each window counts."""
    ones = np.ones((1, 1, *spatial))
    if call.get("count_include_pad", 0):
        ones = np.pad(ones, [(0, 0), (0, 0), *w.pads], constant_values=1)
        pads = tuple((0, b - own) for (_, b), (_, own) in zip(pads, w.pads))
    n = len(spatial)
    return _windows(ones, w, pads, 0).sum(tuple(range(2 + n, 2 + 2 * n)))


@host("AveragePool")
def _average_pool_arrays(call: Call, x: np.ndarray) -> np.ndarray:
    w = Window(call, x.shape[2:], tuple(call.get("kernel_shape")))
    n, pads = x.ndim - 2, _pool_pads(call, w, x.shape[2:])
    total = _windows(wide(x), w, pads, 0).sum(tuple(range(2 + n, 2 + 2 * n)))
    return (total / _counts(call, w, x.shape[2:], pads)).astype(x.dtype)


@host("LpPool")
def _lp_pool(call: Call, x: np.ndarray) -> np.ndarray:
    w, p = Window(call, x.shape[2:], tuple(call.get("kernel_shape"))), call.get("p", 2)
    n, pads = x.ndim - 2, _pool_pads(call, w, x.shape[2:])
    views = np.abs(_windows(wide(x), w, pads, 0)) ** p
    return (views.sum(tuple(range(2 + n, 2 + 2 * n))) ** (1 / p)).astype(x.dtype)


def _spatial(x: Any) -> tuple[int, ...]:
    return tuple(range(2, len(x.shape)))


graph("GlobalAveragePool")(lambda call, x: F.mean(x, _spatial(x), keepdims=True))
host("GlobalAveragePool")(lambda call, x: wide(x).mean(_spatial(x), keepdims=True).astype(x.dtype))
graph("GlobalMaxPool")(lambda call, x: F.max(x, _spatial(x), keepdims=True))
host("GlobalMaxPool")(lambda call, x: x.max(_spatial(x), keepdims=True))


@host("GlobalLpPool")
def _global_lp_pool(call: Call, x: np.ndarray) -> np.ndarray:
    p = call.get("p", 2)
    return ((np.abs(wide(x)) ** p).sum(_spatial(x), keepdims=True) ** (1 / p)).astype(x.dtype)


@host("MaxUnpool", dynamic=True)
def _max_unpool(call: Call, x: np.ndarray, at: np.ndarray, shape: Any = None) -> np.ndarray:
    w = Window(call, x.shape[2:], tuple(call.get("kernel_shape")))
    own = (*x.shape[:2], *[(n - 1) * s + k - a - b for n, s, k, (a, b) in
                           zip(x.shape[2:], w.strides, w.kernel, w.pads)])  # fmt: skip
    made = np.zeros(math.prod(guard(own)), x.dtype)
    made[at.ravel()] = x.ravel()
    made = made.reshape(own)
    if shape is None:
        return made
    full = np.zeros(guard(shape), x.dtype)
    full[tuple(slice(n) for n in own)] = made
    return full


# ---- blocks ----
@graph("DepthToSpace")
def _depth_to_space(call: Call, x: Any) -> Any:
    return F.pixel_shuffle(x, call.get("blocksize"), call.get("mode", "DCR"))


@host("DepthToSpace")
def _depth_to_space_arrays(call: Call, x: np.ndarray) -> np.ndarray:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    if call.get("mode", "DCR") == "DCR":
        y = x.reshape(n, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


@host("SpaceToDepth")
def _space_to_depth(call: Call, x: np.ndarray) -> np.ndarray:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    y = x.reshape(n, c, h // b, b, w // b, b)
    order = (0, 3, 5, 1, 2, 4) if call.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return y.transpose(order).reshape(n, c * b * b, h // b, w // b)


@host("Col2Im")
def _col2im(call: Call, x: np.ndarray, shape: Any, block: Any) -> np.ndarray:
    image, kernel = tuple(int(n) for n in shape), tuple(int(n) for n in block)
    w = Window(call, image, kernel)
    c = x.shape[1] // math.prod(kernel)
    counts = tuple((n + a + b - span) // s + 1
                   for n, (a, b), span, s in zip(image, w.pads, w.span, w.strides))  # fmt: skip
    columns = x.reshape((x.shape[0], c, *kernel, *counts))
    full = tuple(n + a + b for n, (a, b) in zip(image, w.pads))
    made = np.zeros((x.shape[0], c, *guard(full)), x.dtype)
    for at in itertools.product(*map(range, kernel)):
        strided = tuple(slice(k * d, k * d + s * (m - 1) + 1, s)
                    for k, d, s, m in zip(at, w.dilations, w.strides, counts))  # fmt: skip
        made[key(slice(None), slice(None), *strided)] += columns[key(slice(None), slice(None), *at)]
    inner = [slice(a, a + n) for n, (a, _) in zip(image, w.pads)]
    return made[key(slice(None), slice(None), *inner)]


# ---- resize ----
def _weights(n: int, m: int, scale: float, call: Call, roi: Any, mode: str,
             antialias: bool) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The matrix (m, n) that resizes an axis, and which outputs lie outside of the image."""
    kind = call.get("coordinate_transformation_mode", "half_pixel")
    kind = "asymmetric" if call.version < 11 else kind
    o = np.arange(m, dtype=np.float64)
    at = {
        "half_pixel": lambda: (o + 0.5) / scale - 0.5,
        "half_pixel_symmetric": lambda: n / 2 * (1 - m / (n * scale)) + (o + 0.5) / scale - 0.5,
        "pytorch_half_pixel": lambda: (o + 0.5) / scale - 0.5 if m > 1 else o * 0,
        "align_corners": lambda: o * (n - 1) / (n * scale - 1) if n * scale != 1 else o * 0,
        "asymmetric": lambda: o / scale,
        "tf_half_pixel_for_nn": lambda: (o + 0.5) / scale,
        "tf_crop_and_resize": lambda: roi[0] * (n - 1) + (
            o * (roi[1] - roi[0]) * (n - 1) / (m - 1) if m > 1
            else 0.5 * (roi[1] - roi[0]) * (n - 1)),
    }[kind]() + np.zeros(m)  # fmt: skip
    outside = (at < 0) | (at > n - 1) if kind == "tf_crop_and_resize" else np.zeros(m, bool)
    made = np.zeros((m, n))
    if mode == "nearest":
        rounding = call.get("nearest_mode", "round_prefer_floor")
        rounding = "floor" if call.version < 11 else rounding
        picks: dict[str, Any] = {
            "round_prefer_floor": lambda v: np.ceil(v - 0.5), "floor": np.floor,
            "round_prefer_ceil": lambda v: np.floor(v + 0.5), "ceil": np.ceil,
            "simple": lambda v: np.ceil(v) if scale < 1 else np.floor(v),
        }  # fmt: skip
        made[np.arange(m), np.clip(picks[rounding](at), 0, n - 1).astype(int)] = 1
        return made, outside
    shrink = min(scale, 1.0) if antialias else 1.0
    reach = (1 if mode == "linear" else 2) / shrink
    taps = np.floor(at)[:, None] + np.arange(-math.ceil(reach) + 1, math.ceil(reach) + 1)
    distance = np.abs(at[:, None] - taps) * shrink
    if mode == "linear":
        w = np.clip(1 - distance, 0, None)
    else:
        w = _cubic(distance, call.get("cubic_coeff_a", -0.75))
    if call.get("exclude_outside", 0):
        w = np.where((taps < 0) | (taps >= n), 0, w)
    w = w / w.sum(1, keepdims=True)
    np.add.at(made, (np.arange(m)[:, None], np.clip(taps, 0, n - 1).astype(int)), w)
    return made, outside


def _cubic(d: np.ndarray, a: float) -> np.ndarray:
    """Keys's cubic convolution kernel (1981) at distances."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _sizes(call: Call, shape: tuple[int, ...], axes: list[int], scales: Any,
           sizes: Any) -> tuple[list[int], list[float]]:  # fmt: skip
    """The extents and scales of the resized axes."""
    extents = [shape[a] for a in axes]
    if sizes is None or len(sizes) == 0:
        factors = [float(s) for s in scales]
        return [math.floor(n * s) for n, s in zip(extents, factors)], factors
    wanted, policy = [int(n) for n in sizes], call.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        f = (min if policy == "not_larger" else max)(m / n for m, n in zip(wanted, extents))
        return [int(math.floor(n * f + 0.5)) for n in extents], [f] * len(extents)
    return wanted, [m / n for m, n in zip(wanted, extents)]


@host("Resize Upsample")
def _resize(call: Call, x: np.ndarray, *more: Any) -> np.ndarray:
    roi, scales, sizes = _resize_inputs(call, more)
    axes = [a % x.ndim for a in call.get("axes") or range(x.ndim)]
    mode, y = call.get("mode", "nearest"), wide(x).astype(np.float64)
    found, factors = _sizes(call, x.shape, axes, scales, sizes)
    guard(found)
    beyond = np.zeros(1, bool)
    for k, (axis, m, scale) in enumerate(zip(axes, found, factors)):
        ends = None if roi is None or not len(roi) else (roi[k], roi[k + len(axes)])
        if m == x.shape[axis] and scale == 1 and ends is None:
            continue
        w, outside = _weights(x.shape[axis], m, scale, call, ends, mode.replace("bi", ""),
                              bool(call.get("antialias", 0)))  # fmt: skip
        y = np.moveaxis(np.tensordot(w, y, (1, axis)), 0, axis)
        beyond = beyond | outside.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    y = np.where(beyond, call.get("extrapolation_value", 0.0), y)
    return (np.rint(y) if x.dtype.kind in "iu" else y).astype(x.dtype)


def _resize_inputs(call: Call, more: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """roi, scales and sizes, in the order that the version has them."""
    if call.version < 11:
        scales = more[0] if more else call.get("scales")
        if scales is None:  # version 1
            scales = [1, 1, call.get("height_scale"), call.get("width_scale")]
        return None, scales, None
    roi, scales, sizes = (*more, None, None, None)[:3]
    return roi, scales, sizes


@graph("Resize Upsample", known=(1, 2, 3))
def _resize_nodes(call: Call, x: Any, *more: Any) -> Any:
    """Nearest by integral factors, as Upsample's, moves pixels alone: repeats along axes."""
    _, scales, sizes = _resize_inputs(call, more)
    shape, axes = tuple(x.shape), call.get("axes")
    axes = [a % len(shape) for a in axes or range(len(shape))]
    kind = call.get("coordinate_transformation_mode", "half_pixel")
    kind = "asymmetric" if call.version < 11 else kind
    rounding = "floor" if call.version < 11 else call.get("nearest_mode", "round_prefer_floor")
    plain = (kind == "asymmetric" and rounding == "floor") or (
        kind in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round")
    )
    found, factors = _sizes(call, shape, axes, scales, sizes)
    integral = all(f == int(f) and f >= 1 for f in factors)
    if call.get("mode", "nearest") != "nearest" or not (plain and integral):
        raise Unfit
    for axis, f in zip(axes, factors):
        if f > 1:
            x = F.expand_dims(x, axis + 1)
            wide_shape = (*shape[: axis + 1], int(f), *shape[axis + 1 :])
            shape = (*shape[:axis], shape[axis] * int(f), *shape[axis + 1 :])
            x = F.reshape(F.broadcast_to(x, wide_shape), shape)
    return x


# ---- sampling ----
def _sample(x: np.ndarray, at: list[np.ndarray], mode: str, padding: str, align: bool,
            a: float = -0.75) -> np.ndarray:  # fmt: skip
    """Elements of x (C, *spatial) at real coordinates, interpolated: (C, *coordinates' shape)."""
    reach = {"nearest": 0, "linear": 1, "cubic": 2}[mode]
    shape = at[0].shape
    base = [np.rint(v) if mode == "nearest" else np.floor(v) for v in at]
    total = np.zeros((x.shape[0], *shape))
    offsets = (0,) if mode == "nearest" else range(1 - reach, 1 + reach)
    for offset in itertools.product(offsets, repeat=len(at)):
        weight, valid, index = np.ones(shape), np.ones(shape, bool), []
        for v, b, o, n in zip(at, base, offset, x.shape[1:]):
            position = b + o
            d = np.abs(v - position)
            if mode == "linear":
                weight = weight * np.clip(1 - d, 0, None)
            elif mode == "cubic":
                weight = weight * _cubic(d, a)
            if padding == "zeros":
                valid &= (position >= 0) & (position < n)
            elif padding == "reflection":
                position = _reflect(position, n, align)
            index.append(np.clip(np.nan_to_num(position), 0, n - 1).astype(np.int64))
        total += np.where(valid, x[key(slice(None), *index)], 0) * weight
    return total


def _reflect(v: np.ndarray, n: int, align: bool) -> np.ndarray:
    """Positions mirrored at the borders, between pixels unless corners are aligned."""
    low, span = (0.0, n - 1) if align else (-0.5, n)
    if span <= 0:
        return np.zeros_like(v)
    t = np.mod(v - low, 2 * span)
    return np.where(t > span, 2 * span - t, t) + low


@host("GridSample")
def _grid_sample(call: Call, x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    align = bool(call.get("align_corners", 0))
    mode = call.get("mode", "linear" if call.version >= 20 else "bilinear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    padding = call.get("padding_mode", "zeros")
    made = []
    for image, points in zip(x, wide(grid)):
        at = []
        for k, n in enumerate(image.shape[1:]):
            v = points[..., len(image.shape) - 2 - k].astype(np.float64)
            v = (v + 1) / 2 * (n - 1) if align else ((v + 1) * n - 1) / 2
            if padding == "border" and mode != "cubic":
                v = np.clip(v, 0, n - 1)
            elif padding == "reflection" and mode != "cubic":
                v = _reflect(v, n, align)
                v = np.clip(v, 0, n - 1)
            at.append(v)
        made.append(_sample(wide(image), at, mode, padding, align))
    return np.stack(made).astype(x.dtype)


@host("AffineGrid")
def _affine_grid(call: Call, theta: np.ndarray, size: Any) -> np.ndarray:
    extents, align = [int(n) for n in size][2:], call.get("align_corners", 0)
    lines = [np.linspace(-1, 1, n) if align else (np.arange(n) * 2 + 1) / n - 1 for n in extents]
    mesh = np.meshgrid(*lines, indexing="ij")[::-1]
    points = np.stack([*mesh, np.ones(guard(extents))], -1)
    made = np.einsum("...k,njk->n...j", points, wide(theta).astype(np.float64))
    return made.astype(theta.dtype)


@host("RoiAlign")
def _roi_align(call: Call, x: np.ndarray, rois: np.ndarray, batch: np.ndarray) -> np.ndarray:
    h, w = call.get("output_height", 1), call.get("output_width", 1)
    scale, ratio = call.get("spatial_scale", 1.0), call.get("sampling_ratio", 0)
    mode = call.get("coordinate_transformation_mode",
                    "half_pixel" if call.version >= 16 else "output_half_pixel")  # fmt: skip
    half = 0.5 if mode == "half_pixel" else 0.0
    guard((len(rois), x.shape[1], h, w))
    made = np.zeros((len(rois), x.shape[1], h, w))
    for k, (roi, b) in enumerate(zip(rois.astype(np.float64), batch)):
        x1, y1, x2, y2 = roi * scale - half
        rw, rh = x2 - x1, y2 - y1
        if not half:
            rw, rh = max(rw, 1.0), max(rh, 1.0)
        gy = ratio or max(math.ceil(rh / h), 1)
        gx = ratio or max(math.ceil(rw / w), 1)
        ys = y1 + (np.arange(h * gy) + 0.5) * rh / (h * gy)
        xs = x1 + (np.arange(w * gx) + 0.5) * rw / (w * gx)
        largest = call.get("mode", "avg") == "max"
        values = _roi_values(x[int(b)], ys, xs, largest)
        values = values.reshape((x.shape[1], h, gy, w, gx, -1))
        made[k] = values.max((2, 4, 5)) if largest else values.sum(-1).mean((2, 4))
    return made.astype(x.dtype)


def _roi_values(x: np.ndarray, ys: np.ndarray, xs: np.ndarray, apart: bool) -> np.ndarray:
    """Bilinear samples of x (C, H, W) on a grid; `apart` gives the four weighted neighbors."""
    grid = np.meshgrid(ys, xs, indexing="ij")
    valid = np.ones(grid[0].shape, bool)
    clipped = []
    for v, n in zip(grid, x.shape[1:]):
        valid &= (v >= -1) & (v <= n)
        clipped.append(np.clip(v, 0, n - 1))
    low = [np.minimum(np.floor(v), n - 1).astype(int) for v, n in zip(clipped, x.shape[1:])]
    parts = []
    for dy, dx in itertools.product((0, 1), repeat=2):
        wy = np.abs(1 - dy - (clipped[0] - low[0]))
        wx = np.abs(1 - dx - (clipped[1] - low[1]))
        iy, ix = (np.minimum(v + d, n - 1) for v, d, n in zip(low, (dy, dx), x.shape[1:]))
        parts.append(np.where(valid, x[:, iy, ix] * wy * wx, 0))
    return np.stack(parts, -1) if apart else np.sum(parts, axis=0)[..., None]


@host("DeformConv")
def _deform_conv(call: Call, x: np.ndarray, f: np.ndarray, offset: np.ndarray, bias: Any = None,
                 mask: Any = None) -> np.ndarray:  # fmt: skip
    w = Window(call, x.shape[2:], f.shape[2:])
    groups, parts = call.get("group", 1), call.get("offset_group", 1)
    n, c = x.shape[:2]
    kh, kw = f.shape[2:]
    oh, ow = offset.shape[2:]
    offset = offset.reshape(n, parts, kh, kw, 2, oh, ow)
    mask = np.ones((n, parts, kh, kw, oh, ow)) if mask is None else mask.reshape(
        n, parts, kh, kw, oh, ow)  # fmt: skip
    columns = np.zeros((n, c, kh, kw, oh, ow))
    for b, g, i, j in itertools.product(range(n), range(parts), range(kh), range(kw)):
        base_y = np.arange(oh) * w.strides[0] - w.pads[0][0] + i * w.dilations[0]
        base_x = np.arange(ow) * w.strides[1] - w.pads[1][0] + j * w.dilations[1]
        at = [base_y[:, None] + offset[b, g, i, j, 0], base_x[None] + offset[b, g, i, j, 1]]
        own = slice(g * c // parts, (g + 1) * c // parts)
        columns[b, own, i, j] = _sample(x[b, own], at, "linear", "zeros", True) * mask[b, g, i, j]
    made = []
    for g, weights in enumerate(np.split(f, groups)):
        part = columns[:, g * c // groups : (g + 1) * c // groups]
        made.append(np.einsum("ncijhw,ocij->nohw", part, weights))
    y = np.concatenate(made, 1)
    return (y if bias is None else y + bias.reshape(1, -1, 1, 1)).astype(x.dtype)


# ---- boxes ----
@host("NonMaxSuppression", dynamic=True)
def _nms(call: Call, boxes: np.ndarray, scores: np.ndarray, *numbers: Any) -> np.ndarray:
    return _selected(call, Tensor(boxes), Tensor(scores), numbers)


@values("NonMaxSuppression")
def _nms_on_device(call: Call, boxes: Any, scores: Any, *numbers: Any) -> np.ndarray:
    """Of Tensors, by the operator on their device."""
    if not isinstance(boxes, Tensor) and not isinstance(scores, Tensor):
        raise Unfit
    given = call.walker.value(boxes), call.walker.value(scores)
    return _selected(call, *given, tuple(map(call.walker.look, numbers)))


def _selected(call: Call, boxes: Any, scores: Any, numbers: tuple[Any, ...]) -> np.ndarray:
    """The rows of the operator that are boxes."""
    most, overlap, least = (
        None if x is None else np.ravel(x)[0].item() for x in (*numbers, None, None, None)[:3]
    )
    rows, count = F.non_max_suppression(
        boxes, scores, max(most or 0, 0), overlap or 0.0, least,
        bool(call.get("center_point_box", 0)),
    )  # fmt: skip
    return rows.numpy()[: int(count)]
