"""What PyTorch has for the rows of tests/support/table/samples.py, and where we differ from it on
purpose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.table.draws import Draw
from support.table.rows import Case, classes, extreme, signed

try:
    import torch
    import torch.nn.functional as F
except ImportError:  # then nothing here is called: operators.missing says so
    torch = F = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Oracle:
    """The same function of tensors; `local` ones make each element of one of each input."""

    function: Callable[..., Any]
    local: bool = False
    draw: Callable[[Draw], Case] | None = None  # instead of that of tests/support/table/draws.py
    patterns: bool = True  # whether its inputs may have values out of the row's domain
    order: int = 2  # of the derivatives that are compared
    conditioned: float = 0.0  # how much of the case's condition a value may be off by
    saturates: bool = False  # derivatives have terms of size 1 + |x| that may cancel
    terms: Callable[..., float] | None = None  # of a derivative, which may cancel
    derivatives: bool = True  # whether derivatives are compared where an input is not finite
    underflows: bool = False  # a factor of a derivative may be next to 0, where digits are few
    refuses: str = ""  # errors that PyTorch does not raise, by a part of their text

    def may_refuse(self, problem: Any, error: Exception) -> bool:
        """Whether we refuse on purpose what PyTorch takes."""
        return bool(self.refuses) and any(part in str(error) for part in self.refuses.split("|"))


def larger_or_smaller(a: Any, b: Any, first: Any) -> Any:
    """a where it comes first, else b. Of equal inputs the result is the second, which tells for
    zeros of two signs, and the first has the gradient, where PyTorch gives each a half.
    """

    class Extreme(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            return torch.where(first | a.isnan(), a, b)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            to_first = first | a.isnan() | (a == b)
            parts = torch.where(to_first, dy, 0), torch.where(to_first, 0, dy)
            return tuple(part.sum_to_size(x.shape) for part, x in zip(parts, (a, b)))

    return Extreme.apply(a, b)


def local(function: Callable[..., Any], **more: Any) -> Oracle:
    return Oracle(function, local=True, **more)


# ---- draws of rows that tests/support/table/draws.py has not ----
def constants(*more: float) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        const = d.one(2, -1.5, 0.5, 3, 1, 0, -1, -2, 0.25, *more)
        return Case((d.shape(0, 4),), {"const": const})

    return draw


def positive_constants(d: Draw) -> Case:
    return Case((d.shape(0, 4),), {"const": d.one(2, 0.5, 3.0, 1, 0.0, 10)})


def sloped(d: Draw) -> Case:
    return Case((d.shape(0, 4),), {"alpha": d.one(0.1, 0.01, 1.0, 0.5, 0.0)})


def thresholds(d: Draw) -> Case:
    return Case((d.shape(0, 4),), {"delta": d.one(1.0, 0.5, 3.0)})


def limits(d: Draw) -> Case:
    low, high = sorted((d.sixteenths(-2, 2), d.sixteenths(-2, 2)))
    return Case((d.shape(0, 4),), {"low": low, "high": high})


def softmaxed(d: Draw) -> Case:
    """With an axis now and then."""
    shape = d.shape(1, 4)
    attrs = {"axis": d.axis(len(shape))} if d.number(0, 3) == 3 else {}
    return Case((shape,), attrs, d.one(None, extreme))


def attending(d: Draw) -> Case:
    """With grouped queries, causal or not, and perhaps a scale."""
    n, kv, group = d.number(1, 3), d.number(1, 2), d.number(1, 3)
    rows, columns, size, value_size = d.number(1, 40), d.number(1, 40), *d.pair(1, 20)
    shapes = (n, kv * group, rows, size), (n, kv, columns, size), (n, kv, columns, value_size)
    return Case(shapes, {"causal": d.flag(), "scale": d.one(None, 0.25, 1.5)})


def attention(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def images(d: Draw) -> Case:
    return Case(((d.number(0, 3), d.number(1, 5), *d.pair(1, 7)),), {"keepdims": d.flag()})


def stacked(d: Draw) -> Case:
    shape = d.shape(0, 3)
    return Case((shape,) * d.number(1, 4), {"axis": d.number(-len(shape) - 1, len(shape))})


def vectors(d: Draw) -> Case:
    return Case(((d.number(0, 40),), (d.number(0, 40),)))


def times(d: Draw) -> Case:
    inner = d.number(0, 60)
    return Case(((d.number(0, 30), inner), (inner,)))


def reshaped(d: Draw) -> Case:
    shape = d.shape(1, 4)
    order = d.rng.permutation(len(shape))
    after: tuple[int, ...] = tuple(shape[k] for k in order)
    if math.prod(after) and d.flag():
        at = d.number(0, len(after) - 1)
        after = (*after[:at], -1, *after[at + 1 :])
    return Case((shape,), {"shape": after})


def spread(d: Draw) -> Case:
    small, _ = d.broadcasting(2)
    whole = tuple(d.number(1, 5) if n == 1 else n for n in small)
    lead = tuple(d.number(1, 3) for _ in range(d.number(0, 2)))
    return Case((small,), {"shape": (*lead, *whole)})


def regression(**more: Any) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        attrs = {key: d.one(*values) for key, values in more.items()}
        shape = d.shape(0, 3)
        return Case((shape, shape), {"reduction": d.one("mean", "sum", "none"), **attrs})

    return draw


def shared_rows(domain: Any) -> Callable[[Draw], Case]:
    """Two arrays of rows of classes."""

    def draw(d: Draw) -> Case:
        shape = (*d.shape(0, 2), d.number(1, 12))
        case = Case((shape, shape), {"reduction": d.one("mean", "sum", "none")}, domain)
        return case

    return draw


def likelihoods(d: Draw) -> Case:
    count, rows = d.number(1, 12), d.number(1, 9)
    attrs: dict[str, Any] = {"reduction": d.one("mean", "sum", "none")}
    if d.flag():
        attrs["weights"] = [d.sixteenths(0, 2) + 0.25 for _ in range(count)]
    if d.flag() and count > 1:
        attrs["ignore_index"] = d.number(0, count - 1)
    labels = classes(count, d.one(np.int64, np.int32, np.uint8))
    return Case(((rows, count), (rows,)), attrs, (signed, labels))


def margins(d: Draw) -> Case:
    count, rows = d.number(1, 12), d.number(1, 9)
    attrs = {"reduction": d.one("mean", "sum", "none"), "margin": d.sixteenths(0, 2) + 0.5}
    labels = classes(count, d.one(np.int64, np.int32))
    return Case(((rows, count), (rows,)), attrs, (signed, labels))


# ---- functions ----
def axes_of(x: Any, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.ndim))
    return (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)


def over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of PyTorch's, for which no axes are no reduction."""

    def reduce(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        axes = axes_of(x, axis)
        return function(x, axes, keepdims) if axes else function(x[None], (0,), False)

    return reduce


def first_of(name: str) -> Callable[..., Any]:
    """The gradient of an extreme goes to the first of several that are equal, as PyTorch has it
    along one axis.
    """

    def extreme_over(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
        axes = tuple(sorted(k % x.ndim for k in axes))
        rest = [k for k in range(x.ndim) if k not in axes]
        count = math.prod(x.shape[k] for k in axes)
        flat = x.permute(*rest, *axes).reshape(*(x.shape[k] for k in rest), count)
        position = getattr(torch, f"arg{name}")(flat, -1, keepdim=True)
        y = flat.gather(-1, position)[..., 0]
        return y.reshape([1 if k in axes else n for k, n in enumerate(x.shape)]) if keepdims else y

    return over_axes(extreme_over)


def position_of(name: str) -> Callable[..., Any]:
    def position(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
        axes = tuple(sorted(k % x.ndim for k in axes))
        rest = [k for k in range(x.ndim) if k not in axes]
        count = math.prod(x.shape[k] for k in axes)
        flat = x.permute(*rest, *axes).reshape(*(x.shape[k] for k in rest), count)
        y = getattr(torch, f"arg{name}")(flat, -1)
        return y.reshape([1 if k in axes else n for k, n in enumerate(x.shape)]) if keepdims else y

    return over_axes(position)


def product_over(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Factor by factor: torch.prod's gradient divides by them, which leaves rounding."""
    for k in sorted((k % x.ndim for k in axes), reverse=True):
        y = functools.reduce(torch.mul, x.unbind(k), torch.ones_like(x.sum(k)))
        x = y.unsqueeze(k) if keepdims else y
    return x


def variance(x: Any, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Any:
    axes = axes_of(x, axis)
    if not axes:
        return x - x
    return torch.var(x, axes, correction=ddof, keepdim=keepdims)


def summed_up(x: Any, axis: int = -1, reverse: bool = False) -> Any:
    return torch.cumsum(x.flip(axis), axis).flip(axis) if reverse else torch.cumsum(x, axis)


def indexed(x: Any, key: Any) -> Any:
    """PyTorch has no negative steps: those axes are turned first."""
    parts = list(key) if isinstance(key, tuple) else [key]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    found, axis = [], 0
    for part in parts:
        if part is Ellipsis:
            axis += x.ndim - used
        elif part is not None:
            if isinstance(part, slice) and (part.step or 1) < 0:
                places = list(range(*part.indices(x.shape[axis])))
                x = x.index_select(axis, torch.tensor(places, dtype=torch.int64))
                part = slice(None)
            axis += 1
        found.append(part)
    return x[tuple(found)]


def undone(dy: Any, x: Any, key: Any) -> Any:
    """The transposed linear map, by PyTorch's own differentiation."""
    zeros = torch.zeros_like(x).requires_grad_()
    (found,) = torch.autograd.grad(indexed(zeros, key), zeros, dy, create_graph=True)
    return found


def padded_with(mode: str) -> Callable[..., Any]:
    """numpy's modes by indexing, of which PyTorch knows the gradient."""

    def pad(x: Any, paddings: Any, value: float = 0.0) -> Any:
        for axis, (before, after) in enumerate(paddings):
            n = x.shape[axis]
            if mode == "constant":
                ends = []
                for count in (before, after):
                    shape = [*x.shape[:axis], count, *x.shape[axis + 1 :]]
                    ends.append(torch.full(shape, float(value), dtype=x.dtype))
                x = torch.cat([ends[0], x, ends[1]], axis)
                continue
            places = np.pad(np.arange(n), (before, after), mode)
            x = x.index_select(axis, torch.tensor(places, dtype=torch.int64))
        return x

    return pad


def gathered(x: Any, indices: Any, axis: int = 0) -> Any:
    axis %= x.ndim
    flat = x.index_select(axis, indices.reshape(-1))
    return flat.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def scattered(x: Any, indices: Any, updates: Any, axis: int = 0) -> Any:
    axis %= x.ndim
    flat = updates.reshape(*x.shape[:axis], indices.numel(), *x.shape[axis + 1 :])
    return x.index_add(axis, indices.reshape(-1), flat)


def windows(x: Any, size: Any, stride: Any, padding: Any, dilation: Any = 1) -> Any:
    """Padding before and after each axis."""
    pair = lambda v: (v, v) if isinstance(v, int) else tuple(v)  # noqa: E731
    stride, dilation = pair(stride), pair(dilation)
    if padding == "valid":
        return ((0, 0), (0, 0))
    if padding == "same":
        found = []
        for n, k, s, d in zip(x.shape[2:], size, stride, dilation):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            found.append((total // 2, total - total // 2))
        return tuple(found)
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in pair(padding))


def grown(x: Any, pads: Any, value: float = 0.0) -> Any:
    (top, bottom), (left, right) = pads
    return F.pad(x, (left, right, top, bottom), value=value)


def convolved(
    x: Any, f: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    pads = windows(x, f.shape[2:], stride, padding, dilation)
    return F.conv2d(grown(x, pads), f, bias, stride, 0, dilation, groups)


def convolved_rows(
    x: Any, f: Any, bias: Any = None, stride: int = 1, padding: Any = 0, dilation: int = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    if isinstance(padding, tuple):
        padding = ((0, 0), padding)
    elif isinstance(padding, int):
        padding = ((0, 0), (padding, padding))
    y = convolved(x[:, :, None], f[:, :, None], bias, (1, stride), padding, (1, dilation), groups)
    return y[:, :, 0]


def of_data(f: Any, dy: Any, x: Any, **attrs: Any) -> Any:
    zeros = torch.zeros_like(x).requires_grad_()
    y = convolved(zeros, f, **attrs)
    return torch.autograd.grad(y, zeros, dy, create_graph=True)[0]


def of_filter(x: Any, dy: Any, f: Any, **attrs: Any) -> Any:
    zeros = torch.zeros_like(f).requires_grad_()
    y = convolved(x, zeros, **attrs)
    return torch.autograd.grad(y, zeros, dy, create_graph=True)[0]


def transposed(
    x: Any, f: Any, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    """PyTorch's without padding, cut to what the padding leaves."""
    pads = windows(x, f.shape[2:], 1, padding)
    pair = lambda v: (v, v) if isinstance(v, int) else tuple(v)  # noqa: E731
    more = pair(output_padding)
    y = F.conv_transpose2d(x, f, None, stride, 0, 0, groups, dilation)
    y = F.pad(y, (0, more[1], 0, more[0]))
    (top, bottom), (left, right) = pads
    return y[:, :, top : y.shape[2] - bottom, left : y.shape[3] - right]


def pooled(
    x: Any, window: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False
) -> Any:
    """By windows of an array padded with -inf, the first largest of each."""
    pair = lambda v: (v, v) if isinstance(v, int) else tuple(v)  # noqa: E731
    window = pair(window)
    stride = window if stride is None else pair(stride)
    pads = [list(p) for p in windows(x, window, stride, padding)]
    counts = []
    for k in (0, 1):
        n, (before, after) = x.shape[2 + k], pads[k]
        room = n + before + after - window[k]
        if room < 0:
            raise ValueError("no window fits")
        count = (-(-room // stride[k]) if ceil_mode else room // stride[k]) + 1
        if ceil_mode and (count - 1) * stride[k] >= n + before:
            count -= 1
        counts.append(count)
        pads[k][1] = max(after, (count - 1) * stride[k] + window[k] - n - before)
    full = grown(x, pads, -torch.inf)
    seen = full.unfold(2, window[0], stride[0]).unfold(3, window[1], stride[1])
    seen = seen[:, :, : counts[0], : counts[1]].flatten(-2)
    place = torch.argmax(seen, -1, keepdim=True)
    return seen.gather(-1, place)[..., 0]


def averaged(
    x: Any, window: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:  # fmt: skip
    """By windows: PyTorch's own has no padding on one side."""
    pair = lambda v: (v, v) if isinstance(v, int) else tuple(v)  # noqa: E731
    window = pair(window)
    stride = window if stride is None else pair(stride)
    pads = windows(x, window, stride, padding)
    sizes, counts = [], []
    full = list(pads)
    for k in (0, 1):
        n, (before, after) = x.shape[2 + k], pads[k]
        room = n + before + after - window[k]
        if room < 0:
            raise ValueError("no window fits")
        count = (-(-room // stride[k]) if ceil_mode else room // stride[k]) + 1
        if ceil_mode and (count - 1) * stride[k] >= n + before:
            count -= 1
        starts = np.arange(count) * stride[k] - before
        low, high = (-before, n + after) if count_include_pad else (0, n)
        sizes.append(np.minimum(starts + window[k], high) - np.maximum(starts, low))
        counts.append(count)
        full[k] = (before, max(after, (count - 1) * stride[k] + window[k] - n - before))
    seen = grown(x, full).unfold(2, window[0], stride[0]).unfold(3, window[1], stride[1])
    total = seen[:, :, : counts[0], : counts[1]].sum((-2, -1))
    return total / torch.tensor(np.outer(*sizes), dtype=x.dtype)


def resized(
    x: Any, size: Any = None, scale: Any = None, mode: str = "nearest", align_corners: bool = False
) -> Any:
    planes = x.reshape(1, -1, *x.shape[-2:])
    if size is None:
        pair = scale if isinstance(scale, tuple) else (scale, scale)
        size = [math.floor(n * s) for n, s in zip(x.shape[-2:], pair)]
    size = [size, size] if isinstance(size, int) else list(size)
    if mode == "nearest" and align_corners:
        for axis, m in zip((2, 3), size):
            n = planes.shape[axis]
            places = [-(-(2 * i * (n - 1) - (m - 1)) // (2 * (m - 1))) if m > 1 else 0
                      for i in range(m)]  # fmt: skip
            planes = planes.index_select(axis, torch.tensor(places, dtype=torch.int64))
        y = planes
    elif mode == "nearest":
        y = F.interpolate(planes, size, mode="nearest-exact")
    else:
        y = F.interpolate(planes, size, mode="bilinear", align_corners=align_corners)
    return y.reshape(*x.shape[:-2], *size)


def to_space(x: Any, block: int, mode: str = "DCR") -> Any:
    if mode == "CRD":
        return F.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    y = x.reshape(n, block * block, c // block**2, h, w).transpose(1, 2)
    return F.pixel_shuffle(y.reshape(n, c, h, w), block)


def to_depth(x: Any, block: int, mode: str = "DCR") -> Any:
    y = F.pixel_unshuffle(x, block)
    if mode == "CRD":
        return y
    n, c, h, w = y.shape
    return y.reshape(n, c // block**2, block * block, h, w).transpose(1, 2).reshape(n, c, h, w)


def multiplied(a: Any, b: Any, trans_A: bool = False, trans_B: bool = False) -> Any:
    return torch.matmul(a.mT if trans_A else a, b.mT if trans_B else b)


def linear(a: Any, b: Any, bias: Any, trans_B: bool = False) -> Any:
    return torch.matmul(a, b.mT if trans_B else b) + bias


def batch_normed(x: Any, scale: Any, bias: Any, eps: float = 1e-5) -> Any:
    axes = tuple(k for k in range(x.ndim) if k != 1)
    mean, spread_ = x.mean(axes, keepdim=True), torch.var(x, axes, correction=0, keepdim=True)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return (x - mean) / torch.sqrt(spread_ + eps) * scale.reshape(shape) + bias.reshape(shape)


def fixed_normed(
    x: Any, mean: Any, spread_: Any, scale: Any, bias: Any, eps: float, training: bool = False
) -> Any:
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, spread_, scale, bias = (v.reshape(shape) for v in (mean, spread_, scale, bias))
    return (x - mean) / torch.sqrt(spread_ + eps) * scale + bias


def by_rows(x: Any, axes: tuple[int, ...], eps: float, centered: bool = True) -> Any:
    if centered:
        x = x - x.mean(axes, keepdim=True)
    return x / torch.sqrt((x * x).mean(axes, keepdim=True) + eps)


def layer_normed(x: Any, scale: Any, bias: Any, eps: float) -> Any:
    return by_rows(x, tuple(range(-scale.ndim, 0)), eps) * scale + bias


def root_normed(x: Any, scale: Any, eps: float) -> Any:
    return by_rows(x, tuple(range(-scale.ndim, 0)), eps, centered=False) * scale


def group_normed(x: Any, scale: Any, bias: Any, groups: int, eps: float) -> Any:
    """Its own is refused by PyTorch where a group has one value."""
    parts = x.reshape(x.shape[0], groups, x.shape[1] // max(groups, 1), *x.shape[2:])
    y = by_rows(parts, tuple(range(2, parts.ndim)), eps).reshape(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return y * scale.reshape(shape) + bias.reshape(shape)


def gradient_bound(
    axes: Callable[..., tuple[int, ...]], centered: bool = True
) -> Callable[..., float]:
    """The largest derivative of a normalization: scale / deviation."""

    def terms(x: np.ndarray, scale: np.ndarray, *_: Any, eps: float = 1e-5, **attrs: Any) -> float:
        if not x.size or not np.isfinite(x).all():
            return 1.0
        x, over = axes(x, scale, **attrs)
        middle = x - x.mean(over, keepdims=True) if centered else x
        least = np.sqrt((middle**2).mean(over) + eps).min()
        return float(1 + (1 + np.abs(scale).max()) * (1 + np.abs(x).max()) / least)

    return terms


def one(*_: Any, **__: Any) -> float:
    """Terms like y · (dy - Σ y · dy), each at most 1."""
    return 1.0


def last_axes(x: np.ndarray, scale: np.ndarray) -> Any:
    return x, tuple(range(-scale.ndim, 0))


def channel_axes(x: np.ndarray, scale: np.ndarray) -> Any:
    return x, tuple(k for k in range(x.ndim) if k != 1)


def group_axes(x: np.ndarray, scale: np.ndarray, groups: int | None = None) -> Any:
    groups = groups or x.shape[1]
    return x.reshape(x.shape[0], groups, -1), (2,)


def class_loss(
    x: Any, labels: Any, reduction: str = "mean", label_smoothing: float = 0.0, weights: Any = None,
    ignore_index: int | None = None,
) -> Any:  # fmt: skip
    w = None if weights is None else torch.tensor(weights, dtype=x.dtype)
    more = {} if ignore_index is None else {"ignore_index": ignore_index}
    flat = x.reshape(-1, x.shape[-1])
    flat_labels = labels.reshape(-1, x.shape[-1]) if labels.ndim == x.ndim else labels.reshape(-1)
    y = F.cross_entropy(
        flat, flat_labels, w, reduction=reduction, label_smoothing=label_smoothing, **more
    )
    return y.reshape(x.shape[:-1]) if reduction == "none" else y


def likelihood(
    x: Any, labels: Any, reduction: str = "mean", weights: Any = None,
    ignore_index: int | None = None,
) -> Any:  # fmt: skip
    w = None if weights is None else torch.tensor(weights, dtype=x.dtype)
    more = {} if ignore_index is None else {"ignore_index": ignore_index}
    return F.nll_loss(x, labels, w, reduction=reduction, **more)


def reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of elements or rows under a reduction."""

    def loss(*tensors: Any, reduction: str = "mean", **attrs: Any) -> Any:
        rows = function(*tensors, **attrs)
        return {"none": lambda: rows, "sum": rows.sum, "mean": rows.mean}[reduction]()

    return loss


def logit_loss(x: Any, y: Any, reduction: str = "mean", positive_weight: float = 1.0) -> Any:
    """By PyTorch's softplus: its own form of this loss takes (1 - y) · x from x, which leaves
    rounding of the size of the logit.
    """
    rows = positive_weight * y * F.softplus(-x, threshold=40) + (1 - y) * F.softplus(
        x, threshold=40
    )
    return {"none": lambda: rows, "sum": rows.sum, "mean": rows.mean}[reduction]()


def divergence(log_q: Any, p: Any) -> Any:
    return F.kl_div(log_q, p, reduction="none").sum(-1)


def margin_loss(x: Any, labels: Any, reduction: str = "mean", margin: float = 1.0) -> Any:
    return F.multi_margin_loss(x, labels, margin=margin, reduction=reduction)


def transposed_axes(x: Any, axes: Any = None) -> Any:
    return x.permute(*(range(x.ndim)[::-1] if axes is None else axes))


def joined(*tensors: Any, axis: int) -> Any:
    return torch.cat(tensors, axis)


def split_part(x: Any, sections: Any, axis: int) -> Any:
    """Part 1, which the row takes."""
    if isinstance(sections, int):
        sections = [x.shape[axis] // sections] * sections
    return torch.split(x, list(sections), axis)[1]


def elementwise() -> dict[str, Oracle]:
    """Functions of each element."""
    return {
        **{
            name: local(getattr(torch, name))
            for name in ("neg", "exp", "log", "sqrt", "cos", "sin", "log1p", "rsqrt", "abs", "sign")
        },
        **{
            name: local(getattr(torch, name))
            for name in (
                "exp2",
                "expm1",
                "log2",
                "log10",
                "tan",
                "asin",
                "acos",
                "atan",
                "sinh",
                "cosh",
                "asinh",
                "acosh",
                "atanh",
                "erf",
                "reciprocal",
                "floor",
                "ceil",
                "trunc",
                "round",
                "isnan",
                "isinf",
                "isfinite",
            )
        },
        "atan2": local(torch.atan2),
        "tanh": local(torch.tanh, saturates=True),
        "sigmoid": local(torch.sigmoid, saturates=True),
        "relu": local(torch.relu, order=1),
        "add": local(torch.add),
        "sub": local(torch.sub),
        "mul": local(torch.mul),
        "div": local(torch.div),
        "pow": local(torch.pow, underflows=True),
        "relu_gradient": local(lambda x, g: torch.where(x > 0, g, 0.0), order=1),
        "add_const": local(lambda x, const: x + const, draw=constants()),
        "mul_const": local(lambda x, const: x * const, draw=constants()),
        "div_const": local(lambda x, const: x / const, draw=constants()),
        "rsub_const": local(lambda x, const: const - x, draw=constants()),
        "rdiv_const": local(lambda x, const: const / x, draw=constants()),
        # PyTorch has 1 / sqrt(x) for x**-0.5, whose signs at -0 and -inf are not those of pow.
        "pow_const": local(
            lambda x, const: x**const if const != -0.5 else torch.pow(x, torch.full_like(x, const)),
            draw=constants(0.5, -0.5, 1.5),
        ),
        "rpow_const": local(lambda x, const: torch.pow(const, x), draw=positive_constants),
        "clip": local(lambda x, low, high: torch.clamp(x, low, high), draw=limits, order=1),
        "relu6": local(F.relu6, order=1),
        "leaky_relu": local(lambda x, alpha: F.leaky_relu(x, alpha), draw=sloped, order=1),
        "elu": local(lambda x, alpha: F.elu(x, alpha), draw=sloped, order=1, saturates=True),
        "silu": local(F.silu, conditioned=1, saturates=True),
        "gelu": local(F.gelu, conditioned=1, saturates=True),
        "gelu_tanh": local(lambda x: F.gelu(x, approximate="tanh"), conditioned=1, saturates=True),
        "softplus": local(lambda x: torch.logaddexp(x, torch.zeros_like(x)), saturates=True),
        # PyTorch's own have 1 / 6 in float32
        "hard_sigmoid": local(lambda x: torch.clamp(x + 3, 0, 6) / 6, order=1),
        "hard_swish": local(lambda x: x * torch.clamp(x + 3, 0, 6) / 6, order=1, saturates=True),
        **{
            name: local(getattr(torch, theirs))
            for name, theirs in (
                ("equal", "eq"),
                ("not_equal", "ne"),
                ("less", "lt"),
                ("less_equal", "le"),
                ("greater", "gt"),
                ("greater_equal", "ge"),
                ("logical_and", "logical_and"),
                ("logical_or", "logical_or"),
                ("logical_xor", "logical_xor"),
                ("logical_not", "logical_not"),
                ("truth_and", "logical_and"),
                ("truth_or", "logical_or"),
                ("truth_xor", "logical_xor"),
                ("truth_not", "logical_not"),
            )
        },
        "where": local(lambda c, a, b: torch.where(c != 0, a, b)),
        "minimum": local(lambda a, b: larger_or_smaller(a, b, a < b), order=1),
        "maximum": local(lambda a, b: larger_or_smaller(a, b, a > b), order=1),
    }


def reductions() -> dict[str, Oracle]:
    """Sums and extremes over axes."""
    return {
        "sum": Oracle(over_axes(lambda x, axes, keep: x.sum(axes, keepdim=keep))),
        "mean": Oracle(over_axes(lambda x, axes, keep: x.mean(axes, keepdim=keep))),
        "max": Oracle(first_of("max"), order=1),
        "min": Oracle(first_of("min"), order=1),
        "argmax": Oracle(position_of("max")),
        "argmin": Oracle(position_of("min")),
        "prod": Oracle(over_axes(product_over), conditioned=1),
        "logsumexp": Oracle(
            over_axes(lambda x, a, keep: torch.logsumexp(x, a, keepdim=keep)),
            conditioned=1,
            derivatives=False,
            terms=one,
        ),
        "var": Oracle(variance, conditioned=1, derivatives=False),
        "cumsum": Oracle(summed_up),
    }


def flattened(x: Any, axis: int = 1) -> Any:
    return x.flatten(axis) if axis < x.ndim else x[..., None]


def movements() -> dict[str, Oracle]:
    """What moves elements."""
    return {
        "reshape": Oracle(lambda x, shape: x.reshape(shape), draw=reshaped),
        "reshape_like": Oracle(lambda x, like: x.reshape(like.shape)),
        "transpose": Oracle(transposed_axes),
        "broadcast_to": Oracle(lambda x, shape: x.broadcast_to(shape), draw=spread),
        "squeeze": Oracle(lambda x, axis=None: x.squeeze() if axis is None else x.squeeze(axis)),
        "copy": Oracle(lambda x: x.clone()),
        "stop_gradient": Oracle(lambda x: x.detach()),
        "flatten": Oracle(flattened),
        "getitem": Oracle(indexed),
        "slice_gradient": Oracle(undone),
        "gather": Oracle(gathered),
        "scatter_add": Oracle(scattered),
        "embedding": Oracle(gathered),
        "one_hot": Oracle(
            lambda i, depth, dtype=None: F.one_hot(i, depth).to(torch.float64), patterns=False
        ),
        "concat": Oracle(joined),
        "concat_two": Oracle(lambda a, b, axis=0: joined(a, b, axis=axis)),
        "stack": Oracle(lambda *x, axis: torch.stack(x, axis), draw=stacked),
        "split_sizes": Oracle(split_part),
        "split_equal": Oracle(split_part),
        "constant_pad": Oracle(padded_with("constant")),
        "pad_edge": Oracle(padded_with("edge"), terms=one),
        "pad_reflect": Oracle(padded_with("reflect")),
        "tile": Oracle(lambda x, reps: x.tile(reps if isinstance(reps, tuple) else (reps,))),
        "depth_to_space": Oracle(to_space),
        "space_to_depth": Oracle(to_depth),
        "resize": Oracle(resized, conditioned=1),
        "resize_nearest": Oracle(lambda x, **attrs: resized(x, mode="nearest", **attrs)),
        "resize_bilinear": Oracle(
            lambda x, **attrs: resized(x, mode="bilinear", **attrs), conditioned=1
        ),
    }


def products() -> dict[str, Oracle]:
    """Products, convolutions and pooling."""
    return {
        "matmul": Oracle(multiplied),
        "batched_matmul": Oracle(multiplied),
        "linear": Oracle(linear),
        "outer": Oracle(torch.outer, draw=vectors),
        "times_vector": Oracle(torch.mv, draw=times),
        "einsum": Oracle(lambda *x, text: torch.einsum(text.replace(" ", ""), *x)),
        "conv2d": Oracle(convolved),
        "conv2d_bias": Oracle(convolved),
        "conv2d_function": Oracle(convolved),
        "conv1d": Oracle(convolved_rows),
        "conv2d_data_gradient_like": Oracle(of_data),
        "conv2d_filter_gradient_like": Oracle(of_filter),
        "conv_transpose2d": Oracle(transposed),
        "max_pool2d": Oracle(pooled, order=1),
        "max_pool2d_function": Oracle(pooled, order=1),
        "avg_pool2d": Oracle(averaged),
        "avg_pool2d_function": Oracle(averaged),
        "global_max_pool2d": Oracle(
            lambda x, keepdims=False: first_of("max")(x, (2, 3), keepdims), draw=images, order=1
        ),
        "global_avg_pool2d": Oracle(
            lambda x, keepdims=False: x.mean((2, 3), keepdim=keepdims), draw=images
        ),
    }


def normalizations() -> dict[str, Oracle]:
    """Softmax, attention and normalization."""
    return {
        "attention": Oracle(
            attention, draw=attending, patterns=False, conditioned=1, derivatives=False, terms=one
        ),
        "softmax": Oracle(
            lambda x, axis=-1: torch.softmax(x, axis),
            draw=softmaxed,
            conditioned=1,
            derivatives=False,
            terms=one,
        ),
        "log_softmax": Oracle(
            lambda x, axis=-1: torch.log_softmax(x, axis),
            draw=softmaxed,
            conditioned=1,
            derivatives=False,
            terms=one,
        ),
        "batch_normalization": Oracle(
            batch_normed, conditioned=1, derivatives=False, terms=gradient_bound(channel_axes)
        ),
        "batch_normalize": Oracle(fixed_normed, conditioned=1, derivatives=False),
        "layer_normalization": Oracle(
            layer_normed, conditioned=1, derivatives=False, terms=gradient_bound(last_axes)
        ),
        "rms_normalization": Oracle(
            root_normed, conditioned=1, derivatives=False, terms=gradient_bound(last_axes, False)
        ),
        "group_normalization": Oracle(
            group_normed, conditioned=1, derivatives=False, terms=gradient_bound(group_axes)
        ),
        "instance_normalization": Oracle(
            lambda x, s, b, eps: group_normed(x, s, b, x.shape[1], eps),
            conditioned=1,
            derivatives=False,
            terms=gradient_bound(group_axes),
        ),
    }


def losses() -> dict[str, Oracle]:
    """Losses."""
    return {
        "softmax_cross_entropy_options": Oracle(
            class_loss, conditioned=1, derivatives=False, terms=one
        ),
        "softmax_cross_entropy_dense_options": Oracle(
            class_loss, conditioned=1, derivatives=False, terms=one, patterns=False
        ),
        "negative_log_likelihood": Oracle(
            likelihood, draw=likelihoods, conditioned=1, derivatives=False
        ),
        "mean_squared_error": Oracle(
            reduced(lambda p, t: (p - t) ** 2), conditioned=1, derivatives=False, draw=regression()
        ),
        "mean_absolute_error": Oracle(
            reduced(lambda p, t: (p - t).abs()),
            conditioned=1,
            derivatives=False,
            order=1,
            draw=regression(),
        ),
        "huber": local(
            lambda d, delta: F.huber_loss(d, torch.zeros_like(d), "none", delta),
            draw=thresholds,
            order=1,
        ),
        "huber_loss": Oracle(
            reduced(lambda p, t, delta: F.huber_loss(p, t, "none", delta)),
            conditioned=1,
            derivatives=False,
            order=1,
            draw=regression(delta=(1.0, 0.5, 3.0)),
        ),
        "binary_cross_entropy": Oracle(
            # PyTorch's own bounds 1 / (p · (1 - p)) by 1e12
            reduced(lambda p, y: -(y * torch.log(p) + (1 - y) * torch.log1p(-p))),
            conditioned=1,
            derivatives=False,
            draw=regression(),
            patterns=False,
            saturates=True,
        ),
        "binary_cross_entropy_with_logits": Oracle(
            logit_loss,
            conditioned=1,
            derivatives=False,
            saturates=True,
            draw=regression(positive_weight=(1.0, 2.5, 0.25)),
        ),
        "kl_divergence": Oracle(
            reduced(divergence), conditioned=1, derivatives=False, patterns=False
        ),
        "multiclass_hinge_loss": Oracle(
            margin_loss, draw=margins, conditioned=1, derivatives=False, order=1
        ),
        "hinge_loss": Oracle(
            reduced(lambda x, y: torch.relu(1 - x * y)),
            conditioned=1,
            derivatives=False,
            order=1,
            draw=regression(),
        ),
        "global_norm": Oracle(lambda *x: torch.sqrt(sum((v * v).sum() for v in x)), order=0),
    }


def make() -> dict[str, Oracle]:
    """By rows of samples.py."""
    if torch is None:
        return {}
    families = (elementwise, reductions, movements, products, normalizations, losses)
    return {name: oracle for family in families for name, oracle in family().items()}


ORACLES = make()

# Where we differ from PyTorch on purpose: what is not compared for which values, and why.
PURPOSE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("resize", "resize_bilinear"),
        {"values": ("edges",), "why": "PyTorch multiplies what does not count by 0: NaN"},
    ),
    **dict.fromkeys(
        ("conv2d", "conv2d_bias", "conv2d_function", "conv1d"),
        {
            "values": ("edges",),
            "why": "the padding's zeros times infinity: depthwise kernels of the CPU device leave "
            "these products out, the others make NaN of them, as PyTorch does",
        },
    ),
    "binary_cross_entropy_with_logits": {
        "values": ("edges",), "why": "PyTorch takes inf - inf where one class alone is infinite"
    },
    "div": {
        "gradients": ("edges",),
        "why": "dy / b is a factor of both gradients: it may overflow, but is 0 where dy is, "
        "however small b; PyTorch's a / b² is NaN there",
    },
    "multiclass_hinge_loss": {
        "values": ("edges",), "why": "the own class is taken from all, itself too: inf - inf"
    },
    **dict.fromkeys(
        ("log2", "log10", "asinh", "acosh"),
        {"gradients": ("edges",), "why": "a factor near 1 / x overflows or is subnormal there"},
    ),
    "sign": {"values": ("edges",), "why": "the sign of NaN is NaN, as numpy has it, in PyTorch 0"},
    **dict.fromkeys(
        ("max", "min", "global_max_pool2d"),
        {"gradients": ("edges",), "why": "PyTorch's position of NaN is another one"},
    ),
}  # fmt: skip

# Rows that are not tried, with the reason. The names of one reason are parted by blanks.
WITHOUT: dict[str, str] = {
    "casts, leaves and shapes, which no arithmetic is in": (
        "cast cast_like cast_to_integers as_node expand_like broadcast_like sum_to_like "
        "sum_to_like_function "
        "expand_dims window slice place constant full ones_like zeros_like assign group channels "
        "per_channel normalization_view expand_last uniform_like pad tile_op target target_of "
        "class_scores weights_like"
    ),
    "the same operator under another name": (
        "add_function sub_function mul_function div_function power_function clip_smooth "
        "conv2d_op conv2d_add_bias_op max_pool2d_op avg_pool2d_op "
        "binarycrossentropy batch_normalization_op softmax_cross_entropy row_normalize "
        "sparse_softmax_cross_entropy multiclass_hinge_loss_of_one_hot softmax_cross_entropy_rows "
        "sparse_softmax_cross_entropy_rows negative_log_likelihood_rows reducesumaxiszero "
        "einsum_op binary_cross_entropy_with_array_weights binary_cross_entropy_with_node_weights "
        "attention_op attention_biased packed_attention packed_attention_op split_heads join_heads"
    ),
    "a derivative that the operator's own gradients and their gradients go through": (
        "clip_gradient leaky_relu_gradient elu_gradient silu_gradient gelu_gradient "
        "gelu_tanh_gradient softplus_gradient hard_swish_gradient gather_gradient scatter "
        "concat_gradient pad_edge_gradient pad_reflect_gradient tile_gradient product_like "
        "resize_nearest_gradient resize_bilinear_gradient conv2d_data_gradient "
        "conv2d_filter_gradient conv2d_gradient_of_data_op conv2d_gradient_of_filter_op "
        "max_pool2d_gradient max_pool2d_gradient_like max_pool2d_read max_pool2d_gradient_op "
        "avg_pool2d_gradient avg_pool2d_gradient_like avg_pool2d_gradient_op batch_statistics "
        "batch_normalize_sums batch_normalize_gradient row_normalize_gradient row_normalize_sums "
        "softmax_cross_entropy_gradient sparse_softmax_cross_entropy_gradient "
        "negative_log_likelihood_gradient negative_log_likelihood_gradient_like "
        "attention_gradient attention_of_mask packed_attention_gradient"
    ),
    "values that jump, orders and stacks of products, which rows compare with numpy's": (
        "fmod remainder floor_divide shifted sort argsort topk topk_indices product "
        "take_along_axis put_along_axis "
        "masked_fill tril triu std cumprod recurrence product_operator product_gradient "
        "non_max_suppression non_max_suppression_count soft_nms soft_nms_scores soft_nms_count"
    ),
    "a part of a loss that PyTorch has not alone": (
        "class_weights class_weights_function reduce_rows is_one_hot"
    ),
    "the assignment's, without the mean in its gradient": "softmaxcrossentropy",
    "random numbers of another generator": (
        "random_uniform uniform random_bernoulli bernoulli random_normal random_truncated_normal "
        "normal dropout dropout_op masked step_of_draw dropped_attention "
        "dropped_attention_gradient dropped_attention_second dropped_packed_attention "
        "dropped_packed_attention_gradient"
    ),
    "integers, which are compared exactly with numpy's": (
        "quantize dequantize quantized_add quantized_conv2d quantized_matmul quantized_max_pool2d"
    ),
    "the same over images with channels last, which fusions make": (
        "conv2d_channels_last conv2d_data_gradient_channels_last "
        "conv2d_filter_gradient_channels_last max_pool2d_channels_last "
        "max_pool2d_gradient_channels_last"
    ),
    "the optimizers' rules and states, which fuzz/training.py tries": (
        "running_update running_statistics sgd_update sgd_momentum_update adam_update "
        "adam_update_of_7 rmsprop_update rmsprop_centered_update rmsprop_momentum_update "
        "rmsprop_centered_momentum_update adagrad_update lion_update average_update "
        "accumulate_update advance_step advance_step_at_the_end accumulate"
    ),
    "parts of generation, which rows compare with their definitions": (
        "append_to_cache cached_attention draw_token"
    ),
    "batches of data on the device": (
        "shuffled_index take_batch shuffled_batch shuffled_batch_labels"
    ),
    "what passes make of the operators here, with the fused graphs of fuzz/training.py": (
        "matmul_bias matmul_bias_both matmul_map matmul_gradient matmul_sums fused_cross_entropy "
        "matmul_add matmul_bias_add "
        "fused_row_normalize fused_row_normalize_gradient "
        "batch_normalize_map batch_normalize_map_gradient batch_normalize_map_sums "
        "batch_normalize_relu_sums_output_1 batch_normalize_relu_sums_output_2 "
        "batch_normalize_relu_sums_recomputed_1 batch_normalize_relu_sums_recomputed_2 "
        "batch_normalize_sums_single_pass batch_statistics_single_pass matmul_u8 matmul_u8_bias "
        "scaled shuffled_rows shuffled_rows_labels matvec matvec_chain "
        "quantized_conv2d_fused quantized_matmul_chain conv2d_kept "
        "fused_sparse_cross_entropy narrow_cross_entropy narrow_cross_entropy_gradient "
        "linear_cross_entropy matmul_row_factors "
        "pointwise conv2d_pool conv2d_pool_data_gradient "
        "conv2d_pool_filter_gradient conv2d_pool_filter_bias_gradient"
    ),
}
