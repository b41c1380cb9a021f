"""Mean average precision as COCO defines it: the twelve figures of its evaluation of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...ops.boxes import area, intersection, iou
from .scenes import Scene

Array = np.ndarray[Any, Any]

LIMITS = np.linspace(0.5, 0.95, 10)  # of IoU, at which a box counts as found
_RECALLS = np.linspace(0, 1, 101)
_SIZES = {"all": (0, 1e10), "small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}
_MOST = (1, 10, 100)  # boxes of a class in an image
_EPS = np.spacing(1)


class Found(NamedTuple):
    """What was found in a photo: boxes (k, 4), their labels and scores (k,)."""

    boxes: Array
    labels: Array
    scores: Array


class Figures(NamedTuple):
    """`means`: COCO's twelve figures by name, NaN where nothing is there to be found; `by_class`:
    the average precision at IoU 0.5 of each class.
    """

    means: dict[str, float]
    by_class: tuple[float, ...]


class _Matched(NamedTuple):
    """Of one class in one image: scores in descending order; for each IoU limit which boxes hit
    something, and which count neither way; how many there are to be found.
    """

    scores: Array
    hit: Array
    ignored: Array
    things: int


def measured(truth: Sequence[Scene], found: Sequence[Found], classes: int) -> Figures:
    """The figures of what was found in each scene."""
    precision = np.full((len(LIMITS), classes, len(_SIZES)), np.nan)  # means over recalls
    recall = np.full((len(LIMITS), classes, len(_SIZES), len(_MOST)), np.nan)
    for label in range(classes):
        pairs = [(_of_class(t, label), _found_of(f, label)) for t, f in zip(truth, found)]
        pairs = [(t, f) for t, f in pairs if len(t.boxes) or len(f.boxes)]
        for k, limits in enumerate(_SIZES.values()):
            matched = [_match(t, f, limits) for t, f in pairs]
            for m, most in enumerate(_MOST):
                curve = _curve(matched, most)
                if curve is not None:
                    recall[:, label, k, m] = curve[1]
                    precision[:, label, k] = curve[0]  # the last is that of all boxes
    ap, ar = (lambda *at: _mean(precision[at])), (lambda *at: _mean(recall[at]))
    every = slice(None)
    means = {"AP": ap(every, every, 0), "AP50": ap(0, every, 0), "AP75": ap(5, every, 0)}
    means |= {f"AP_{name}": ap(every, every, k) for k, name in enumerate(_SIZES) if k}
    means |= {f"AR_{most}": ar(every, every, 0, m) for m, most in enumerate(_MOST)}
    means |= {f"AR_{name}": ar(every, every, k, 2) for k, name in enumerate(_SIZES) if k}
    return Figures(means, tuple(precision[0, :, 0].tolist()))


def _mean(values: Array) -> float:
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else float("nan")


def _of_class(given: Scene, label: int) -> Scene:
    own = given.labels == label
    return given._replace(
        boxes=given.boxes[own], labels=given.labels[own],
        areas=given.areas[own], ignored=given.ignored[own],
    )  # fmt: skip


def _found_of(given: Found, label: int) -> Found:
    own = given.labels == label
    return Found(given.boxes[own], given.labels[own], given.scores[own])


def _match(truth: Scene, found: Found, limits: tuple[float, float]) -> _Matched:
    """Each box that was found, best first, takes the free one that it overlaps most, of those that
    count before those that do not; a crowd is never taken.
    """
    low, high = limits
    order = np.argsort(-found.scores, kind="stable")[: _MOST[-1]]
    boxes = found.boxes[order].astype(np.float64)
    out = truth.ignored | (truth.areas < low) | (truth.areas > high)
    sorting = np.argsort(out, kind="stable")
    out, crowd = out[sorting], truth.ignored[sorting]
    overlap = _overlaps(boxes, truth.boxes[sorting].astype(np.float64), crowd)
    hit, ignored = (np.zeros((len(LIMITS), len(boxes)), bool) for _ in range(2))
    for t, limit in enumerate(LIMITS):
        taken = np.zeros(len(out), bool)
        for d in range(len(boxes)):
            best, most = -1, min(limit, 1 - 1e-10)
            for g in range(len(out)):
                if taken[g] and not crowd[g]:
                    continue
                if best >= 0 and out[g] and not out[best]:
                    break
                if overlap[d, g] >= most:
                    best, most = g, overlap[d, g]
            if best >= 0:
                taken[best] = hit[t, d] = True
                ignored[t, d] = out[best]
    sizes = area(boxes)
    ignored |= ~hit & ((sizes < low) | (sizes > high))
    return _Matched(found.scores[order], hit, ignored, int((~out).sum()))


def _overlaps(boxes: Array, truth: Array, crowd: Array) -> Array:
    """The IoU of each box with each true one; of a crowd the share of the box that lies in it."""
    within = intersection(boxes[:, None], truth) / np.maximum(area(boxes), _EPS)[:, None]
    return np.where(crowd, within, iou(boxes[:, None], truth))


def _curve(matched: Sequence[_Matched], most: int) -> tuple[Array, Array] | None:
    """The average precision and the recall at each limit; None where nothing is to be found."""
    count = sum(one.things for one in matched)
    if not count:
        return None
    scores = np.concatenate([one.scores[:most] for one in matched])
    order = np.argsort(-scores, kind="stable")
    hit, ignored = (
        np.concatenate([part[:, :most] for part in parts], 1)[:, order]
        for parts in zip(*((one.hit, one.ignored) for one in matched))
    )
    right = np.cumsum(hit & ~ignored, 1, dtype=np.float64)
    wrong = np.cumsum(~hit & ~ignored, 1, dtype=np.float64)
    precision, recall = np.zeros(len(LIMITS)), np.zeros(len(LIMITS))
    if not scores.size:
        return precision, recall
    for t in range(len(LIMITS)):
        reached = right[t] / count
        exact = right[t] / (right[t] + wrong[t] + _EPS)
        best_from = np.append(np.maximum.accumulate(exact[::-1])[::-1], 0.0)
        precision[t] = best_from[np.searchsorted(reached, _RECALLS, side="left")].mean()
        recall[t] = reached[-1]
    return precision, recall
