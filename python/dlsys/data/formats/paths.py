"""The folders of data sets, and checks that their files are the right ones."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ...errors import DataError
from ...system import lock, open_folder

_CHUNK_NBYTES = 1 << 20


def default_folder(name: str) -> Path:
    """data/NAME of the checkout that dlsys runs in or was installed from, or next to the program,
    where it is there, else a folder of the user's cache.
    """
    for folder in _checkouts():
        if (folder / "data" / name).is_dir():
            return folder / "data" / name
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "dlsys" / name


def _checkouts() -> Iterator[Path]:
    yield Path(__file__).resolve().parents[4]
    installed_from = _installed_from()
    if installed_from is not None:
        yield installed_from
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is not None:
        yield Path(program).resolve().parent


def _installed_from() -> Path | None:
    """The folder that `pip install .` was given, which it notes next to the package (PEP 610)."""
    found = importlib.metadata.distributions(
        name="dlsys-graph", path=[str(Path(__file__).resolve().parents[3])]
    )
    for distribution in found:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            url = urlsplit(json.loads(distribution.read_text("direct_url.json") or "{}")["url"])
            if url.scheme == "file" and url.netloc in ("", "localhost"):
                return Path(unquote(url.path))
    return None


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """The block is for one process and one thread, which others wait for, where the system has
    locks.
    """
    handle = open_folder(folder)
    if handle is None:
        yield
        return
    try:
        lock(handle, wait=True)
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
