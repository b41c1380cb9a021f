"""Boxes in images: which of many that were found to keep."""

from __future__ import annotations

from ..ops import boxes as suppression
from ..ops.elementwise import as_node
from .record import Array, recorded

__all__ = ["non_max_suppression", "soft_nms"]


@recorded
def non_max_suppression(
    boxes: Array,
    scores: Array,
    max_output_boxes_per_class: int,
    iou_threshold: float = 0.5,
    score_threshold: float | None = None,
    center_point_box: bool = False,
) -> tuple[Array, Array]:
    """Non-maximum suppression, as ONNX defines it: of each class of each image the boxes that
    overlap no box of a better score that stays by an IoU above `iou_threshold`.

    boxes: (N, B, 4) in floats, two opposite corners of each in any order, such as (x1, y1, x2, y2);
    with `center_point_box` (x center, y center, width, height). scores: (N, C, B). Of equal scores
    the lower index is better. A score counts if it is above `score_threshold`; by default every
    score does but NaN. A box without area, or with NaN, overlaps none.

    Returns rows (image, class, box) of int64 and the number of them that are boxes, int64. The rows
    are (N · C · most, 3), where most is the smaller of `max_output_boxes_per_class` and B: images
    and classes in order, the best score of each first, then rows of -1. The devices choose the same
    boxes to the bit, in float32. There is no gradient. ShapeError where shapes or dtypes do not
    fit.

    >>> boxes = dl.tensor([[[0.0, 0, 4, 4], [0, 0, 4, 5], [9, 9, 10, 10]]])
    >>> rows, count = F.non_max_suppression(boxes, dl.tensor([[[0.5, 0.9, 0.1]]]), 3)
    >>> rows[: int(count)]
    Tensor([[0, 0, 1],
            [0, 0, 2]], device=numpy)
    """
    rows, count = suppression.non_max_suppression_op(
        as_node(boxes), as_node(scores), max_output_boxes_per_class=max_output_boxes_per_class,
        iou_threshold=iou_threshold, score_threshold=score_threshold,
        center_point_box=center_point_box,
    )  # fmt: skip
    return rows, count


@recorded
def soft_nms(
    boxes: Array,
    scores: Array,
    max_output_boxes_per_class: int,
    iou_threshold: float = 0.5,
    score_threshold: float | None = None,
    center_point_box: bool = False,
    method: str = "gaussian",
    sigma: float = 0.5,
) -> tuple[Array, Array, Array]:
    """Soft-NMS (Bodla et al., 2017): an overlap with a better box does not remove a box but lowers
    its score.

    The best box of a class is taken; the scores of the others are multiplied by exp(-IoU² / sigma),
    or with the method "linear" by 1 - IoU where that is above `iou_threshold`; and so on among
    those whose score is still above `score_threshold`, such as 0.001. Scores of 0 and more are
    meant.

    boxes, scores and the other arguments: as of `non_max_suppression`. Returns its rows, the score
    of each as it was taken (N · C · most,), then 0, and the number of rows that are boxes. The
    devices choose the same boxes but where scores are within rounding of each other: exp is
    computed in float64. There is no gradient. ShapeError where shapes or dtypes do not fit.

    >>> boxes = dl.tensor([[[0.0, 0, 4, 4], [0, 0, 4, 4]]])
    >>> rows, scores, count = F.soft_nms(boxes, dl.tensor([[[0.5, 0.9]]]), 2)
    >>> scores
    Tensor([0.9       , 0.06766764], device=numpy)
    """
    rows, values, count = suppression.soft_nms_op(
        as_node(boxes), as_node(scores), max_output_boxes_per_class=max_output_boxes_per_class,
        iou_threshold=iou_threshold, score_threshold=score_threshold,
        center_point_box=center_point_box, method=method, sigma=sigma,
    )  # fmt: skip
    return rows, values, count
