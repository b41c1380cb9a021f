"""The negative log-likelihood of class labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arguments.kinds import Int
from ...arguments.signature import Signature, declared
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe, floating
from ..comparison import equal_op, where_op
from ..elementwise import (
    cast_op,
)
from ..indexing import check_range, gather_op
from .rows import (
    REDUCTION,
    Weights,
    check_class_numbers,
    check_integer_labels,
    class_weights,
    label_offsets,
    reduce_rows,
    take_labels,
)

__all__ = ["negative_log_likelihood"]


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
            loss[...] = take_labels(x, labels)  # in the loss's dtype, which unsigned integers need
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
            dx.reshape(-1)[label_offsets(dx, labels)] = -dy.reshape(-1)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, likelihood_rows_op(output_grad, node.inputs[0])]


likelihood_rows_op = NegativeLogLikelihoodRowsOp()
likelihood_gradient_like_op = NegativeLogLikelihoodGradientLikeOp()
likelihood_gradient_op = NegativeLogLikelihoodGradientOp()


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
    infinity for other classes included. reduction: "mean", "sum" or "none". Raises OutOfRangeError
    for a label out of range.
    """
    ignored = row_weights = None
    if ignore_index is not None:
        ignored = equal_op(labels, ignore_index)
        labels = where_op(ignored, 0, labels)
    rows = likelihood_rows_op(log_probabilities, labels)
    if weights is not None:
        row_weights = gather_op(
            class_weights(weights, log_probabilities), cast_op(labels, np.int64)
        )
        rows = rows * row_weights
    return reduce_rows("negative_log_likelihood", rows, reduction, row_weights, ignored)
