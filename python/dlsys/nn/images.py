"""Layers that change the size of images, and those that only say what goes where."""

from __future__ import annotations

import math

from .. import functional as F
from ..arguments.kinds import Bool, Int, OneOf, Shape
from ..arguments.signature import declared
from ..autodiff import Node
from ..errors import GraphError, ShapeError
from ..graph.lines import where
from ..ops.conv.geometry import IntPair
from ..ops.resize import Factors
from .kinds import AsGiven
from .layers import SIZE, Pair
from .module import Module
from .shapes import known


class Upsample(Module):
    """Images x (N, C, H, W) resized to `size` or by `scale`, see `F.resize`: "nearest" is
    PyTorch's "nearest-exact", which is its "nearest" too where scales are integers.

    GraphError unless one of size and scale is given.
    """

    @declared(
        size=AsGiven(IntPair(low=1)), scale=AsGiven(Factors()),
        mode=OneOf("nearest", "bilinear"), align_corners=Bool(),
    )  # fmt: skip
    def __init__(
        self,
        size: Pair | None = None,
        scale: float | tuple[float, float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        if (size is None) == (scale is None):
            raise GraphError(f"Upsample: expected either size or scale [{where()}]")
        self.size = None if size is None else IntPair(low=1).take(size)
        self.scale, self.mode, self.align_corners = scale, mode, align_corners

    def forward(self, x: Node) -> Node:
        return F.resize(x, self.size, self.scale, self.mode, self.align_corners)

    def options(self) -> str:
        factor = f"scale={self.scale}" if self.size is None else f"size={self.size}"
        corners = ", align_corners=True" if self.align_corners else ""
        return f"{factor}, mode={self.mode!r}{corners}"


class PixelShuffle(Module):
    """x (N, C · factor², H, W) to (N, C, H · factor, W · factor), see `F.pixel_shuffle`. Shi et al.
    (2016).
    """

    @declared(factor=SIZE)
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def forward(self, x: Node) -> Node:
        return F.pixel_shuffle(x, self.factor)

    def options(self) -> str:
        return f"{self.factor}"


class PixelUnshuffle(PixelShuffle):
    """x (N, C, H · factor, W · factor) to (N, C · factor², H, W): the inverse of `PixelShuffle`."""

    def forward(self, x: Node) -> Node:
        return F.pixel_unshuffle(x, self.factor)


class Identity(Module):
    """x itself: takes the place of a layer that is not wanted."""

    def forward(self, x: Node) -> Node:
        return x


class Unflatten(Module):
    """Axis `axis` of x as several of the extents `sizes`, one of which may be -1.

    All extents of x but one must be known when the graph is built: GraphError at use where they are
    not, ShapeError where the sizes do not make up the axis.
    """

    @declared(axis=Int(), sizes=Shape(low=-1))
    def __init__(self, axis: int, sizes: tuple[int, ...]) -> None:
        self.axis, self.sizes = axis, sizes

    def forward(self, x: Node) -> Node:
        shape = list(x.shape or ())
        if not -len(shape) <= self.axis < len(shape):
            raise ShapeError(
                f"Unflatten: an input of shape {x.shape} has no axis {self.axis} [{where()}]"
            )
        axis = self.axis % len(shape)
        sizes = self._sizes(shape[axis])
        extents = [-1 if n is None else n for n in (*shape[:axis], *sizes, *shape[axis + 1 :])]
        if extents.count(-1) > 1:
            known("Unflatten", None, f"positions along all axes but one of {x.shape}")
        return F.reshape(x, tuple(extents))

    def _sizes(self, extent: int | None) -> tuple[int, ...]:
        """The sizes for an axis of this extent, in which -1 stands only where that is unknown."""
        fixed = math.prod(n for n in self.sizes if n != -1)
        if extent is None:
            return self.sizes
        sizes = tuple(extent // max(fixed, 1) if n == -1 else n for n in self.sizes)
        if self.sizes.count(-1) > 1 or math.prod(sizes) != extent:
            raise ShapeError(
                f"Unflatten: sizes {self.sizes} do not make up an axis of {extent} [{where()}]"
            )
        return sizes

    def options(self) -> str:
        return f"{self.axis}, {self.sizes}"
