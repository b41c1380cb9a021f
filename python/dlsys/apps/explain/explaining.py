"""Explains photographs: a picture for each, or a sheet of all with several methods."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...data.formats.decode import require_pillow
from ...errors import DataError
from ...explain import METHODS, Explainer, Explanation, overlay
from ...files import replacing
from ...runtime.device import Context
from .. import streams
from ..superres.photos import listed
from ..superres.planes import format_of
from ..usage import UsageError
from . import models

Array = np.ndarray[Any, Any]

_TOP = 3  # classes that are said
_SIDE = 224  # pixels of a picture at least
_GAP, _LINE = 4, 14  # pixels between pictures, and of a line of text


class Shown(NamedTuple):
    """A photo with the explanation of each method."""

    file: Path
    image: Array
    found: dict[str, Explanation]


def run(options: argparse.Namespace, ctx: Context | None) -> int:
    """Explains the photos of files and folders. A file that cannot be read is said on standard
    error, and the others are explained all the same; returns 1 then.
    """
    if not options.photos:
        raise UsageError("explain needs photos: explain MODEL photo.jpg, or a folder of photos")
    if options.sheet is not None:
        format_of(options.sheet)
    classifier = models.load(options.model)
    wanted = _class_of(options.of, classifier.classes)
    explainers = {
        method: Explainer(classifier.model, method, options.layer, ctx)
        for method in _methods(options.method)
    }
    failed, shown = 0, []
    for path in options.photos:
        try:
            files = listed([path])
        except DataError as error:
            streams.say(str(error))
            files, failed = [], 1
        for file in files:
            try:
                one = _explained(file, classifier, explainers, wanted)
                print(f"{file}  {likeliest(one, classifier.classes)}", flush=True)
                if options.sheet is None:
                    _write_each(one, options.out)
                shown.append(one)
            except DataError as error:
                streams.say(str(error))
                failed = 1
    if options.sheet is not None and shown:
        _save(options.sheet, sheet(shown, classifier.classes))
        print(f"{options.sheet}  {len(shown)} photos")
    return failed


def likeliest(shown: Shown, classes: Sequence[str]) -> str:
    """The likeliest classes with their probabilities, as text."""
    chances = next(iter(shown.found.values())).probabilities[0]
    best = np.argsort(-chances, kind="stable")[:_TOP]
    return "  ".join(f"{_name(classes, int(k))} {chances[k]:.3f}" for k in best)


def sheet(shown: Sequence[Shown], classes: Sequence[str]) -> Array:
    """A picture (h, w, 3) uint8: a row for each photo, itself first, then a map of each method."""
    from PIL import ImageDraw

    scale = _scale(shown[0].image)
    side = shown[0].image.shape[1] * scale
    titles = ["photo", *shown[0].found]
    high, wide = side + _LINE + _GAP, side + _GAP
    size = (wide * len(titles) - _GAP, _LINE + high * len(shown))
    page = require_pillow().new("RGB", size, "white")
    pen = ImageDraw.Draw(page)
    for column, title in enumerate(titles):
        pen.text((column * wide + 2, 1), title, fill="black")
    for row, one in enumerate(shown):
        top = _LINE + row * high
        maps = [drawable(method, explanation.maps[0]) for method, explanation in one.found.items()]
        for column, evidence in enumerate([maps[0] * 0, *maps]):
            picture = overlay(one.image, evidence, scale)[..., :3]
            tile = require_pillow().fromarray(np.ascontiguousarray(picture))
            page.paste(tile, (column * wide, top))
        label = int(next(iter(one.found.values())).classes[0])
        text = f"for {_name(classes, label)}:  {likeliest(one, classes)}"
        pen.text((2, top + side), text, fill="black")
    return np.asarray(page)


def drawable(method: str, evidence: Array) -> Array:
    """A map as it is drawn. Maps by pixel have few that are far above the others: for the eye the
    strongest hundredth count alike.
    """
    if method not in ("saliency", "integrated_gradients"):
        return evidence
    return np.clip(evidence / max(np.percentile(evidence, 99), 1e-6), 0, 1)


# ---- its parts ----
def _methods(given: str | None) -> list[str]:
    """The methods of a list such as grad_cam,saliency. UsageError for others."""
    names = [METHODS[0]] if given is None else given.split(",")
    for name in names:
        if name != "all" and name not in METHODS:
            raise UsageError(f"--method {name!r:.40} is none of {', '.join(METHODS)} and all")
    return list(METHODS) if "all" in names else list(dict.fromkeys(names))


def _class_of(given: str | None, classes: Sequence[str]) -> int | None:
    """The index of a class by its name or number. UsageError for one that there is not."""
    if given is None:
        return None
    if given in classes:
        return list(classes).index(given)
    if given.isdigit() and (not classes or int(given) < len(classes)):
        return int(given)
    raise UsageError(f"--class {given!r:.40} is no class of the model, by name or by number")


def _explained(
    file: Path, classifier: models.Classifier, explainers: dict[str, Explainer], wanted: int | None
) -> Shown:
    image = classifier.read(file)
    return Shown(file, image, {m: e(image[None], wanted) for m, e in explainers.items()})


def _write_each(shown: Shown, out: Path | None) -> None:
    """A picture for each method beside the photo, or in a folder, which is made."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for method, explanation in shown.found.items():
        target = (out or shown.file.parent) / f"{shown.file.stem}_{method}.png"
        if target.exists():
            raise DataError(f"{target} is there already: move it away, or name a folder, --out")
        evidence = drawable(method, explanation.maps[0])
        _save(target, overlay(shown.image, evidence, _scale(shown.image))[..., :3])
        print(f"  {target}", flush=True)


def _scale(image: Array) -> int:
    """Pixels of a picture for one of the image."""
    return max(_SIDE // image.shape[1], 1)


def _name(classes: Sequence[str], label: int) -> str:
    return classes[label] if classes else f"class {label}"


def _save(path: Path, pixels: Array) -> None:
    kind = format_of(path)
    options: dict[str, Any] = {} if kind == "PNG" else {"quality": 85}
    with replacing(path) as file:
        require_pillow().fromarray(np.ascontiguousarray(pixels)).save(file, kind, **options)
