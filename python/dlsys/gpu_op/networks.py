"""The kernels of networks as plain functions on NDArrays of either native device: convolution,
pooling, normalization, dropout, activations, joining and updates.

Images are (N, C, H, W). `padding` and `stride` are one integer or (height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError
from ..ndarray import NDArray, array, empty, launch
from ..ops.concat import concat_ops
from ..ops.conv.convolution import (
    convolution_op,
    data_gradient_like_op,
    filter_gradient_like_op,
)
from ..ops.conv.pooling import avg_pool_gradient_like_op, avg_pool_op, max_pool_op
from ..ops.indexing import Span, getitem_op
from ..ops.norm.batch_norm import (
    batch_normalize_gradient_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_statistics_op,
)
from ..ops.optim.apply import options_of
from ..ops.optim.rules import RULES
from ..ops.pad import constant_pad_op
from ..rungs import CONV
from .checks import (
    algorithm_of_rung,
    check_arrays,
    check_separate,
    check_shape,
    checked,
    elementwise,
)

__all__ = [
    "adam_update", "average_pooling2d", "average_pooling2d_gradient", "batch_normalization",
    "batch_normalization_gradient", "concat", "conv2d", "conv2d_gradient_of_data",
    "conv2d_gradient_of_filter", "dropout", "leaky_relu", "max_pooling2d",
    "max_pooling2d_gradient", "pad", "sgd_update", "sigmoid", "slice", "tanh",
]  # fmt: skip

Pair = tuple[int, int]


# ---- convolution ----


def conv2d(
    x: NDArray, f: NDArray, out: NDArray, padding: Any = 0, stride: Any = 1, algo: str = ""
) -> None:
    """out (N, O, oH, oW) = x (N, C, H, W) convolved with f (O, C, kH, kW).

    `algo` names a rung of the ladder (docs/learn/conv.md), of the gradients too; "auto" leaves it
    to the heuristic and "" to DLSYS_CONV. NotApplicableError, which lists those that there are, for
    one that the device lacks or that cannot serve the convolution.
    """
    scalars = checked(convolution_op, (x, f), out, padding=padding, stride=stride)
    _convolve("conv2d", (x, f, out), scalars, algo)


def conv2d_gradient_of_data(
    f: NDArray, dy: NDArray, dx: NDArray, padding: Any = 0, stride: Any = 1, algo: str = ""
) -> None:
    """dx (N, C, H, W) of conv2d from its filter and the gradient dy of its output. `algo` is as of
    `conv2d`.
    """
    scalars = checked(data_gradient_like_op, (f, dy, dx), dx, padding=padding, stride=stride)
    _convolve("conv2d_data_gradient", (f, dy, dx), scalars, algo)


def conv2d_gradient_of_filter(
    x: NDArray, dy: NDArray, df: NDArray, padding: Any = 0, stride: Any = 1, algo: str = ""
) -> None:
    """df (O, C, kH, kW) of conv2d from its data and the gradient dy of its output. `algo` is as of
    `conv2d`.
    """
    scalars = checked(filter_gradient_like_op, (x, dy, df), df, padding=padding, stride=stride)
    _convolve("conv2d_filter_gradient", (x, dy, df), scalars, algo)


def _convolve(
    kernel: str, arrays: tuple[NDArray, ...], scalars: tuple[Any, ...], algo: str
) -> None:
    """Runs a kernel of convolution by a rung; its plain arguments are those of an operator."""
    (windows, groups, _, precision), ctx = scalars, arrays[0].ctx
    number = algorithm_of_rung(kernel, ctx, CONV, algo)
    launch(kernel, ctx, *arrays, windows, groups, number, precision)


# ---- pooling ----


def max_pooling2d(
    in_arr: NDArray, kernel_h: int, kernel_w: int, out: NDArray, padding: Any = 0, stride: Any = 1
) -> None:
    """out (N, C, oH, oW) = the largest value of each window of in (N, C, H, W)."""
    attrs = dict(window=(kernel_h, kernel_w), padding=padding, stride=stride)
    scalars = checked(max_pool_op, (in_arr,), out, **attrs)
    launch("max_pool2d", out.ctx, in_arr, out, empty(out.shape, out.ctx, np.int32), *scalars)


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
    attrs = dict(window=(kernel_h, kernel_w), padding=padding, stride=stride)
    scalars = checked(max_pool_op, (in_arr,), out_grad, **attrs)
    check_arrays(op, in_arr, in_grad)
    check_shape(op, "the gradient", in_grad, in_arr.shape)
    check_separate(op, in_grad, out_grad)
    ctx, argmax = in_arr.ctx, empty(out_grad.shape, in_arr.ctx, np.int32)
    launch("max_pool2d", ctx, in_arr, empty(out_grad.shape, ctx), argmax, *scalars)
    launch(op, ctx, out_grad, argmax, in_grad, *scalars)


def average_pooling2d(
    in_arr: NDArray, kernel_h: int, kernel_w: int, out: NDArray, padding: Any = 0, stride: Any = 1
) -> None:
    """out (N, C, oH, oW) = the mean of each window of in (N, C, H, W), padding counted as 0."""
    attrs = dict(window=(kernel_h, kernel_w), padding=padding, stride=stride)
    launch("avg_pool2d", out.ctx, in_arr, out, *checked(avg_pool_op, (in_arr,), out, **attrs))


def average_pooling2d_gradient(
    out_grad: NDArray,
    kernel_h: int,
    kernel_w: int,
    in_grad: NDArray,
    padding: Any = 0,
    stride: Any = 1,
) -> None:
    """in_grad (N, C, H, W) of average_pooling2d from the gradient of its output."""
    attrs = dict(window=(kernel_h, kernel_w), padding=padding, stride=stride)
    scalars = checked(avg_pool_gradient_like_op, (out_grad, in_grad), in_grad, **attrs)
    launch("avg_pool2d_gradient", in_grad.ctx, out_grad, in_grad, *scalars)


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
    checked(batch_statistics_op, (in_arr,), mean, variance)
    inputs = (in_arr, mean, variance, scale, bias)
    scalars = checked(batch_normalize_op, inputs, out, eps=eps, training=True)
    launch("batch_statistics", in_arr.ctx, in_arr, mean, variance)
    launch("batch_normalize", in_arr.ctx, *inputs, *scalars, out)


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
    of_batch, sums = (in_arr, mean, variance), (scale_grad, bias_grad)
    inputs = (*of_batch, scale, *sums, out_grad)
    checked(batch_normalize_gradient_op, inputs, in_grad, eps=eps)
    attrs = dict(eps=eps, training=True)
    scalars = checked(batch_normalize_sums_op, (*of_batch, out_grad), *sums, **attrs)
    launch("batch_normalize_sums", in_arr.ctx, *of_batch, out_grad, *scalars, *sums)
    launch("batch_normalize_gradient", in_arr.ctx, *inputs, *scalars, in_grad)


def dropout(
    in_arr: NDArray, keep_prob: float, out: NDArray, seed: int = 0, node: int = 0, step: int = 0
) -> None:
    """out = in / keep_prob where kept, else 0. What is kept depends on seed, node, step and the
    position alone, so the gradient is the same call on the output's gradient.
    """
    op = "dropout"
    check_arrays(op, in_arr)
    if not 0 < keep_prob <= 1:
        raise ShapeError(f"{op}: expected 0 < keep_prob <= 1, got {keep_prob}")
    at = array(np.array([step], np.int64), in_arr.ctx, np.int64)
    identity = int(seed), int(node), round(keep_prob * 2**32)
    elementwise(op, op, (in_arr,), out, at, *identity, 1 / keep_prob)


def leaky_relu(in_arr: NDArray, alpha: float, out: NDArray) -> None:
    """out = in where in > 0, else alpha * in."""
    elementwise("leaky_relu", "leaky_relu", (in_arr,), out, float(alpha))


def sigmoid(in_arr: NDArray, out: NDArray) -> None:
    """out = 1 / (1 + exp(-in))."""
    elementwise("sigmoid", "sigmoid", (in_arr,), out)


def tanh(in_arr: NDArray, out: NDArray) -> None:
    """out = tanh(in)."""
    elementwise("tanh", "tanh", (in_arr,), out)


# ---- layout ----


def concat(in_arr_a: NDArray, in_arr_b: NDArray, out: NDArray, axis: int = 0) -> None:
    """out = a and then b along an axis."""
    scalars = checked(concat_ops[2], (in_arr_a, in_arr_b), out, axis=axis)
    launch("concat_2", out.ctx, in_arr_a, in_arr_b, *scalars, out)


def pad(
    in_arr: NDArray,
    out: NDArray,
    paddings: Sequence[Pair],
    mode: str = "constant",
    constant_values: float = 0.0,
) -> None:
    """out = in with `paddings[k]` = (before, after) positions of `constant_values` along axis k."""
    if mode.lower() != "constant":
        raise ShapeError(f"pad: the mode here is constant, got {mode!r}; ad.pad_op has others")
    attrs = dict(paddings=paddings, value=constant_values)
    launch("place", out.ctx, in_arr, *checked(constant_pad_op, (in_arr,), out, **attrs), out)


def slice(in_arr: NDArray, out: NDArray, begin: Sequence[int]) -> None:
    """out = the part of in that begins at `begin` and has the shape of out."""
    scalars = checked(getitem_op, (in_arr,), out, key=tuple(map(Span, begin, out.shape)))
    launch("slice", out.ctx, in_arr, *scalars, out)


# ---- updates ----


def sgd_update(param: NDArray, grad: NDArray, lr: float) -> None:
    """param -= lr * grad."""
    _check_alike("sgd_update", param, grad)
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
    _check_alike(op, param, grad, mean, square)
    if step < 1:
        raise ShapeError(f"{op}: steps are counted from 1, got {step}")
    before = array(np.array([step - 1], np.int64), param.ctx, np.int64)
    states = [param, mean, square]
    _update(op, states, grad, lr, [before], beta1=beta1, beta2=beta2, eps=eps)


# ---- checks ----


def _check_alike(op: str, param: NDArray, *others: NDArray) -> None:
    check_arrays(op, param, *others)
    for other in others:
        check_shape(op, "an array", other, param.shape)


def _update(
    op: str, states: list[NDArray], grad: NDArray, lr: float, step: list[NDArray], **attrs: float
) -> None:
    """One update by a rule, its gradient taken as it is: due at every run, no clip, no decay."""
    rate = array(np.array([lr], np.float32), grad.ctx)
    lists: tuple[list[NDArray], ...] = (states, [grad], [rate], step, [], [])
    launch(op, grad.ctx, *lists, options_of(RULES[op], attrs))
