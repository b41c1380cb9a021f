"""Softmax and losses."""

from __future__ import annotations

import numpy as np

from ....graph.node import Node
from ....ops.elementwise import cast_op, sqrt_op
from ....ops.indexing import one_hot_op
from ....ops.loss.softmax import log_softmax_op, softmax_op
from ....ops.movement import expand_dims_op, reshape_op
from ....ops.reduce import mean_op, sum_op
from ....ops.sorting import take_along_axis_op
from ..registry import rule
from ..trace import Emitter
from .elementwise import arithmetic


@rule("softmax", "Softmax")
def _softmax(g: Emitter, node: Node, x: str) -> str:
    return arithmetic(g, node, "Softmax", x, axis=node.attrs["axis"])


@rule("log_softmax", "LogSoftmax")
def _log_softmax(g: Emitter, node: Node, x: str) -> str:
    return arithmetic(g, node, "LogSoftmax", x, axis=node.attrs["axis"])


# ---- cross-entropy of weights of the classes ----


@rule("softmax_cross_entropy")
def _rows(g: Emitter, node: Node, *names: str) -> Node:
    x, labels = (cast_op(i, node.spec.dtype) for i in node.inputs)
    return -sum_op(labels * log_softmax_op(x), axis=-1)


@rule("softmax_cross_entropy_gradient")
def _gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, labels, dy = (cast_op(i, node.spec.dtype) for i in node.inputs)
    total = sum_op(labels, axis=-1, keepdims=True)
    return (softmax_op(x) * total - labels) * _column(dy, node)


@rule("softmaxcrossentropy")
def _mean(g: Emitter, node: Node, *names: str) -> Node:
    x, labels = (cast_op(i, node.spec.dtype) for i in node.inputs)
    return reshape_op(mean_op(-sum_op(labels * log_softmax_op(x), axis=-1)), (1,))


# ---- of class numbers ----


def _column(rows: Node, node: Node) -> Node:
    """One number a row, to broadcast over the classes of the node's rows."""
    return reshape_op(rows, (*node.spec.shape[:-1], 1))


def _of_labels(x: Node, labels: Node) -> Node:
    """The element of each row that its label names."""
    at = expand_dims_op(cast_op(labels, np.int64), -1)
    return reshape_op(take_along_axis_op(x, at, axis=-1), labels.spec.shape)


def _one_hot(labels: Node, node: Node) -> Node:
    rows = one_hot_op(cast_op(labels, np.int64), node.spec.shape[-1])
    return cast_op(rows, node.spec.dtype)


@rule("sparse_softmax_cross_entropy")
def _sparse_rows(g: Emitter, node: Node, *names: str) -> Node:
    x, labels = node.inputs
    return -_of_labels(log_softmax_op(cast_op(x, node.spec.dtype)), labels)


@rule("sparse_softmax_cross_entropy_gradient")
def _sparse_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, labels, dy = node.inputs
    rows = softmax_op(cast_op(x, node.spec.dtype)) - _one_hot(labels, node)
    return rows * _column(cast_op(dy, node.spec.dtype), node)


@rule("negative_log_likelihood")
def _likelihood(g: Emitter, node: Node, *names: str) -> Node:
    x, labels = node.inputs
    return -_of_labels(cast_op(x, node.spec.dtype), labels)


@rule("negative_log_likelihood_gradient")
def _likelihood_gradient(g: Emitter, node: Node, *names: str) -> Node:
    labels, dy = node.inputs
    return _one_hot(labels, node) * _column(-dy, node)


# ---- of data sets on the device ----


@rule("scaled")
def _scaled(g: Emitter, node: Node, *names: str) -> Node:
    x, scale = node.inputs
    return cast_op(x, node.spec.dtype) * scale


@rule("global_norm")
def _global_norm(g: Emitter, node: Node, *names: str) -> Node:
    squares = [sum_op(x * x) for x in node.inputs]
    return reshape_op(sqrt_op(sum(squares[1:], squares[0])), node.spec.shape)
