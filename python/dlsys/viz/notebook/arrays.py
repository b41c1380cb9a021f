"""Arrays in notebooks: their values, what is known of them, and images drawn."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np

from ...ndarray import NDArray
from ...values import text_of as values_text
from ..images import in_rows, stretched
from ..page import folded
from ..png import png
from .frame import framed, plain, sentence

_SIDE = 5  # pixels that an image has at least; a matrix alone, which may be anything, has _MATRIX
_MATRIX = 8
_ASPECT = 4.0  # the sides of an image differ at most by this factor
_TILES = 24  # images that are drawn
_PIXELS = 256  # on a side that are drawn; of larger images every second, third, …
_LETTERS = 120  # that a line of values has at most
_WIDTH, _ALONE, _ROW = 640, 168, 56  # of the picture, and heights of one image and of several


def values_html(array: Any) -> str:
    """An NDArray or a Tensor, in notebooks."""
    if isinstance(array, NDArray):
        return array_html(array.asnumpy(), "NDArray", array.dtype, array.ctx)
    needs = array.requires_grad
    return array_html(array.numpy(), "Tensor", array.dtype, array.device, needs)


def array_html(
    array: np.ndarray, name: str, dtype: Any, device: Any, requires_grad: bool = False
) -> str:
    """An array in notebooks: what it is, its values cut to a few lines, and images drawn.

    array: the values. name: of its class. dtype, device: as they are told. Arrays (H, W), (N, H, W)
    and those of 1 or 3 channels, before or after H and W, are drawn as images where H and W can be
    those of one; pixels of uint8, and floats between 0 and 1, as they are, others with their lowest
    value in black and their highest in white.
    """
    facts = f"{dtype} {array.shape} on {device}" + (", requires grad" if requires_grad else "")
    values = values_text(array, separator=", ", max_line_width=_LETTERS)
    pictured = images_of(array)
    if pictured is None:
        return framed(name, facts, plain(values), sentence(_range(array)))
    told = f"{_caption(pictured, array.dtype)}; {_range(array)}"
    picture = _image(pictured, f"{name} {facts}, {told}")
    return framed(name, facts, picture, sentence(told), folded("values", values))


class Images(NamedTuple):
    """Images of an array: `tiles` (n, H, W) or (n, H, W, 3), those of `total` that are drawn, with
    every `stride`-th of their pixels.
    """

    tiles: np.ndarray
    total: int
    stride: int


def images_of(array: np.ndarray) -> Images | None:
    """The images that an array seems to have; None where it is something else."""
    if array.dtype.kind not in "buif" or not 2 <= array.ndim <= 4 or not array.size:
        return None
    tiles = _tiles(array)
    least = _MATRIX if array.ndim == 2 else _SIDE
    low, high = sorted(tiles.shape[1:3]) if tiles is not None else (0, 0)
    if tiles is None or low < least or high > _ASPECT * low:
        return None
    stride = -(-high // _PIXELS)
    return Images(tiles[:_TILES, ::stride, ::stride], len(tiles), stride)


def _tiles(array: np.ndarray) -> np.ndarray | None:
    """(n, H, W) or (n, H, W, 3): channels are the axis of 1 or 3 before or after H and W."""
    if array.ndim == 4:
        if array.shape[1] in (1, 3):
            array = np.moveaxis(array, 1, -1)
        if array.shape[-1] not in (1, 3):
            return None
        return array[..., 0] if array.shape[-1] == 1 else array
    if array.ndim == 3 and (array.shape[0] in (1, 3) or array.shape[-1] in (1, 3)):
        return _tiles(array[None])
    return array[None] if array.ndim == 2 else array


def _image(images: Images, words: str) -> str:
    """An `<img>` with its file within."""
    drawn, _ = in_rows(_shades(images.tiles), columns=8)
    rgba = np.zeros((*drawn.shape[:2], 4))
    rgba[..., :3] = np.nan_to_num(drawn[..., None] if drawn.ndim == 2 else drawn[..., :3])
    rgba[..., 3] = ~np.isnan(drawn) if drawn.ndim == 2 else drawn[..., 3]
    file = base64.b64encode(png(np.round(rgba * 255).astype(np.uint8))).decode()
    wanted = (_ALONE if images.total == 1 else _ROW) // images.tiles.shape[1]
    zoom = max(min(wanted, _WIDTH // drawn.shape[1]), 1)
    return (
        f'<img src="data:image/png;base64,{file}" alt="{words}" '
        f'width="{drawn.shape[1] * zoom}" height="{drawn.shape[0] * zoom}">'
    )


def _shades(tiles: np.ndarray) -> np.ndarray:
    if tiles.dtype == np.uint8:
        return tiles / 255.0
    return tiles.astype(np.float64) if _is_shade(tiles) else stretched(tiles)


def _is_shade(tiles: np.ndarray) -> bool:
    return bool(np.isfinite(tiles).all() and tiles.min() >= 0 and tiles.max() <= 1)


def _caption(images: Images, dtype: Any) -> str:
    drawn = len(images.tiles)
    words = "drawn as an image" if images.total == 1 else f"drawn as {images.total:,} images"
    if drawn < images.total:
        words += f", the first {drawn} here"
    if images.stride > 1:
        words += f", one pixel in {images.stride} along each side"
    if dtype != np.uint8 and not _is_shade(images.tiles):
        words += ", black the lowest value and white the highest"
    return words


def _range(array: np.ndarray) -> str:
    """The extremes and the mean of more values than one sees at a glance."""
    if array.dtype.kind not in "iuf" or array.size < 2:
        return ""
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    missing = array.size - finite.size
    words = [f"{missing:,} not finite"] if missing else []
    if finite.size:
        mean = finite.mean(dtype=np.float64)
        words = [f"from {finite.min():.6g} to {finite.max():.6g}", f"mean {mean:.6g}", *words]
    return ", ".join(words)
