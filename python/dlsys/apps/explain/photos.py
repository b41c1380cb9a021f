"""Photographs as classifiers take them: the middle square, scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...data.formats.decode import decoded, planes, require_pillow

Array = np.ndarray[Any, Any]


def square(path: Path, side: int, channels: int = 3) -> Array:
    """The middle square of a photo, upright, as (channels, side, side) uint8, in gray for one
    channel. DataError for what is no image.
    """

    def cut(image: Any) -> Array:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image).convert("RGB" if channels == 3 else "L")
        extent = min(image.size)
        left, top = ((n - extent) // 2 for n in image.size)
        part = image.crop((left, top, left + extent, top + extent))
        return planes(part.resize((side, side), require_pillow().Resampling.BICUBIC))

    return decoded(path, cut)
