"""The kernels of networks as plain functions on NDArrays of either native device: convolution,
pooling, normalization, dropout, activations, joining and updates.

Images are (N, C, H, W). `padding` and `stride` are one integer or (height, width).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError
from ..ndarray import NDArray, array, empty, launch
from ..ops.optim.apply import options_of
from ..ops.optim.rules import RULES
from ..runtime.interface import interface
from .checks import check_arrays, check_separate, check_shape

__all__ = [
    "adam_update", "average_pooling2d", "average_pooling2d_gradient", "batch_normalization",
    "batch_normalization_gradient", "concat", "conv2d", "conv2d_gradient_of_data",
    "conv2d_gradient_of_filter", "dropout", "leaky_relu", "max_pooling2d",
    "max_pooling2d_gradient", "pad", "sgd_update", "sigmoid", "slice", "tanh",
]  # fmt: skip

Pair = tuple[int, int]
_Windows = interface.struct("WindowOptions")
_MAX_NDIM = 8  # strides that the kernels of slices take


# ---- convolution ----


def conv2d(x: NDArray, f: NDArray, out: NDArray, padding: Any = 0, stride: Any = 1) -> None:
    """out (N, O, oH, oW) = x (N, C, H, W) convolved with f (O, C, kH, kW)."""
    _conv("conv2d", x, f, out, padding, stride, x, f, out)


def conv2d_gradient_of_data(
    f: NDArray, dy: NDArray, dx: NDArray, padding: Any = 0, stride: Any = 1
) -> None:
    """dx (N, C, H, W) of conv2d from its filter and the gradient dy of its output."""
    _conv("conv2d_data_gradient", dx, f, dy, padding, stride, f, dy, dx)


def conv2d_gradient_of_filter(
    x: NDArray, dy: NDArray, df: NDArray, padding: Any = 0, stride: Any = 1
) -> None:
    """df (O, C, kH, kW) of conv2d from its data and the gradient dy of its output."""
    _conv("conv2d_filter_gradient", x, df, dy, padding, stride, x, dy, df)


def _conv(
    kernel: str, x: NDArray, f: NDArray, y: NDArray, padding: Any, stride: Any, *arrays: NDArray
) -> None:
    check_arrays(kernel, *arrays)
    check_separate(kernel, arrays[2], *arrays[:2])
    _check_images(kernel, x, f, y)
    if x.shape[1] != f.shape[1]:
        raise ShapeError(
            f"{kernel}: data {x.shape} has {x.shape[1]} channels, filter {f.shape} {f.shape[1]}"
        )
    pads, steps = _pair(kernel, "padding", padding, 0), _pair(kernel, "stride", stride, 1)
    out = _windows(kernel, x.shape[2:], f.shape[2:], pads, steps)
    check_shape(kernel, "the convolution", y, (x.shape[0], f.shape[0], *out))
    launch(kernel, x.ctx, *arrays, _Windows(stride=steps, before=pads, dilation=(1, 1)), 1, 0, 0)


# ---- pooling ----


def max_pooling2d(
    in_arr: NDArray, kernel_h: int, kernel_w: int, out: NDArray, padding: Any = 0, stride: Any = 1
) -> None:
    """out (N, C, oH, oW) = the largest value of each window of in (N, C, H, W)."""
    windows = _pool("max_pool2d", in_arr, (kernel_h, kernel_w), out, padding, stride)
    check_separate("max_pool2d", out, in_arr)
    launch("max_pool2d", out.ctx, in_arr, out, empty(out.shape, out.ctx, np.int32), windows)


def max_pooling2d_gradient(
    in_arr: NDArray,
    out_grad: NDArray,
    kernel_h: int,
    kernel_w: int,
    in_grad: NDArray,
    padding: Any = 0,
    stride: Any = 1,
) -> None:
    """in_grad (N, C, H, W) = out_grad at the first largest element of each window, else 0.

    The windows are searched again; in a graph, `ad.max_pool2d` keeps what it has found.
    """
    op = "max_pool2d_gradient"
    windows = _pool(op, in_arr, (kernel_h, kernel_w), out_grad, padding, stride)
    check_arrays(op, in_arr, in_grad)
    check_shape(op, "the gradient", in_grad, in_arr.shape)
    check_separate(op, in_grad, out_grad)
    argmax = empty(out_grad.shape, in_arr.ctx, np.int32)
    launch("max_pool2d", in_arr.ctx, in_arr, empty(out_grad.shape, in_arr.ctx), argmax, windows)
    launch(op, in_arr.ctx, out_grad, argmax, in_grad, windows)


def average_pooling2d(
    in_arr: NDArray, kernel_h: int, kernel_w: int, out: NDArray, padding: Any = 0, stride: Any = 1
) -> None:
    """out (N, C, oH, oW) = the mean of each window of in (N, C, H, W), padding counted as 0."""
    windows = _pool("avg_pool2d", in_arr, (kernel_h, kernel_w), out, padding, stride)
    check_separate("avg_pool2d", out, in_arr)
    launch("avg_pool2d", out.ctx, in_arr, out, windows, 1)


def average_pooling2d_gradient(
    out_grad: NDArray,
    kernel_h: int,
    kernel_w: int,
    in_grad: NDArray,
    padding: Any = 0,
    stride: Any = 1,
) -> None:
    """in_grad (N, C, H, W) of average_pooling2d from the gradient of its output."""
    op = "avg_pool2d_gradient"
    windows = _pool(op, in_grad, (kernel_h, kernel_w), out_grad, padding, stride)
    check_separate(op, in_grad, out_grad)
    launch(op, in_grad.ctx, out_grad, in_grad, windows, 1)


def _pool(op: str, x: NDArray, window: Pair, y: NDArray, padding: Any, stride: Any) -> Any:
    check_arrays(op, x, y)
    _check_images(op, x, y)
    size = _pair(op, "window", window, 1)
    pads, steps = _pair(op, "padding", padding, 0), _pair(op, "stride", stride, 1)
    if pads[0] >= size[0] or pads[1] >= size[1]:
        raise ShapeError(f"{op}: padding {pads} must be smaller than the window {size}")
    out = _windows(op, x.shape[2:], size, pads, steps)
    check_shape(op, "the pooled array", y, (*x.shape[:2], *out))
    return _Windows(size=size, stride=steps, before=pads, after=pads, dilation=(1, 1))


# ---- normalization, dropout, activations ----


def batch_normalization(
    in_arr: NDArray,
    scale: NDArray,
    bias: NDArray,
    out: NDArray,
    mean: NDArray,
    variance: NDArray,
    eps: float = 1e-5,
) -> None:
    """out = (in - mean) / sqrt(variance + eps) * scale + bias for each channel of in (N, C, ...).

    mean and variance (C,) are those of this batch and are written too; the gradient needs them.
    """
    op = "batch_normalization"
    _check_channels(op, in_arr, out, scale, bias, mean, variance)
    check_separate(op, out, in_arr)
    launch("batch_statistics", in_arr.ctx, in_arr, mean, variance)
    launch("batch_normalize", in_arr.ctx, in_arr, mean, variance, scale, bias, float(eps), out)


def batch_normalization_gradient(
    out_grad: NDArray,
    in_arr: NDArray,
    scale: NDArray,
    mean: NDArray,
    variance: NDArray,
    in_grad: NDArray,
    scale_grad: NDArray,
    bias_grad: NDArray,
    eps: float = 1e-5,
) -> None:
    """The three gradients of batch_normalization, through the batch's mean and variance too."""
    op = "batch_normalization_gradient"
    _check_channels(op, in_arr, out_grad, scale, mean, variance, scale_grad, bias_grad)
    check_arrays(op, in_arr, in_grad)
    check_shape(op, "the gradient", in_grad, in_arr.shape)
    check_separate(op, in_grad, in_arr, out_grad)
    of_batch = (in_arr, mean, variance)
    sums = (scale_grad, bias_grad)
    launch("batch_normalize_sums", in_arr.ctx, *of_batch, out_grad, float(eps), *sums)
    arguments = (*of_batch, scale, *sums, out_grad, float(eps), in_grad)
    launch("batch_normalize_gradient", in_arr.ctx, *arguments)


