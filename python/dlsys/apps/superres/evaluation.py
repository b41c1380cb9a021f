"""Measures networks against bicubic enlarging on photographs, and shows them side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from ...data.formats.decode import require_pillow
from ...errors import DataError
from ...files import replacing
from ...runtime.device import Context
from ...train.history import plain
from ..usage import UsageError
from . import training
from .enlarging import Enlarger
from .photos import listed
from .planes import (
    Array,
    Photo,
    enlarged,
    format_of,
    in_8_bits,
    pixels,
    read_photo,
    reduced,
    resized,
)
from .quality import psnr, ssim

BICUBIC = "bicubic"
_SIDE, _ZOOM, _GAP, _TITLE = 96, 2, 4, 16  # pixels of a sheet: crops, between them, above them


class Row(NamedTuple):
    """A photo, or their mean, at a scale: (PSNR in dB, SSIM) of each way to enlarge it."""

    scale: int
    photo: str
    figures: dict[str, tuple[float, float]]


def evaluate(options: argparse.Namespace, ctx: Context | None) -> None:
    """Prints the table of one or more runs, and writes it as JSON and pictures where asked for."""
    runs = [training.load(folder) for folder in (options.folder, *options.paths)]
    paths = _photos(options, [settings for settings, _ in runs])
    if options.pictures is not None:
        format_of(options.pictures)
        require_pillow()
    enlargers = [Enlarger(settings, model, ctx) for settings, model in runs]
    rows = measured(enlargers, paths)
    which = "" if options.photos else " that were held out"
    print(f"{len(paths)} photos{which}; PSNR in dB and SSIM of luminance\n")
    print(table(rows))
    if options.json is not None:
        with replacing(options.json) as file:
            file.write(json.dumps([plain(row._asdict()) for row in rows], indent=1).encode())
    if options.pictures is not None:
        write_sheet(options.pictures, enlargers, paths)


def measured(enlargers: Sequence[Enlarger], paths: Sequence[Path]) -> list[Row]:
    """PSNR and SSIM of bicubic enlarging and of each network on each photo, and their means, by
    scale: of luminance in steps of 1/255, less a border of `scale` pixels, as is usual. DataError
    for a photo that is too small for SSIM.
    """
    rows = []
    for scale in sorted({enlarger.scale for enlarger in enlargers}):
        own = [enlarger for enlarger in enlargers if enlarger.scale == scale]
        found = [
            Row(scale, path.stem, _figures(own, path))
            for path in tqdm(paths, f"{scale}x", unit=" photos", leave=False, disable=None)
        ]
        means = {
            way: tuple(np.mean([row.figures[way] for row in found], axis=0).tolist())
            for way in found[0].figures
        }
        rows += [*found, Row(scale, "mean", means)]
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, a column for each way to enlarge."""
    ways = list(dict.fromkeys(way for row in rows for way in row.figures))
    lines = [["scale", "photo", *ways], ["---"] * (2 + len(ways))]
    for row in rows:
        cells = [
            f"{row.figures[way][0]:.2f} / {row.figures[way][1]:.4f}" if way in row.figures else ""
            for way in ways
        ]
        lines.append([f"{row.scale}x", row.photo, *cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)) + " |"
        for line in lines
    )


def write_sheet(path: Path, enlargers: Sequence[Enlarger], paths: Sequence[Path]) -> None:
    """Writes a picture with a row for each photo: the part that bicubic enlarging fails most on,
    by each network of the first one's scale, and as it is. DataError where it cannot be written.
    """
    own = [enlarger for enlarger in enlargers if enlarger.scale == enlargers[0].scale]
    crops = [_crops(own, photo) for photo in paths]
    titles = list(crops[0])
    side = _SIDE * _ZOOM
    height, width = len(crops) * (side + _GAP) + _TITLE, len(titles) * (side + _GAP) - _GAP
    sheet = np.full((height, width, 3), 255, np.uint8)
    for i, row in enumerate(crops):
        for j, crop in enumerate(row.values()):
            top, left = _TITLE + i * (side + _GAP), j * (side + _GAP)
            large = crop.repeat(_ZOOM, 0).repeat(_ZOOM, 1)
            sheet[top : top + side, left : left + side] = large
    _save(path, sheet, titles)


