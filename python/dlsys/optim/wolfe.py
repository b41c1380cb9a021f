"""The line search for the strong Wolfe conditions of Nocedal and Wright (2006), algorithms 3.5 and
3.6: bracket a step, then narrow the bracket by cubic interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

DECREASE, CURVATURE = 1e-4, 0.9  # c1 and c2, theirs for quasi-Newton directions
_GROWTH = 3.0  # of steps that are still too short
_INSIDE = 0.1  # of a bracket: the least distance of a new step from its ends


class Point(NamedTuple):
    """A step along the direction with the loss there, its slope, and its gradient."""

    step: float
    loss: float
    slope: float
    gradient: Any


def search(at: Callable[[float], Point], start: Point, step: float, most: int) -> Point | None:
    """A point whose loss is at most start.loss + c1 · step · start.slope and whose slope is at most
    c2 · |start.slope| in size.

    at: computes a point. start: step 0, its slope below 0. step: the first to try. most:
    evaluations. Where they do not suffice, the lowest point that the bracket has; None where none
    is below the start, as behind the precision of the loss. Losses that are NaN or infinite count
    as too high.
    """
    before = start
    for k in range(most):
        point = at(step)
        if _too_high(point, start) or (k and not point.loss < before.loss):
            return _zoom(at, start, before, point, most - k - 1)
        if abs(point.slope) <= -CURVATURE * start.slope:
            return point
        if point.slope >= 0:
            return _zoom(at, start, point, before, most - k - 1)
        before, step = point, _GROWTH * step
    return before


def _zoom(
    at: Callable[[float], Point], start: Point, low: Point, high: Point, most: int
) -> Point | None:
    """Narrows a bracket, whose end `low` has the lowest loss so far and slopes down inwards."""
    for _ in range(most):
        point = at(_between(low, high))
        if _too_high(point, start) or not point.loss < low.loss:
            high = point
            continue
        if abs(point.slope) <= -CURVATURE * start.slope:
            return point
        if point.slope * (high.step - low.step) >= 0:
            high = low
        low = point
    return low if low.step else None


def _too_high(point: Point, start: Point) -> bool:
    return not point.loss <= start.loss + DECREASE * point.step * start.slope


def _between(a: Point, b: Point) -> float:
    """The minimum of the cubic that has both losses and slopes, not near the ends; the middle where
    there is none.
    """
    middle, half = (a.step + b.step) / 2, (b.step - a.step) / 2
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if not 0 <= square < math.inf:
        return middle
    d2 = math.copysign(math.sqrt(square), b.step - a.step)
    below = b.slope - a.slope + 2 * d2
    step = b.step - (b.step - a.step) * (b.slope + d2 - d1) / below if below else middle
    room = abs(half) * (1 - 2 * _INSIDE)
    return min(max(step, middle - room), middle + room)