def dropout(
    in_arr: NDArray, keep_prob: float, out: NDArray, seed: int = 0, node: int = 0, step: int = 0
) -> None:
    """out = in / keep_prob where kept, else 0. What is kept depends on seed, node, step and the
    position alone, so the gradient is the same call on the output's gradient.
    """
    op = "dropout"
    _check_alike("dropout", in_arr, out)
    if not 0 < keep_prob <= 1:
        raise ShapeError(f"{op}: expected 0 < keep_prob <= 1, got {keep_prob}")
    at = array(np.array([step], np.int64), in_arr.ctx, np.int64)
    threshold = round(keep_prob * 2**32)
    launch(op, out.ctx, in_arr, at, int(seed), int(node), threshold, 1 / keep_prob, out)


def leaky_relu(in_arr: NDArray, alpha: float, out: NDArray) -> None:
    """out = in where in > 0, else alpha * in."""
    _check_alike("leaky_relu", in_arr, out)
    launch("leaky_relu", out.ctx, in_arr, float(alpha), out)


def sigmoid(in_arr: NDArray, out: NDArray) -> None:
    """out = 1 / (1 + exp(-in))."""
    _check_alike("sigmoid", in_arr, out)
    launch("sigmoid", out.ctx, in_arr, out)


def tanh(in_arr: NDArray, out: NDArray) -> None:
    """out = tanh(in)."""
    _check_alike("tanh", in_arr, out)
    launch("tanh", out.ctx, in_arr, out)


