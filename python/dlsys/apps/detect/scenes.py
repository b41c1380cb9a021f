"""Photographs with boxes: VOC's and COCO's files, what is cut and flipped, batches for training."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...data.formats.decode import decoded, require_pillow
from ...data.numbered import NumberedBatches
from ...data.prefetch import ordered_map
from ...errors import DataError
from ...files import opened
from ...graph.node import Node
from ...ops.boxes import area
from .network import positions, targets

Array = np.ndarray[Any, Any]

_GRAY = 114  # around a photo that is no square
_WORKERS = 6  # threads that make batches, most of which Pillow and numpy do without the lock
_SMALLEST, _KEPT = 0.6, 0.4  # share of a side that a cut has, and of a box that must be in it


class Scene(NamedTuple):
    """A photo and what is in it. boxes (k, 4) float32 in pixels; labels (k,) int64; areas (k,),
    by which COCO tells small things from large ones; ignored (k,) bool: crowds and what VOC calls
    difficult, which nothing is trained on.
    """

    photo: Path | Array  # (h, w, 3) uint8
    boxes: Array
    labels: Array
    areas: Array
    ignored: Array


class Scenes(NamedTuple):
    """Scenes, and the names of the classes that their labels count."""

    scenes: list[Scene]
    names: tuple[str, ...]


def scene(
    photo: Path | Array, rows: Sequence[Any], areas: Any = None, ignored: Any = None
) -> Scene:
    """A Scene of rows (x1, y1, x2, y2, label)."""
    table = np.asarray(rows, np.float32).reshape(-1, 5)
    boxes = table[:, :4]
    given = area(boxes) if areas is None else np.asarray(areas, np.float64)
    skip = np.zeros(len(table), bool) if ignored is None else np.asarray(ignored, bool)
    return Scene(photo, boxes, table[:, 4].astype(np.int64), given, skip)


# ---- files ----
def read(path: Path) -> Scenes:
    """The scenes of a list of VOC, `VOC2007/ImageSets/Main/train.txt`, or of a JSON file of COCO,
    `annotations/instances_train2017.json`. DataError for what is neither.
    """
    if path.suffix == ".json":
        return _read_coco(path)
    if path.suffix == ".txt":
        return _read_voc(path)
    raise DataError(
        f"{path} is neither a list of VOC, ImageSets/Main/train.txt, nor a JSON file of COCO"
    )


def _text(path: Path) -> bytes:
    try:
        with opened(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def _read_voc(path: Path) -> Scenes:
    root = path.absolute().parents[2] if len(path.absolute().parents) > 2 else path.parent
    rows = []
    for name in _text(path).decode("utf-8", "replace").split("\n"):
        if name.strip():
            file = root / "Annotations" / f"{name.split()[0]}.xml"
            rows.append((root / "JPEGImages" / f"{name.split()[0]}.jpg", _voc_things(file)))
    names = tuple(sorted({thing[0] for _, things in rows for thing in things}))
    made = []
    for photo, things in rows:
        table = [(*corners, names.index(name)) for name, corners, _ in things]
        made.append(scene(photo, table, ignored=[difficult for *_, difficult in things]))
    return Scenes(made, names)


def _voc_things(path: Path) -> list[tuple[str, tuple[float, ...], bool]]:
    """The name, the box and whether it is difficult, of each object in a file of VOC, whose pixels
    count from 1 and whose boxes include their last one.
    """
    content = _text(path)
    try:
        if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
            raise ValueError("it declares entities, which VOC's files do not")
        found: list[tuple[str, tuple[float, ...], bool]] = []
        for thing in ElementTree.fromstring(content).iter("object"):
            box = thing.find("bndbox")
            if box is None:
                raise ValueError("an object has no bndbox")
            x1, y1, x2, y2 = (float(box.findtext(k, "")) for k in ("xmin", "ymin", "xmax", "ymax"))
            if not (x1 <= x2 and y1 <= y2):
                raise ValueError("a box has its corners the wrong way around")
            difficult = thing.findtext("difficult", "0").strip() == "1"
            found.append((thing.findtext("name", "").strip(), (x1 - 1, y1 - 1, x2, y2), difficult))
        return found
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{path} is no annotation of VOC: {error}") from None


def _read_coco(path: Path) -> Scenes:
    try:
        content = json.loads(_text(path))
        kinds = sorted(content["categories"], key=lambda kind: kind["id"])
        label = {kind["id"]: k for k, kind in enumerate(kinds)}
        things: dict[Any, list[Any]] = {image["id"]: [] for image in content["images"]}
        for one in content["annotations"]:
            x, y, w, h = map(float, one["bbox"])
            row = (x, y, x + w, y + h, label[one["category_id"]])
            crowd = bool(one.get("iscrowd", 0))
            things[one["image_id"]].append((row, float(one.get("area", w * h)), crowd))
        folders = [path.parent, path.parent.parent / path.stem.replace("instances_", "")]
        made = []
        for image in content["images"]:
            options = [folder / image["file_name"] for folder in folders]
            photo = next((option for option in options if option.is_file()), options[-1])
            rows, areas, crowds = zip(*things[image["id"]]) if things[image["id"]] else ((),) * 3
            made.append(scene(photo, rows, areas, crowds))
        return Scenes(made, tuple(str(kind["name"]) for kind in kinds))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is no file of COCO: {type(error).__name__} {error}") from None


# ---- pixels ----
def pixels_of(photo: Path | Array) -> Array:
    """The pixels (h, w, 3) uint8 of a photo."""
    if isinstance(photo, Path):
        return np.asarray(decoded(photo, lambda image: np.array(image.convert("RGB"))))
    return photo


def framed(pixels: Array, size: int) -> tuple[Array, float]:
    """A photo scaled into the upper left of size × size pixels, gray where it is not, and how many
    pixels there one of its own is.
    """
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return pixels, 1.0
    pillow = require_pillow()
    scale = size / max(height, width)
    extent = max(1, round(width * scale)), max(1, round(height * scale))
    made = np.full((size, size, 3), _GRAY, np.uint8)
    small = pillow.fromarray(pixels).resize(extent, pillow.Resampling.BILINEAR)
    made[: extent[1], : extent[0]] = np.asarray(small)
    return made, scale


def framed_scene(given: Scene, size: int) -> Scene:
    """A Scene whose photo is size × size pixels in memory."""
    pixels, scale = framed(pixels_of(given.photo), size)
    return given._replace(photo=pixels, boxes=given.boxes * np.float32(scale))


def normalized(pixels: Array) -> Array:
    """What a Detector takes of pixels (…, h, w, 3) uint8: (…, 3, h, w) float32 around 0."""
    return (np.ascontiguousarray(np.moveaxis(pixels, -1, -3), np.float32) - 127.5) / 64


def cut(given: Scene, window: tuple[float, float, float, float]) -> Scene:
    """The part (x1, y1, x2, y2) of a framed scene, enlarged to its size. Boxes are cut too; those
    of which less than 0.4 is left are ignored there, since nobody could tell what they are.
    """
    pillow = require_pillow()
    assert not isinstance(given.photo, Path)
    size = given.photo.shape[0]
    image = pillow.fromarray(given.photo)
    photo = np.asarray(image.resize((size, size), pillow.Resampling.BILINEAR, box=window))
    origin, factor = np.array(window[:2] * 2), size / (window[2] - window[0])
    whole = (given.boxes - origin) * factor
    boxes = np.clip(whole, 0, size).astype(np.float32)
    few = area(boxes) < _KEPT * area(whole)
    return Scene(photo, boxes, given.labels, area(boxes), given.ignored | few)


def flipped(given: Scene) -> Scene:
    """A framed scene, left and right exchanged."""
    assert not isinstance(given.photo, Path)
    x1, y1, x2, y2 = given.boxes.T
    width = given.photo.shape[1]
    boxes = np.stack([width - x2, y1, width - x1, y2], 1)
    return given._replace(photo=given.photo[:, ::-1], boxes=boxes)


class SceneLoader(NumberedBatches):
    """Batches for `train.fit`: images (n, 3, size, size) float32 and what a Detector should say of
    them. Scenes are framed once and kept. augment: each is cut at random and its light changed;
    flip: half of them are flipped too. What a batch has is a function of (seed, its number) alone.
    """

    def __init__(
        self,
        given: Scenes,
        size: int,
        batch_size: int,
        steps: int,
        seed: int = 0,
        augment: bool = True,
        flip: bool = False,
    ) -> None:
        self._scenes = [framed_scene(one, size) for one in given.scenes]
        self._places, self._classes = positions(size), len(given.names)
        self._seed, self._augment, self._flip = seed, augment, flip
        fields = {
            "image": ((3, size, size), np.float32),
            "target": ((len(self._places), self._classes + 4), np.float32),
        }
        super().__init__(batch_size, steps, fields)

    def batch(self, number: int) -> tuple[Array, Array]:
        """The images and targets of a batch, by its number since the first epoch's beginning."""
        rng = np.random.default_rng((self._seed, number))
        chosen = (number * self.batch_size + np.arange(self.batch_size)) % len(self._scenes)
        if self._augment:
            chosen = rng.integers(len(self._scenes), size=self.batch_size)
        images: list[Any] = []
        wanted = []
        for k in chosen:
            one = self._changed(self._scenes[k], rng) if self._augment else self._scenes[k]
            seen = ~one.ignored
            boxes, labels = one.boxes[seen], one.labels[seen]
            images.append(one.photo)
            wanted.append(targets(self._places, boxes, labels, self._classes))
        made = normalized(np.stack(images))
        if self._augment:
            shape = (self.batch_size, 1, 1, 1)
            made *= rng.uniform(0.7, 1.3, shape).astype(np.float32)
            made += rng.uniform(-0.3, 0.3, shape).astype(np.float32)
        return made, np.stack(wanted)

    def epoch(self, number: int, start: int = 0) -> Generator[dict[Node, Any], None, None]:
        """The feeds of each batch of an epoch, from batch `start` on, made ahead by threads."""
        numbers = range(number * len(self) + start, (number + 1) * len(self))
        for arrays in ordered_map(self._part, numbers, _WORKERS, 2 * _WORKERS):
            yield dict(zip(self.inputs(), arrays))

    def _changed(self, one: Scene, rng: np.random.Generator) -> Scene:
        assert not isinstance(one.photo, Path)
        size = one.photo.shape[0]
        side = size * rng.uniform(_SMALLEST, 1)
        x, y = rng.uniform(0, size - side, 2)
        one = cut(one, (x, y, x + side, y + side))
        return flipped(one) if self._flip and rng.random() < 0.5 else one
