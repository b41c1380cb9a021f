"""Layers over sequences x (N, C, L): convolution and pooling along one axis, see `F.conv1d`."""

from __future__ import annotations

from typing import Any

from .. import functional as F
from ..arguments.kinds import Bool, Kind, Rung
from ..arguments.signature import declared
from ..autodiff import Node
from ..init import Initializer, Rng, he_normal
from ..ops.conv.geometry import IntPair
from ..rungs import CONV
from .kinds import AsGiven, Padding1d
from .layers import DRAWN, SIZE, Filtered, drawn, filter_shape
from .pool import Pool

PADDING = AsGiven(Padding1d())
SHARED: dict[str, Kind] = dict(window=SIZE, stride=SIZE, padding=PADDING, ceil_mode=Bool())


class Conv1d(Filtered):
    """The convolution of x (N, inputs, L) with weight (outputs, inputs/groups, window), plus bias
    (outputs,); the other arguments are those of `F.conv1d`. Raises what `Conv2d` raises.

    window: the extent k. initializer: a function of `init`, which draws the weight.

    >>> nn.Conv1d(3, 8, 5, padding="same")(dl.zeros(2, 3, 20)).shape
    (2, 8, 20)
    """

    @declared(
        inputs=SIZE, outputs=SIZE, window=SIZE, stride=SIZE, padding=PADDING, dilation=SIZE,
        groups=SIZE, bias=Bool(), algo=Rung(CONV), **DRAWN,
    )  # fmt: skip
    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int,
        stride: int = 1,
        padding: Any = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        initializer: Initializer = he_normal,
        rng: Rng = None,
        algo: str | None = None,
    ) -> None:
        *shape, _, width = filter_shape("Conv1d", inputs, outputs, (1, window), groups)
        weight = drawn("Conv1d", initializer, (*shape, width), rng)
        attrs = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, algo=algo)
        super().__init__(weight, inputs, outputs, bias, attrs)

    def forward(self, x: Node) -> Node:
        return F.conv1d(x, self.weight, self.bias, **self.attrs)


class _Pool1d(Pool):
    """Base of pooling along one axis, which is pooling of images of one row."""

    _pool: Any

    @declared(**SHARED)
    def __init__(
        self, window: int, stride: int | None = None, padding: Any = 0, ceil_mode: bool = False
    ) -> None:
        super().__init__(window, dict(stride=stride, padding=padding, ceil_mode=ceil_mode))

    def forward(self, x: Node) -> Node:
        """x (N, C, L) to (N, C, oL)."""
        stride, padding = self.attrs["stride"] or self.window, self.attrs["padding"]
        if not isinstance(padding, str):
            padding = ((0, 0), IntPair().take(padding))
        y = self._pool(
            F.expand_dims(x, 2), (1, self.window), (1, stride), padding,
            ceil_mode=self.attrs["ceil_mode"],
        )  # fmt: skip
        return F.squeeze(y, 2)


class MaxPool1d(_Pool1d):
    """The largest element of each window of x (N, C, L); the stride is the window's size unless
    given.

    stride, padding and ceil_mode: as of `F.max_pool2d`, of one axis.
    """

    _pool = staticmethod(F.max_pool2d)


class AvgPool1d(_Pool1d):
    """The mean of each window of x (N, C, L), zeros of the padding counted.

    stride, padding and ceil_mode: as of `F.avg_pool2d`, of one axis.
    """

    _pool = staticmethod(F.avg_pool2d)
