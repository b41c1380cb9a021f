"""Pooling as layers. Sizes, padding and ties are as in `F.max_pool2d` and `F.avg_pool2d`."""

from __future__ import annotations

from typing import Any

from .. import functional as F
from ..arguments.kinds import Bool, Kind, Rung
from ..arguments.signature import declared
from ..autodiff import Node
from ..ops.conv.geometry import Padding
from ..rungs import POOL
from .kinds import AsGiven
from .layers import WINDOW, Pair
from .module import Module, changed

SHARED: dict[str, Kind] = dict(
    window=WINDOW, stride=WINDOW, padding=AsGiven(Padding()), ceil_mode=Bool(), algo=Rung(POOL)
)
USUAL = dict(stride=None, padding=0, ceil_mode=False, dilation=1, count_include_pad=True, algo=None)


class Pool(Module):
    """Base of pooling over windows: the window, and the attributes of the operator."""

    def __init__(self, window: Pair, attrs: dict[str, Any]) -> None:
        self.window, self.attrs = window, attrs

    def options(self) -> str:
        return ", ".join([str(self.window), *changed(self.attrs, USUAL)])


class MaxPool2d(Pool):
    """The largest element of each window of x (N, C, H, W); the stride is the window's size unless
    given.

    padding, dilation, ceil_mode and algo: as of `F.max_pool2d`.

    >>> nn.MaxPool2d(2)(dl.zeros(1, 3, 8, 8)).shape
    (1, 3, 4, 4)
    """

    @declared(**SHARED, dilation=WINDOW)
    def __init__(
        self,
        window: Pair,
        stride: Pair | None = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        dilation: Pair = 1,
        algo: str | None = None,
    ) -> None:
        attrs = dict(stride=stride, padding=padding, ceil_mode=ceil_mode, dilation=dilation)
        super().__init__(window, attrs | {"algo": algo})

    def forward(self, x: Node) -> Node:
        return F.max_pool2d(x, self.window, **self.attrs)


class AvgPool2d(Pool):
    """The mean of each window of x (N, C, H, W), zeros of the padding counted unless
    `count_include_pad` is False.

    stride, padding, ceil_mode and algo: as of `F.avg_pool2d`.

    >>> nn.AvgPool2d(2)(dl.zeros(1, 3, 8, 8)).shape
    (1, 3, 4, 4)
    """

    @declared(**SHARED, count_include_pad=Bool())
    def __init__(
        self,
        window: Pair,
        stride: Pair | None = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        algo: str | None = None,
    ) -> None:
        attrs = dict(stride=stride, padding=padding, ceil_mode=ceil_mode, algo=algo)
        super().__init__(window, attrs | {"count_include_pad": count_include_pad})

    def forward(self, x: Node) -> Node:
        return F.avg_pool2d(x, self.window, **self.attrs)


class GlobalAvgPool(Module):
    """The mean of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1) with `keepdims`."""

    @declared(keepdims=Bool())
    def __init__(self, keepdims: bool = False) -> None:
        self.keepdims = keepdims

    def forward(self, x: Node) -> Node:
        return F.global_avg_pool2d(x, self.keepdims)


class GlobalMaxPool(Module):
    """The largest element of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1) with
    `keepdims`.
    """

    @declared(keepdims=Bool())
    def __init__(self, keepdims: bool = False) -> None:
        self.keepdims = keepdims

    def forward(self, x: Node) -> Node:
        return F.global_max_pool2d(x, self.keepdims)
