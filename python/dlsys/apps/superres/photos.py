"""The photographs to train on and those that are held out: of packages, or the user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ...errors import DataError, how_to_install
from ..pictures import SUFFIXES

# The photographs that the packages have in their wheels, none of which is downloaded: of
# scikit-image without drawings, pages, microscopy and the second picture of a stereo pair.
_PACKAGED = {
    "skimage": (
        "data",
        (
            "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png",
            "grass.png", "gravel.png", "hubble_deep_field.jpg", "moon.png", "motorcycle_left.png",
            "retina.jpg", "rocket.jpg",
        ),
    ),
    "sklearn": ("datasets/images", ("china.jpg", "flower.jpg")),
}  # fmt: skip
_EVERY = 3  # the third, the sixth, … photo by name is held out


def packaged_photos() -> list[Path]:
    """The photographs that scikit-image and scikit-learn ship, by name. DataError, with what to
    install, where a package or one of its files is missing. Neither is imported.
    """
    found = []
    for module, (folder, names) in _PACKAGED.items():
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(
                f"the photos to train on are those of scikit-image and scikit-learn, and {module} "
                f"is not installed: {how_to_install(module)}, or name --photos of your own"
            )
        found += [Path(spec.submodule_search_locations[0], folder, name) for name in names]
    missing = [path for path in found if not path.is_file()]
    if missing:
        raise DataError(
            f"{missing[0]} is missing: this version of the package does not ship it, install one "
            "that pyproject.toml names, or name --photos of your own"
        )
    return sorted(found, key=lambda path: path.name)


def listed(paths: Sequence[Path]) -> list[Path]:
    """The image files among paths and in folders, by name; those of packages where there are no
    paths. DataError for a path that is not there and a folder without any.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such photo or folder of photos")
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        if path.is_dir() and not inside:
            raise DataError(f"{path} has no photos, files in {', '.join(SUFFIXES)}")
        found += inside if path.is_dir() else [path]
    return sorted(found, key=lambda p: (p.name, p)) if found else packaged_photos()


def split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The photos to train on and those held out: of all in the order of their names, each third
    is held out. DataError for fewer than three.

    >>> split([Path(name) for name in "abcdefg"])[1]
    [PosixPath('c'), PosixPath('f')]
    """
    if len(paths) < _EVERY:
        raise DataError(
            f"{len(paths)} photos are too few: each third is held out, so {_EVERY} are needed"
        )
    held = list(paths[_EVERY - 1 :: _EVERY])
    return [path for path in paths if path not in held], held
