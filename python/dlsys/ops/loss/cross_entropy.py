"""Losses. Each has an operator for the loss of every row and one for its gradient, each in one
pass.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import GraphError
from ...graph.lines import where
from ...graph.node import Node, Op, Spec
from ...graph.shapes import describe, floating, promote
from ...graph.signature import Choice, Int, Number, Numbers, Signature, declared, is_node
from ..comparison import equal_op, where_op
from ..elementwise import cast_op
from ..indexing import check_range, gather_op
from ..leaf import constant_op, full_op, oneslike_op
from ..movement import reshape_like_op
from ..reduce import mean_op, sum_op
from .softmax import log_softmax, log_softmax_op, softmax, softmax_op

REDUCTION = Choice("mean", "sum", "none")


class Weights(Numbers):
    """A number a class, or a node of them."""

    expected = "one number a class, or a node of them"

    def take(self, value: Any) -> Any:
        return value if is_node(value) else super().take(value)


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
            np.negative(_pick(logp, labels), out=loss)

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


class NegativeLogLikelihoodRowsOp(Op):
    """-x_label of each row; log-probabilities x are (…, classes), integer labels (…), the result
    (…). Other classes may hold anything.
    """

    name = kernel = "negative_log_likelihood"
    signature = Signature("log_probabilities", "labels")
    gathers = 1
    fallible = True
    any_dtype = (1,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_integer_labels(node, specs)
        return Spec(specs[1].shape, floating(specs[0].dtype), specs[0].declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, labels, loss = arrays
        check_range(node, "label", labels, x.shape[-1])
        if x.size:
            loss[...] = _pick(x, labels)  # in the loss's dtype, which unsigned integers need
            np.negative(loss, out=loss)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, labels = node.inputs
        return [likelihood_gradient_like_op(labels, output_grad, x), None]


class NegativeLogLikelihoodGradientLikeOp(Op):
    """The gradient of the rows' loss in the log-probabilities, of which only the shape counts."""

    name = "negative_log_likelihood_gradient_like"
    signature = Signature("labels", "dy", "log_probabilities")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        labels, dy, x = specs
        if dy.shape != labels.shape or x.shape[:-1] != labels.shape or not x.shape:
            raise node.error(f"expected one label and dy a row, got {describe(node, specs)}")
        return dy._replace(shape=x.shape)

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return likelihood_gradient_op(*node.inputs[:2], classes=node.spec.shape[-1])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, likelihood_rows_op(output_grad, node.inputs[0]), None]


class NegativeLogLikelihoodGradientOp(Op):
    """Rows (…, classes) of zeros with -dy at their integer label; labels and dy are (…)."""

    name = kernel = "negative_log_likelihood_gradient"
    signature = Signature("labels", "dy", "*", classes=Int(low=0))
    fallible = True
    any_dtype = (0,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        labels, dy = specs
        check_class_numbers(node, labels, node.inputs[0].name)
        if dy.shape != labels.shape:
            raise node.error(f"expected one dy a label, got {describe(node, specs)}")
        return dy._replace(shape=(*dy.shape, node.attrs["classes"]))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        labels, dy, dx = arrays
        check_range(node, "label", labels, dx.shape[-1])
        dx.fill(0)
        if dx.size:
            dx.reshape(-1)[_picked(dx, labels)] = -dy.reshape(-1)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, likelihood_rows_op(output_grad, node.inputs[0])]


