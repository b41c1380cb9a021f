"""Operators over images (N, H, W, C), which several fusions make or read; the fusion
`channels_last` says what they are for.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ...arguments.kinds import Instance, Int
from ...arguments.signature import Signature
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops.conv.geometry import Windows
from ...ops.conv.pooling import INT32, UINT8
from ...ops.matmul import algorithm_number
from .body import Body, Fused


class OverImages(Fused):
    """An operator over images (N, H, W, C); filters stay (O, C/groups, kH, kW)."""

    tolerance = 1e-4
    signature = Signature("*inputs", body=Instance(Body), windows=Instance(Windows))

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return (node.attrs["windows"].argument,)


class Convolution(OverImages):
    """A convolution or a gradient of it."""

    tunable = True
    signature = Signature(
        "*inputs", body=Instance(Body), windows=Instance(Windows), groups=Int(low=1)
    )

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return (*super().scalars(node), node.attrs["groups"], algorithm_number(node))


class FilterGradient(Convolution):
    """The gradient of a filter, behind the gradient of the results that it reads: where data
    gradients went first, the images of many layers would wait for it.
    """

    cache_local = True


MOST_PLACES = 256  # of a window, that a byte counts


class MaxPool(OverImages):
    """The largest element of each window, and its place within the window: row by row, uint8. The
    body gives its index into H×W.
    """

    def __init__(self) -> None:
        super().__init__("max_pool2d_channels_last", 2)

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        y, argmax = cast(tuple[Spec, Spec], super().infer(node, *specs))
        return y, argmax._replace(dtype=UINT8)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y, places = arrays
        argmax = np.empty(places.shape, INT32)
        super().numpy(node, x, y, argmax)
        windows: Windows = node.attrs["windows"]
        (down, across), (row, column) = _corners(windows), np.divmod(argmax, windows.image[1])
        places[...] = (row - down) * windows.size[1] + column - across


class MaxPoolGradient(OverImages):
    """Adds each dy to where its maximum was found; inputs: dy, places. The body is over indices
    into H×W.
    """

    def __init__(self) -> None:
        super().__init__("max_pool2d_gradient_channels_last", 1, (1,))

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        dy, places = specs
        return super().infer(node, dy, places._replace(dtype=INT32))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        dy, places, dx = arrays
        windows: Windows = node.attrs["windows"]
        (down, across), (row, column) = _corners(windows), np.divmod(places, windows.size[1])
        argmax = (down + row) * windows.image[1] + across + column
        super().numpy(node, dy, argmax, dx)


def _corners(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """The row of each window's first element in the image (oH, 1, 1), and its column (oW, 1);
    before the image with padding.
    """
    down, across = (
        np.arange(count, dtype=INT32) * stride - before
        for count, stride, before in zip(windows.out, windows.stride, windows.before)
    )
    return down[:, None, None], across[:, None]


conv2d_channels_last_op = Convolution("conv2d_channels_last")
data_gradient_channels_last_op = Convolution("conv2d_data_gradient_channels_last")
filter_gradient_channels_last_op = FilterGradient("conv2d_filter_gradient_channels_last")
max_pool_channels_last_op = MaxPool()
max_pool_gradient_channels_last_op = MaxPoolGradient()
