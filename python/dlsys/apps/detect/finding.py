"""Finds things in photographs with a trained detector, draws them, and measures how well."""

from __future__ import annotations

import argparse
import colorsys
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ...data.formats.decode import require_pillow
from ...errors import DataError
from ...files import replacing
from ...inference import infer
from ...runtime.device import Context
from .. import streams
from ..superres.photos import listed
from ..superres.planes import format_of
from ..usage import UsageError
from . import training
from .coco import Figures, Found, measured
from .prediction import Prediction
from .scenes import Scene, framed, normalized, pixels_of

Array = np.ndarray[Any, Any]

_MEASURED = 0.01  # the least score that is measured
_BATCH = 16
_SHOWN, _ZOOM, _GAP = (2, 4), 2, 4  # rows and columns of a sheet, and between its photos


class Finder:
    """A trained detector for photos of any size. settings, model: what `training.load` returns.
    least, suppression: see Prediction.
    """

    def __init__(
        self,
        settings: training.Settings,
        model: Any,
        ctx: Context | None = None,
        least: float = _MEASURED,
        suppression: str = "hard",
    ) -> None:
        self.names, self._size = settings.names, settings.size
        self._program = infer(Prediction(model, settings.size, least, suppression), ctx=ctx)

    def __call__(self, photos: Sequence[Array]) -> list[Found]:
        """What is in each photo (h, w, 3) uint8, the highest score first."""
        parts = [framed(photo, self._size) for photo in photos]
        frames = [(scale, x.shape[1], x.shape[0]) for x, (_, scale) in zip(photos, parts)]
        images = normalized(np.stack([pixels for pixels, _ in parts]))
        made = []
        for boxes, labels, scores in zip(*self._program(images, np.array(frames, np.float32))):
            found = scores > 0
            made.append(Found(boxes[found], labels[found], scores[found]))
        return made


def drawn(photo: Array, found: Found, names: Sequence[str], zoom: int = 1) -> Array:
    """A photo, `zoom` times as large, with the boxes, classes and scores of what was found."""
    from PIL import ImageDraw

    image = require_pillow().fromarray(photo.repeat(zoom, 0).repeat(zoom, 1))
    pen = ImageDraw.Draw(image)
    for box, label, score in reversed(list(zip(*found))):
        hue = colorsys.hsv_to_rgb(label / len(names), 0.9, 1.0)
        color = tuple(round(255 * part) for part in hue)
        left, top, right, low = (float(edge) * zoom for edge in box)
        pen.rectangle((left, top, max(right - 1, left), max(low - 1, top)), outline=color, width=2)
        text = f"{names[label]} {score:.0%}"
        _, _, width, height = pen.textbbox((0, 0), text)
        x = max(min(left, image.width - width - 2), 0)
        y = top - height - 2 if top > height + 2 else top
        pen.rectangle((x, y, x + width + 2, y + height + 2), fill=color)
        pen.text((x + 1, y), text, fill="black")
    return np.asarray(image)


# ---- commands ----
def run(options: argparse.Namespace, ctx: Context | None) -> int:
    """Finds things in the photos of files and folders, and draws them. A file that cannot be read
    is said on standard error, and the others are shown all the same; returns 1 then.
    """
    if not options.paths:
        raise UsageError("run needs photos: detect run DIR photo.jpg, or a folder of photos")
    settings, model = training.load(options.folder)
    least = 0.4 if options.least is None else options.least
    finder = Finder(settings, model, ctx, least, options.suppression)
    failed = 0
    for path in options.paths:
        try:
            files = listed([path])
        except DataError as error:
            streams.say(str(error))
            files, failed = [], 1
        for file in files:
            try:
                _show(finder, file, options.out)
            except DataError as error:
                streams.say(str(error))
                failed = 1
    return failed


def _show(finder: Finder, file: Path, out: Path | None) -> None:
    photo = pixels_of(file)
    (found,) = finder([photo])
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    target = (out or file.parent) / f"{file.stem}_found.png"
    if target.exists():
        raise DataError(f"{target} is there already: move it away, or name another folder, --out")
    _save(target, drawn(photo, found, finder.names))
    print(f"{file}  ->  {target}")
    for box, label, score in zip(*found):
        print(f"  {finder.names[label]}  {score:.2f}  at {', '.join(f'{x:.0f}' for x in box)}")


def evaluate(options: argparse.Namespace, ctx: Context | None) -> None:
    """Prints COCO's figures of a run on what is held out, and writes them as JSON and a picture
    where asked for.
    """
    if options.paths:
        raise UsageError(f"evaluate has one folder, of the run: what is {options.paths[0]}?")
    settings, model = training.load(options.folder)
    if options.pictures is not None:
        format_of(options.pictures)
    held = settings.held_out()
    # Boxes are written in the pixels of the photo itself; areas are COCO's.
    finder = Finder(settings, model, ctx, suppression=options.suppression)
    found: list[Found] = []
    for k in tqdm(range(0, len(held.scenes), _BATCH), leave=False, disable=None):
        found += finder([pixels_of(one.photo) for one in held.scenes[k : k + _BATCH]])
    figures = measured(held.scenes, found, len(settings.names))
    things = sum(int((~one.ignored).sum()) for one in held.scenes)
    print(f"{things} things in {len(held.scenes)} photos that were held out")
    print(f"suppression: {options.suppression}\n")
    print(table(figures, settings.names))
    if options.json is not None:
        record = {"photos": len(held.scenes), "things": things, "suppression": options.suppression}
        record |= {"figures": _plain(figures.means)}
        record |= {"AP50_by_class": _plain(dict(zip(settings.names, figures.by_class)))}
        with replacing(options.json) as file:
            file.write(json.dumps(record, indent=1).encode())
    if options.pictures is not None:
        sure = [_above(one, 0.4) for one in found]
        _save(options.pictures, sheet(held.scenes, sure, settings.names))


def table(figures: Figures, names: Sequence[str]) -> str:
    """The figures as Markdown: COCO's twelve, then the average precision at 0.5 of each class."""
    rows = [*figures.means.items(), *((f"AP50 {n}", x) for n, x in zip(names, figures.by_class))]
    width = max(len(name) for name, _ in rows)
    lines = [f"| {'figure':<{width}} | value |", f"| {'-' * width} | ----- |"]
    return "\n".join([*lines, *(f"| {name:<{width}} | {_text(x)} |" for name, x in rows)])


def sheet(given: Sequence[Scene], found: Sequence[Found], names: Sequence[str]) -> Array:
    """The first photos side by side, with what was found; photos must have one size."""
    rows, columns = _SHOWN
    shown = [drawn(pixels_of(s.photo), f, names, _ZOOM) for s, f in zip(given, found)]
    shown = [one for one in shown[: rows * columns] if one.shape == shown[0].shape]
    height, width = shown[0].shape[:2]
    size = rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3
    made = np.full(size, 255, np.uint8)
    for k, one in enumerate(shown):
        top, left = (k // columns) * (height + _GAP), (k % columns) * (width + _GAP)
        made[top : top + height, left : left + width] = one
    return made


def _above(found: Found, least: float) -> Found:
    sure = found.scores >= least
    return Found(found.boxes[sure], found.labels[sure], found.scores[sure])


def _text(value: float) -> str:
    return "  -  " if math.isnan(value) else f"{value:.3f}"


def _plain(values: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(x) else round(x, 5) for name, x in values.items()}


def _save(path: Path, pixels: Array) -> None:
    kind = format_of(path)
    with replacing(path) as file:
        require_pillow().fromarray(pixels).save(file, kind)
