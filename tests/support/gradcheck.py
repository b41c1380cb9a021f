"""Compares gradients with finite differences along random directions, in float64.

One direction tests every element at once: a gradient that is wrong anywhere gives a wrong product
with a random direction, and each input costs four evaluations, however large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

STEP = 1e-3  # the formula's error is of order STEP**4, what rounding adds of order eps / STEP
RTOL = 1e-7
UNDERFLOW = 1e-30  # what is smaller has lost its digits beside numbers of ordinary size


def check_gradients(
    function: Callable[[Sequence[np.ndarray]], float],
    gradients: Sequence[np.ndarray],
    point: Sequence[np.ndarray],
    rng: np.random.Generator,
    factor: float = 1.0,
    magnitude: float = 0.0,
) -> None:
    """Raises AssertionError unless `gradients` are `factor` times those of `function` at `point`.

    function: a number from float64 arrays, smooth within 2 * STEP of `point` in every element.
    gradients: an array for each array of `point`, in its shape. magnitude: of the terms that the
    function adds up, where these may cancel: their rounding is that of their size, not of the sum.
    """
    for k, (x, gradient) in enumerate(zip(point, gradients)):
        if gradient.shape != x.shape:
            raise AssertionError(
                f"input {k} has shape {x.shape} and its gradient {gradient.shape}, expected one"
            )
        direction = rng.uniform(-1, 1, x.shape)

        def along(distance: float, k: int = k, step: np.ndarray = direction) -> float:
            moved = list(point)
            moved[k] = point[k] + distance * step
            return float(function(moved))

        ahead, behind = along(STEP), along(-STEP)
        expected = 8 * (ahead - behind) - (along(2 * STEP) - along(-2 * STEP))
        expected *= factor / (12 * STEP)
        terms = gradient * direction
        # A softmax whose terms, 12.7 in all, add up to -0.089 was 1.5e-13 off: a tenth of eps of
        # its terms over 2 STEP, yet more than the 9e-14 that the sum by itself is given.
        values = max(abs(ahead), abs(behind), magnitude)
        size = np.abs(terms).sum() + abs(factor) * 1e-5 * values
        if not abs(terms.sum() - expected) <= RTOL * size + UNDERFLOW < np.inf:
            raise AssertionError(
                f"input {k} of shape {x.shape}: along a random direction the gradient gives "
                f"{terms.sum():.9g}, finite differences give {expected:.9g}"
            )
