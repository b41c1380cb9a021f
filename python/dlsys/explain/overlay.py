"""A map of evidence drawn over its image."""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError

# Dark violet over red to yellow: lightness rises with the evidence, so that it reads in gray too.
_COLORS = np.array([(13, 8, 135), (126, 3, 168), (204, 71, 120), (248, 149, 64), (240, 249, 33)])
_STRONGEST = 0.75  # the opacity of the color where the evidence is 1


def overlay(image: np.ndarray, evidence: np.ndarray, scale: int = 1) -> np.ndarray:
    """The pixels (scale · H, scale · W, 4) uint8, RGBA, of an image with a map over it.

    image: (C, H, W) uint8 with one or three channels. evidence: (H, W) from 0 to 1, which is the
    opacity of its color. scale: pixels of the picture for one of the image, in each direction.
    ShapeError for an image and a map of other shapes.

    >>> explain.overlay(np.zeros((1, 4, 4), np.uint8), np.eye(4), scale=2).shape
    (8, 8, 4)
    """
    if image.ndim != 3 or image.shape[0] not in (1, 3) or image.shape[1:] != evidence.shape:
        raise ShapeError(
            f"overlay: expected an image (1 or 3, H, W) and a map (H, W), got {image.shape} and "
            f"{evidence.shape}"
        )
    amount = np.clip(np.asarray(evidence, np.float64), 0, 1)[..., None]
    positions = np.linspace(0, 1, len(_COLORS))
    tint = np.stack([np.interp(amount[..., 0], positions, c) for c in _COLORS.T], axis=-1)
    paper = np.broadcast_to(np.moveaxis(image, 0, -1), (*evidence.shape, 3))
    opacity = _STRONGEST * amount
    mixed = np.rint(paper * (1 - opacity) + tint * opacity).astype(np.uint8)
    opaque = np.full((*evidence.shape, 1), 255, np.uint8)
    return np.concatenate([mixed, opaque], axis=-1).repeat(scale, axis=0).repeat(scale, axis=1)
