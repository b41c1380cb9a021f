"""Losses built of other operators: their gradients, of any order, are those of the parts.

All take `reduction`: "mean" or "sum" over all elements or rows, or "none". A target is a node or an
array of the prediction's shape, or one Python number for all elements; class numbers, where a loss
takes them, have the shape without the last axis. Nothing is broadcast: predictions (n, 1) against
targets (n,) would be n · n differences. ShapeError says so, when the loss is built if the shapes
are known then, else when they are inferred.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from ..graph.node import Node, Op, Spec
from ..graph.shapes import FLOAT32, describe, floating, merge_shapes, promote
from ..graph.signature import Bool, Instance, Int, Number, Operand, Signature, declared
from .activation import softplus_op
from .compare import equal_op, greater_op, where_op
from .elementwise import (
    Parametric,
    abs_op,
    as_node,
    cast_op,
    clip_op,
    is_number,
    log1p_op,
    log_op,
    number_of,
    relu_op,
)
from .index import gather_op, one_hot_op
from .loss import (
    REDUCTION,
    Weights,
    check_integer_labels,
    class_weights,
    expand_last,
    is_integer,
    reduce_rows,
)
from .reduce import mean_op, sum_op
from .source import constant_op

_SMALLEST = 2.0**-126  # of float32 with all its digits: log is -87.3
_LARGEST = 1 - 2.0**-24  # below 1 in float32: log(1 - p) is -16.6


class ClassesLikeOp(Op):
    """One-hot rows (…, classes) of class numbers (…), like logits (…, classes)."""

    name = "classes_like"
    any_dtype = True
    signature = Signature("logits", "labels")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_integer_labels(node, specs)
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        rows = one_hot_op(cast_op(node.inputs[1], np.int64), node.spec.shape[-1], FLOAT32)
        return cast_op(rows, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, None]


class TargetOp(Op):
    """A loss's target (input 1), which has the shape of its prediction (input 0) or is refused."""

    name = "target"
    signature = Signature("prediction", "target", "*", loss=Instance(str))
    any_dtype = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if specs[0].shape != specs[1].shape:
            raise ShapeError(
                f"{node.attrs['loss']}: prediction and target must have one shape, got "
                f"{describe(node, specs)}; reshape one of them [{node.where}]"
            )
        return specs[1]

    def simplify(self, node: Node) -> Node:
        return node.inputs[1]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, output_grad]


class ClassScoresOp(Op):
    """Scores (…, classes) as they are, of at least two classes: the largest of one says nothing."""

    name = "class_scores"
    signature = Signature("scores")
    any_dtype = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if specs[0].shape[-1:] in ((), (0,), (1,)):
            raise node.error(
                f"expected scores (…, classes) of two classes at least, got {describe(node, specs)}"
                "; train.BinaryAccuracy is for one output a label"
            )
        return specs[0]

    def simplify(self, node: Node) -> Node:
        return node.inputs[0]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [output_grad]


classes_like_op = ClassesLikeOp()
target_op = TargetOp()
class_scores_op = ClassScoresOp()


