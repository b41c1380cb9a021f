"""Enlarges photographs with a trained network, in tiles, and writes it as an ONNX file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ...data.formats.decode import MAX_PIXELS
from ...errors import DataError
from ...inference import infer
from ...runtime.device import Context
from .. import streams
from ..usage import UsageError
from . import training
from .photos import listed
from .planes import Array, Photo, enlarged, format_of, read_photo, write_photo

_TILE = 256
_STEP = 32  # of the extents of smaller tiles, for each of which there is a program


class Enlarger:
    """A trained network that enlarges planes and photos of any size.

    settings, model: what `training.load` returns. tile: the largest extent, in pixels of what the
    network takes, that it sees at once, besides its margins. The result does not depend on it but
    for rounding: tiles overlap by twice the network's margin, and what a pixel behind a tile's edge
    would have changed is cut off. Behind the edges of a photo its last pixels go on.
    """

    def __init__(
        self,
        settings: training.Settings,
        model: training.Network,
        ctx: Context | None = None,
        tile: int = _TILE,
    ) -> None:
        self.settings, self.scale, self._tile = settings, settings.scale, tile
        self._margin = model.margin
        self._program = infer(model, ctx=ctx)

    def photo(self, small: Photo, name: str = "") -> Photo:
        """A photo enlarged: its luminance by the network, colors and alpha bicubically, which eyes
        tell less. With a name a bar shows the tiles on a terminal.
        """
        colors, alpha = small.colors, small.alpha
        return Photo(
            self.plane(small.luminance, name),
            None if colors is None else np.stack([enlarged(p, self.scale) for p in colors]),
            None if alpha is None else enlarged(alpha, self.scale),
        )

    def plane(self, small: Array, name: str = "") -> Array:
        """A plane (h, w) in [0, 1] as (h · scale, w · scale) float32, clipped to [0, 1]."""
        given = self.settings.given(small)
        margin, f = self._margin, self.settings.factor
        height, width = (min(self._tile, -(-n // _STEP) * _STEP) for n in given.shape)
        rows, columns = max(height, given.shape[0]), max(width, given.shape[1])
        behind = rows - given.shape[0], columns - given.shape[1]
        padded = np.pad(given, [(margin, margin + n) for n in behind], mode="edge")
        made = np.empty((rows * f, columns * f), np.float32)
        tiles = [(i, j) for i in _starts(rows, height) for j in _starts(columns, width)]
        hidden = None if name else True  # None: unless it is a terminal
        for row, column in tqdm(tiles, name, unit=" tiles", leave=False, disable=hidden):
            part = padded[row : row + height + 2 * margin, column : column + width + 2 * margin]
            result = self._program(part[None, None])[0, 0]
            made[row * f : (row + height) * f, column * f : (column + width) * f] = result[
                margin * f : -margin * f, margin * f : -margin * f
            ]
        made = made[: given.shape[0] * f, : given.shape[1] * f]
        return np.clip(made, 0, 1)


def _starts(extent: int, tile: int) -> list[int]:
    """Where tiles begin that cover an extent: the last one ends where it does."""
    return [*range(0, extent - tile, tile), extent - tile]


# ---- commands ----
def run(options: argparse.Namespace, ctx: Context | None) -> int:
    """Enlarges the photos of files and folders. A file that cannot be read is said on standard
    error, and the others are enlarged all the same; returns 1 then.
    """
    if not options.paths:
        raise UsageError("run needs photos: superres run DIR photo.jpg, or a folder of photos")
    settings, model = training.load(options.folder)
    enlarger = Enlarger(settings, model, ctx, options.tile or _TILE)
    failed = 0
    for file in _files(options.paths):
        try:
            if isinstance(file, DataError):
                raise file
            _enlarge(enlarger, file, _target(file, settings.scale, options.out))
        except DataError as error:
            streams.say(str(error))
            failed = 1
    return failed


def _files(paths: Sequence[Path]) -> Iterator[Path | DataError]:
    """The photos of files and folders, or the error of a path that has none."""
    for path in paths:
        try:
            yield from listed([path])
        except DataError as error:
            yield error


def _enlarge(enlarger: Enlarger, file: Path, target: Path) -> None:
    format_of(target)
    if target.exists():
        raise DataError(f"{target} is there already: move it away, or name another folder, --out")
    small = read_photo(file)
    height, width = (extent * enlarger.scale for extent in small.luminance.shape)
    if height * width > MAX_PIXELS:
        raise DataError(
            f"{file}: enlarged it would have {width:,} x {height:,} pixels, more than the "
            f"{MAX_PIXELS:,} that are written; make it smaller, or take a part of it"
        )
    write_photo(target, enlarger.photo(small, file.name))
    print(f"{file}  {width // enlarger.scale} x {height // enlarger.scale}", end="")
    print(f"  ->  {target}  {width} x {height}", flush=True)


def _target(file: Path, scale: int, out: Path | None) -> Path:
    """Where an enlarged photo goes: beside the small one, or into a folder, which is made."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    return (out or file.parent) / f"{file.stem}_{scale}x.png"


def export(options: argparse.Namespace) -> None:
    """Writes the network as an ONNX file for planes of any size."""
    from ...onnx.exporter import export as write

    if len(options.paths) != 1:
        raise UsageError("export needs the ONNX file to write: superres export DIR FILE.onnx")
    settings, model = training.load(options.folder)
    what = (
        "a small luminance" if settings.network == "espcn" else "a luminance enlarged bicubically"
    )
    about = {"scale": str(settings.scale), "input": f"{what}, float32 in [0, 1]"}
    write(model, options.paths[0], (None, 1, "height", "width"), metadata=about)
    print(f"{options.paths[0]}: {settings.network}, {settings.scale}x, takes {about['input']}")
