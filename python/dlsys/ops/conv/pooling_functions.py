"""Pooling as functions of nodes, and under the names of older scripts."""

from __future__ import annotations

from typing import Any

from ...graph.node import Node
from ...graph.signature import Bool, Int, IntPair, Kind, declared
from ..reduce import mean_op, sum_op
from .geometry import Padding, Pair
from .pooling import (
    COUNTED,
    DILATED,
    avg_pool_gradient_like_op,
    avg_pool_op,
    max_pool_gradient_like_op,
    max_pool_op,
)

OLD: dict[str, Kind] = dict(  # attributes of the operators of older scripts
    kernel_H=Int(low=1), kernel_W=Int(low=1), padding=Padding(), stride=IntPair(low=1)
)


@declared(**(DILATED | {"window": IntPair(low=1)}))
def max_pool2d(
    x: Node,
    window: int | Pair,
    stride: int | Pair | None = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    dilation: int | Pair = 1,
    name: str | None = None,
) -> Node:
    """The largest element of each window of x (N, C, H, W): (N, C, oH, oW).

    oH = (H + padding before and after - extent) // stride + 1, where a window extends over
    dilation · (window - 1) + 1 elements and sees every dilation-th of them; `ceil_mode` rounds up,
    as long as the last window begins on the plane or the padding before it. stride: that of the
    window by default. padding: as of `conv2d`, below the extent; it never wins. A tie goes to the
    first element in row-major order, and NaN counts as larger than every number. For the indices
    too, call `max_pool_op`. Raises ShapeError for attributes or shapes that do not fit.
    """
    pooled = max_pool_op(
        x, window=window, stride=stride, padding=padding, ceil_mode=ceil_mode, dilation=dilation,
        name=name,
    )  # fmt: skip
    return pooled[0]


@declared(**(COUNTED | {"window": IntPair(low=1)}))
def avg_pool2d(
    x: Node,
    window: int | Pair,
    stride: int | Pair | None = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    name: str | None = None,
) -> Node:
    """The mean of each window of x (N, C, H, W): (N, C, oH, oW), sizes as of `max_pool2d`.

    `count_include_pad` counts zeros of the padding too; what `ceil_mode` adds behind it is never
    counted. Raises ShapeError for attributes or shapes that do not fit.
    """
    return avg_pool_op(
        x, window=window, stride=stride, padding=padding, ceil_mode=ceil_mode,
        count_include_pad=count_include_pad, name=name,
    )  # fmt: skip


@declared(keepdims=Bool())
def global_max_pool2d(x: Node, keepdims: bool = False) -> Node:
    """The largest element of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1)."""
    largest = max_pool_op(x)[0]
    return largest if keepdims else sum_op(largest, axis=(2, 3))  # over extents of 1: a view


@declared(keepdims=Bool())
def global_avg_pool2d(x: Node, keepdims: bool = False) -> Node:
    """The mean of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1)."""
    return mean_op(x, axis=(2, 3), keepdims=keepdims)


@declared(**OLD)
def max_pool2d_op(
    A: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """`max_pool2d` of A (N, C, H, W) with windows (kernel_H, kernel_W)."""
    return max_pool2d(A, (kernel_H, kernel_W), stride, padding)


@declared(**OLD)
def avg_pool2d_op(
    A: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """`avg_pool2d` of A (N, C, H, W) with windows (kernel_H, kernel_W), padding counted."""
    return avg_pool2d(A, (kernel_H, kernel_W), stride, padding)


@declared(**OLD)
def max_pool2d_gradient_op(
    y: Node, dy: Node, x: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: Any = 1
) -> Node:
    """The gradient of `max_pool2d_op` for x; y, its result, is not needed."""
    attrs: dict[str, Any] = dict(window=(kernel_H, kernel_W), stride=stride, padding=padding)
    return max_pool_gradient_like_op(dy, max_pool_op(x, **attrs)[1], x, **attrs)


@declared(**OLD)
def avg_pool2d_gradient_op(
    y: Node, dy: Node, x: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: Any = 1
) -> Node:
    """The gradient of `avg_pool2d_op` for x; neither y, its result, nor the values of x matter."""
    attrs: dict[str, Any] = dict(window=(kernel_H, kernel_W), stride=stride, padding=padding)
    return avg_pool_gradient_like_op(dy, x, count_include_pad=True, **attrs)