# ---- layout ----


def concat(in_arr_a: NDArray, in_arr_b: NDArray, out: NDArray, axis: int = 0) -> None:
    """out = a and then b along an axis."""
    op = "concat"
    check_arrays(op, in_arr_a, in_arr_b, out)
    check_separate(op, out, in_arr_a, in_arr_b)
    shape = list(in_arr_a.shape)
    if not 0 <= axis < min(len(shape), in_arr_b.ndim):
        raise ShapeError(f"{op}: axis {axis} does not fit {in_arr_a.shape} and {in_arr_b.shape}")
    shape[axis] = in_arr_b.shape[axis]
    check_shape(op, "the second input", in_arr_b, tuple(shape))
    shape[axis] += in_arr_a.shape[axis]
    check_shape(op, "the output", out, tuple(shape))
    launch("concat_2", out.ctx, in_arr_a, in_arr_b, int(axis), out)


def pad(
    in_arr: NDArray,
    out: NDArray,
    paddings: Sequence[Pair],
    mode: str = "constant",
    constant_values: float = 0.0,
) -> None:
    """out = in with `paddings[k]` = (before, after) positions of `constant_values` along axis k."""
    op = "pad"
    check_arrays(op, in_arr, out)
    check_separate(op, out, in_arr)
    if mode.lower() != "constant":
        raise ShapeError(f"{op}: the mode here is constant, got {mode!r}; ad.pad_op has others")
    if len(paddings) != in_arr.ndim or any(n < 0 for both in paddings for n in both):
        raise ShapeError(f"{op}: paddings {tuple(paddings)} do not fit {in_arr.shape}")
    padded = tuple(a + n + b for (a, b), n in zip(paddings, in_arr.shape))
    check_shape(op, "the output", out, padded)
    offset = _offset([before for before, _ in paddings], out.shape)
    bits = np.float32(constant_values).view(np.int32).item()
    launch("place", out.ctx, in_arr, bits, offset, *[1] * _MAX_NDIM, out)


