"""Operators of a small convolution, the relu and the max-pool behind it, and of their gradients,
which several fusions make or read; the fusion `conv_pool` says what they are for.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from ...arguments.kinds import Bool, Instance
from ...arguments.signature import Signature
from ...graph.node import Node
from ...graph.spec import FLOAT32, Spec
from ...ops.conv import tiles as numpy_form
from ...ops.conv.geometry import Pair
from ...ops.conv.tiles import CUT, UINT8, Memory, Scratch, Tiles
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

    @property
    def tiles(self) -> Tiles:
        """The shapes for the numpy form."""
        sizes = self.plane, self.size, self.before, self.window, self.out
        return Tiles(self.channels, self.filters, *sizes)


class ConvPoolOp(Fused):
    """x (N, C, H, W), f (O, C, kH, kW) and perhaps bias (O,) → the maxima of relu(conv) in windows
    (N, O, oH, oW) and the codes of their positions, uint8. The body gives the maxima and argmax.
    """

    tolerance = 1e-4
    has_precision = reads_host = shares = True
    discrete_outputs = (1,)
    signature = Signature("*inputs", body=Instance(Body), geometry=Instance(Geometry), relu=Bool())

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        y, argmax = cast(tuple[Spec, Spec], super().infer(node, *specs))
        return y, argmax._replace(dtype=UINT8)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _scratch(node, inputs[0])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        count = len(node.inputs)
        given, scratch, (y, code) = arrays[:count], arrays[count:-2], arrays[-2:]
        geometry, relu = node.attrs["geometry"], node.attrs["relu"]
        if scratch:
            x, f, *bias = given
            operands = x, f, bias[0] if bias else None
            if numpy_form.forward(geometry.tiles, operands, relu, Memory(*scratch), y, code):
                return
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
    has_precision = shares = True

    def __init__(self, name: str, outputs: int = 1) -> None:
        super().__init__(name, outputs, any_dtype=(2,))
        kinds = dict(body=Instance(Body), geometry=Instance(Geometry))
        self.signature = Signature("other", "dy", "code", "*", **kinds)

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        other, dy, code = specs
        return super().infer(node, other, dy, code._replace(dtype=INT32))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _scratch(node, inputs[1])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        other, dy, code = arrays[:3]
        scratch, made = arrays[3 : -self.outputs], arrays[-self.outputs :]
        if scratch and self._by_tiles(node, (other, dy, code), scratch, made):
            return
        cut = code == CUT
        rows, columns, corner = _positions(node, code)
        position = np.where(cut, 0, code).astype(INT32)
        argmax = (corner + position // rows * columns + position % rows).astype(INT32)
        super().numpy(node, other, np.where(cut, np.zeros((), dy.dtype), dy), argmax, *made)

    def _by_tiles(self, node: Node, given: Any, scratch: Any, made: Any) -> bool:
        tiles = node.attrs["geometry"].tiles
        return numpy_form.data_gradient(tiles, given, Memory(*scratch), made[0])

    def scalars(self, node: Node) -> tuple[Any, ...]:
        geometry: Geometry = node.attrs["geometry"]
        return _HW(*geometry.before), geometry.window, precision_number(node)


class ConvPoolFilterGradientOp(ConvPoolGradientOp):
    """The gradients for the filter and, with two outputs, the bias, of (x, dy, code)."""

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        scratch, images = _scratch(node, inputs[1]), inputs[1].shape[0]
        sums = [numpy_form.sums_spec(node.attrs["geometry"].tiles, images)] if scratch else []
        return scratch + sums

    def _by_tiles(self, node: Node, given: Any, scratch: Any, made: Any) -> bool:
        *memory, sums = scratch
        tiles, bias = node.attrs["geometry"].tiles, made[1] if self.outputs == 2 else None
        return numpy_form.filter_gradient(tiles, given, Memory(*memory), sums, made[0], bias)

    def lists(self, node: Node) -> tuple[int]:
        return (self.outputs,)


def _scratch(node: Node, images: Spec) -> list[Spec]:
    """The workspace of the numpy form in float32; in float64 it is the body's."""
    if images.dtype != FLOAT32:
        return []
    return Scratch.specs(node.attrs["geometry"].tiles, images.shape[0])


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
