"""Losses of predictions against targets, built of other operators, which give their gradients."""

from __future__ import annotations

from typing import Any

from ...graph.kinds import Number, Operand
from ...graph.node import Node
from ...graph.signature import declared
from ..elementwise import (
    abs_op,
    clip_op,
)
from .rows import (
    REDUCTION,
    reduce_rows,
    target_of,
)

__all__ = ["huber_loss", "mean_absolute_error", "mean_squared_error"]


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
    distance = abs_op(prediction - target_of("huber_loss", prediction, target))
    inner = clip_op(distance, 0.0, float(delta))
    return reduce_rows("huber_loss", inner * (distance - 0.5 * inner), reduction)
