"""Operators that move or repeat elements and compute nothing: reshape, transpose, broadcast_to,
copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import Axes, Int, Ints, Shape
from ..arguments.signature import Signature
from ..graph.node import Node, Op, hooks
from ..graph.spec import Spec, describe, merge_shapes, normalize_axes
from ..runtime.interface import interface

_Permutation = interface.struct("Permutation")
__all__ = [
    "array_reshape_op", "broadcast_to_op", "copy_op", "expand_dims_op", "flatten_op",
    "reshape_like_op", "reshape_op", "squeeze_op", "stop_gradient_op", "transpose_op",
]  # fmt: skip


class ReshapeOp(Op):
    """The elements of x in another shape; one extent may be -1. Costs nothing: it is a view."""

    name = "reshape"
    view = True
    movement = True
    autocast = "follow"
    signature = Signature("x", shape=Shape(low=-1))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        wanted = node.attrs["shape"]
        known = 1
        for extent in wanted:
            known *= extent if extent != -1 else 1
        size = specs[0].size
        fits = size == known
        if wanted.count(-1) == 1:
            fits = known > 0 and size % known == 0
            wanted = tuple(size // known if n == -1 and fits else n for n in wanted)
        if not fits or min(wanted, default=0) < 0:
            raise node.error(
                f"{node.inputs[0].name} {specs[0].shape} has {size} elements and cannot become "
                f"{node.attrs['shape']}"
            )
        return specs[0]._replace(shape=wanted)

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        if x.spec.shape == node.spec.shape:
            return x
        return reshape_op(x.inputs[0], node.spec.shape) if x.op is reshape_op else None

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [reshape_like_op(output_grad, node.inputs[0])]


class ReshapedOp(Op):
    """Base of the operators that are a reshape of x once shapes are known; of further inputs only
    the shapes count.
    """

    def shape(self, node: Node, shape: tuple[int, ...]) -> Sequence[int]:
        """The output's shape from that of x."""
        raise NotImplementedError

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]._replace(shape=tuple(self.shape(node, specs[0].shape)))

    def simplify(self, node: Node) -> Node:
        return reshape_op(node.inputs[0], node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, *others = node.inputs
        return [reshape_like_op(output_grad, x), *[None] * len(others)]


class ReshapeLikeOp(ReshapedOp):
    """x in the shape of another node with as many elements."""

    name = "reshape_like"
    vocabulary = False
    signature = Signature("x", "like")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if specs[0].size != specs[1].size:
            raise node.error(f"{describe(node, specs)} differ in their number of elements")
        return specs[0]._replace(shape=specs[1].shape)


class SqueezeOp(ReshapedOp):
    """x without the axes `axis`, which have extent 1; by default without all such axes. A view."""

    name = "squeeze"
    signature = Signature("x", axis=Axes(None))

    def shape(self, node: Node, shape: tuple[int, ...]) -> Sequence[int]:
        if node.attrs["axis"] is None:
            return [n for n in shape if n != 1]
        axes = normalize_axes(node, node.attrs["axis"], len(shape))
        if any(shape[axis] != 1 for axis in axes):
            raise node.error(f"axes {axes} of {node.inputs[0].name} {shape} are not all 1")
        return [n for axis, n in enumerate(shape) if axis not in axes]


class ExpandDimsOp(ReshapedOp):
    """x with new axes of extent 1, which are the axes `axis` of the output. A view."""

    name = "expand_dims"
    signature = Signature("x", axis=Axes())

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        if isinstance(attrs["axis"], int):
            attrs["axis"] = (attrs["axis"],)
        return Node(self, inputs, attrs, name)

    def shape(self, node: Node, shape: tuple[int, ...]) -> Sequence[int]:
        ndim = len(shape) + len(node.attrs["axis"])
        axes = normalize_axes(node, node.attrs["axis"], ndim)
        rest = iter(shape)
        return [1 if axis in axes else next(rest) for axis in range(ndim)]


class FlattenOp(ReshapedOp):
    """x with all axes from `axis` on as one; the axes before it stay. A view."""

    name = "flatten"
    signature = Signature("x", axis=Int(1))

    def shape(self, node: Node, shape: tuple[int, ...]) -> Sequence[int]:
        axis = node.attrs["axis"]
        if not -len(shape) <= axis <= len(shape):
            raise node.error(f"axis {axis} does not fit {node.inputs[0].name} {shape}")
        axis += len(shape) if axis < 0 else 0
        return [*shape[:axis], math.prod(shape[axis:])]


class TransposeOp(Op):
    """Axes in another order, reversed by default; output axis k is input axis `axes[k]`."""

    name = kernel = "transpose"
    autocast = "follow"
    movement = any_dtype = True
    signature = Signature("x", axes=Ints(None))

    def permutation(self, node: Node, ndim: int) -> tuple[int, ...]:
        """The order of the input's axes in the output, without negative numbers."""
        axes = node.attrs["axes"]
        if axes is None:
            return tuple(reversed(range(ndim)))
        if len(axes) != ndim:
            raise node.error(f"axes {axes} do not name each of {ndim} dimensions once")
        normalize_axes(node, axes, ndim)
        return tuple(axis % ndim for axis in axes)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape = specs[0].shape
        return specs[0]._replace(shape=tuple(shape[k] for k in self.permutation(node, len(shape))))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        np.copyto(arrays[1], arrays[0].transpose(node.attrs["axes"]))

    def scalars(self, node: Node) -> tuple[Any]:
        return (_Permutation(axes=self.permutation(node, len(node.spec.shape))),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        axes = node.attrs["axes"]
        if axes is None:
            return [transpose_op(output_grad)]
        return [
            transpose_op(output_grad, [int(k) for k in np.argsort([a % len(axes) for a in axes])])
        ]

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        axes = self.permutation(node, len(node.spec.shape))
        if x.op is transpose_op:  # two in a row are one
            inner = self.permutation(x, len(axes))
            return transpose_op(x.inputs[0], [inner[k] for k in axes])
        moving = [k for k in axes if x.spec.shape[k] != 1]
        return reshape_op(x, node.spec.shape) if moving == sorted(moving) else None


class BroadcastToOp(Op):
    """x repeated to `shape` by numpy's rule."""

    name = kernel = "broadcast_to"
    autocast = "follow"
    movement = any_dtype = True
    signature = Signature("x", shape=Shape())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape = node.attrs["shape"]
        if merge_shapes(specs[0].shape, shape) != shape:
            raise node.error(
                f"{node.inputs[0].name} {specs[0].shape} does not broadcast to {shape}"
            )
        return specs[0]._replace(shape=shape)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        np.copyto(arrays[1], arrays[0])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [hooks["sum_to_like"](output_grad, node.inputs[0])]

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        return reshape_op(x, node.spec.shape) if x.spec.size == node.spec.size else None


class CopyOp(Op):
    """A copy of x in memory of its own; the planner inserts it where aliasing would be
    seen.
    """

    name = "copy"
    kernel = "cast"
    any_dtype = True
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        np.copyto(arrays[1], arrays[0])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [output_grad]


class StopGradientOp(Op):
    """x as it is, through which no gradient passes."""

    name = "stop_gradient"
    view = movement = any_dtype = True
    autocast = "follow"
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]

    def simplify(self, node: Node) -> Node:
        return node.inputs[0]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


reshape_op = array_reshape_op = ReshapeOp()
reshape_like_op = ReshapeLikeOp()
squeeze_op = SqueezeOp()
expand_dims_op = ExpandDimsOp()
flatten_op = FlattenOp()
transpose_op = TransposeOp()
broadcast_to_op = BroadcastToOp()
copy_op = CopyOp()
stop_gradient_op = StopGradientOp()
