"""How near one plane is to another: PSNR and SSIM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_DEVIATION, _RADIUS = 1.5, 5  # of SSIM's Gaussian window, in pixels
_K1, _K2 = 0.01, 0.03


def psnr(plane: Array, truth: Array) -> float:
    """The peak signal-to-noise ratio in dB of a plane with values in [0, 1], whose peak is 1:
    -10 log10 of the mean squared error; infinite for equal ones.

    >>> round(psnr(np.zeros((4, 4)), np.full((4, 4), 0.1)), 6)
    20.0
    """
    return psnr_of(float(np.mean((plane.astype(np.float64) - truth) ** 2)))


def psnr_of(error: float) -> float:
    """The PSNR in dB of a mean squared error where the peak is 1.

    >>> psnr_of(0.001)
    30.0
    """
    return -10 * math.log10(error) if error else math.inf


def ssim(plane: Array, truth: Array) -> float:
    """The structural similarity of planes (h, w) with values in [0, 1], both extents at least 11:
    the mean over all windows that lie within them, Gaussian of 11 × 11 pixels with a deviation of
    1.5, K1 = 0.01 and K2 = 0.03, as in Wang et al. (2004).

    >>> ssim(np.eye(12), np.eye(12))
    1.0
    """
    x, y = plane.astype(np.float64), truth.astype(np.float64)
    mean_x, mean_y = _windowed(x), _windowed(y)
    both = mean_x * mean_y
    squares = mean_x**2 + mean_y**2
    variances = _windowed(x * x + y * y) - squares
    covariance = _windowed(x * y) - both
    c1, c2 = _K1**2, _K2**2
    found = (2 * both + c1) * (2 * covariance + c2) / ((squares + c1) * (variances + c2))
    return float(found.mean())


def _windowed(plane: Array) -> Array:
    """The Gaussian mean of each window that lies within a plane, in two passes."""
    offsets = np.arange(-_RADIUS, _RADIUS + 1)
    weights = np.exp(-(offsets**2) / (2 * _DEVIATION**2))
    weights /= weights.sum()
    for axis in (0, 1):
        windows = np.lib.stride_tricks.sliding_window_view(plane, len(weights), axis)
        plane = windows @ weights
    return plane
