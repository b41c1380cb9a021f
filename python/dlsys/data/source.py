"""Where the files of data sets lie, and whether they are the right ones."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError

_CHUNK_NBYTES = 1 << 20


def default_folder(name: str) -> Path:
    """data/NAME of the repository where dlsys runs from one and has it, else a folder of the user's
    cache.
    """
    checkout = Path(__file__).resolve().parents[3] / "data" / name
    if checkout.is_dir():
        return checkout
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "dlsys" / name


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """The block is for one process and one thread, which others wait for."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_md5(path: Path, expected: str) -> None:
    """Raises DataError unless the bytes of the file have this MD5, in hex."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise DataError(
            f"{path}: the content is not the expected one: its MD5 is {digest.hexdigest()}, "
            f"expected {expected}; fetch the file again"
        )
