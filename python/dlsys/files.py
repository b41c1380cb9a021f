"""Files that are whole or not there, and folders to put them into."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import DataError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` when the block ends, and vanishes if it raises.

    It is on the disk when it gets its name, so that `path` is whole after a power failure too.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Makes a folder unless it is there. DataError where files cannot be put into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path}: no folder can be made there: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise DataError(f"{path}: nothing can be written into this folder; choose another one")


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file to read. DataError for anything else, without waiting for whoever may write
    into a FIFO; OSError where it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise DataError(f"{os.fspath(path)} is {kind}, expected a file")
    return os.fdopen(handle, "rb")


def _sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk too, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
