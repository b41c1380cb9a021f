"""Images from files, as the networks here know them: 28 by 28, white on black."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..data import read_idx
from ..data.decode import decoded, require_pillow
from ..errors import DataError
from ..files import opened

SIDE = 28
_BOX = 20  # that a digit is scaled to, as MNIST's were (LeCun et al., 1998)
_INK = 0.15  # of the brightest pixel: what is above belongs to the digit


def read_pictures(path: Path, digits: bool) -> np.ndarray:
    """The images of an IDX file, or the one of a file that Pillow reads: uint8 (n, 1, 28, 28).

    Dark on light is turned into light on dark. An image of another size is cut to what is drawn;
    with `digits` it is scaled into 20 by 20 pixels and its center of mass is put into the middle,
    as MNIST was made, else it fills 28 by 28. DataError for what is no such file, or without
    Pillow.
    """
    try:
        with opened(path) as file:
            start = file.read(3)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if start[:2] == b"\x1f\x8b" or (start[:2] == b"\0\0" and start[2:3] >= b"\x08"):
        return _idx_images(path)
    return normal_form(decoded(path, _gray), digits)[None, None]


def normal_form(pixels: np.ndarray, digits: bool) -> np.ndarray:
    """Gray values (H, W) uint8 as (28, 28): see `read_pictures`."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    if np.median(border) > 127:
        pixels = 255 - pixels
    if pixels.shape == (SIDE, SIDE):
        return pixels
    drawn = pixels > _INK * max(int(pixels.max()), 1)
    if not drawn.any():
        return np.zeros((SIDE, SIDE), np.uint8)
    rows, cols = (np.flatnonzero(drawn.any(axis=axis)) for axis in (1, 0))
    box = pixels[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    scaled = _scaled(box, _BOX if digits else SIDE)
    middle = _center_of_mass(scaled) if digits else (np.array(scaled.shape) - 1) / 2
    room = SIDE - np.array(scaled.shape)
    top, left = np.clip(np.rint((SIDE - 1) / 2 - middle), 0, room).astype(int)
    out = np.zeros((SIDE, SIDE), np.uint8)
    out[top : top + scaled.shape[0], left : left + scaled.shape[1]] = scaled
    return out


def _idx_images(path: Path) -> np.ndarray:
    array = read_idx(path)
    if array.dtype != np.uint8 or array.shape[-2:] != (SIDE, SIDE) or array.ndim not in (2, 3):
        raise DataError(
            f"{path} holds {array.dtype} {array.shape}, expected images uint8 (n, {SIDE}, {SIDE})"
        )
    if not array.size:
        raise DataError(f"{path} holds no image")
    return array.reshape(-1, 1, SIDE, SIDE)


def _gray(image: Any) -> np.ndarray:
    """Gray values of a Pillow image; what is transparent is white."""
    seen = image.convert("RGBA")
    pillow = require_pillow()
    paper = pillow.new("RGBA", seen.size, "white")
    return np.asarray(pillow.alpha_composite(paper, seen).convert("L"))


def _scaled(pixels: np.ndarray, side: int) -> np.ndarray:
    """The longer side becomes `side`, the other one keeps its share of it."""
    factor = side / max(pixels.shape)
    height, width = (max(1, round(extent * factor)) for extent in pixels.shape)
    image_class = require_pillow()
    image = image_class.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((width, height), image_class.Resampling.LANCZOS))


def _center_of_mass(pixels: np.ndarray) -> np.ndarray:
    weights = pixels / max(int(pixels.sum(dtype=np.int64)), 1)
    return np.array([axis @ weights.sum(axis=k) for k, axis in _axes(pixels.shape)])


def _axes(shape: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """The axis to sum away, and the positions along the other one: rows first."""
    return [(1, np.arange(shape[0])), (0, np.arange(shape[1]))]
