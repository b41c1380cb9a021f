"""MNIST: where its files are, what is in them, and how it is split."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..errors import DataError
from .idx import read_idx

N_TRAIN = 50_000


class IdxFile(NamedTuple):
    """A file of the set: its name without `.gz`, its shape, the SHA-256 of its unpacked bytes."""

    name: str
    shape: tuple[int, ...]
    sha256: str


FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        (60_000, 28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        (60_000,),
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        (10_000, 28, 28),
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        (10_000,),
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)


class Split(NamedTuple):
    """Images (n, 784) in [0, 1] and their labels (n,) int64."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]


class Mnist(NamedTuple):
    """50,000 digits to train on, 10,000 to validate, 10,000 to test."""

    train: Split
    validation: Split
    test: Split


def default_folder() -> Path:
    """data/mnist of the repository where dlsys runs from one, else a folder of the user's cache."""
    checkout = Path(__file__).resolve().parents[3] / "data" / "mnist"
    if checkout.is_dir():
        return checkout
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "dlsys" / "mnist"


def load_mnist(
    data_dir: str | os.PathLike[str] | None = None, dtype: DTypeLike = np.float32
) -> Mnist:
    """MNIST from the IDX files in `data_dir`, plain or gzip; missing ones are downloaded into it.

    Pixels are divided by 255 and take `dtype`, a floating-point one. Raises DataError for files
    that are missing and cannot be downloaded, or are not MNIST's.
    """
    dtype = np.dtype(dtype)
    if not np.issubdtype(dtype, np.floating):
        raise DataError(f"load_mnist: pixels in [0, 1] need a floating-point dtype, not {dtype}")
    folder = default_folder() if data_dir is None else Path(data_dir)
    paths = [_find(folder, file) for file in FILES]
    missing = [file for file, path in zip(FILES, paths, strict=True) if path is None]
    if missing:
        # Here, since urllib is slow to import and rarely needed.
        from .download import download

        download(missing, folder)
    arrays = [_read(folder, file) for file in FILES]
    pixels = [np.divide(a.reshape(len(a), -1), 255, dtype=dtype) for a in arrays[::2]]
    labels = [a.astype(np.int64) for a in arrays[1::2]]
    return Mnist(
        Split(pixels[0][:N_TRAIN], labels[0][:N_TRAIN]),
        Split(pixels[0][N_TRAIN:], labels[0][N_TRAIN:]),
        Split(pixels[1], labels[1]),
    )


def _find(folder: Path, file: IdxFile) -> Path | None:
    candidates = (folder / f"{file.name}.gz", folder / file.name)
    return next((path for path in candidates if path.is_file()), None)


def _read(folder: Path, file: IdxFile) -> np.ndarray[Any, Any]:
    path = _find(folder, file)
    assert path is not None
    return read_idx(path, shape=file.shape, sha256=file.sha256)
