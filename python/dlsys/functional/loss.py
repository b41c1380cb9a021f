"""Losses. Each takes `reduction`: "mean" or "sum" give one number, "none" one a row or element.

Nothing is broadcast: a prediction (n, 1) against a target (n,) is refused by ShapeError, since it
would make n · n differences. A target may be a number or an array too.
"""

from __future__ import annotations

from typing import Any

from ..graph.node import Node
from ..ops.elementwise import as_node
from ..ops.loss import classification, likelihood, regression
from ..ops.loss import cross_entropy as softmax_loss
from .record import Array, recorded

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "hinge_loss",
    "huber_loss", "kl_div", "l1_loss", "mse_loss", "multi_margin_loss", "nll_loss",
]  # fmt: skip


@recorded
def cross_entropy(
    logits: Array,
    targets: Array,
    weight: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Array:
    """The cross-entropy -Σ_c y_c · log softmax(logits)_c over the last axis.

    logits: (…, classes), floats. targets: class indices (…) of an integer dtype, or probabilities
    (…, classes) in the logits' dtype. weight: a number a class, (classes,). label_smoothing s takes
    targets y as (1 - s) · y + s / classes. Rows whose class index is ignore_index have no loss. The
    mean of class indices is over the weights of the rows' classes, ignored rows counting 0; that of
    probabilities is over the rows. reduction: "mean" or "sum" for one number, "none" for one a row.

    ShapeError where shapes do not fit, OutOfRangeError for a class index out of range, GraphError
    for ignore_index with probabilities.

    >>> logits = dl.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    >>> F.cross_entropy(logits, [0, 1])
    Tensor(0.28872603, device=numpy)
    >>> F.cross_entropy(logits, [0, 2], reduction="none", label_smoothing=0.1)
    Tensor([0.507606 , 2.1365128], device=numpy)
    """
    return softmax_loss.softmax_cross_entropy(
        as_node(logits), as_node(targets), reduction, label_smoothing, _weights(weight),
        ignore_index,
    )  # fmt: skip


@recorded
def nll_loss(
    log_probabilities: Array,
    targets: Array,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Array:
    """The negative log-likelihood -log_probabilities[target] of each row.

    log_probabilities: (…, classes), as of `log_softmax`. targets: class indices (…) of an integer
    dtype. weight: a number a class, (classes,). Rows whose class index is ignore_index have no
    loss; the mean is over the weights of the rows' classes. reduction: "mean" or "sum" for one
    number, "none" for one a row. ShapeError where shapes do not fit, OutOfRangeError for a class
    index out of range.

    >>> logits = dl.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    >>> F.nll_loss(F.log_softmax(logits), [0, 1])
    Tensor(0.28872603, device=numpy)
    """
    return likelihood.negative_log_likelihood(
        as_node(log_probabilities), as_node(targets), reduction, _weights(weight), ignore_index
    )


@recorded
def mse_loss(prediction: Array, target: Array, reduction: str = "mean") -> Array:
    """The squared error (prediction - target)² of each element.

    prediction and target: one shape, floats of one dtype. reduction: "mean" or "sum" for one
    number, "none" for one an element. ShapeError where the shapes differ.

    >>> F.mse_loss(dl.tensor([1.0, 2.0]), [0.0, 4.0])
    Tensor(2.5, device=numpy)
    """
    return regression.mean_squared_error(as_node(prediction), target, reduction)


@recorded
def l1_loss(prediction: Array, target: Array, reduction: str = "mean") -> Array:
    """The absolute error |prediction - target| of each element, its gradient 0 where they are
    equal.

    prediction and target: one shape, floats of one dtype. reduction: "mean" or "sum" for one
    number, "none" for one an element. ShapeError where the shapes differ.

    >>> F.l1_loss(dl.tensor([1.0, 2.0]), [0.0, 4.0])
    Tensor(1.5, device=numpy)
    """
    return regression.mean_absolute_error(as_node(prediction), target, reduction)


@recorded
def huber_loss(
    prediction: Array, target: Array, delta: float = 1.0, reduction: str = "mean"
) -> Array:
    """d² / 2 where d = |prediction - target| <= delta, else delta · (d - delta / 2).

    prediction and target: one shape, floats of one dtype. reduction: "mean" or "sum" for one
    number, "none" for one an element. ShapeError where the shapes differ, SignatureError unless
    delta > 0. After Huber (1964).

    >>> F.huber_loss(dl.tensor([0.0, 4.0]), [0.5, 0.0], delta=1.0, reduction="none")
    Tensor([0.125, 3.5  ], device=numpy)
    """
    return regression.huber_loss(as_node(prediction), target, delta, reduction)


@recorded
def binary_cross_entropy(probability: Array, target: Array, reduction: str = "mean") -> Array:
    """-(y · log p + (1 - y) · log(1 - p)) of probabilities p and targets y in [0, 1].

    probability and target: one shape, floats of one dtype. p is first clipped to [2^-126, 1 -
    2^-24], in float16 to [2^-24, 1 - 2^-11], so that loss and gradient stay finite; where that
    clips, the gradient is 0. reduction:
    "mean" or "sum" for one number, "none" for one an element. ShapeError where the shapes differ.
    `binary_cross_entropy_with_logits` loses nothing.

    >>> F.binary_cross_entropy(dl.tensor([0.5, 0.9]), [0.0, 1.0])
    Tensor(0.39925388, device=numpy)
    """
    return classification.binary_cross_entropy(as_node(probability), target, reduction)


@recorded
def binary_cross_entropy_with_logits(
    logits: Array, target: Array, reduction: str = "mean", pos_weight: Any = 1.0
) -> Array:
    """pos_weight · y · softplus(-x) + (1 - y) · softplus(x): the binary cross-entropy of sigmoid(x)
    and targets y in [0, 1], exact for logits of any size.

    logits and target: one shape, floats of one dtype. pos_weight: a number, or numbers that
    broadcast to that shape. reduction: "mean" or "sum" for one number, "none" for one an element.
    ShapeError where shapes do not fit.

    >>> F.binary_cross_entropy_with_logits(dl.tensor([0.0, 5.0]), [1.0, 0.0], "none")
    Tensor([0.6931472, 5.0067153], device=numpy)
    """
    return classification.binary_cross_entropy_with_logits(
        as_node(logits), target, reduction, pos_weight
    )


@recorded
def hinge_loss(scores: Array, target: Array, reduction: str = "mean") -> Array:
    """max(0, 1 - y · score) of each element, for targets y of 1 and -1.

    scores and target: one shape, floats of one dtype. reduction: "mean" or "sum" for one number,
    "none" for one an element. ShapeError where the shapes differ.

    >>> F.hinge_loss(dl.tensor([0.5, 2.0]), [1.0, -1.0], reduction="none")
    Tensor([0.5, 3. ], device=numpy)
    """
    return classification.hinge_loss(as_node(scores), target, reduction)


@recorded
def multi_margin_loss(
    scores: Array, targets: Array, margin: float = 1.0, reduction: str = "mean"
) -> Array:
    """The mean over classes of max(0, margin - score[target] + score[c]), the target's own left
    out as 0, of each row.

    scores: (…, classes), floats. targets: class indices (…) of an integer dtype, or one-hot rows
    (…, classes). reduction: "mean" or "sum" for one number, "none" for one a row. ShapeError where
    shapes do not fit, OutOfRangeError for a class index out of range. After Weston and Watkins
    (1999).

    >>> logits = dl.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    >>> F.multi_margin_loss(logits, [0, 2], reduction="none")
    Tensor([0., 1.], device=numpy)
    """
    return classification.multiclass_hinge_loss(
        as_node(scores), as_node(targets), margin, reduction
    )


@recorded
def kl_div(log_q: Array, p: Array, reduction: str = "mean") -> Array:
    """The Kullback-Leibler divergence Σ p · (log p - log_q) over the last axis.

    log_q: logarithms of probabilities (…, classes), as of `log_softmax`; p: probabilities of the
    same shape; p = 0 adds 0. The mean is over the rows, what PyTorch calls "batchmean". reduction:
    "mean" or "sum" for one number, "none" for one a row. ShapeError where the shapes differ.

    >>> logits = dl.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    >>> F.kl_div(F.log_softmax(logits), F.softmax(logits[::-1]))
    Tensor(1.7538772, device=numpy)
    """
    return classification.kl_divergence(as_node(log_q), p, reduction)


def _weights(weight: Any) -> Any:
    """Weights a class: a node as it is, other numbers as a tuple of floats."""
    if weight is None or isinstance(weight, Node):
        return weight
    return tuple(float(number) for number in weight)
