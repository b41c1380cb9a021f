"""Losses built of other operators: their gradients, of any order, are those of the parts.

All take `reduction`: "mean" or "sum" over all elements or rows, or "none". Elementwise losses
broadcast as their operators do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import GraphError
from ..graph.node import Node, Op, Spec
from ..graph.shapes import FLOAT32, floating
from .activation import softplus_op
from .compare import equal_op, greater_op, where_op
from .elementwise import abs_op, as_node, cast_op, clip_op, log1p_op, log_op, relu_op
from .index import gather_op, one_hot_op
from .loss import check_integer_labels, class_weights, expand_last, is_integer, reduce_rows
from .reduce import mean_op, sum_op

_SMALLEST = 2.0**-126  # of float32 with all its digits: log is -87.3
_LARGEST = 1 - 2.0**-24  # below 1 in float32: log(1 - p) is -16.6


class ClassesLikeOp(Op):
    """One-hot rows (…, classes) of class numbers (…), like logits (…, classes)."""

    name = "classes_like"
    any_dtype = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_integer_labels(node, specs)
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        rows = one_hot_op(cast_op(node.inputs[1], np.int64), node.spec.shape[-1], FLOAT32)
        return cast_op(rows, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, None]


classes_like_op = ClassesLikeOp()


def negative_log_likelihood(
    log_probabilities: Node,
    labels: Node,
    reduction: str = "mean",
    weights: Any = None,
    ignore_index: int | None = None,
) -> Node:
    """-log_probabilities[label] of each row; log_probabilities are (…, classes), labels class
    numbers (…) declared with an integer dtype.

    weights: a number a class, (classes,). Rows whose label is ignore_index have no loss; the mean
    is over the weights of the rows' classes. For log_softmax outputs, and any other numbers, minus
    infinity for other classes included. Labels out of range raise on numpy and CPU.
    """
    ignored = row_weights = None
    if ignore_index is not None:
        ignored = equal_op(labels, ignore_index)
        labels = where_op(ignored, 0, labels)
    chosen = classes_like_op(log_probabilities, labels)
    finite = where_op(greater_op(chosen, 0), log_probabilities, 0.0)
    rows = -sum_op(finite, axis=-1)
    if weights is not None:
        row_weights = gather_op(
            class_weights(weights, log_probabilities), cast_op(labels, np.int64)
        )
        rows = rows * row_weights
    return reduce_rows("negative_log_likelihood", rows, reduction, row_weights, ignored)


def mean_squared_error(prediction: Node, target: Any, reduction: str = "mean") -> Node:
    """(prediction - target)²."""
    difference = prediction - target
    return reduce_rows("mean_squared_error", difference * difference, reduction)


def mean_absolute_error(prediction: Node, target: Any, reduction: str = "mean") -> Node:
    """|prediction - target|; its gradient is 0 where the two are equal."""
    return reduce_rows("mean_absolute_error", abs_op(prediction - target), reduction)


def huber_loss(prediction: Node, target: Any, delta: float = 1.0, reduction: str = "mean") -> Node:
    """d² / 2 where d = |prediction - target| <= delta, else delta · (d - delta / 2).

    GraphError unless delta > 0. After Huber (1964).
    """
    if not delta > 0:
        raise GraphError(f"huber_loss: expected delta > 0, got {delta}")
    distance = abs_op(prediction - target)
    inner = clip_op(distance, 0.0, float(delta))
    return reduce_rows("huber_loss", inner * (distance - 0.5 * inner), reduction)


def binary_cross_entropy(probability: Node, labels: Any, reduction: str = "mean") -> Node:
    """-(y · log(p) + (1 - y) · log(1 - p)) of probabilities p and labels y in [0, 1].

    p is first clipped to [2^-126, 1 - 2^-24], so that the loss and its gradient stay finite; where
    that clips, the gradient is 0. With logits at hand, `binary_cross_entropy_with_logits` loses
    nothing.
    """
    p = clip_op(probability, _SMALLEST, _LARGEST)
    rows = -(labels * log_op(p) + (1 - labels) * log1p_op(-p))
    return reduce_rows("binary_cross_entropy", rows, reduction)


def binarycrossentropy_op(prediction: Node, labels: Node) -> Node:
    """`binary_cross_entropy` of each element."""
    return binary_cross_entropy(prediction, labels, "none")


def binary_cross_entropy_with_logits(
    logits: Node, labels: Any, reduction: str = "mean", positive_weight: float = 1.0
) -> Node:
    """positive_weight · y · softplus(-x) + (1 - y) · softplus(x): the binary cross-entropy of
    sigmoid(x) and labels y in [0, 1], exact for logits of any size.
    """
    positive = labels if positive_weight == 1 else positive_weight * labels
    rows = positive * softplus_op(-logits) + (1 - labels) * softplus_op(logits)
    return reduce_rows("binary_cross_entropy_with_logits", rows, reduction)


def hinge_loss(scores: Node, labels: Any, reduction: str = "mean") -> Node:
    """max(0, 1 - y · score) for labels y of 1 and -1."""
    return reduce_rows("hinge_loss", relu_op(1 - labels * scores), reduction)


def multiclass_hinge_loss(
    scores: Node, labels: Node, margin: float = 1.0, reduction: str = "mean"
) -> Node:
    """The mean over classes of max(0, margin - score[label] + score[c]), the label's own left out
    as 0, of each row; scores are (…, classes), labels one-hot (…, classes), or class numbers (…)
    declared with an integer dtype. After Weston and Watkins (1999).
    """
    chosen = classes_like_op(scores, labels) if is_integer(labels) else labels
    own = sum_op(chosen * scores, axis=-1)
    excess = relu_op(scores - expand_last(own, scores) + margin)
    rows = mean_op((1 - chosen) * excess, axis=-1)
    return reduce_rows("multiclass_hinge_loss", rows, reduction)


def kl_divergence(log_q: Node, p: Any, reduction: str = "mean") -> Node:
    """Σ p · (log p - log_q) over the last axis, of probabilities p and logarithms log_q, such as
    log_softmax of logits, both (…, classes); p = 0 adds 0. The mean is over the rows.
    """
    p = as_node(p)
    rows = sum_op(p * (log_op(clip_op(p, _SMALLEST, 1.0)) - log_q), axis=-1)
    return reduce_rows("kl_divergence", rows, reduction)
