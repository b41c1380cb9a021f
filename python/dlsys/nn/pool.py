"""Pooling as layers. Sizes, padding and ties are as in `ad.max_pool2d` and `ad.avg_pool2d`."""

from __future__ import annotations

from typing import Any

from .. import autodiff as ad
from ..autodiff import Node
from ..graph.kinds import Bool
from ..graph.signature import declared
from ..ops.conv.geometry import Padding
from .kinds import AsGiven
from .layers import WINDOW, Pair
from .module import Module


class MaxPool2d(Module):
    """The largest element of each window of x (N, C, H, W); the stride is the window's size unless
    given.
    """

    @declared(
        window=WINDOW,
        stride=WINDOW,
        padding=AsGiven(Padding()),
        ceil_mode=Bool(),
        dilation=WINDOW,
    )
    def __init__(
        self,
        window: Pair,
        stride: Pair | None = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        dilation: Pair = 1,
    ) -> None:
        self.window = window
        self.attrs = {
            "stride": stride,
            "padding": padding,
            "ceil_mode": ceil_mode,
            "dilation": dilation,
        }

    def forward(self, x: Node) -> Node:
        return ad.max_pool2d(x, self.window, **self.attrs)

    def options(self) -> str:
        return _pool_options(self)


class AvgPool2d(Module):
    """The mean of each window of x (N, C, H, W), zeros of the padding counted unless
    `count_include_pad` is False.
    """

    @declared(
        window=WINDOW, stride=WINDOW, padding=AsGiven(Padding()), ceil_mode=Bool(),
        count_include_pad=Bool(),
    )  # fmt: skip
    def __init__(
        self,
        window: Pair,
        stride: Pair | None = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        self.window = window
        self.attrs = {
            "stride": stride,
            "padding": padding,
            "ceil_mode": ceil_mode,
            "count_include_pad": count_include_pad,
        }

    def forward(self, x: Node) -> Node:
        return ad.avg_pool2d(x, self.window, **self.attrs)

    def options(self) -> str:
        return _pool_options(self)


class GlobalAvgPool(Module):
    """The mean of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1) with `keepdims`."""

    @declared(keepdims=Bool())
    def __init__(self, keepdims: bool = False) -> None:
        self.keepdims = keepdims

    def forward(self, x: Node) -> Node:
        return ad.global_avg_pool2d(x, self.keepdims)


class GlobalMaxPool(Module):
    """The largest element of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1) with
    `keepdims`.
    """

    @declared(keepdims=Bool())
    def __init__(self, keepdims: bool = False) -> None:
        self.keepdims = keepdims

    def forward(self, x: Node) -> Node:
        return ad.global_max_pool2d(x, self.keepdims)


def _pool_options(layer: MaxPool2d | AvgPool2d) -> str:
    """The window, and what is not as usual."""
    usual = {
        "stride": None,
        "padding": 0,
        "ceil_mode": False,
        "dilation": 1,
        "count_include_pad": True,
    }
    changed = [f"{name}={value}" for name, value in layer.attrs.items() if value != usual[name]]
    return ", ".join([str(layer.window), *changed])
