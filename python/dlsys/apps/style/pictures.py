"""Photographs and paintings as arrays, read at a size and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...data.formats.decode import require_pillow
from ...errors import DataError
from ...files import replacing
from ..detect.scenes import pixels_of
from ..superres.planes import format_of

Array = np.ndarray[Any, Any]


def read(path: Path, size: int | None = None) -> Array:
    """A picture (h, w, 3) float32 in [0, 1], upright; with a size its longer side has that many
    pixels at most. DataError for what is no image, or has less than 32 pixels on a side.
    """
    pixels = pixels_of(path)
    factor = 1.0 if size is None else min(size / max(pixels.shape[:2]), 1.0)
    height, width = (round(n * factor) for n in pixels.shape[:2])
    if min(height, width) < 32:
        raise DataError(f"{path}: {width} x {height} pixels are too few, expected 32 a side")
    if factor < 1:
        pillow = require_pillow()
        image = pillow.fromarray(pixels).resize((width, height), pillow.Resampling.BICUBIC)
        pixels = np.asarray(image)
    return pixels.astype(np.float32) / np.float32(255)


def write(path: Path, picture: Array) -> None:
    """Writes a picture (h, w, 3), clipped to [0, 1], in the format of the file's ending."""
    kind = format_of(path)
    options: dict[str, Any] = {} if kind == "PNG" else {"quality": 90}
    image = require_pillow().fromarray(in_bytes(picture))
    try:
        with replacing(path) as file:
            image.save(file, kind, **options)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: the picture cannot be written: {reason}") from None


def in_bytes(picture: Array) -> Array:
    """A picture in [0, 1] as uint8."""
    return np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8)


def check_free(path: Path) -> None:
    """Raises DataError for a file that is there, and for an ending that is not written."""
    format_of(path)
    if path.exists():
        raise DataError(f"{path} is there already: move it away, or name another, --out")
