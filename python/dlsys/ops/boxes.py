"""Boxes in images: how far they overlap, and which of many that were found to keep.

Non-maximum suppression has ONNX's semantics, and Soft-NMS (Bodla et al., 2017) its arguments. How
many boxes stay depends on values; the outputs have room for all that may, and a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arguments.kinds import Bool, Int, Number, OneOf
from ..arguments.signature import Signature
from ..dtypes import INT64
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe, promote

__all__ = ["non_max_suppression_op", "soft_nms_op"]

Array = np.ndarray[Any, Any]


# ---- geometry: boxes are (x1, y1, x2, y2), the corner with the lower numbers first ----


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


def corners(boxes: Array, center: bool) -> Array:
    """Boxes (…, 4) by their lower and their upper corner, of any two opposite corners or, with
    `center`, of (x center, y center, width, height).
    """
    first, second = boxes[..., :2], boxes[..., 2:]
    if center:
        half = second / 2
        return np.concatenate([first - half, first + half], -1)
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], -1)


# ---- selection ----


class Column(NamedTuple):
    """A class of an image: its number in both, its candidates, and their boxes and scores.

    A candidate's score is above the threshold; without one, it is any number but NaN.
    """

    image: int
    label: int
    candidates: Array
    boxes: Array
    scores: Array


def columns(boxes: Array, scores: Array, threshold: float | None, center: bool) -> Iterator[Column]:
    """The classes of images, of boxes (N, B, 4) and scores (N, C, B)."""
    given = corners(boxes, center)
    for image, label in np.ndindex(scores.shape[:2]):
        own = scores[image, label]
        found = np.flatnonzero(_above(own, threshold))
        yield Column(image, label, found, given[image, found], own[found])


def _above(scores: Array, threshold: float | None) -> Array:
    return scores == scores if threshold is None else scores > threshold


def suppressed(of: Column, most: int, limit: float) -> Array:
    """The candidates that stay, the best first, at most so many: each that overlaps none that
    stayed by an IoU above the limit.
    """
    left = np.argsort(-of.scores, kind="stable")
    kept: list[int] = []
    while len(left) and len(kept) < most:
        best, left = left[0], left[1:]
        kept.append(int(best))
        left = left[iou(of.boxes[best], of.boxes[left]) <= limit]
    return of.candidates[kept]


def softly_suppressed(
    of: Column, most: int, limit: float, sigma: float | None, threshold: float | None
) -> tuple[Array, Array]:
    """The candidates in the order in which Soft-NMS takes them, at most so many, with their scores
    then.

    sigma: of the Gaussian decay, which is computed in float64, as functions of float32 differ
    between devices; None for the linear one above the limit.
    """
    scores, left = of.scores.copy(), np.arange(len(of.scores))
    kept: list[int] = []
    while len(left) and len(kept) < most:
        at = int(np.argmax(scores[left]))
        best = left[at]
        kept.append(int(best))
        left = np.delete(left, at)
        overlap = iou(of.boxes[best], of.boxes[left])
        if sigma is None:
            scores[left] *= np.where(overlap > limit, 1 - overlap, 1).astype(scores.dtype)
        else:
            decay = np.exp(-(overlap.astype(np.float64) ** 2) / sigma)
            scores[left] *= decay.astype(scores.dtype)
        left = left[_above(scores[left], threshold)]
    return of.candidates[kept], scores[kept]


# ---- operators ----


class Suppression(Op):
    """Base of the operators: a selection from each class of each image."""

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, ...]:
        boxes, scores = specs
        for x, spec in zip(node.inputs, specs):
            if spec.dtype is not None and spec.dtype.kind != "f":
                raise node.error(f"expected boxes and scores in floats, got {x.name} {spec.dtype}")
        promote(node, *specs)
        fits = len(boxes.shape) == len(scores.shape) == 3 and boxes.shape[2] == 4
        if not fits or boxes.shape[:2] != (scores.shape[0], scores.shape[2]):
            raise node.error(
                f"expected boxes (N, B, 4) and scores (N, C, B), got {describe(node, specs)}"
            )
        images, classes, count = scores.shape
        room = images * classes * min(node.attrs["max_output_boxes_per_class"], count)
        values = [scores._replace(shape=(room,))] * (self.outputs == 3)
        return Spec((room, 3), INT64, False), *values, Spec((), INT64, False)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        boxes, scores, indices, *taken, count = arrays
        threshold, center = node.attrs["score_threshold"], node.attrs["center_point_box"]
        at = 0
        for column in columns(boxes, scores, threshold, center):
            found, *values = self.select(node, column)
            rows = slice(at, at + len(found))
            indices[rows, :2], indices[rows, 2] = (column.image, column.label), found
            for y, value in zip(taken, values):
                y[rows] = value
            at += len(found)
        indices[at:] = -1
        for y in taken:
            y[at:] = 0
        count[...] = at

    def select(self, node: Node, of: Column) -> tuple[Array, ...]:
        """The boxes of a column that stay, in order, and what else the operator tells of each."""
        raise NotImplementedError

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        threshold = node.attrs["score_threshold"]
        bounds = int(threshold is not None), 0.0 if threshold is None else float(threshold)
        return float(node.attrs["iou_threshold"]), *bounds, int(node.attrs["center_point_box"])

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 16 * inputs[1].size * min(node.attrs["max_output_boxes_per_class"], 64)


class NonMaxSuppressionOp(Suppression):
    """The boxes of each class of each image that overlap none of a better score that stays, by an
    IoU above the threshold, of boxes (N, B, 4) and scores (N, C, B). Two outputs: rows (image,
    class, box) of int64 in this order, the best score first, then -1; and the number of boxes.
    """

    name = kernel = "non_max_suppression"
    outputs = 2
    discrete_outputs = (0, 1)
    signature = Signature(
        "boxes", "scores", max_output_boxes_per_class=Int(low=0),
        iou_threshold=Number(0.5, low=0, high=1), score_threshold=Number(None),
        center_point_box=Bool(False),
    )  # fmt: skip

    def select(self, node: Node, of: Column) -> tuple[Array, ...]:
        limit = of.boxes.dtype.type(node.attrs["iou_threshold"])
        return (suppressed(of, node.attrs["max_output_boxes_per_class"], limit),)


class SoftNmsOp(Suppression):
    """The boxes of each class of each image as Soft-NMS takes them in turn, of boxes (N, B, 4) and
    scores (N, C, B). Three outputs: rows (image, class, box) of int64 in this order, then -1; the
    score of each as it was taken, then 0; and the number of boxes.
    """

    name = kernel = "soft_nms"
    outputs = 3
    discrete_outputs = (0, 1, 2)
    signature = Signature(
        "boxes", "scores", max_output_boxes_per_class=Int(low=0),
        iou_threshold=Number(0.5, low=0, high=1), score_threshold=Number(None),
        center_point_box=Bool(False), method=OneOf("gaussian", "linear", default="gaussian"),
        sigma=Number(0.5, above=0),
    )  # fmt: skip

    def select(self, node: Node, of: Column) -> tuple[Array, ...]:
        attrs, real = node.attrs, of.boxes.dtype.type
        sigma = float(real(attrs["sigma"])) if attrs["method"] == "gaussian" else None
        return softly_suppressed(
            of, attrs["max_output_boxes_per_class"], real(attrs["iou_threshold"]), sigma,
            attrs["score_threshold"],
        )  # fmt: skip

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        gaussian = node.attrs["method"] == "gaussian"
        return float(node.attrs["sigma"]) if gaussian else 0.0, *super().scalars(node)


non_max_suppression_op = NonMaxSuppressionOp()
soft_nms_op = SoftNmsOp()
