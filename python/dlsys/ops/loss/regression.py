"""Losses of predictions against targets."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arguments.kinds import Number
from ...arguments.signature import declared
from ...graph.node import Node
from ..elementwise import (
    Parametric,
    abs_op,
    clip_op,
)
from ..leaf import Operand
from .rows import (
    REDUCTION,
    reduce_rows,
    target_of,
)

__all__ = ["huber_loss", "mean_absolute_error", "mean_squared_error"]


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


@declared(target=Operand(), reduction=REDUCTION)
def mean_squared_error(prediction: Node, target: Any, reduction: str = "mean") -> Node:
    """(prediction - target)².

    prediction, target: one shape. reduction: "mean", "sum" or "none".
    """
    difference = prediction - target_of("mean_squared_error", prediction, target)
    return reduce_rows("mean_squared_error", difference * difference, reduction)


@declared(target=Operand(), reduction=REDUCTION)
def mean_absolute_error(prediction: Node, target: Any, reduction: str = "mean") -> Node:
    """|prediction - target|; its gradient is 0 where the two are equal.

    prediction, target: one shape. reduction: "mean", "sum" or "none".
    """
    difference = prediction - target_of("mean_absolute_error", prediction, target)
    return reduce_rows("mean_absolute_error", abs_op(difference), reduction)


@declared(target=Operand(), delta=Number(above=0), reduction=REDUCTION)
def huber_loss(prediction: Node, target: Any, delta: float = 1.0, reduction: str = "mean") -> Node:
    """d² / 2 where d = |prediction - target| <= delta, else delta · (d - delta / 2).

    GraphError unless delta > 0. prediction, target: one shape. reduction: "mean", "sum" or "none".
    After Huber (1964).
    """
    difference = prediction - target_of("huber_loss", prediction, target)
    return reduce_rows("huber_loss", huber_op(difference, delta=float(delta)), reduction)