class ClassWeightsOp(Op):
    """Given numbers, one a class, in the dtype of logits (…, classes)."""

    name = "class_weights"
    signature = Signature("logits", "*", values=Numbers())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        count = len(node.attrs["values"])
        if specs[0].shape[-1:] != (count,):
            raise node.error(f"got {count} weights for {node.inputs[0].name} {specs[0].shape}")
        return Spec((count,), floating(specs[0].dtype), declared=False)

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return constant_op(np.array(node.attrs["values"], node.spec.dtype))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


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
    declared with an integer dtype, class numbers (…). reduction: "mean" or "sum" over all rows,
    giving (), or "none", giving (…). label_smoothing s takes labels y as (1 - s) · y + s / classes.
    weights: a number a class, (classes,), that multiplies its part of the loss. Rows whose class
    number is ignore_index have no loss. The mean of class numbers is over the weights of the rows'
    classes, ignored rows counting 0; that of one-hot labels is over the rows.

    Differentiable to any order in the logits. OutOfRangeError for a class number out of range,
    GraphError for a reduction or smoothing that does not exist.
    """
    weights = None if weights is None else class_weights(weights, logits)
    if not is_integer(labels):
        if ignore_index is not None:
            raise GraphError(
                f"softmax_cross_entropy: ignore_index needs class numbers as labels [{where()}]"
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


def reduce_rows(
    name: str,
    rows: Node,
    reduction: str,
    row_weights: Node | None = None,
    ignored: Node | None = None,
) -> Node:
    """The losses of rows as `reduction` says: "none", "sum", or "mean" over the rows' weights;
    rows that are `ignored` count nothing.
    """
    if reduction not in ("mean", "sum", "none"):
        raise GraphError(f"{name}: reduction must be mean, sum or none, got {reduction!r}")
    if ignored is not None:
        rows = where_op(ignored, 0.0, rows)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return sum_op(rows)
    if row_weights is None and ignored is None:
        return mean_op(rows)
    row_weights = oneslike_op(rows) if row_weights is None else row_weights
    if ignored is not None:
        row_weights = where_op(ignored, 0.0, row_weights)
    return sum_op(rows) / sum_op(row_weights)


def class_weights(weights: Any, logits: Node) -> Node:
    """Weights as a node (classes,): a node as it is, numbers in the dtype of the logits."""
    if isinstance(weights, Node):
        return weights
    return class_weights_op(logits, values=weights)


def expand_last(x: Node, like: Node) -> Node:
    """x, one element a row of `like`, shaped (…, 1) so that it broadcasts over the last axis."""
    return reshape_like_op(x, sum_op(like, axis=-1, keepdims=True))


def check_integer_labels(node: Node, specs: tuple[Spec, ...]) -> None:
    """Refuses labels that are no integers, or not one a row."""
    check_class_numbers(node, specs[1], node.inputs[1].name)
    if not specs[0].shape or specs[1].shape != specs[0].shape[:-1]:
        raise node.error(f"expected one class number a row, got {describe(node, specs[:2])}")


def check_class_numbers(node: Node, spec: Spec, name: str) -> None:
    """Refuses labels, an input of this name, that are no integers."""
    if spec.dtype is not None and spec.dtype.kind not in "iu":
        raise node.error(f"class numbers must be integers, got {name} of {spec.dtype}")


def check_row_gradients(node: Node, specs: tuple[Spec, ...]) -> None:
    """Refuses output gradients that are not one a row of the logits."""
    if specs[2].size != math.prod(specs[0].shape[:-1]):
        raise node.error(f"expected one output gradient a row, got {describe(node, specs)}")


def is_integer(labels: Node) -> bool:
    """Whether labels are known to be class numbers."""
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
    rows = np.arange(0, values.size, values.shape[-1])
    return rows + labels.reshape(-1).astype(np.int64, copy=False)


cross_entropy_rows_op = SoftmaxCrossEntropyRowsOp()
sparse_cross_entropy_rows_op = SparseSoftmaxCrossEntropyRowsOp()
cross_entropy_gradient_op = CrossEntropyGradientOp()
sparse_cross_entropy_gradient_op = SparseCrossEntropyGradientOp()
likelihood_rows_op = NegativeLogLikelihoodRowsOp()
likelihood_gradient_like_op = NegativeLogLikelihoodGradientLikeOp()
likelihood_gradient_op = NegativeLogLikelihoodGradientOp()
softmaxcrossentropy_op = AssignmentCrossEntropyOp()
class_weights_op = ClassWeightsOp()
uniform_like_op = UniformLikeOp()