class WeightsLikeOp(Op):
    """Weights in the dtype of a node whose elements they multiply, to whose shape they broadcast.

    weak: they are an array of the user's, which adapts to the node's dtype whatever its own is.
    """

    name = "weights_like"
    signature = Signature("weights", "like", "*", weak=Bool(False))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        weights, like = specs
        if merge_shapes(weights.shape, like.shape) != like.shape:
            raise node.error(f"weights do not broadcast: {describe(node, specs)}")
        dtype = like.dtype if node.attrs["weak"] else promote(node, *specs)
        return Spec(weights.shape, floating(dtype), weights.declared and not node.attrs["weak"])

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return cast_op(node.inputs[0], node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [output_grad, None]


weights_like_op = WeightsLikeOp()


def _weights_like(weights: Any, like: Node) -> Node:
    """Weights, a node or an array, as a node in the dtype of another."""
    if isinstance(weights, Node):
        return weights_like_op(weights, like)
    return weights_like_op(constant_op(np.asarray(weights)), like, weak=True)


def target_of(loss: str, prediction: Node, target: Any) -> Any:
    """What a loss compares a prediction with: a number as it is, anything else as a node of the
    prediction's shape.
    """
    if is_number(target):
        return target
    return target_op(prediction, as_node(target), loss=loss)


def _huber(d: np.ndarray, inner: np.ndarray, half: np.ndarray, y: np.ndarray, delta: float) -> None:
    np.clip(d, -delta, delta, out=inner)
    np.multiply(inner, 0.5, out=half)
    np.subtract(d, half, out=y)
    np.multiply(y, inner, out=y)


huber_op = Parametric(
    "huber", ("delta",), _huber, lambda d, y, dy, delta: dy * clip_op(d, -delta, delta),
    scratch=2, check=lambda delta: None if delta > 0 else f"expected delta > 0, got {delta}",
)  # fmt: skip
huber_op.doc = "d² / 2 where |d| <= delta, else delta · (|d| - delta / 2)."


class Weight(Operand):
    """A finite number that is not negative, or an array or a node."""

    def take(self, value: Any) -> Any:
        return _WEIGHT.take(value) if is_number(value) else super().take(value)


_WEIGHT = Number(low=0, finite=True)


@declared(reduction=REDUCTION, weights=Weights(), ignore_index=Int())
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
    infinity for other classes included. Raises OutOfRangeError for a label out of range.
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


@declared(target=Operand(), reduction=REDUCTION)
def mean_squared_error(prediction: Node, target: Any, reduction: str = "mean") -> Node:
    """(prediction - target)²."""
    difference = prediction - target_of("mean_squared_error", prediction, target)
    return reduce_rows("mean_squared_error", difference * difference, reduction)


@declared(target=Operand(), reduction=REDUCTION)
def mean_absolute_error(prediction: Node, target: Any, reduction: str = "mean") -> Node:
    """|prediction - target|; its gradient is 0 where the two are equal."""
    difference = prediction - target_of("mean_absolute_error", prediction, target)
    return reduce_rows("mean_absolute_error", abs_op(difference), reduction)


@declared(target=Operand(), delta=Number(above=0), reduction=REDUCTION)
def huber_loss(prediction: Node, target: Any, delta: float = 1.0, reduction: str = "mean") -> Node:
    """d² / 2 where d = |prediction - target| <= delta, else delta · (d - delta / 2).

    GraphError unless delta > 0. After Huber (1964).
    """
    difference = prediction - target_of("huber_loss", prediction, target)
    return reduce_rows("huber_loss", huber_op(difference, delta=float(delta)), reduction)


@declared(labels=Operand(), reduction=REDUCTION)
def binary_cross_entropy(probability: Node, labels: Any, reduction: str = "mean") -> Node:
    """-(y · log(p) + (1 - y) · log(1 - p)) of probabilities p and labels y in [0, 1].

    p is first clipped to [2^-126, 1 - 2^-24], so that the loss and its gradient stay finite; where
    that clips, the gradient is 0. With logits at hand, `binary_cross_entropy_with_logits` loses
    nothing.
    """
    labels = target_of("binary_cross_entropy", probability, labels)
    p = clip_op(probability, _SMALLEST, _LARGEST)
    rows = -(labels * log_op(p) + (1 - labels) * log1p_op(-p))
    return reduce_rows("binary_cross_entropy", rows, reduction)


@declared()
def binarycrossentropy_op(prediction: Node, labels: Node) -> Node:
    """`binary_cross_entropy` of each element."""
    return binary_cross_entropy(prediction, labels, "none")


@declared(labels=Operand(), reduction=REDUCTION, positive_weight=Weight())
def binary_cross_entropy_with_logits(
    logits: Node, labels: Any, reduction: str = "mean", positive_weight: Any = 1.0
) -> Node:
    """positive_weight · y · softplus(-x) + (1 - y) · softplus(x): the binary cross-entropy of
    sigmoid(x) and labels y in [0, 1], exact for logits of any size.

    positive_weight: a number, or an array or node that broadcasts to the logits' shape, such as one
    number a class (classes,) for logits (…, classes). Arrays take the logits' dtype. ShapeError
    where it does not broadcast.
    """
    labels = target_of("binary_cross_entropy_with_logits", logits, labels)
    if is_number(positive_weight):
        weight = number_of(positive_weight)
        positive = labels if weight == 1 else weight * labels
    else:
        positive = _weights_like(positive_weight, logits) * labels
    rows = positive * softplus_op(-logits) + (1 - labels) * softplus_op(logits)
    return reduce_rows("binary_cross_entropy_with_logits", rows, reduction)


@declared(labels=Operand(), reduction=REDUCTION)
def hinge_loss(scores: Node, labels: Any, reduction: str = "mean") -> Node:
    """max(0, 1 - y · score) for labels y of 1 and -1."""
    labels = target_of("hinge_loss", scores, labels)
    return reduce_rows("hinge_loss", relu_op(1 - labels * scores), reduction)


@declared(margin=Number(finite=True), reduction=REDUCTION)
def multiclass_hinge_loss(
    scores: Node, labels: Node, margin: float = 1.0, reduction: str = "mean"
) -> Node:
    """The mean over classes of max(0, margin - score[label] + score[c]), the label's own left out
    as 0, of each row; scores are (…, classes), labels one-hot (…, classes), or class numbers (…)
    declared with an integer dtype. After Weston and Watkins (1999).
    """
    if is_integer(labels):
        chosen = classes_like_op(scores, labels)
    else:
        chosen = target_of("multiclass_hinge_loss", scores, labels)
    own = sum_op(chosen * scores, axis=-1)
    excess = relu_op(scores - expand_last(own, scores) + margin)
    rows = mean_op((1 - chosen) * excess, axis=-1)
    return reduce_rows("multiclass_hinge_loss", rows, reduction)


@declared(p=Operand(), reduction=REDUCTION)
def kl_divergence(log_q: Node, p: Any, reduction: str = "mean") -> Node:
    """Σ p · (log p - log_q) over the last axis, of probabilities p and logarithms log_q, such as
    log_softmax of logits, both (…, classes); p = 0 adds 0. The mean is over the rows.
    """
    p = target_of("kl_divergence", log_q, as_node(p))
    rows = sum_op(p * (log_op(clip_op(p, _SMALLEST, 1.0)) - log_q), axis=-1)
    return reduce_rows("kl_divergence", rows, reduction)
