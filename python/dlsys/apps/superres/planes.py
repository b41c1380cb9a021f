"""Photographs as planes in [0, 1]: color spaces, bicubic resizing, what a small photo is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...data.formats.decode import decoded, require_pillow
from ...errors import DataError
from ...files import replacing

Array = np.ndarray[Any, Any]

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}  # that are written
# ITU-R BT.601 in the full range of JPEG's YCbCr (JFIF 1.02): rows are luminance, blue and red.
_YCBCR = np.array(
    [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]], np.float32
)
_RGB = np.linalg.inv(_YCBCR.astype(np.float64)).astype(np.float32)


class Photo(NamedTuple):
    """A photograph: its luminance (h, w), its two planes of color, and how opaque it is, float32
    in [0, 1], colors in [-0.5, 0.5].

    colors: (2, h, w), None of a gray one. alpha: (h, w), None of an opaque one.
    """

    luminance: Array
    colors: Array | None
    alpha: Array | None


def read_photo(path: Path) -> Photo:
    """The photograph in a file, upright as its EXIF data say. DataError for what is no image, or
    without Pillow.
    """
    return decoded(path, _photo_of)


def write_photo(path: Path, photo: Photo) -> None:
    """Writes a photograph in the format of the file's ending; values are clipped and rounded to 8
    bits. DataError for another ending, for JPEG that has no alpha, and where it cannot be written.
    """
    image = require_pillow().fromarray(pixels(photo))
    kind = format_of(path)
    if kind == "JPEG" and photo.alpha is not None:
        raise DataError(f"{path}: JPEG has no transparency, which this photo has: write PNG")
    options: dict[str, Any] = {} if kind == "PNG" else {"quality": 95}
    try:
        with replacing(path) as file:
            image.save(file, kind, **options)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: the photo cannot be written: {reason}") from None


def format_of(path: Path) -> str:
    """The format that a file's ending means. DataError for one that is not written here."""
    try:
        return FORMATS[path.suffix.lower()]
    except KeyError:
        raise DataError(f"{path}: the ending says no format, use {', '.join(FORMATS)}") from None


def resized(plane: Array, size: tuple[int, int]) -> Array:
    """A plane (h, w) resized to (height, width) by cubic convolution with a = -0.5 (Keys, 1981),
    whose kernel is as much wider as the plane becomes smaller, so that nothing aliases.
    """
    pillow = require_pillow()
    image = pillow.fromarray(np.ascontiguousarray(plane, np.float32))
    return np.asarray(image.resize(size[::-1], pillow.Resampling.BICUBIC))


def enlarged(plane: Array, scale: int) -> Array:
    """A plane (h, w) bicubically as (h · scale, w · scale)."""
    height, width = plane.shape
    return resized(plane, (height * scale, width * scale))


def reduced(plane: Array, scale: int) -> tuple[Array, Array]:
    """The plane (h · scale, w · scale) less rows and columns that do not fill a block, and the
    small one (h, w) of it, in steps of 1/255, as a file of 8 bits has it.
    """
    height, width = (extent // scale for extent in plane.shape)
    large = plane[: height * scale, : width * scale]
    return large, in_8_bits(resized(large, (height, width)))


def in_8_bits(plane: Array) -> Array:
    """A plane clipped to [0, 1] and rounded to steps of 1/255."""
    return np.rint(np.clip(plane, 0, 1) * np.float32(255)) / np.float32(255)


# ---- Pillow's images ----
def _photo_of(image: Any) -> Photo:
    """A Pillow image of 8 bits a channel as a Photo."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    clear = "A" in image.getbands() or "transparency" in image.info
    gray = image.mode in ("1", "L", "LA") and not (image.mode != "LA" and clear)
    mode = ("LA" if clear else "L") if gray else ("RGBA" if clear else "RGB")
    values = np.asarray(image.convert(mode), np.float32) / np.float32(255)
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    alpha = planes[-1] if clear else None
    if gray:
        return Photo(planes[0], None, alpha)
    luminance, *colors = np.tensordot(_YCBCR, planes[:3], 1)
    return Photo(luminance, np.stack(colors), alpha)


def pixels(photo: Photo) -> Array:
    """The pixels (h, w) or (h, w, channels) uint8 of a Photo."""
    planes = photo.luminance[None]
    if photo.colors is not None:
        planes = np.tensordot(_RGB, np.concatenate([planes, photo.colors]), 1)
    if photo.alpha is not None:
        planes = np.concatenate([planes, photo.alpha[None]])
    pixels = np.rint(np.clip(planes, 0, 1) * 255).astype(np.uint8)
    return pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
