"""Folders of images, a subfolder a class, decoded by Pillow when they are taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ..dataset import Array, Dataset
from .decode import decoded, planes, require_pillow

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


def image_folder(
    folder: str | os.PathLike[str], size: tuple[int, int] | None = None, mode: str = "RGB"
) -> Dataset:
    """The images in the subfolders of `folder`, each of which is a class, in the order of names.
    Images in folders within a class are of it; what is hidden, with a name like `.name`, is not
    there.

    size: (height, width) that images are resized to; without it they must all have the first one's.
    mode: "L", "RGB" or "RGBA". Images are uint8 (n, channels, height, width); they are decoded when
    they are taken, so that the set may be larger than the memory. 16 bits become 8, an animation is
    its first picture, and a camera's note of how to turn the picture is not followed. Needs the
    extra `images`.

    Raises DataError for a folder without images, a size or mode that there is not, and, naming the
    file, an image that cannot be decoded, has another size or more than 50 million pixels.
    """
    if size is not None and not _is_size(size):
        raise DataError(f"image_folder: size {size!r}, expected (height, width) in pixels")
    if mode not in CHANNELS:
        raise DataError(f"image_folder: mode {mode!r}, expected one of {', '.join(CHANNELS)}")
    base = Path(folder)
    if not base.is_dir():
        raise DataError(f"{base}: no such folder; it should have a subfolder a class")
    folders = (path for path in base.iterdir() if path.is_dir())
    classes = sorted(path.name for path in folders if not _is_hidden(path.name))
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = _images_in(base / name)
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise DataError(
            f"{base}: no images; expected a subfolder a class with files of {', '.join(SUFFIXES)}"
        )
    return Dataset(FolderImages(paths, size, mode), np.array(labels, np.int64), classes)


def image_files(paths: Any, size: tuple[int, int] | None = None, mode: str = "RGB") -> FolderImages:
    """The images of a file, a list of files, or a folder and the folders within it, in the order of
    names, without labels; else as `image_folder`. DataError where there is none.

    paths: a path, or a list of them.
    """
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: list[Path] = []
    for path in map(Path, listed):
        found += _images_in(path) if path.is_dir() else [path]
    if not found:
        raise DataError(f"{listed}: no images; expected files of {', '.join(SUFFIXES)}")
    return FolderImages(found, size, mode)


def _is_size(size: Any) -> bool:
    return np.shape(size) == (2,) and all(isinstance(x, (int, np.integer)) and x > 0 for x in size)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _images_in(folder: Path) -> list[Path]:
    """The images in a folder and the folders within it, each folder once: links may lead in circles
    and reach one folder by many paths.
    """
    found = []
    seen = {_identity(folder)}

    def first(path: Path) -> bool:
        known = len(seen)
        seen.add(_identity(path))
        return len(seen) > known

    for parent, folders, names in os.walk(folder, followlinks=True):
        inside = (name for name in sorted(folders) if not _is_hidden(name))
        folders[:] = [name for name in inside if first(Path(parent) / name)]
        files = (Path(parent) / name for name in names if not _is_hidden(name))
        found += [path for path in files if path.suffix.lower() in SUFFIXES]
    return sorted(found)


def _identity(folder: Path) -> tuple[int, int]:
    """The device and inode of a folder, which are its own under all of its names."""
    status = folder.stat()
    return status.st_dev, status.st_ino


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
        return len(self.paths), CHANNELS[self.mode], *self.size

    def __getitem__(self, chosen: Any) -> Array:
        indices = np.arange(len(self.paths))[chosen]
        images = np.empty((*indices.shape, *self.shape[1:]), np.uint8)
        for position, k in np.ndenumerate(indices):
            image = self._decode(self.paths[k])
            if image.shape[1:] != tuple(self.size):
                raise DataError(
                    f"{self.paths[k]}: {image.shape[1:]} pixels where the first image has "
                    f"{tuple(self.size)}; give image_folder a size=(height, width)"
                )
            images[position] = image
        return images

    def part(self, chosen: Any) -> FolderImages:
        """The images at these indices, not decoded."""
        paths = [self.paths[k] for k in np.arange(len(self.paths))[chosen]]
        part = FolderImages(paths, tuple(self.size), self.mode)
        part._resize = self._resize
        return part

    def _decode(self, path: Path) -> Array:
        """The image as (channels, height, width)."""
        return planes(decoded(path, self._fitted))

    def _fitted(self, image: Any) -> Any:
        return fitted(image, self.mode, tuple(self.size) if self._resize else None)


def fitted(image: Any, mode: str, size: tuple[int, ...] | None) -> Any:
    """A Pillow image in a mode, resized to `size`, (height, width), unless that is None."""
    image = image.convert(mode)
    if size is None:
        return image
    height, width = size
    return image.resize((width, height), require_pillow().Resampling.BILINEAR)
