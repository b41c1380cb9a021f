"""Folders of images, a subfolder a class, decoded by Pillow when they are taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .dataset import Array, Dataset

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


def image_folder(
    folder: str | os.PathLike[str], size: tuple[int, int] | None = None, mode: str = "RGB"
) -> Dataset:
    """The images in the subfolders of `folder`, each of which is a class, in the order of names.

    size: (height, width) that images are resized to; without it they must all have the first one's.
    mode: "L", "RGB" or "RGBA". Images are uint8 (n, channels, height, width); they are decoded when
    they are taken, so that the set may be larger than the memory. Needs the extra `images`.

    Raises DataError for a folder without images, a mode that there is not, and, naming the file, an
    image that cannot be decoded or has another size.
    """
    if mode not in _CHANNELS:
        raise DataError(f"image_folder: mode {mode!r}, expected one of {', '.join(_CHANNELS)}")
    base = Path(folder)
    if not base.is_dir():
        raise DataError(f"{base}: no such folder; it should have a subfolder a class")
    classes = sorted(path.name for path in base.iterdir() if path.is_dir())
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(p for p in (base / name).iterdir() if p.suffix.lower() in SUFFIXES)
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise DataError(
            f"{base}: no images; expected a subfolder a class with files of {', '.join(SUFFIXES)}"
        )
    return Dataset(FolderImages(paths, size, mode), np.array(labels, np.int64), classes)


class FolderImages:
    """Images in files, decoded when they are asked for: `images[indices]` is an array."""

    dtype = np.dtype(np.uint8)

    def __init__(self, paths: Sequence[Path], size: tuple[int, int] | None, mode: str) -> None:
        self.paths = list(paths)
        self.mode = mode
        self._resize = size is not None
        self.size = size if size is not None else self._decode(self.paths[0]).shape[1:]

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, channels, height, width)"""
        return len(self.paths), _CHANNELS[self.mode], *self.size

    def __getitem__(self, chosen: Any) -> Array:
        numbers = np.arange(len(self.paths))[chosen]
        images = np.empty((*numbers.shape, *self.shape[1:]), np.uint8)
        for place, number in np.ndenumerate(numbers):
            image = self._decode(self.paths[number])
            if image.shape[1:] != tuple(self.size):
                raise DataError(
                    f"{self.paths[number]}: {image.shape[1:]} pixels where the first image has "
                    f"{tuple(self.size)}; give image_folder a size=(height, width)"
                )
            images[place] = image
        return images

    def part(self, chosen: Any) -> FolderImages:
        """The images of these numbers, not decoded."""
        paths = [self.paths[k] for k in np.arange(len(self.paths))[chosen]]
        part = FolderImages(paths, tuple(self.size), self.mode)
        part._resize = self._resize
        return part

    def _decode(self, path: Path) -> Array:
        """The image as (channels, height, width)."""
        pillow = _pillow()
        try:
            with pillow.open(path) as file:
                image = file.convert(self.mode)
        except FileNotFoundError:
            raise DataError(f"{path}: the file has gone since the folder was listed") from None
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise DataError(
                f"{path}: cannot be read as an image ({error}); remove it or replace it"
            ) from error
        if self._resize:
            height, width = self.size
            image = image.resize((width, height), pillow.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("image folders need Pillow: pip install 'dlsys[images]'") from None
    return Image
