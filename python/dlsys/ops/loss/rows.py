"""Shared parts of losses: targets, class labels, weights, and the reduction over rows.

Losses take `reduction`: "mean" or "sum" over all elements or rows, or "none". A target is a node or
an array of the prediction's shape, or one Python number for all elements; class labels, where a
loss takes them, have the shape without the last axis. Nothing is broadcast: predictions (n, 1)
against targets (n,) would be n · n differences. ShapeError says so, when the loss is built if the
shapes are known then, else when they are inferred.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arguments.kinds import Instance, Kind, OneOf, items, number
from ...arguments.signature import Signature
from ...errors import GraphError, ShapeError
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe, floating
from ..comparison import where_op
from ..elementwise import (
    as_node,
    is_number,
)
from ..leaf import constant_op, oneslike_op
from ..movement import reshape_like_op
from ..reduce import mean_op, sum_op

REDUCTION = OneOf("mean", "sum", "none")


class Numbers(Kind):
    """A tuple of numbers."""

    expected = "a sequence of numbers"

    def take(self, value: Any) -> tuple[float, ...]:
        return tuple([number(item) for item in items(value)])


class Weights(Numbers):
    """A number a class, or a node of them."""

    expected = "one number a class, or a node of them"

    def take(self, value: Any) -> Any:
        return value if isinstance(value, Node) else super().take(value)


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
        return constant_op(np.array(node.attrs["values"]), dtype=node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


def target_of(loss: str, prediction: Node, target: Any) -> Any:
    """The target that a loss compares a prediction with: a number as it is, anything else as a node
    of the prediction's shape.
    """
    if is_number(target):
        return target
    return target_op(prediction, as_node(target), loss=loss)


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
        raise node.error(f"expected one class index a row, got {describe(node, specs[:2])}")


def check_class_numbers(node: Node, spec: Spec, name: str) -> None:
    """Refuses labels, an input of this name, that are no integers."""
    if spec.dtype is not None and spec.dtype.kind not in "iu":
        raise node.error(f"class indices must be integers, got {name} of {spec.dtype}")


def check_row_gradients(node: Node, specs: tuple[Spec, ...]) -> None:
    """Refuses output gradients that are not one a row of the logits."""
    if specs[2].size != math.prod(specs[0].shape[:-1]):
        raise node.error(f"expected one output gradient a row, got {describe(node, specs)}")


def is_integer(labels: Node) -> bool:
    """True where labels are known to be class labels, integers."""
    if labels.spec is not None and labels.spec.dtype is not None:
        return labels.spec.dtype.kind in "iu"
    declared = labels.attrs.get("dtype")
    return declared is not None and declared.kind in "iu"


def take_labels(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return values.reshape(-1)[label_offsets(values, labels)].reshape(labels.shape)


def label_offsets(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The flat index in the values of each row's label."""
    rows = np.arange(0, values.size, values.shape[-1])
    return rows + labels.reshape(-1).astype(np.int64, copy=False)


target_op = TargetOp()
class_scores_op = ClassScoresOp()
class_weights_op = ClassWeightsOp()
