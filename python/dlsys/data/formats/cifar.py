"""CIFAR-10 in its binary form: records of a label and 3 × 32 × 32 pixels, a byte each; a folder in
the Python form is read too, see `cifar_pickles`.

The set is Krizhevsky's, "Learning multiple layers of features from tiny images" (2009).
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import DataError
from ..dataset import Dataset, Sets, Split
from . import cifar_pickles
from .paths import check_md5, default_folder, one_at_a_time

FOLDER = "cifar-10-batches-bin"
FILES = tuple(f"data_batch_{k}.bin" for k in range(1, 6)) + ("test_batch.bin",)
MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
N_RECORDS = 10_000  # of a file
N_TRAIN = 45_000
SAMPLE = (3, 32, 32)
_RECORD_NBYTES = 1 + 3 * 32 * 32


class Archive(NamedTuple):
    """The file that mirrors have."""

    file_name: str
    md5: str

    def check(self, path: Path) -> None:
        """Raises DataError unless the file is this one."""
        check_md5(path, self.md5)


ARCHIVE = Archive("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")


def cifar10_sets(data_dir: str | os.PathLike[str] | None = None) -> Sets:
    """CIFAR-10 as uint8 images (n, 3, 32, 32): 45,000 to train, 5,000 to validate, 10,000 to test.

    The files are taken from `data_dir` or its folder cifar-10-batches-bin, or those of the Python
    version from its folder cifar-10-batches-py; where both are missing, from the archive that lies
    there or is downloaded. Raises DataError for files that are missing
    and cannot be downloaded, or are not CIFAR-10's.
    """
    base = default_folder("cifar10") if data_dir is None else Path(data_dir)
    folder = _find(base)
    parts = _pickled(base) if folder is None else None
    if parts is None:
        folder = folder or _unpacked(base)
        parts = [read_cifar(folder / name, N_RECORDS) for name in FILES]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts[:-1]))
    known = Dataset(images, labels, CLASSES)
    train, validation = known.subset(slice(N_TRAIN)), known.subset(slice(N_TRAIN, None))
    return Sets(train, validation, Dataset(*parts[-1], CLASSES))


def read_cifar(path: str | os.PathLike[str], count: int | None = None) -> Split:
    """The images (n, 3, 32, 32) uint8 and labels (n,) int64 of a file of records.

    Raises DataError, naming the file, where it is not such a file or has not `count` records.
    """
    path = Path(path)
    nbytes = path.stat().st_size
    if nbytes % _RECORD_NBYTES or not nbytes or (count and nbytes != count * _RECORD_NBYTES):
        expected = f"{count} records" if count else "records"
        raise DataError(
            f"{path}: expected {expected} of {_RECORD_NBYTES} bytes, the file has {nbytes} bytes; "
            "fetch it again"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, _RECORD_NBYTES)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= len(CLASSES):
        at = int(np.argmax(labels >= len(CLASSES)))
        raise DataError(
            f"{path}: record {at} has the label {labels[at]}, expected one below {len(CLASSES)}; "
            "fetch the file again"
        )
    return Split(records[:, 1:].reshape(-1, *SAMPLE), labels)


def _find(base: Path) -> Path | None:
    """The folder that has all of the files."""
    for folder in (base / FOLDER, base):
        if all((folder / name).is_file() for name in FILES):
            return folder
    return None


def _pickled(base: Path) -> list[Split] | None:
    """The batches of the Python version, None where it is not there."""
    for folder in (base / cifar_pickles.FOLDER, base):
        paths = [folder / name for name in cifar_pickles.FILES]
        if all(path.is_file() for path in paths):
            read = cifar_pickles.read_cifar_pickle
            return [read(path, SAMPLE, len(CLASSES), N_RECORDS) for path in paths]
    return None


def _unpacked(base: Path) -> Path:
    archive = base / ARCHIVE.file_name
    if archive.is_file():
        ARCHIVE.check(archive)
    else:
        from .download import download

        download([ARCHIVE], base, mirrors=MIRRORS)
    with one_at_a_time(base):
        return _find(base) or _unpacked_now(base)


def _unpacked_now(base: Path) -> Path:
    archive, target = base / ARCHIVE.file_name, base / FOLDER
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}.", dir=base) as temporary:
        fresh = Path(temporary) / FOLDER
        fresh.mkdir()
        _unpack(archive, fresh)
        if target.exists():
            shutil.rmtree(target)  # of an unpacking by hand that was cut
        os.replace(fresh, target)
    return target


def _unpack(archive: Path, folder: Path) -> None:
    """Only the known names are taken out, and nothing but their bytes."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name in FILES:
                entry = tar.getmember(f"{FOLDER}/{name}")
                member = tar.extractfile(entry) if entry.isreg() else None
                if member is None or entry.size != N_RECORDS * _RECORD_NBYTES:
                    raise DataError(
                        f"{archive}: {FOLDER}/{name} is no file of {N_RECORDS} records; fetch the "
                        "archive again"
                    )
                with member, open(folder / name, "wb") as output:
                    shutil.copyfileobj(member, output)
    except (KeyError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{archive}: cannot be unpacked ({error}); fetch it again") from error
