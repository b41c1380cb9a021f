"""Softmax and its logarithm over the last axis, stable for any logits."""

from __future__ import annotations

import numpy as np

from ..graph.node import Node, Op, Spec
from ..graph.shapes import floating
from ..graph.signature import Signature
from .elementwise import exp_op
from .reduce import sum_op


class SoftmaxOp(Op):
    """exp(x - max) / Σ exp(x - max) over the last axis."""

    name = kernel = "softmax"
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if not specs[0].shape:
            raise node.error(f"expected at least one dimension, got {node.inputs[0].name} ()")
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [outputs[0]._replace(shape=(*outputs[0].shape[:-1], 1))]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, row, y = arrays
        if not x.size:
            return
        _row_max(x, y, row)
        np.subtract(x, row, out=y)
        np.exp(y, out=y)
        _row_sum(y, row)
        np.divide(y, row, out=y)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        weighted = output_grad * node
        return [weighted - node * sum_op(weighted, axis=-1, keepdims=True)]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 5 * output.size


class LogSoftmaxOp(SoftmaxOp):
    """x - max - log Σ exp(x - max) over the last axis."""

    name = kernel = "log_softmax"

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [*super().workspace(node, inputs, outputs), outputs[0]]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, row, scratch, y = arrays
        if x.size:
            log_softmax(x, row, scratch, y)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        total = sum_op(output_grad, axis=-1, keepdims=True)
        return [output_grad - exp_op(node) * total]


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


def softmax_func(y: np.ndarray) -> np.ndarray:
    """Stable softmax of a numpy array over its last axis; the assignment's helper."""
    shifted = np.exp(y - np.max(y, axis=-1, keepdims=True))
    return shifted / np.sum(shifted, axis=-1, keepdims=True)


softmax_op = SoftmaxOp()
log_softmax_op = LogSoftmaxOp()
