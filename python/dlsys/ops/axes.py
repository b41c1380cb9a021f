"""Kernels over one axis of any: x is taken as (outer, n, inner) and reduced or scanned over its
middle axis.

Neighboring axes are merged, and axes that lie apart are brought together by a transpose. Several
axes count as one, in the order of their elements in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..arguments.signature import Signature
from ..dtypes import INT64 as INT64
from ..graph.node import Node, Op
from ..graph.spec import Spec, normalize_axes
from .elementwise import cast_op
from .movement import reshape_op, transpose_op

Order = list[int] | None
Shape = tuple[int, ...]


class AxisKernel(Op):
    """A kernel over the middle axis. `keeps` says that the result has x's shape, `dtype` gives the
    result's dtype from x's, which is the same unless the kernel is `free` to take any.
    """

    def __init__(
        self,
        name: str,
        numpy: Callable,
        dtype: Callable,
        keeps: bool = False,
        free: bool = False,
        workspace: Callable = lambda x, y: [],
        outputs: int = 1,
        signature: Signature = Signature("x"),  # noqa: B008 (never changed)
        autocast: str = "float32",
    ) -> None:
        self.name = self.kernel = name
        self.any_dtype = free
        self._numpy = numpy
        self._dtype = dtype
        self._keeps = keeps
        self._workspace = workspace
        self.outputs = outputs
        self.signature = signature
        self.autocast = autocast

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        outer, n, inner = specs[0].shape
        shape = (outer, n, inner) if self._keeps else (outer, inner)
        spec = Spec(shape, self._dtype(specs[0].dtype), specs[0].declared)
        return spec if self.outputs == 1 else (spec,) * self.outputs

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return self._workspace(inputs[0], outputs[0])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        self._numpy(*arrays, **node.attrs)

    def scalars(self, node: Node) -> tuple[int, ...]:
        return tuple(int(value) for value in node.attrs.values())

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size

    def grouped(self, x: Node, dtype: np.dtype, order: Order, shape: Shape) -> Node:
        """x as this kernel takes it: in the result's dtype, with its axes in order and merged."""
        if not self.any_dtype and x.spec.dtype != dtype:
            x = cast_op(x, dtype)
        return reshape_op(x if order is None else transpose_op(x, order), shape)

    def ungrouped(self, result: Node, order: Order, before: Shape) -> Node:
        """A grouped result in the shape that x had before its axes were put in order."""
        if order is None:
            return reshape_op(result, before)
        moved = reshape_op(result, [before[axis] for axis in order])
        return transpose_op(moved, [int(axis) for axis in np.argsort(order)])


class AlongAxesOp(Op):
    """A kernel over the middle axis whose result has the shape of x, for any axes of x; a second
    input is a reduction of x over these axes.
    """

    def __init__(
        self, name: str, kernel: AxisKernel, gradient: Callable, signature: Signature
    ) -> None:
        self.name = name
        self.signature = signature
        self._kernel = kernel
        self._gradient = gradient

    def infer(self, node: Node, *specs: Spec) -> Spec:
        normalize_axes(node, node.attrs["axis"], len(specs[0].shape))
        inner = self._kernel.infer(node, specs[0]._replace(shape=(1, 1, 1)))
        return inner._replace(shape=specs[0].shape)  # type: ignore[union-attr]

    def simplify(self, node: Node) -> Node:
        x, *rest = node.inputs
        before = x.spec.shape
        order, shape = around(before, normalize_axes(node, node.attrs["axis"], len(before)))
        x = self._kernel.grouped(x, node.spec.dtype, order, shape)
        rest = [reshape_op(y, (shape[0], shape[2])) for y in rest]
        attrs = {key: value for key, value in node.attrs.items() if key != "axis"}
        return self._kernel.ungrouped(self._kernel(x, *rest, **attrs), order, before)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return self._gradient(node, output_grad)


def around(shape: Shape, axes: Shape) -> tuple[Order, Shape]:
    """The shape (outer, n, inner) that puts `axes` in the middle, and the order that axes must have
    first, None where they lie side by side.
    """
    wide = [axis for axis in axes if shape[axis] != 1]
    between = range(wide[0], wide[-1]) if wide else ()
    order = None
    if any(axis not in axes and shape[axis] != 1 for axis in between):
        order = [axis for axis in range(len(shape)) if axis not in axes] + list(axes)
        shape = tuple(shape[axis] for axis in order)
        wide = list(range(len(shape) - len(axes), len(shape)))
    start, end = (wide[0], wide[-1] + 1) if wide else (0, 0)
    return order, tuple(math.prod(part) for part in (shape[:start], shape[start:end], shape[end:]))


def same_dtype(dtype: np.dtype | None) -> np.dtype | None:
    return dtype


def summed_dtype(dtype: np.dtype | None) -> np.dtype | None:
    """Integers add up and multiply as int64."""
    return INT64 if dtype is not None and dtype.kind != "f" else dtype
