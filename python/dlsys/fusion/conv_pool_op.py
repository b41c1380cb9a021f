"""Small convolutions with the relu and max-pool that follow them, and their gradients: what
`fusion/conv_pool.py` makes of several operators.

Of the plane before the pool nothing is kept but a byte for each window: the place of its maximum in
row-major order, or CUT where relu lets no gradient pass. The gradients take it from there.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from ..graph.kinds import Bool, Instance
from ..graph.node import Node
from ..graph.signature import Signature
from ..graph.spec import Spec
from ..ops.conv.geometry import Pair, Windows, packed
from .body import Body, Fused

CUT = 255
UINT8, INT32 = np.dtype(np.uint8), np.dtype(np.int32)
_MOST_TAPS = 7  # of a filter along an axis
# On the CPU, where any number runs: with more a matrix product is as fast.
_MOST_CHANNELS = 64
# What the kernels of src/cuda/conv/conv_pool.cuh have: floats of shared memory on every GPU, less
# what rounding takes; threads a block; and how many outputs a thread may make.
_SHARED, _SLACK, _THREADS, _OUTPUTS = 48 * 1024 // 4, 16, 256, (2, 4, 6)


class Fits(NamedTuple):
    """Which of a layer's kernels a device has, and has no slower than what they replace."""

    forward: bool
    data_gradient: bool
    filter_gradient: bool