def slice(in_arr: NDArray, out: NDArray, begin: Sequence[int]) -> None:
    """out = the part of in that begins at `begin` and has the shape of out."""
    op = "slice"
    check_arrays(op, in_arr, out)
    check_separate(op, out, in_arr)
    ends = [start + n for start, n in zip(begin, out.shape)]
    fits = len(begin) == in_arr.ndim == out.ndim and min(begin, default=0) >= 0
    if not fits or any(end > n for end, n in zip(ends, in_arr.shape)):
        raise ShapeError(f"{op}: {out.shape} from {tuple(begin)} on is not within {in_arr.shape}")
    if out.size:
        launch(op, out.ctx, in_arr, _offset(begin, in_arr.shape), *[1] * _MAX_NDIM, out)


# ---- updates ----


def sgd_update(param: NDArray, grad: NDArray, lr: float) -> None:
    """param -= lr * grad."""
    _check_alike("sgd_update", grad, param)
    _update("sgd_update", [param], grad, lr, [])


def adam_update(
    param: NDArray,
    grad: NDArray,
    mean: NDArray,
    square: NDArray,
    lr: float,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """Adam's step number `step`, counted from 1, of param and its two moments, all of one shape."""
    op = "adam_update"
    for other in (grad, mean, square):
        _check_alike(op, other, param)
    if step < 1:
        raise ShapeError(f"{op}: steps are counted from 1, got {step}")
    before = array(np.array([step - 1], np.int64), param.ctx, np.int64)
    states = [param, mean, square]
    _update(op, states, grad, lr, [before], beta1=beta1, beta2=beta2, eps=eps)


# ---- checks ----


def _check_alike(op: str, in_arr: NDArray, out: NDArray) -> None:
    check_arrays(op, in_arr, out)
    check_shape(op, "the output", out, in_arr.shape)


def _check_images(op: str, *arrays: NDArray) -> None:
    for arr in arrays:
        if arr.ndim != 4:
            raise ShapeError(f"{op}: expected four dimensions, got {arr.shape}")


def _check_channels(op: str, x: NDArray, like_x: NDArray, *values: NDArray) -> None:
    check_arrays(op, x, like_x, *values)
    if x.ndim < 2:
        raise ShapeError(f"{op}: expected (N, C, ...), got {x.shape}")
    check_shape(op, "the output or its gradient", like_x, x.shape)
    for value in values:
        check_shape(op, "an array of one value a channel", value, (x.shape[1],))


def _pair(op: str, what: str, value: Any, least: int) -> Pair:
    pair = (value, value) if np.ndim(value) == 0 else tuple(value)
    if len(pair) != 2 or min(pair) < least:
        raise ShapeError(f"{op}: {what} must be one or two integers from {least} on, got {value}")
    return int(pair[0]), int(pair[1])


def _windows(op: str, extents: Sequence[int], size: Sequence[int], pads: Pair, steps: Pair) -> Pair:
    out = [(n + 2 * p - k) // s + 1 for n, k, p, s in zip(extents, size, pads, steps)]
    if min(out) < 1:
        raise ShapeError(
            f"{op}: a window of {tuple(size)} is larger than {tuple(extents)} padded by {pads}"
        )
    return out[0], out[1]


def _offset(begin: Sequence[int], shape: Sequence[int]) -> int:
    """The flat index of the element at `begin`."""
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    return sum(at * stride for at, stride in zip(begin, strides))


def _update(
    op: str, states: list[NDArray], grad: NDArray, lr: float, step: list[NDArray], **attrs: float
) -> None:
    """One update by a rule, its gradient taken as it is: due at every run, no clip, no decay."""
    lists: tuple[list[NDArray], ...] = (states, [grad], [_scalar(lr, grad)], step, [], [])
    launch(op, grad.ctx, *lists, options_of(RULES[op], attrs))


def _scalar(value: float, like: NDArray) -> NDArray:
    return array(np.array([value], np.float32), like.ctx)
