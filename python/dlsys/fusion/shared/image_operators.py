"""Operators over images (N, H, W, C), which several fusions make or read; the fusion
`channels_last` says what they are for.
"""

from __future__ import annotations

from typing import Any

from ...arguments.kinds import Instance, Int
from ...arguments.signature import Signature
from ...graph.node import Node
from ...ops.conv.geometry import Windows
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


conv2d_channels_last_op = Convolution("conv2d_channels_last")
data_gradient_channels_last_op = Convolution("conv2d_data_gradient_channels_last")
filter_gradient_channels_last_op = FilterGradient("conv2d_filter_gradient_channels_last")
