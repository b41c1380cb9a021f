"""The ink of a photo of a digit: told from the paper whatever the light, the colors, the camera.

The paper as it would be without ink is the gray closing of the image, a maximum and then a minimum
over a square that is wider than a stroke (Serra, Image Analysis and Mathematical Morphology, 1982).
It follows gradients, and edges of shadows exactly where they are straight. Light multiplies what
paper and ink reflect, so that contrasts are differences of logarithms. Ink is where the contrast
is at least half of the highest in the neighborhood.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray

_WINDOW = 1 / 3  # of the longer side: wider than a stroke
_RAREST = 0.001  # the share of an image that the ink has at least: what is rarer is noise
_BLACK = 24  # gray values added before the logarithm: what is darker is camera noise
_FAINT = 0.1  # the contrast of 200 and 178: paper alone has less
_SHADED = 0.4  # of the highest contrast in the image: the lowest that ink has in a neighborhood
_SPECK = 0.05  # of the area of the largest part of a digit: smaller ones are dust


def ink_of(gray: Array) -> Array:
    """The ink, float32 (H, W) from 0 to 1, in a photo or a drawing, uint8 (H, W), dark on light or
    light on dark; 0 everywhere for an empty one. Edges of strokes have values between.

    All edges of strokes are edges of the ink, but only some are edges of paper that they shut in:
    of the two polarities it is that with the sharper and longer edges. Specks, and what comes in
    from the border of the image, are left out.
    """
    values = np.log(gray.astype(np.float32) + _BLACK)
    contrasts = (_contrast(values), _contrast(-values))
    highest = max(float(np.quantile(contrast, 1 - _RAREST)) for contrast in contrasts)
    if highest < _FAINT:
        return np.zeros(gray.shape, np.float32)
    edges = [_edges(contrast, highest) for contrast in contrasts]
    light = edges[1] > edges[0]
    return _strength(contrasts[light], highest, light)


def bounding_box(mask: Array) -> tuple[slice, slice]:
    """The rows and the columns between the first and the last that have something."""
    rows, cols = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    return slice(rows[0], rows[-1] + 1), slice(cols[0], cols[-1] + 1)


def _contrast(values: Array) -> Array:
    """Measures how far each pixel is below the paper around it."""
    side = _window(values.shape)
    padded = np.pad(
        _median(values), side, mode="edge"
    )  # so that a gradient is closed to itself there too
    paper = -_highest(-_highest(padded, side), side)
    return np.maximum(paper[side:-side, side:-side] - values, 0)


def _edges(contrast: Array, highest: float) -> float:
    """Measures how long and how sharp the edges are of what has a high contrast."""
    drop = contrast + _highest(-contrast, 3)
    return float(np.square(drop[_parts(contrast > highest / 2)]).sum())


def _strength(contrast: Array, highest: float, light: bool) -> Array:
    """Ink from 0 to 1, in proportion to gray values: what is half paper and half ink is 0.5."""
    side = _window(contrast.shape)
    around = _blurred(_highest(_blurred(contrast, 1), side), side // 4)
    kept = _parts(contrast > np.maximum(around, _SHADED * highest) / 2)
    amount = np.expm1(contrast) if light else -np.expm1(-contrast)
    full = _highest(np.where(kept, amount, 0), side // 3 | 1)  # on the same side of a shadow's edge
    near = (_highest(kept.astype(np.float32), 3) > 0) & (full > 0)
    ink = np.divide(amount, full, out=np.zeros_like(amount), where=near)
    return np.clip(2 * ink - 0.5, 0, 1)


def _parts(mask: Array) -> Array:
    """The connected parts of a digit: without specks, and without what touches the border unless
    the largest does.
    """
    labels = _connected(mask)
    counts = np.bincount(labels.ravel())
    counts[0] = 0
    border = np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    inner = counts.copy()
    inner[border] = 0
    if inner.max() >= _SPECK * counts.max():
        counts = inner
    kept = counts > _SPECK * counts.max()
    return kept[labels]


def _connected(mask: Array) -> Array:
    """The number of its connected part at each pixel that is set, corners included; 0 elsewhere.

    Each pixel takes the highest number around it, and then that of the pixel which had it, so that
    a number crosses the image in a few rounds.
    """
    numbers = np.arange(1, mask.size + 1).reshape(mask.shape) * mask
    while True:
        highest = np.max(_neighbors(np.pad(numbers, 1)), axis=0) * mask
        heads = np.concatenate([[0], highest.ravel()])
        while (further := heads[heads]).sum() != heads.sum():
            heads = further
        if (heads[1:] == numbers.ravel()).all():
            known = np.unique(np.append(0, numbers), return_inverse=True)[1]
            return known.ravel()[1:].reshape(mask.shape)
        numbers = heads[1:].reshape(mask.shape)


# ---- filters ----
def _window(shape: tuple[int, ...]) -> int:
    """The side of the square, odd."""
    return round(_WINDOW * max(shape)) | 1


def _neighbors(padded: Array) -> list[Array]:
    """Nine images: each pixel and those around it."""
    height, width = padded.shape
    return [padded[y : height - 2 + y, x : width - 2 + x] for y in range(3) for x in range(3)]


def _median(values: Array) -> Array:
    """The median over 3 by 3 pixels, which takes noise away and leaves edges."""
    return np.median(_neighbors(np.pad(values, 1, mode="edge")), axis=0)


def _highest(values: Array, side: int) -> Array:
    """The maximum over a square of `side` pixels, odd, around each pixel. A maximum over 2k pixels
    is that of two over k, so that it takes log2(side) passes.
    """
    for axis in (0, 1):
        padded = np.pad(values, [(side // 2, side // 2) if k == axis else (0, 0) for k in (0, 1)],
                        mode="edge").swapaxes(0, axis)  # fmt: skip
        wide = 1
        while wide < side:
            step = min(wide, side - wide)
            padded = np.maximum(padded[:-step], padded[step:])
            wide += step
        values = padded.swapaxes(0, axis)
    return values


def _blurred(values: Array, radius: int) -> Array:
    """The mean over a square of 2 radius + 1 pixels."""
    side = 2 * radius + 1
    for axis in (0, 1):
        padded = np.pad(values, [(radius + 1, radius) if k == axis else (0, 0) for k in (0, 1)],
                        mode="edge")  # fmt: skip
        sums = padded.cumsum(axis, np.float64).swapaxes(0, axis)
        values = ((sums[side:] - sums[:-side]) / side).swapaxes(0, axis).astype(np.float32)
    return values
