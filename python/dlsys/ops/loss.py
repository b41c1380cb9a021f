"""Losses. Each has an operator for the loss of every row and one for its gradient, each in one
pass.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import GraphError, ShapeError
from ..graph.node import Node, Op, Spec
from ..graph.shapes import describe, floating, promote
from .layout import reshape_like_op
from .reduce import mean_op, sum_op
from .softmax import log_softmax, log_softmax_op, softmax_op


class SoftmaxCrossEntropyRowsOp(Op):
    """Σ_c y_c · (log Σ exp(x) - x_c) of each row; logits x and labels y are (…, classes), the
    result (…).
    """

    name = kernel = "softmax_cross_entropy"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if specs[0].shape != specs[1].shape or not specs[0].shape:
            raise node.error(
                f"logits and one-hot labels must have one shape, got {describe(node, specs)}"
            )
        declared = specs[0].declared or specs[1].declared
        return Spec(specs[0].shape[:-1], floating(promote(node, *specs)), declared)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _row_workspace(inputs[0], outputs[0].dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, labels, row, scratch, logp, loss = arrays
        if not x.size:
            loss.fill(0)
            return
        log_softmax(x, row, scratch, logp)
        np.multiply(labels, logp, out=scratch)
        np.sum(scratch, axis=-1, out=loss)
        np.negative(loss, out=loss)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, labels = node.inputs
        return [
            cross_entropy_gradient_op(x, labels, output_grad),
            -log_softmax_op(x) * expand_last(output_grad, x),
        ]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 6 * inputs[0].size


class SparseSoftmaxCrossEntropyRowsOp(Op):
    """log Σ exp(x) - x_label of each row; logits x are (…, classes), integer labels (…), the
    result (…).
    """

    name = kernel = "sparse_softmax_cross_entropy"
    fallible = True
    any_dtype = (1,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_integer_labels(node, specs)
        return Spec(specs[1].shape, floating(specs[0].dtype), specs[0].declared)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _row_workspace(inputs[0], outputs[0].dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, labels, row, scratch, logp, loss = arrays
        check_labels_in_range(node, labels, x.shape[-1])
        if x.size:
            log_softmax(x, row, scratch, logp)
            np.negative(_pick(logp, labels), out=loss)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [sparse_cross_entropy_gradient_op(*node.inputs, output_grad), None]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 5 * inputs[0].size


class CrossEntropyGradientOp(Op):
    """(softmax(x) · Σ_c y_c - y) · dy, the gradient of the rows' loss; dy has one element a row."""

    name = kernel = "softmax_cross_entropy_gradient"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if specs[0].shape != specs[1].shape or not specs[0].shape:
            raise node.error(
                f"logits and one-hot labels must have one shape, got {describe(node, specs)}"
            )
        check_row_gradients(node, specs)
        return Spec(specs[0].shape, floating(promote(node, *specs)), any(s.declared for s in specs))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _row_workspace(inputs[0], outputs[0].dtype)[:2]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, labels, dy, row, scratch, dx = arrays
        softmax_op.numpy(node, x, row, scratch)
        np.sum(labels, axis=-1, keepdims=True, out=row)
        np.multiply(scratch, row, out=scratch)
        np.subtract(scratch, labels, out=scratch)
        np.multiply(scratch, dy.reshape(row.shape), out=dx)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, labels, dy = node.inputs
        p = softmax_op(x)
        total = sum_op(labels, axis=-1, keepdims=True)
        weighted = output_grad * expand_last(dy, x)
        inner = sum_op(p * weighted, axis=-1, keepdims=True)
        per_row = sum_op(output_grad * (p * total - labels), axis=-1)
        return [p * total * (weighted - inner), inner - weighted, reshape_like_op(per_row, dy)]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 8 * output.size


