"""Operators of a small convolution, the relu and the max-pool behind it, and of their gradients,
which several fusions make or read; the fusion `conv_pool` says what they are for.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from ...arguments.kinds import Bool, Instance
from ...arguments.signature import Signature
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops.conv.geometry import Pair
from ...ops.conv.tiles import CUT, UINT8
from ...ops.matmul import precision_number
from ...runtime.interface import interface
from .body import Body, Fused

_HW = interface.struct("HW")
INT32 = np.dtype(np.int32)


class Geometry(NamedTuple):
    """A convolution of stride 1 and the windows of a pool over it; see `small`."""

    channels: int
    filters: int
    plane: Pair
    size: Pair
    before: Pair
    between: Pair  # the H×W that is pooled
    window: int
    out: Pair


class ConvPoolOp(Fused):
    """x (N, C, H, W), f (O, C, kH, kW) and perhaps bias (O,) → the maxima of relu(conv) in windows
    (N, O, oH, oW) and the codes of their positions, uint8. The body gives the maxima and argmax.
    """

    tolerance = 1e-4
    has_precision = reads_host = True
    discrete_outputs = (1,)
    signature = Signature("*inputs", body=Instance(Body), geometry=Instance(Geometry), relu=Bool())

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        y, argmax = cast(tuple[Spec, Spec], super().infer(node, *specs))
        return y, argmax._replace(dtype=UINT8)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        *given, y, code = arrays
        argmax = np.empty(code.shape, INT32)
        super().numpy(node, *given, y, argmax)
        rows, columns, corner = _positions(node, code)
        code[...] = (argmax - corner) // columns * rows + (argmax - corner) % columns
        if node.attrs["relu"]:
            np.copyto(code, CUT, where=~(y > 0))

    def scalars(self, node: Node) -> tuple[Any, ...]:
        geometry: Geometry = node.attrs["geometry"]
        attrs = _HW(*geometry.before), geometry.window, int(node.attrs["relu"])
        return *attrs, precision_number(node)

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs) - 2,)


class ConvPoolGradientOp(Fused):
    """A gradient of `ConvPoolOp`, of (f or x, dy, code). The body is over argmax instead of the
    codes, and relu's gradient in it is that dy is 0 where they say CUT.
    """

    tolerance = 1e-4
    has_precision = True

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
        rows, columns, corner = _positions(node, code)
        position = np.where(cut, 0, code).astype(INT32)
        argmax = (corner + position // rows * columns + position % rows).astype(INT32)
        super().numpy(node, other, np.where(cut, np.zeros((), dy.dtype), dy), argmax, *made)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        geometry: Geometry = node.attrs["geometry"]
        return _HW(*geometry.before), geometry.window, precision_number(node)


class ConvPoolFilterGradientOp(ConvPoolGradientOp):
    """The gradients for the filter and, with two outputs, the bias, of (x, dy, code)."""

    def lists(self, node: Node) -> tuple[int]:
        return (self.outputs,)


def _positions(node: Node, code: np.ndarray) -> tuple[int, int, np.ndarray]:
    """The windows' extent, the width of the H×W that they tile, and the index of each window's
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
