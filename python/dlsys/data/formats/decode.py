"""Image files, decoded by Pillow: only the formats named here, and only as much as is sensible.

A file says its size at its beginning, so that one of a few kilobytes whose pixels would fill the
memory is refused before any of them is decoded. Whatever Pillow raises becomes a DataError.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, DlsysError, how_to_install
from ...files import opened
from ..dataset import Array

# Pillow would take others too, and start Ghostscript for one of them.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 50_000_000  # 200 MB as RGBA, of which up to four copies are made at once
MAX_NBYTES = 8 * MAX_PIXELS  # RGBA of 16 bits, without any packing


def decoded(path: Path, convert: Callable[[Any], Any]) -> Any:
    """convert(image) of the Pillow image in a file, 8 bits a channel.

    Raises DataError, naming the file, for what is no image of these formats, damaged, or larger
    than MAX_PIXELS; DlsysError without Pillow.
    """
    require_pillow()
    try:
        content = _content(path)
    except DlsysError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: the file is not there, or has gone since it was listed") from None
    except OSError as error:
        raise _unreadable(str(path), error) from error
    return decoded_content(str(path), content, convert)


def decoded_content(
    what: str, content: bytes, convert: Callable[[Any], Any], most: int = MAX_PIXELS
) -> Any:
    """The same of the bytes of a file, whose errors name it as `what`. most: pixels."""
    pillow = require_pillow()
    try:
        # From memory, where a part that claims to be longer than the file takes only what is there.
        with pillow.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_size(what, image.size, most)
            return convert(in_bytes(pillow, image))
    except DlsysError:
        raise
    except pillow.UnidentifiedImageError:
        raise DataError(
            f"{what}: cannot be read as an image, it is none of {', '.join(FORMATS)}; remove it or "
            "replace it"
        ) from None
    except Exception as error:  # its plugins raise what they stumble over: struct.error, IndexError
        raise _unreadable(what, error) from error


def _unreadable(what: str, error: Exception) -> DataError:
    reason = str(error) or type(error).__name__
    return DataError(f"{what}: cannot be read as an image ({reason}); remove it or replace it")


def _content(path: Path) -> bytes:
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_NBYTES:
            raise DataError(f"{path}: the file has more than {MAX_NBYTES:,} bytes; make it smaller")
        return file.read()


def _check_size(what: str, size: tuple[int, int], most: int) -> None:
    width, height = size
    if width * height > most:
        raise DataError(
            f"{what}: the image has {width:,} x {height:,} pixels, more than the {most:,} "
            "that are decoded; make it smaller"
        )


def in_bytes(pillow: Any, image: Any) -> Any:
    """The image with 8 bits a channel. Pillow's own conversion would cut brighter values off."""
    wide = image.mode == "I" and image.format == "PNG"  # 16 bits, to older versions of Pillow
    if wide or image.mode.startswith("I;16"):
        return pillow.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have 32 bits, mode {image.mode}, of no known range")
    return image


def planes(image: Any) -> Array:
    """The pixels as (channels, height, width) uint8."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def require_pillow() -> Any:
    """Pillow's Image. DataError says how to install it."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"reading images needs Pillow: {how_to_install('PIL')}") from None
    return Image
