"""From a detector's output to boxes: decoding, suppression and the best of them, in one program on
any device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import functional as F
from ... import nn
from ...autodiff import Node
from .network import distances, positions

Array = np.ndarray[Any, Any]

SUPPRESSIONS = ("hard", "soft", "none")
CANDIDATES, MOST = 300, 100  # boxes of a photo, before suppression and after it
OVERLAP = 0.6  # IoU of two boxes of one class, above which only the better one stays


def boxes_of(output: Node, places: Array) -> tuple[Node, Node]:
    """The boxes (n, positions, 4) in pixels of the images and the probabilities (n, positions,
    classes) that a Detector tells.
    """
    edges = distances(output) * places[:, 2:]
    at = places[:, :2]
    found = F.concatenate([at - edges[:, :, :2], at + edges[:, :, 2:]], axis=2)
    return found, F.sigmoid(output[:, :, :-4])


class Prediction(nn.Module):
    """Images (n, 3, size, size) and their frames (n, 3) to what a Detector finds in each: boxes
    (n, m, 4), classes (n, m) int64 and scores (n, m), the highest first; behind them scores are 0.

    A frame is the factor by which a photo became its image, the photo's width and its height; boxes
    are in the pixels of the photo. least: the least score of a box. suppression: "hard" removes a
    box that overlaps a better one of its class, "soft" lowers its score (Soft-NMS), "none" does
    nothing.
    """

    def __init__(self, detector: nn.Module, size: int, least: float, suppression: str) -> None:
        self.detector, self.suppression = detector, suppression
        self.places = positions(size)
        # Scores count above a threshold: the float32 before `least`.
        self.threshold = float(np.nextafter(np.float32(least), np.float32(-np.inf)))

    def forward(self, images: Node, frames: Node) -> tuple[Node, Node, Node]:
        boxes, chances = boxes_of(self.detector(images), self.places)
        _, count, classes = chances.shape or (0,) * 3
        most = min(CANDIDATES, count * classes)
        scores, index = F.topk(F.reshape(chances, (-1, count * classes)), most, axis=1)
        boxes, labels = _rows(boxes, index // classes), index % classes
        photo = F.expand_dims(frames, 1)
        edges = F.concatenate([photo[:, :, 1:], photo[:, :, 1:]], axis=2)
        boxes = F.minimum(F.maximum(boxes / photo[:, :, :1], 0.0), edges)
        scores = self._suppressed(boxes, labels, scores, classes)
        scores, order = F.topk(scores, min(MOST, most), axis=1)
        return _rows(boxes, order), F.take_along_axis(labels, order, axis=1), scores

    def _suppressed(self, boxes: Node, labels: Node, scores: Node, classes: int) -> Node:
        """The scores (n, m) of the candidates that stay, 0 of the others. Classes do not touch each
        other: a candidate's score in all but its own is below every threshold.
        """
        if self.suppression == "none":
            return F.where(scores > self.threshold, scores, 0.0)
        own = F.expand_dims(labels, 1) == np.arange(classes).reshape(1, classes, 1)
        by_class = F.where(own, F.expand_dims(scores, 1), -np.inf)
        # A row names a candidate of all images by its number from 1 on; 0 stands for none.
        most = (scores.shape or (0,))[-1]
        every = F.concatenate([np.zeros(1, np.float32), F.reshape(scores, (-1,))], axis=0)
        if self.suppression == "soft":
            rows, taken, _ = F.soft_nms(boxes, by_class, MOST, score_threshold=self.threshold)
            numbers = _numbers(rows, most)
        else:
            rows, _ = F.non_max_suppression(boxes, by_class, MOST, OVERLAP, self.threshold)
            numbers = _numbers(rows, most)
            taken = F.take(every, numbers)
        kept = F.scatter_add(F.zeros_like(every), numbers, taken)
        return F.reshape(kept[1:], (-1, most))


def _numbers(rows: Node, most: int) -> Node:
    """The numbers of the candidates that rows (image, class, candidate) name, of `most` a photo."""
    return F.maximum(rows[:, 0] * most + rows[:, 2] + 1, 0)


def _rows(boxes: Node, index: Node) -> Node:
    """Boxes (n, b, 4) at indices (n, m)."""
    return F.take_along_axis(boxes, F.tile(F.expand_dims(index, 2), (1, 1, 4)), axis=1)
