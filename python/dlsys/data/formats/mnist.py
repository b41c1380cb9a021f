"""MNIST and Fashion-MNIST: where their files are, what is in them, and how they are split."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ...errors import DataError
from ..dataset import Array, Dataset, Sets, Split
from .idx import is_gzip, read_idx
from .paths import check_md5, default_folder

N_TRAIN = 50_000


class IdxFile(NamedTuple):
    """A file of a set: its name without `.gz`, its shape, the SHA-256 of its unpacked bytes or the
    MD5 of its packed ones, and the SHA-256 of what another set keeps under the same name.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str | None = None
    packed_md5: str | None = None
    other_sha256: str | None = None

    @property
    def file_name(self) -> str:
        """On the mirrors and in the folder."""
        return f"{self.name}.gz"

    def check(self, path: Path) -> None:
        """Raises DataError unless the file is this one."""
        self.read(path)

    def read(self, path: Path) -> Array:
        """The array that the file holds, plain or packed; DataError unless the file is this one."""
        if self.packed_md5 is not None and is_gzip(path):
            check_md5(path, self.packed_md5)
        array = read_idx(path, shape=self.shape, sha256=self.sha256)
        if self.other_sha256 and hashlib.sha256(path.read_bytes()).hexdigest() == self.other_sha256:
            raise DataError(f"{path}: this is another set's file of that name; fetch the right one")
        return array


class IdxSet(NamedTuple):
    """Images and labels to train, then to test, in IDX files."""

    name: str
    files: tuple[IdxFile, IdxFile, IdxFile, IdxFile]
    mirrors: tuple[str, ...]
    classes: tuple[str, ...]


class Mnist(NamedTuple):
    """50,000 images to train on, 10,000 to validate, 10,000 to test.

    train, validation, test: the three.
    """

    train: Split
    validation: Split
    test: Split


_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_SHAPES = ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,))
_MNIST_SHA256 = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FASHION_MD5 = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)


def _four(files: Sequence[IdxFile]) -> tuple[IdxFile, IdxFile, IdxFile, IdxFile]:
    first, second, third, fourth = files
    return first, second, third, fourth


MNIST = IdxSet(
    "mnist",
    _four([IdxFile(*known) for known in zip(_NAMES, _SHAPES, _MNIST_SHA256)]),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://raw.githubusercontent.com/fgnt/mnist/master/",
    ),
    tuple("0123456789"),
)
FASHION_MNIST = IdxSet(
    "fashion-mnist",
    _four(
        [
            IdxFile(name, shape, None, md5, other)
            for name, shape, md5, other in zip(_NAMES, _SHAPES, _FASHION_MD5, _MNIST_SHA256)
        ]
    ),
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    (
        "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
        "ankle boot",
    ),
)  # fmt: skip


def load_mnist(
    data_dir: str | os.PathLike[str] | None = None, dtype: DTypeLike = np.float32
) -> Mnist:
    """MNIST from the IDX files in `data_dir`, plain or gzip; missing ones are downloaded into it.

    Images are (n, 784), pixels divided by 255, in `dtype`, a floating-point one. Raises DataError
    for files that are missing and cannot be downloaded, or are not MNIST's.
    """
    return _in_floats("load_mnist", MNIST, data_dir, dtype)


def load_fashion_mnist(
    data_dir: str | os.PathLike[str] | None = None, dtype: DTypeLike = np.float32
) -> Mnist:
    """Fashion-MNIST of Xiao, Rasul and Vollgraf (2017) as `load_mnist` gives MNIST."""
    return _in_floats("load_fashion_mnist", FASHION_MNIST, data_dir, dtype)


def mnist_sets(data_dir: str | os.PathLike[str] | None = None) -> Sets:
    """MNIST as uint8 images (n, 1, 28, 28), from where `load_mnist` takes it."""
    return _as_sets(MNIST, data_dir)


def fashion_mnist_sets(data_dir: str | os.PathLike[str] | None = None) -> Sets:
    """Fashion-MNIST as uint8 images (n, 1, 28, 28), from where `load_fashion_mnist` takes it.

    data_dir: as of `load_fashion_mnist`.
    """
    return _as_sets(FASHION_MNIST, data_dir)


def _in_floats(
    function: str, source: IdxSet, data_dir: str | os.PathLike[str] | None, dtype: DTypeLike
) -> Mnist:
    dtype = np.dtype(dtype)
    if not np.issubdtype(dtype, np.floating):
        raise DataError(f"{function}: pixels in [0, 1] need a floating-point dtype, not {dtype}")
    arrays = _read(source, data_dir)
    pixels = [np.divide(a.reshape(len(a), -1), 255, dtype=dtype) for a in arrays[::2]]
    labels = [a.astype(np.int64) for a in arrays[1::2]]
    return Mnist(
        Split(pixels[0][:N_TRAIN], labels[0][:N_TRAIN]),
        Split(pixels[0][N_TRAIN:], labels[0][N_TRAIN:]),
        Split(pixels[1], labels[1]),
    )


def _as_sets(source: IdxSet, data_dir: str | os.PathLike[str] | None) -> Sets:
    arrays = _read(source, data_dir)
    known, test = (
        Dataset(images[:, None], labels, source.classes)
        for images, labels in zip(arrays[::2], arrays[1::2])
    )
    return Sets(known.subset(slice(N_TRAIN)), known.subset(slice(N_TRAIN, None)), test)


def _read(source: IdxSet, data_dir: str | os.PathLike[str] | None) -> list[Array]:
    folder = default_folder(source.name) if data_dir is None else Path(data_dir)
    missing = [file for file in source.files if _find(folder, file) is None]
    if missing:
        # Here, since urllib is slow to import and rarely needed.
        from .download import download

        download(missing, folder, mirrors=source.mirrors)
    found = [_find(folder, file) for file in source.files]
    return [file.read(path) for file, path in zip(source.files, found) if path is not None]


def _find(folder: Path, file: IdxFile) -> Path | None:
    candidates = (folder / file.file_name, folder / file.name)
    return next((path for path in candidates if path.is_file()), None)
