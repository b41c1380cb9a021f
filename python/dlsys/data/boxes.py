"""Boxes in images: their overlap, and which of many that were found to keep.

A box is four numbers (x1, y1, x2, y2) of pixels' edges: its upper left and its lower right corner.
"""

from __future__ import annotations

import numpy as np

from .dataset import Array


def area(boxes: Array) -> Array:
    """The areas of boxes (…, 4)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def intersection(a: Array, b: Array) -> Array:
    """The area that boxes have in common: (…, 4) and (…, 4), which broadcast."""
    low = np.maximum(a[..., :2], b[..., :2])
    extent = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - low, 0, None)
    return extent[..., 0] * extent[..., 1]


def iou(a: Array, b: Array) -> Array:
    """The intersection of boxes over their union, 0 where that is empty: (…, 4) and (…, 4), which
    broadcast.

    >>> iou(np.array([0.0, 0, 2, 2]), np.array([[1.0, 0, 3, 2], [5, 5, 6, 6]]))
    array([0.33333333, 0.        ])
    """
    both = intersection(a, b)
    union = area(a) + area(b) - both
    return np.divide(both, union, out=np.zeros_like(both), where=union > 0)


def nms(boxes: Array, scores: Array, limit: float = 0.5, most: int | None = None) -> Array:
    """Non-maximum suppression: the indices of boxes (n, 4) in the order of their scores (n,), less
    those that overlap a better one of them by an IoU above the limit. most: how many to keep.

    >>> nms(np.array([[0.0, 0, 4, 4], [0, 0, 4, 5], [9, 9, 10, 10]]), np.array([0.5, 0.9, 0.1]))
    array([1, 2])
    """
    left = np.argsort(-scores, kind="stable")
    kept: list[int] = []
    while len(left) and (most is None or len(kept) < most):
        best, left = left[0], left[1:]
        kept.append(int(best))
        left = left[iou(boxes[best], boxes[left]) <= limit]
    return np.asarray(kept, np.int64)


def soft_nms(
    boxes: Array, scores: Array, sigma: float = 0.5, least: float = 1e-3
) -> tuple[Array, Array]:
    """Soft-NMS of Bodla et al. (2017): an overlap with a better box does not remove a box but
    lowers its score by exp(-IoU² / sigma). Returns the indices of those whose score remains at
    `least` or above, best first, and their new scores.

    >>> found, scores = soft_nms(np.array([[0.0, 0, 4, 4], [0, 0, 4, 4]]), np.array([0.5, 0.9]))
    >>> found, scores.round(3)
    (array([1, 0]), array([0.9  , 0.068]))
    """
    scores = scores.copy()
    left = np.flatnonzero(scores >= least)
    kept: list[int] = []
    while len(left):
        at = int(np.argmax(scores[left]))
        best = left[at]
        kept.append(int(best))
        left = np.delete(left, at)
        scores[left] *= np.exp(-(iou(boxes[best], boxes[left]) ** 2) / sigma)
        left = left[scores[left] >= least]
    indices = np.asarray(kept, np.int64)
    return indices, scores[indices]
