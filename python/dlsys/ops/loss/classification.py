"""Losses of scores and probabilities: binary cross-entropy, hinge, Kullback-Leibler. They are built
of other operators, which give their gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arguments.kinds import Bool, Number
from ...arguments.signature import Signature, declared
from ...dtypes import FLOAT16
from ...graph.node import Node, Op
from ...graph.spec import FLOAT32, Spec, describe, floating, merge_shapes, promote
from ..activation import softplus_op
from ..elementwise import (
    as_node,
    cast_op,
    clip_op,
    is_number,
    log1p_op,
    log_op,
    number_of,
    relu_op,
)
from ..indexing import one_hot_op
from ..leaf import Operand, constant_op
from ..reduce import mean_op, sum_op
from .rows import (
    REDUCTION,
    check_integer_labels,
    expand_last,
    is_integer,
    reduce_rows,
    target_of,
)

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "binarycrossentropy_op",
    "hinge_loss", "kl_divergence", "multiclass_hinge_loss",
]  # fmt: skip

# Probabilities of finite logarithms: float32's smallest normal number, whose log is -87.3, and the
# largest below 1, where log(1 - p) is -16.6. In float16 these would round to 0 and 1.
_INSIDE = 2.0**-126, 1 - 2.0**-24
_INSIDE_FLOAT16 = 2.0**-24, 1 - 2.0**-11


class ClassesLikeOp(Op):
    """One-hot rows (…, classes) of class indices (…), like logits (…, classes)."""

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
classes_like_op = ClassesLikeOp()


def _weights_like(weights: Any, like: Node) -> Node:
    """Weights, a node or an array, as a node in the dtype of another."""
    if isinstance(weights, Node):
        return weights_like_op(weights, like)
    return weights_like_op(constant_op(np.asarray(weights)), like, weak=True)


class Weight(Operand):
    """A finite number that is not negative, or an array or a node."""

    def take(self, value: Any) -> Any:
        return _WEIGHT.take(value) if is_number(value) else super().take(value)


_WEIGHT = Number(low=0, finite=True)


@declared(labels=Operand(), reduction=REDUCTION)
def binary_cross_entropy(probability: Node, labels: Any, reduction: str = "mean") -> Node:
    """-(y · log(p) + (1 - y) · log(1 - p)) of probabilities p and labels y in [0, 1].

    p is first clipped to [2^-126, 1 - 2^-24], float16 to [2^-24, 1 - 2^-11], so that the loss and
    its gradient stay finite; where that clips, the gradient is 0. With logits at hand,
    `binary_cross_entropy_with_logits` loses nothing. probability, labels: one shape. reduction:
    "mean", "sum" or "none".
    """
    labels = target_of("binary_cross_entropy", probability, labels)
    p = clip_op(probability, *_inside(probability))
    rows = -(labels * log_op(p) + (1 - labels) * log1p_op(-p))
    return reduce_rows("binary_cross_entropy", rows, reduction)


@declared()
def binarycrossentropy_op(prediction: Node, labels: Node) -> Node:
    """`binary_cross_entropy` of each element.

    prediction, labels: one shape.
    """
    return binary_cross_entropy(prediction, labels, "none")


@declared(labels=Operand(), reduction=REDUCTION, positive_weight=Weight())
def binary_cross_entropy_with_logits(
    logits: Node, labels: Any, reduction: str = "mean", positive_weight: Any = 1.0
) -> Node:
    """positive_weight · y · softplus(-x) + (1 - y) · softplus(x): the binary cross-entropy of
    sigmoid(x) and labels y in [0, 1], exact for logits of any size.

    positive_weight: a number, or an array or node that broadcasts to the logits' shape, such as one
    number a class (classes,) for logits (…, classes). Arrays take the logits' dtype. reduction:
    "mean", "sum" or "none". ShapeError where it does not broadcast.
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
    """max(0, 1 - y · score) for labels y of 1 and -1.

    scores, labels: one shape. reduction: "mean", "sum" or "none".
    """
    labels = target_of("hinge_loss", scores, labels)
    return reduce_rows("hinge_loss", relu_op(1 - labels * scores), reduction)


@declared(margin=Number(finite=True), reduction=REDUCTION)
def multiclass_hinge_loss(
    scores: Node, labels: Node, margin: float = 1.0, reduction: str = "mean"
) -> Node:
    """The mean over classes of max(0, margin - score[label] + score[c]), the label's own left out
    as 0, of each row; scores are (…, classes), labels one-hot (…, classes), or class indices (…)
    declared with an integer dtype. After Weston and Watkins (1999).

    reduction: "mean", "sum" or "none".
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

    reduction: "mean", "sum" or "none".
    """
    p = target_of("kl_divergence", log_q, as_node(p))
    smallest, _ = _inside(p)
    rows = sum_op(p * (log_op(clip_op(p, smallest, 1.0)) - log_q), axis=-1)
    return reduce_rows("kl_divergence", rows, reduction)


def _inside(p: Node) -> tuple[float, float]:
    return _INSIDE_FLOAT16 if p.dtype == FLOAT16 else _INSIDE