class Geometry(NamedTuple):
    """A convolution of stride 1 and the windows of a pool over it; see `small`."""

    channels: int
    filters: int
    plane: Pair
    size: Pair
    before: Pair
    between: Pair  # the plane that is pooled
    window: int
    out: Pair

    def fits(self, gpu: bool) -> Fits:
        """What fused kernels there are for this geometry on a GPU, or else on the CPU."""
        if gpu:
            return Fits(
                self._forward_fits(), self._data_gradient_fits(), self._filter_gradient_fits()
            )
        few = max(self.channels, self.filters) <= _MOST_CHANNELS
        return Fits(few, few, few)

    def _forward_fits(self) -> bool:
        """Whether the GPU's kernels hold an image's planes and all filters."""
        planes = self.channels * self._plane(self.out[0])
        taps = self.channels * self.size[0] * self.size[1]
        return any(
            taps * _pitch(self.filters, outputs) + planes + _SLACK <= _SHARED
            for outputs in _OUTPUTS
        )

    def _data_gradient_fits(self) -> bool:
        """The same for the gradient for the data."""
        down, across = ((extent + 1) // 2 for extent in self.plane)
        rows, columns = 2 * down + self.size[0] - 1, 2 * across + self.size[1] - 1
        planes = self.filters * rows * (columns + columns % 2)
        room = _THREADS // (down * across)  # outputs of a block, in threads
        if room == 0:
            return False
        taps = self.filters * self.size[0] * self.size[1]
        return any(
            taps * _pitch(_together(self.channels, outputs, room), outputs)
            + max(planes, _THREADS * outputs * 4)
            + _SLACK
            <= _SHARED
            for outputs in _OUTPUTS
        )

    def _filter_gradient_fits(self) -> bool:
        """The same for the gradients for filter and bias, which hold a row of windows at least."""
        room = _THREADS // (self.channels * self.size[0] + 1)
        if room == 0:
            return False
        places = self.window * self.window * self.out[1]
        planes = (self.channels + 1) * self._plane(1)  # and a row of ones
        return any(
            planes + places * _pitch(_together(self.filters, outputs, room), outputs) + 3 * _SLACK
            <= _SHARED
            for outputs in _OUTPUTS
        )

    def _plane(self, rows: int) -> int:
        """The floats of a channel that `rows` rows of windows see."""
        down = rows * self.window + self.size[0] - 1
        across = self.out[1] * self.window + self.size[1] - 1
        return down * (across + 1)


def _together(count: int, outputs: int, room: int) -> int:
    """Of `count` outputs those that a block makes when a thread makes `outputs` of them."""
    groups = -(-count // outputs)
    return -(-groups // -(-groups // room)) * outputs


def _pitch(count: int, outputs: int) -> int:
    """How far rows of `count` outputs lie apart in shared memory (src/cuda/conv/conv_pool.cuh)."""
    width = 2 if outputs % 4 else 4
    vectors = -(-count // outputs) * outputs // width
    return (vectors if vectors % 2 else vectors + 1) * width


def small(x: Spec, f: Spec, conv: Windows, pool: Windows, groups: int) -> Geometry | None:
    """The geometry of a convolution of x by f that is pooled, if these operators can have it: at
    stride 1, in one group, by at most 7 x 7 taps, under square windows of 2 or 3 that neither
    overlap nor reach over the plane.
    """
    window = pool.size[0]
    around = zip(conv.size, conv.before, conv.after)
    plain = conv.stride == conv.dilation == (1, 1) and groups == 1
    plain = plain and all(max(before, after) < k for k, before, after in around)
    tiled = window in (2, 3) and pool.size == pool.stride == (window, window)
    tiled = tiled and pool.dilation == (1, 1)
    inside = all(n * window <= extent for n, extent in zip(pool.out, pool.plane))
    if not (plain and tiled and inside) or pool.before != (0, 0):
        return None
    if max(conv.size) > _MOST_TAPS or min(x.shape[1], f.shape[0]) < 1:
        return None
    sizes = conv.plane, conv.size, conv.before, pool.plane, window, pool.out
    return Geometry(x.shape[1], f.shape[0], *sizes)


class ConvPoolOp(Fused):
    """x (N, C, H, W), f (O, C, kH, kW) and perhaps bias (O,) → the maxima of relu(conv) in windows
    (N, O, oH, oW) and the codes of their places, uint8. The body gives the maxima and argmax.
    """

    tolerance = 1e-4
    discrete_outputs = (1,)
    signature = Signature("*inputs", body=Instance(Body), geometry=Instance(Geometry), relu=Bool())

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        y, argmax = cast(tuple[Spec, Spec], super().infer(node, *specs))
        return y, argmax._replace(dtype=UINT8)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        *given, y, code = arrays
        argmax = np.empty(code.shape, INT32)
        super().numpy(node, *given, y, argmax)
        rows, columns, corner = _places(node, code)
        code[...] = (argmax - corner) // columns * rows + (argmax - corner) % columns
        if node.attrs["relu"]:
            np.copyto(code, CUT, where=~(y > 0))

    def scalars(self, node: Node) -> tuple[int, ...]:
        geometry: Geometry = node.attrs["geometry"]
        return packed(geometry.before), geometry.window, int(node.attrs["relu"])

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs) - 2,)


class ConvPoolGradientOp(Fused):
    """A gradient of `ConvPoolOp`, of (f or x, dy, code). The body is over argmax instead of the
    codes, and the relu's part in it is that dy is 0 where they say CUT.
    """

    tolerance = 1e-4

    def __init__(self, name: str, outputs: int = 1) -> None:
        super().__init__(name, outputs, any_dtype=(2,))
        kinds = dict(body=Instance(Body), geometry=Instance(Geometry))
        self.signature = Signature("other", "dy", "code", "*", **kinds)

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        other, dy, code = specs
        return super().infer(node, other, dy, code._replace(dtype=INT32))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        other, dy, code, *made = arrays
        cut = code == CUT
        rows, columns, corner = _places(node, code)
        place = np.where(cut, 0, code).astype(INT32)
        argmax = (corner + place // rows * columns + place % rows).astype(INT32)
        super().numpy(node, other, np.where(cut, np.zeros((), dy.dtype), dy), argmax, *made)

    def scalars(self, node: Node) -> tuple[int, ...]:
        geometry: Geometry = node.attrs["geometry"]
        return packed(geometry.before), geometry.window


class ConvPoolFilterGradientOp(ConvPoolGradientOp):
    """The gradients for the filter and, with two outputs, the bias, of (x, dy, code)."""

    def lists(self, node: Node) -> tuple[int]:
        return (self.outputs,)


def _places(node: Node, code: np.ndarray) -> tuple[int, int, np.ndarray]:
    """The windows' extent, the width of the plane that they tile, and the index of each window's
    first element in it.
    """
    geometry: Geometry = node.attrs["geometry"]
    width = geometry.between[1]
    i, j = np.indices(code.shape[2:], INT32)
    return geometry.window, width, (i * width + j) * geometry.window


conv_pool_op = ConvPoolOp("conv2d_pool", 2)
conv_pool_data_gradient_op = ConvPoolGradientOp("conv2d_pool_data_gradient")
conv_pool_filter_gradient_op = ConvPoolFilterGradientOp("conv2d_pool_filter_gradient")
conv_pool_filter_bias_gradient_op = ConvPoolFilterGradientOp("conv2d_pool_filter_gradient", 2)
