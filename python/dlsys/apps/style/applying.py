"""Paints photographs with a trained network, measures it, and writes it as an ONNX file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import nn
from ...autodiff import Executor, Variable, constant
from ...errors import DataError
from ...files import replacing
from ...inference import infer
from ...runtime.device import Context
from ..superres.photos import listed
from ..superres.planes import format_of
from ..usage import UsageError
from .losses import Losses, in_planes
from .painting import Record, paint
from .pictures import check_free, read, write
from .training import load

Array = np.ndarray[Any, Any]

_STEP = 32  # of the extents that are computed, for each of which there is a program
_MEASURED = 256  # pixels of the longer side of the photos that `evaluate` takes
_SEARCHED = 50  # steps of L-BFGS beside the network
_GAP = 4  # pixels between the pictures of a sheet


class Painter:
    """A trained network for photos of any size: `painter(photo)`.

    Photos are taken as a whole: instance normalization measures all of a picture, so that tiles
    would differ in color. Behind their edges they go on mirrored, up to a multiple of 32 pixels.
    """

    def __init__(self, model: nn.StyleNet, ctx: Context | None = None) -> None:
        self._program = infer(model, ctx=ctx)

    def __call__(self, photo: Array) -> Array:
        """The painting (h, w, 3) float32 in [0, 1] of a photo (h, w, 3) in [0, 1]."""
        height, width = photo.shape[:2]
        behind = [(0, -n % _STEP) for n in (height, width)]
        padded = np.pad(photo, [*behind, (0, 0)], mode="reflect")
        made = self._program(in_planes(padded))[0].transpose(1, 2, 0)
        return np.clip(made[:height, :width], 0, 1)


class Row(NamedTuple):
    """A photo, or their mean, and the losses of each way to paint it."""

    photo: str
    losses: dict[str, Record]


# ---- commands ----
def run(options: argparse.Namespace, ctx: Context | None) -> int:
    """Paints the photos of files and folders; returns 1 where one could not be read."""
    from .. import streams

    folder, *paths = options.paths
    if not paths:
        raise UsageError("run needs photos: style run DIR photo.jpg, or a folder of photos")
    painter = Painter(load(folder)[1], ctx)
    failed = 0
    for path in paths:
        try:
            for file in listed([path]):
                _paint(painter, file, options.out, options.size)
        except DataError as error:
            streams.say(str(error))
            failed = 1
    return failed


def _paint(painter: Painter, file: Path, out: Path | None, size: int | None) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    target = (out or file.parent) / f"{file.stem}_painted.png"
    check_free(target)
    photo = read(file, size)
    write(target, painter(photo))
    print(f"{file}  ->  {target}  {photo.shape[1]} x {photo.shape[0]}", flush=True)


def evaluate(options: argparse.Namespace, ctx: Context | None) -> None:
    """Prints the losses of a network on the photos that were held out, beside those of the photos
    themselves and of L-BFGS, and writes them as JSON and a sheet where asked for.
    """
    folder, *others = options.paths
    if others:
        raise UsageError(f"evaluate has one folder, of the run: what is {others[0]}?")
    settings, model = load(folder)
    if options.pictures is not None:
        format_of(options.pictures)
    paths = listed(options.photos) if options.photos else settings.split()[1]
    losses, painter = settings.losses(ctx), Painter(model, ctx)
    steps = options.steps or _SEARCHED
    rows, sheet = [], []
    for path in paths:
        photo = read(path, options.size or _MEASURED)
        painted = painter(photo)
        searched, records = paint(photo, losses, steps=steps, ctx=ctx)
        own = measured(painted, photo, losses, ctx)
        ways = {"unchanged": records[0], "network": own, f"L-BFGS, {steps} steps": records[-1]}
        rows.append(Row(path.stem, ways))
        sheet.append([photo, painted, searched])
    rows.append(_mean(rows))
    print(f"{len(paths)} photos; loss = content + {settings.style_weight:g} · style + variation\n")
    print(table(rows))
    if options.json is not None:
        record = [
            {"photo": row.photo, **{way: r._asdict() for way, r in row.losses.items()}}
            for row in rows
        ]
        with replacing(options.json) as file:
            file.write(json.dumps(record, indent=1).encode())
    if options.pictures is not None:
        write(options.pictures, stacked([side_by_side(row) for row in sheet]))


def measured(painted: Array, photo: Array, losses: Losses, ctx: Context | None) -> Record:
    """The losses of a painting (h, w, 3) of a photo of that shape."""
    given = in_planes(photo)
    picture = Variable("picture", given.shape, np.float32)
    wanted = losses.content_of(constant(given))
    nodes = [losses.total(picture, wanted), *losses.of(picture, wanted)]
    values = Executor(nodes, ctx=ctx).run({picture: in_planes(painted)}, True)
    return Record(0, *map(float, values))


def table(rows: Sequence[Row]) -> str:
    """The losses as Markdown: content and style of each way, and their weighted sum."""
    ways = list(rows[0].losses)
    lines = [["photo", *ways], ["---"] * (1 + len(ways))]
    for row in rows:
        found = [row.losses[way] for way in ways]
        cells = [f"{r.loss:.2f} ({r.content:.2f}, {r.style:.4f})" for r in found]
        lines.append([row.photo, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def side_by_side(pictures: Sequence[Array]) -> Array:
    """Pictures (h, w, 3) of one height in a row, on white."""
    height = max(picture.shape[0] for picture in pictures)
    gap = np.ones((height, _GAP, 3), np.float32)
    parts = [part for picture in pictures for part in (_filled(picture, height, 0), gap)]
    return np.concatenate(parts[:-1], axis=1)


def stacked(rows: Sequence[Array]) -> Array:
    """Rows of pictures one below the other, on white."""
    width = max(row.shape[1] for row in rows)
    parts = []
    for row in rows:
        filled = _filled(row, row.shape[0], width)
        parts += [filled, np.ones((_GAP, width, 3), np.float32)]
    return np.concatenate(parts[:-1])


def _filled(picture: Array, height: int, width: int) -> Array:
    behind = [(0, max(n - m, 0)) for n, m in zip((height, width), picture.shape)]
    return np.pad(picture, [*behind, (0, 0)], constant_values=1)


def _mean(rows: Sequence[Row]) -> Row:
    ways = rows[0].losses
    means = {way: np.mean([row.losses[way] for row in rows], axis=0) for way in ways}
    return Row("mean", {way: Record(ways[way].step, *map(float, means[way][1:])) for way in ways})


def export(options: argparse.Namespace) -> None:
    """Writes the network as an ONNX file for photos of any multiple of 4 pixels."""
    from ...onnx.exporter import export as write_onnx

    if len(options.paths) != 2:
        raise UsageError("export needs the ONNX file to write: style export DIR FILE.onnx")
    folder, path = options.paths
    settings, model = load(folder)
    about = {"style": Path(settings.style).name, "input": "RGB in [0, 1], float32"}
    write_onnx(model, path, (None, 3, "height", "width"), metadata=about)
    print(f"{path}: takes {about['input']}, (n, 3, height, width) in multiples of 4")
