"""The rows of samples.py for boxes: non-maximum suppression and Soft-NMS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from support.table.rows import Case, Domain, Sample, Shape, case, refuse, uniform

Array = np.ndarray


# ---- formulas, a box at a time ----


def overlap(a: Array, b: Array) -> float:
    """The IoU of boxes (low x, low y, high x, high y)."""
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    both = sides[0] * sides[1] if (sides > 0).all() else 0.0
    return both and both / (np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - both)


def ordered(box: Array, center: bool) -> Array:
    a, b = box[:2], box[2:]
    return np.concatenate([a - b / 2, a + b / 2] if center else [np.fmin(a, b), np.fmax(a, b)])


def selected(
    boxes: Array, scores: Array, most: int, least: float | None, center: bool,
    lower: Callable[[float, float], float],
) -> Iterator[tuple[int, int, int, float]]:  # fmt: skip
    """Rows and scores: the best is taken, `lower` makes new scores of those and of overlaps."""
    for image, label in np.ndindex(scores.shape[:2]):
        low = -np.inf if least is None else least
        left = {k: s for k, s in enumerate(scores[image, label]) if s > low}
        for _ in range(min(most, len(left))):
            if not left:
                break
            best = max(left, key=lambda k: (left[k], -k))
            yield image, label, best, left.pop(best)
            box = ordered(boxes[image, best], center)
            after = {
                k: lower(s, overlap(box, ordered(boxes[image, k], center))) for k, s in left.items()
            }
            left = {k: s for k, s in after.items() if s > low}


def padded(
    boxes: Array, scores: Array, lower: Callable[[float, float], float],
    max_output_boxes_per_class: int, score_threshold: float | None = None,
    center_point_box: bool = False, **more: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    found = list(selected(boxes, scores, max_output_boxes_per_class, score_threshold,
                          center_point_box, lower))  # fmt: skip
    room = scores.shape[0] * scores.shape[1] * min(max_output_boxes_per_class, scores.shape[2])
    rows, values = np.full((room, 3), -1), np.zeros(room)
    if found:
        rows[: len(found)] = [row[:3] for row in found]
        values[: len(found)] = [row[3] for row in found]
    return rows, values, np.array(len(found))


def hard(boxes: Array, scores: Array, iou_threshold: float = 0.5, **attrs: Any) -> Any:
    return padded(boxes, scores, lambda s, iou: -np.inf if iou > iou_threshold else s, **attrs)


def soft(
    boxes: Array, scores: Array, iou_threshold: float = 0.5, method: str = "gaussian",
    sigma: float = 0.5, **attrs: Any,
) -> Any:  # fmt: skip
    def lower(s: float, iou: float) -> float:
        if method == "gaussian":
            return s * np.exp(-iou * iou / sigma)
        return s * (1 - iou if iou > iou_threshold else 1)

    return padded(boxes, scores, lower, **attrs)


# ---- domains ----


def clustered(rng: np.random.Generator, shape: Shape) -> Array:
    """Boxes near each other, of corners in any order."""
    middle = rng.choice([10.0, 14, 40, 43], (*shape[:-1], 2)) + rng.uniform(-2, 2, (*shape[:-1], 2))
    side = rng.uniform(3, 8, (*shape[:-1], 2)) * rng.choice([-1, 1], (*shape[:-1], 2))
    return np.concatenate([middle - side, middle + side], -1).astype("f4").astype("f8")


def centered(rng: np.random.Generator, shape: Shape) -> Array:
    middle, side = rng.choice([10.0, 14, 40], (*shape[:-1], 2)), rng.uniform(3, 8, shape)[..., :2]
    return np.concatenate([middle + side / 8, side], -1).astype("f4").astype("f8")


def on_grid(rng: np.random.Generator, shape: Shape) -> Array:
    """Boxes with many equals, and IoUs that are the threshold itself."""
    low = rng.integers(0, 3, (*shape[:-1], 2))
    return np.concatenate([low, low + rng.integers(0, 3, low.shape)], -1).astype(float)


def apart(rng: np.random.Generator, shape: Shape) -> Array:
    """Boxes that meet at their borders."""
    at = np.broadcast_to(np.arange(shape[-2], dtype=float)[:, None], (*shape[:-1], 1))
    return np.concatenate([at, 0 * at, at + 1, 0 * at + 1], -1)


def equal(rng: np.random.Generator, shape: Shape) -> Array:
    return np.broadcast_to([1.0, 2, 5, 9], shape).copy()


def eighths(rng: np.random.Generator, shape: Shape) -> Array:
    return rng.integers(0, 9, shape) / 8


chance = uniform(0, 1)
chance_apart = lambda rng, shape: (rng.permuted(  # noqa: E731
    np.broadcast_to(np.arange(1, shape[-1] + 1), shape), axis=-1) / 2.0**13)  # fmt: skip


def use(
    images: int, classes: int, boxes: int, most: int, domain: Domain = clustered,
    scores: Domain = chance, **attrs: Any,
) -> Case:  # fmt: skip
    return case(
        (images, boxes, 4), (images, classes, boxes), domain=(domain, scores),
        max_output_boxes_per_class=most, **attrs,
    )  # fmt: skip


CASES = (
    use(1, 1, 6, 3), use(2, 3, 40, 40, iou_threshold=0.3125), use(1, 2, 40, 5, iou_threshold=0.75),
    use(2, 2, 30, 30, score_threshold=0.5), use(2, 1, 30, 30, centered, center_point_box=True),
    use(1, 2, 50, 50, on_grid, eighths), use(1, 2, 50, 50, clustered, eighths, iou_threshold=0.25),
    use(1, 1, 12, 12, equal), use(1, 1, 12, 12, equal, eighths, iou_threshold=1.0),
    use(1, 2, 20, 20, clustered, chance, score_threshold=2.0), use(1, 1, 5, 0),
    use(1, 3, 0, 4), use(0, 2, 5, 5), use(2, 0, 5, 5), use(3, 1, 1, 9),
    use(2, 2, 64, 64, apart), use(1, 2, 65, 65, apart), use(1, 1, 130, 129, apart),
)  # fmt: skip
SHAPED = (
    refuse(
        r"boxes \(N, B, 4\) and scores \(N, C, B\), got \S+ \(1, 5, 4\) and \S+ \(1, 2, 6\)",
        (1, 5, 4), (1, 2, 6), max_output_boxes_per_class=1,
    ),
    refuse("expected boxes .N, B, 4.", (2, 5, 4), (5, 2), max_output_boxes_per_class=1),
    refuse("expected boxes .N, B, 4.", (1, 5, 3), (1, 2, 5), max_output_boxes_per_class=1),
    refuse(
        r"expected boxes and scores in floats, got \S+ int64", (1, 5, 4), (1, 2, 5),
        dtypes=("float32", "int64"), max_output_boxes_per_class=1,
    ),
)  # fmt: skip


def output(op: Any, k: int) -> Callable[..., Any]:
    return lambda *inputs, **attrs: op(*inputs, **attrs)[k]


def rows(
    op: Any, formula: Callable, cases: tuple[Case, ...], names: tuple[tuple[str, int], ...],
    **more: Any,
) -> tuple[Sample, ...]:  # fmt: skip
    """A row for each output: its name, and its place in what the formula gives."""
    return tuple(
        Sample(
            name, op, lambda *arrays, at=at, **attrs: formula(*arrays, **attrs)[at], cases,
            build=output(op, k), differentiable=(), specials=False, refusals=SHAPED, **more,
        )
        for k, (name, at) in enumerate(names)
    )  # fmt: skip


# The keys of more boxes than 4,096 are sorted outside of shared memory, see
# src/cuda/boxes/non_max_suppression.cu.
HARD = (*CASES, use(1, 2, 1100, 20), use(1, 1, 5000, 6, clustered, chance_apart))
SOFT = (
    *CASES[:5], use(1, 2, 40, 40, method="linear", iou_threshold=0.3125), use(1, 1, 12, 12, equal),
    use(2, 2, 30, 30, sigma=0.125, score_threshold=0.3), use(1, 2, 50, 50, apart, eighths),
    use(2, 2, 30, 30, score_threshold=0.001, method="linear"),
    *CASES[9:15], use(1, 1, 700, 20, clustered, chance_apart),
)  # fmt: skip
# Choices are exact. Worst of scores: 46, of boxes by their centers, whose corners are rounded;
# exp(-IoU² / sigma) has 2 IoU² / sigma times the error of an IoU, for each box taken before.
BOXES = (
    *rows(
        ad.non_max_suppression_op, hard, HARD,
        (("non_max_suppression", 0), ("non_max_suppression_count", 2)),
    ),
    *rows(
        ad.soft_nms_op, soft, SOFT,
        (("soft_nms", 0), ("soft_nms_scores", 1), ("soft_nms_count", 2)), ulps=64,
    ),
)  # fmt: skip
