"""Rosenblatt's perceptron."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import functional as F
from ...arguments.signature import declared
from ...autodiff import Node
from ...errors import GraphError, ShapeError
from ...init import zeros
from ..layers import SIZE, Linear
from ..module import Module


class Perceptron(Module):
    """One unit: x (N, inputs) to scores w · x + b (N,), positive for class 1, else class 0.

    With `loss` and any constant learning rate, gradient steps separate every set that a hyperplane
    separates, in finitely many steps: they are the perceptron's own rule, on all wrong points at
    once. Everything begins at 0. Rosenblatt, "The perceptron" (1958); Novikoff (1962) for the
    proof.
    """

    @declared(inputs=SIZE)
    def __init__(self, inputs: int = 2) -> None:
        self.linear = Linear(inputs, 1, initializer=zeros)

    def forward(self, x: Node) -> Node:
        return F.squeeze(self.linear(x), axis=1)

    @staticmethod
    def loss(scores: Node, labels: Node) -> Node:
        """The mean of max(0, -t · score), t = 1 for label 1 and -1 for label 0; labels (N,) are
        declared with an integer dtype. A score of 0 is wrong too, and has the gradient of a wrong
        one, or nothing would ever move.
        """
        margins = (2 * F.astype(labels, np.float32) - 1) * scores
        return F.mean(F.where(F.less_equal(margins, 0.0), -margins, 0.0))

    def line(self) -> tuple[np.ndarray, float]:
        """The line of score 0: the normal w (inputs,) and b of w · x + b = 0."""
        weight, bias = self.linear.parameters()
        return weight.asnumpy()[0], float(bias.asnumpy()[0])

    def predict(self, points: Any) -> np.ndarray:
        """The classes, 0 or 1 (int64), of points (N, inputs). ShapeError for another shape."""
        normal, offset = self.line()
        points = np.asarray(points)
        if points.ndim != 2 or points.shape[1] != len(normal):
            raise ShapeError(f"Perceptron: expected points (N, {len(normal)}), got {points.shape}")
        return (points @ normal + offset > 0).astype(np.int64)

    def separates(self, points: Any, labels: Any) -> bool:
        """True if every point (N, inputs) is on the side of its label (N,), 0 or 1."""
        return bool((self.predict(points) == np.asarray(labels)).all())

    def boundary(self, low: Any, high: Any) -> np.ndarray | None:
        """The part of the line that is in a box: its two ends as (2, 2), None if it misses the box.

        low and high are the box's corners, two numbers or one for both. GraphError unless there
        are two inputs.
        """
        normal, offset = (np.float64(value) for value in self.line())
        if normal.shape != (2,):
            raise GraphError(f"boundary: a line needs 2 inputs, the perceptron has {normal.size}")
        corners = np.broadcast_to(low, 2), np.broadcast_to(high, 2)
        if not normal.any():
            return None
        foot = -offset * normal / (normal @ normal)
        direction = np.array([-normal[1], normal[0]])
        begin, end = -np.inf, np.inf
        for at, slope, least, most in zip(foot, direction, *corners):
            if slope:
                first, last = sorted(((least - at) / slope, (most - at) / slope))
                begin, end = max(begin, first), min(end, last)
            elif not least <= at <= most:
                return None
        return np.stack([foot + t * direction for t in (begin, end)]) if begin <= end else None