class SparseCrossEntropyGradientOp(Op):
    """(softmax(x) - onehot(label)) · dy, the gradient of the rows' loss; dy has one element a
    row.
    """

    name = kernel = "sparse_softmax_cross_entropy_gradient"
    fallible = True
    any_dtype = (1,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_integer_labels(node, specs)
        check_row_gradients(node, specs)
        return Spec(specs[0].shape, floating(specs[0].dtype), specs[0].declared)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _row_workspace(inputs[0], outputs[0].dtype)[:1]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, labels, dy, row, dx = arrays
        check_labels_in_range(node, labels, x.shape[-1])
        if not x.size:
            return
        softmax_op.numpy(node, x, row, dx)
        dx.reshape(-1)[_picked(x, labels)] -= 1
        np.multiply(dx, dy.reshape(row.shape), out=dx)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, labels, dy = node.inputs
        p = softmax_op(x)
        weighted = output_grad * expand_last(dy, x)
        inner = sum_op(p * weighted, axis=-1, keepdims=True)
        unit = sparse_cross_entropy_gradient_op(x, labels, dy * 0 + 1)
        return [
            p * (weighted - inner),
            None,
            reshape_like_op(sum_op(output_grad * unit, axis=-1), dy),
        ]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 6 * output.size


class AssignmentCrossEntropyOp(Op):
    """The assignment's loss: the mean over rows, of shape (1,).

    Its gradient is `(softmax - y_) * output_grad` and lacks the 1/rows that the mean calls for:
    learning rates of old scripts count on it. `softmax_cross_entropy` has the true gradient.
    """

    name = "softmaxcrossentropy"
    kernel = "softmax_cross_entropy_mean"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return cross_entropy_rows_op.infer(node, *specs)._replace(shape=(1,))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _row_workspace(inputs[0], outputs[0].dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, labels, row, scratch, logp, loss = arrays
        if not x.size:
            loss.fill(0 if row.size else np.nan)  # the mean of no rows is NaN
            return
        log_softmax(x, row, scratch, logp)
        np.multiply(labels, logp, out=scratch)
        np.sum(scratch, out=loss.reshape(()))
        np.multiply(loss, -1.0 / row.size, out=loss)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, labels = node.inputs
        return [(softmax_op(x) - labels) * output_grad, None]


def softmax_cross_entropy(logits: Node, labels: Node, reduction: str = "mean") -> Node:
    """Cross-entropy between softmax(logits) and labels, over the last axis.

    logits: (…, classes). labels: one-hot or any weights (…, classes) in the logits' dtype, or,
    declared with an integer dtype, class numbers (…). reduction: "mean" or "sum" over all rows,
    giving (), or "none", giving (…). Differentiable to any order in the logits. Class numbers out
    of range raise on numpy and CPU; on the GPU they make that row NaN.
    """
    if reduction not in ("mean", "sum", "none"):
        raise GraphError(
            f"softmax_cross_entropy: reduction must be mean, sum or none, got {reduction!r}"
        )
    sparse = _is_integer(labels)
    rows = (sparse_cross_entropy_rows_op if sparse else cross_entropy_rows_op)(logits, labels)
    if reduction == "none":
        return rows
    return mean_op(rows) if reduction == "mean" else sum_op(rows)


def expand_last(x: Node, like: Node) -> Node:
    """x, one element a row of `like`, shaped (…, 1) so that it broadcasts over the last axis."""
    return reshape_like_op(x, sum_op(like, axis=-1, keepdims=True))


def check_integer_labels(node: Node, specs: tuple[Spec, ...]) -> None:
    """Refuses labels that are no integers, or not one a row."""
    dtype = specs[1].dtype
    if dtype is not None and dtype.kind not in "iu":
        raise node.error(f"class numbers must be integers, got {node.inputs[1].name} of {dtype}")
    if not specs[0].shape or specs[1].shape != specs[0].shape[:-1]:
        raise node.error(f"expected one class number a row, got {describe(node, specs[:2])}")


def check_row_gradients(node: Node, specs: tuple[Spec, ...]) -> None:
    """Refuses output gradients that are not one a row of the logits."""
    if specs[2].size != math.prod(specs[0].shape[:-1]):
        raise node.error(f"expected one output gradient a row, got {describe(node, specs)}")


def check_labels_in_range(node: Node, labels: np.ndarray, classes: int) -> None:
    """Raises ShapeError for a class number outside 0 … classes - 1."""
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        bad = labels[(labels < 0) | (labels >= classes)].flat[0]
        raise ShapeError(
            f"{node.op.name}: label {bad} is not a class; there are {classes} [{node.where}]"
        )


def _is_integer(labels: Node) -> bool:
    if labels.spec is not None and labels.spec.dtype is not None:
        return labels.spec.dtype.kind in "iu"
    declared = labels.attrs.get("dtype")
    return declared is not None and declared.kind in "iu"


def _row_workspace(x: Spec, dtype: np.dtype | None) -> list[Spec]:
    full = Spec(x.shape, dtype)
    return [Spec((*x.shape[:-1], 1), dtype), full, full]


def _pick(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return values.reshape(-1)[_picked(values, labels)].reshape(labels.shape)


def _picked(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Where the labels' elements are in the flat values."""
    return np.arange(0, values.size, values.shape[-1]) + labels.reshape(-1)


cross_entropy_rows_op = SoftmaxCrossEntropyRowsOp()
sparse_cross_entropy_rows_op = SparseSoftmaxCrossEntropyRowsOp()
cross_entropy_gradient_op = CrossEntropyGradientOp()
sparse_cross_entropy_gradient_op = SparseCrossEntropyGradientOp()
softmaxcrossentropy_op = AssignmentCrossEntropyOp()
