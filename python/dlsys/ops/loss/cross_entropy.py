"""Softmax cross-entropy, of class labels or distributions: one operator for the loss of every row
and one for its gradient, each in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arguments.kinds import Int, Number
from ...arguments.signature import Signature, declared
from ...errors import GraphError
from ...graph.lines import where
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe, floating, promote
from ..comparison import equal_op, where_op
from ..elementwise import (
    cast_op,
)
from ..indexing import check_range, gather_op
from ..leaf import full_op
from ..movement import reshape_like_op
from ..reduce import mean_op, sum_op
from .rows import (
    REDUCTION,
    Weights,
    check_integer_labels,
    check_row_gradients,
    class_weights,
    expand_last,
    is_integer,
    label_offsets,
    reduce_rows,
    take_labels,
)
from .softmax import log_softmax, log_softmax_op, softmax, softmax_op

__all__ = ["softmax_cross_entropy", "softmaxcrossentropy_op"]


class SoftmaxCrossEntropyRowsOp(Op):
    """Σ_c y_c · (log Σ exp(x) - x_c) of each row; logits x and labels y are (…, classes), the
    result (…).
    """

    name = kernel = "softmax_cross_entropy"
    signature = Signature("logits", "labels")

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
    signature = Signature("logits", "labels")
    fallible = True
    any_dtype = (1,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_integer_labels(node, specs)
        return Spec(specs[1].shape, floating(specs[0].dtype), specs[0].declared)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return _row_workspace(inputs[0], outputs[0].dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, labels, row, scratch, logp, loss = arrays
        check_range(node, "label", labels, x.shape[-1])
        if x.size:
            log_softmax(x, row, scratch, logp)
            np.negative(take_labels(logp, labels), out=loss)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [sparse_cross_entropy_gradient_op(*node.inputs, output_grad), None]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 5 * inputs[0].size


class CrossEntropyGradientOp(Op):
    """(softmax(x) · Σ_c y_c - y) · dy, the gradient of the rows' loss; dy has one element a row."""

    name = kernel = "softmax_cross_entropy_gradient"
    signature = Signature("logits", "labels", "dy")

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
        softmax(x, row, scratch)
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
    signature = Signature("logits", "labels", "dy")
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
        check_range(node, "label", labels, x.shape[-1])
        if not x.size:
            return
        softmax(x, row, dx)
        dx.reshape(-1)[label_offsets(x, labels)] -= 1
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


class UniformLikeOp(Op):
    """1 / classes in the shape of labels (…, classes)."""

    name = "uniform_like"
    signature = Signature("labels")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return full_op(node.spec.shape, 1 / max(node.spec.shape[-1], 1), node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


class AssignmentCrossEntropyOp(Op):
    """The assignment's loss: the mean over rows, of shape (1,).

    Its gradient is `(softmax - y_) * output_grad` and lacks the 1/rows that the mean calls for:
    learning rates of old scripts count on it. `softmax_cross_entropy` has the true gradient.
    """

    name = "softmaxcrossentropy"
    vocabulary = False
    signature = Signature("logits", "labels")
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


@declared(
    reduction=REDUCTION, label_smoothing=Number(low=0, high=1), weights=Weights(),
    ignore_index=Int(),
)  # fmt: skip
def softmax_cross_entropy(
    logits: Node,
    labels: Node,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    weights: Any = None,
    ignore_index: int | None = None,
) -> Node:
    """Cross-entropy between softmax(logits) and labels, over the last axis.

    logits: (…, classes). labels: one-hot or any weights (…, classes) in the logits' dtype, or,
    declared with an integer dtype, class indices (…). reduction: "mean" or "sum" over all rows,
    giving (), or "none", giving (…). label_smoothing s takes labels y as (1 - s) · y + s / classes.
    weights: a number a class, (classes,), that multiplies its part of the loss. Rows whose class
    number is ignore_index have no loss. The mean of class indices is over the weights of the rows'
    classes, ignored rows counting 0; that of one-hot labels is over the rows.

    Differentiable to any order in the logits. OutOfRangeError for a class index out of range,
    GraphError for a reduction or smoothing that does not exist.
    """
    weights = None if weights is None else class_weights(weights, logits)
    if not is_integer(labels):
        if ignore_index is not None:
            raise GraphError(
                f"softmax_cross_entropy: ignore_index needs class indices as labels [{where()}]"
            )
        if label_smoothing:
            labels = labels * (1 - label_smoothing) + label_smoothing * uniform_like_op(labels)
        labels = labels if weights is None else labels * weights
        rows = cross_entropy_rows_op(logits, labels)
        return reduce_rows("softmax_cross_entropy", rows, reduction)
    return _of_class_numbers(logits, labels, reduction, label_smoothing, weights, ignore_index)


def _of_class_numbers(
    logits: Node,
    labels: Node,
    reduction: str,
    label_smoothing: float,
    weights: Node | None,
    ignore_index: int | None,
) -> Node:
    row_weights = ignored = None
    if ignore_index is not None:
        ignored = equal_op(labels, ignore_index)
        labels = where_op(ignored, 0, labels)
    rows = sparse_cross_entropy_rows_op(logits, labels)
    if weights is not None:
        row_weights = gather_op(weights, cast_op(labels, np.int64))
        rows = rows * row_weights
    if label_smoothing:
        logp = log_softmax_op(logits) if weights is None else log_softmax_op(logits) * weights
        rows = (1 - label_smoothing) * rows - label_smoothing * mean_op(logp, axis=-1)
    return reduce_rows("softmax_cross_entropy", rows, reduction, row_weights, ignored)


def _row_workspace(x: Spec, dtype: np.dtype | None) -> list[Spec]:
    full = Spec(x.shape, dtype)
    return [Spec((*x.shape[:-1], 1), dtype), full, full]


cross_entropy_rows_op = SoftmaxCrossEntropyRowsOp()
sparse_cross_entropy_rows_op = SparseSoftmaxCrossEntropyRowsOp()
cross_entropy_gradient_op = CrossEntropyGradientOp()
sparse_cross_entropy_gradient_op = SparseCrossEntropyGradientOp()
softmaxcrossentropy_op = AssignmentCrossEntropyOp()
uniform_like_op = UniformLikeOp()