# ---- one photo ----
def _figures(enlargers: Sequence[Enlarger], path: Path) -> dict[str, tuple[float, float]]:
    scale = enlargers[0].scale
    large, small = reduced(read_photo(path).luminance, scale)
    if min(large.shape) < 11 + 2 * scale:
        raise DataError(f"{path}: a photo of {large.shape} pixels is too small to be measured")
    inner = (slice(scale, -scale),) * 2
    made = {BICUBIC: enlarged(small, scale)}
    made |= {enlarger.settings.network: enlarger.plane(small) for enlarger in enlargers}
    planes = {way: in_8_bits(plane)[inner] for way, plane in made.items()}
    return {way: (psnr(p, large[inner]), ssim(p, large[inner])) for way, p in planes.items()}


def _crops(enlargers: Sequence[Enlarger], path: Path) -> dict[str, Array]:
    """The same part (side, side, 3) uint8 of a photo, enlarged in each way and as it is."""
    scale = enlargers[0].scale
    photo = read_photo(path)
    large, small = reduced(photo.luminance, scale)
    if min(large.shape) < _SIDE:
        raise DataError(f"{path}: the photo is smaller than the {_SIDE} pixels of a sheet's crop")
    made = {"small": np.kron(small, np.ones((scale, scale), np.float32))}
    made[BICUBIC] = enlarged(small, scale)
    made |= {enlarger.settings.network: enlarger.plane(small) for enlarger in enlargers}
    colors = None
    if photo.colors is not None:
        cut = photo.colors[:, : large.shape[0], : large.shape[1]]
        colors = np.stack([enlarged(resized(plane, small.shape), scale) for plane in cut])
    row, column = _worst(np.abs(made[BICUBIC] - large))
    part = np.s_[..., row : row + _SIDE, column : column + _SIDE]
    shown = {way: Photo(plane, colors, None) for way, plane in made.items()}
    shown["original"] = Photo(large, None if photo.colors is None else cut, None)
    return {way: _in_rgb(Photo(p[0][part], None if p[1] is None else p[1][part], None))
            for way, p in shown.items()}  # fmt: skip


def _worst(error: Array) -> tuple[int, int]:
    """The first row and column of the square of a sheet with the largest sum of errors."""
    sums = np.pad(error.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    s = _SIDE
    totals = sums[s:, s:] - sums[:-s, s:] - sums[s:, :-s] + sums[:-s, :-s]
    row, column = np.unravel_index(int(totals.argmax()), totals.shape)
    return int(row), int(column)


def _in_rgb(photo: Photo) -> Array:
    values = pixels(photo)
    return values if values.ndim == 3 else np.stack([values] * 3, -1)


def _save(path: Path, sheet: Array, titles: Sequence[str]) -> None:
    from PIL import ImageDraw

    image = require_pillow().fromarray(sheet)
    draw = ImageDraw.Draw(image)
    for k, title in enumerate(titles):
        draw.text((k * (_SIDE * _ZOOM + _GAP) + 2, 2), title, fill="black")
    with replacing(path) as file:
        image.save(file, format_of(path), **({} if path.suffix == ".png" else {"quality": 85}))


def _photos(options: argparse.Namespace, settings: Sequence[training.Settings]) -> list[Path]:
    """The photos that the user names, or those that the runs held out. UsageError where the runs
    held out others, and where a run is there twice.
    """
    ways = [(each.network, each.scale) for each in settings]
    if len(set(ways)) < len(ways):
        raise UsageError("two of the runs have one network and scale: leave one out")
    if options.photos:
        return listed(options.photos)
    held = [each.split()[1] for each in settings]
    if any(paths != held[0] for paths in held):
        raise UsageError("the runs held out different photos: name --photos to measure all on")
    return held[0]
