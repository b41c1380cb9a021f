"""Softmax and its logarithm over one axis, stable for any logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arguments.kinds import Int
from ...arguments.signature import Signature
from ...graph.node import Node, Op
from ...graph.spec import Spec, floating, normalize_axes
from ..axes import AxisKernel
from ..elementwise import exp_op
from ..movement import reshape_op
from ..reduce import sum_op

__all__ = ["log_softmax_op", "softmax_func", "softmax_op"]


class SoftmaxOp(Op):
    """exp(x - max) / Σ exp(x - max) over `axis`, the last by default; negative ones count from
    behind. Integers give floats. ShapeError for an axis that x does not have.

    Kernel and numpy form are those of the last axis; `simplify` lowers every other to a kernel over
    the middle axis.
    """

    name = kernel = "softmax"
    signature = Signature("x", axis=Int(-1))

    def __init__(self, columns: AxisKernel) -> None:
        self._columns = columns

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if not specs[0].shape:
            raise node.error(f"expected at least one dimension, got {node.inputs[0].name} ()")
        self._axis(node, specs[0])
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [outputs[0]._replace(shape=(*outputs[0].shape[:-1], 1))]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, row, y = arrays
        softmax(x, row, y)

    def simplify(self, node: Node) -> Node | None:
        """Any axis as the last one, or as the middle one of three."""
        x = node.inputs[0]
        assert x.spec is not None and node.spec is not None
        shape, axis = x.spec.shape, self._axis(node, x.spec)
        if axis == len(shape) - 1:
            return None if node.attrs["axis"] == -1 else self(x)
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if inner == 1:
            return reshape_op(self(reshape_op(x, (outer, shape[axis]))), shape)
        grouped = (outer, shape[axis], inner)
        return reshape_op(
            self._columns(self._columns.grouped(x, node.spec.dtype, None, grouped)), shape
        )

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        weighted = output_grad * node
        return [weighted - node * sum_op(weighted, axis=node.attrs["axis"], keepdims=True)]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 5 * output.size

    def _axis(self, node: Node, x: Spec) -> int:
        axis = node.attrs["axis"]
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise node.error(f"expected an integer for axis, got {axis!r}")
        return normalize_axes(node, int(axis), len(x.shape))[0]


class LogSoftmaxOp(SoftmaxOp):
    """x - max - log Σ exp(x - max) over `axis`, as of `softmax_op`."""

    name = kernel = "log_softmax"

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [*super().workspace(node, inputs, outputs), outputs[0]]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, row, scratch, y = arrays
        if x.size:
            log_softmax(x, row, scratch, y)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        total = sum_op(output_grad, axis=node.attrs["axis"], keepdims=True)
        return [output_grad - exp_op(node) * total]


def softmax(x: np.ndarray, row: np.ndarray, y: np.ndarray) -> None:
    """Writes softmax of x over the last axis into y; `row` (…, 1) is overwritten."""
    if not x.size:
        return
    _row_max(x, y, row)
    np.subtract(x, row, out=y)
    np.exp(y, out=y)
    _row_sum(y, row)
    np.divide(y, row, out=y)


def log_softmax(x: np.ndarray, row: np.ndarray, scratch: np.ndarray, y: np.ndarray) -> None:
    """Writes log softmax of x into y; `row` (…, 1) and `scratch` (like y) are overwritten."""
    _row_max(x, scratch, row)
    np.subtract(x, row, out=y)
    np.exp(y, out=scratch)
    _row_sum(scratch, row)
    np.log(row, out=row)
    np.subtract(y, row, out=y)


# numpy reduces short rows one at a time; as columns or by einsum they take a fifth of that.
_SHORT_ROW = 32
_ROWS = 64  # that are summed together before their sums are


def _row_max(x: np.ndarray, scratch: np.ndarray, row: np.ndarray) -> None:
    length = x.shape[-1]
    if length > _SHORT_ROW:
        np.max(x, axis=-1, keepdims=True, out=row)
        return
    columns = scratch.reshape(length, -1)
    np.copyto(columns, x.reshape(-1, length).T)
    np.max(columns, axis=0, out=row.reshape(-1))


def _row_sum(x: np.ndarray, row: np.ndarray) -> None:
    if x.shape[-1] > _SHORT_ROW:
        np.sum(x, axis=-1, keepdims=True, out=row)
    else:
        np.einsum("...i->...", x, out=row[..., 0])


def _softmax_columns(x: np.ndarray, row: np.ndarray, y: np.ndarray) -> None:
    if x.size:
        np.max(x, axis=1, keepdims=True, out=row)
        np.subtract(x, row, out=y)
        np.exp(y, out=y)
        _column_sum(y, row)
        np.divide(y, row, out=y)


def _log_softmax_columns(
    x: np.ndarray, row: np.ndarray, scratch: np.ndarray, y: np.ndarray
) -> None:
    if x.size:
        np.max(x, axis=1, keepdims=True, out=row)
        np.subtract(x, row, out=y)
        np.exp(y, out=scratch)
        _column_sum(scratch, row)
        np.log(row, out=row)
        np.subtract(y, row, out=y)


def _column_sum(x: np.ndarray, row: np.ndarray) -> None:
    """Sums of some rows at a time, in float64: along columns numpy adds one element after the
    other, and roundings add up.
    """
    parts = np.add.reduceat(x, range(0, x.shape[1], _ROWS), axis=1, dtype=np.float64)
    np.copyto(row, np.sum(parts, axis=1, keepdims=True), casting="same_kind")


def _column_workspace(x: Spec, y: Spec) -> list[Spec]:
    return [y._replace(shape=(y.shape[0], 1, y.shape[2]))]


def softmax_func(y: Any, axis: int = -1) -> np.ndarray:
    """Stable softmax of a numpy array over an axis, the last by default; the assignment's
    helper.

    y: an array.
    """
    shifted = np.exp(y - np.max(y, axis=axis, keepdims=True))
    return shifted / np.sum(shifted, axis=axis, keepdims=True)


_columns = AxisKernel(
    "softmax_columns", _softmax_columns, floating, keeps=True, workspace=_column_workspace
)
_log_columns = AxisKernel(
    "log_softmax_columns", _log_softmax_columns, floating, keeps=True,
    workspace=lambda x, y: [*_column_workspace(x, y), y],
)  # fmt: skip
softmax_op = SoftmaxOp(_columns)
log_softmax_op = LogSoftmaxOp(_log_columns)
