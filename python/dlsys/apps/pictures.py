"""Images from files, as the networks here know them: 28 by 28, white on black."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..data import read_idx
from ..data.formats.decode import decoded, decoded_content, require_pillow
from ..errors import DataError
from ..files import opened
from .ink import bounding_box, ink_of

SIDE = 28
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
_BOX = 20  # that a digit is scaled to, as MNIST's were (LeCun et al., 1998)
_SEEN = 240  # pixels of the longer side in which ink is looked for
_DRAWN = 0.15  # of the brightest pixel: what is above belongs to a thing
_ON_NOTHING = 0.6  # of its bounding box is covered by what is drawn on nothing
_PLAIN = 64  # gray values by which ink of one color differs at most


def pictures_of(path: Path, digits: bool) -> Iterator[tuple[Path, np.ndarray | DataError]]:
    """Each file of a path with its images, or with the error that tells why it has none. A folder
    stands for the image files in it and below, in order of their names.
    """
    try:
        files = _files_in(path) if path.is_dir() else [path]
    except DataError as error:
        yield path, error
        return
    for file in files:
        try:
            yield file, read_pictures(file, digits)
        except DataError as error:
            yield file, error


def read_pictures(path: Path, digits: bool) -> np.ndarray:
    """The images of an IDX file, or the one of a file that Pillow reads: uint8 (n, 1, 28, 28).

    Dark on light is turned into light on dark. With `digits` an image of another size is searched
    for ink (see `ink`), which is scaled into 20 by 20 pixels, with its center of mass in the
    middle, as MNIST was made; else it is cut to what is drawn and fills 28 by 28. DataError for
    what is no such file, or without Pillow.
    """
    try:
        with opened(path) as file:
            start = file.read(3)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if start[:2] == b"\x1f\x8b" or (start[:2] == b"\0\0" and start[2:3] >= b"\x08"):
        return _idx_images(path)
    return normal_form(decoded(path, _ink_in_gray if digits else _gray), digits)[None, None]


def picture_in(what: str, content: bytes, digits: bool, most: int) -> np.ndarray:
    """The image (1, 1, 28, 28) uint8 in the bytes of an image file, as `read_pictures` makes it of
    the file. Errors name it as `what`. most: pixels that are decoded.
    """
    pixels = decoded_content(what, content, _ink_in_gray if digits else _gray, most)
    return normal_form(pixels, digits)[None, None]


def normal_form(pixels: np.ndarray, digits: bool) -> np.ndarray:
    """Gray values (H, W) uint8 as (28, 28): see `read_pictures`."""
    if pixels.shape == (SIDE, SIDE):
        return 255 - pixels if _is_light(pixels) else pixels
    seen = _digit(pixels) if digits else _thing(pixels)
    if not seen.any():
        return np.zeros((SIDE, SIDE), np.uint8)
    scaled = _scaled(seen, _BOX if digits else SIDE)
    middle = _center_of_mass(scaled) if digits else (np.array(scaled.shape) - 1) / 2
    room = SIDE - np.array(scaled.shape)
    top, left = np.clip(np.rint((SIDE - 1) / 2 - middle), 0, room).astype(int)
    out = np.zeros((SIDE, SIDE), np.uint8)
    out[top : top + scaled.shape[0], left : left + scaled.shape[1]] = scaled
    return out


def _files_in(folder: Path) -> list[Path]:
    """The image files of a folder. DataError where it has none or cannot be read."""
    try:
        found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}") from None
    if not found:
        raise DataError(f"{folder} is a folder without images, whose names end in {_SUFFIXES}")
    return found


_SUFFIXES = ", ".join(SUFFIXES)


def _idx_images(path: Path) -> np.ndarray:
    array = read_idx(path)
    if array.dtype != np.uint8 or array.shape[-2:] != (SIDE, SIDE) or array.ndim not in (2, 3):
        raise DataError(
            f"{path} holds {array.dtype} {array.shape}, expected images uint8 (n, {SIDE}, {SIDE})"
        )
    if not array.size:
        raise DataError(f"{path} holds no image")
    return array.reshape(-1, 1, SIDE, SIDE)


# ---- gray values ----
def _gray(image: Any) -> np.ndarray:
    """Gray values of a Pillow image; what is transparent is white."""
    return _on_paper(_upright(image), 255)


def _ink_in_gray(image: Any) -> np.ndarray:
    """Gray values of a Pillow image of a digit.

    What is transparent around ink of one color, or around strokes of any, is the paper, and the
    ink is as strong as it is opaque. Around a picture with a paper of its own it goes on as that.
    """
    image = _upright(image)
    opacity = np.asarray(image.getchannel("A"))
    seen = opacity > 127
    if seen.all() or not opacity.any():
        return _on_paper(image, 255)
    if not seen.any():
        return opacity
    values = np.asarray(image.convert("L"))[seen]
    low, high = np.percentile(values, (5, 95))
    if high - low < _PLAIN or seen[bounding_box(seen)].mean() < _ON_NOTHING:
        return opacity
    return _on_paper(image, int(np.median(values)))


def _upright(image: Any) -> Any:
    """The image as RGBA, as its camera was held."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "CMYK":  # which has no way to RGBA but this one
        image = image.convert("RGB")
    return image.convert("RGBA")


def _on_paper(image: Any, value: int) -> np.ndarray:
    """Gray values of an RGBA image over a paper of one."""
    pillow = require_pillow()
    paper = pillow.new("RGBA", image.size, (value, value, value, 255))
    return np.asarray(pillow.alpha_composite(paper, image).convert("L"))


# ---- what is drawn ----
def _is_light(pixels: np.ndarray) -> bool:
    """True where the border is."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return bool(np.median(border) > 127)


def _thing(pixels: np.ndarray) -> np.ndarray:
    """Light on dark, cut to what is drawn; all 0 where nothing is."""
    pixels = 255 - pixels if _is_light(pixels) else pixels
    drawn = pixels > _DRAWN * max(int(pixels.max()), 1)
    return pixels[bounding_box(drawn)] if drawn.any() else pixels


def _digit(pixels: np.ndarray) -> np.ndarray:
    """The ink, uint8, cut to itself; all 0 where there is none. A large image is made smaller, each
    pixel the mean of several.
    """
    factor = -(-max(pixels.shape) // _SEEN)
    ink = ink_of(np.asarray(require_pillow().fromarray(pixels).reduce(factor)))
    cut = ink[bounding_box(ink > 0)] if ink.any() else ink
    return np.rint(255 * cut).astype(np.uint8)


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
