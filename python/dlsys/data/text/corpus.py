"""Corpora: documents of text, from files and from what every machine with Python has."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import DataError

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """A text and the name of where it comes from."""

    name: str
    text: str


def python_library(max_bytes: int | None = None) -> Iterator[Document]:
    """The source of Python's standard library, with its documentation: docstrings, and the texts of
    `pydoc_data`. Its tests are left out. The order is that of a checksum of the names, so that the
    first of them, up to `max_bytes` of UTF-8, are a sample of all.

    DataError where this Python has no source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not _LEFT_OUT & {*path.relative_to(root).parts}]
    if not paths:
        raise DataError(f"{root} has no source of Python's library: name text files in its stead")
    names = {path.relative_to(root).as_posix(): path for path in paths}
    order = sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))
    return _up_to(max_bytes, (Document(name, _read(names[name])) for name in order))


def text_files(paths: Iterable[str | Path], max_bytes: int | None = None) -> Iterator[Document]:
    """The texts of UTF-8 files, each a document; of a folder those of all files below it that end
    in .txt, .md, .rst or .py, by name.

    paths: files and folders. max_bytes: ends behind so many bytes. DataError for what cannot be
    read and for folders without such files.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        below = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".rst", ".py"))
        if path.is_dir() and not below:
            raise DataError(f"{path} has no file that ends in .txt, .md, .rst or .py")
        found += below if path.is_dir() else [path]
    return _up_to(max_bytes, (Document(str(path), _read(path)) for path in found))


def _read(path: Path) -> str:
    """The text of a file. A byte that is no UTF-8 becomes U+FFFD: sources of other encodings are
    rare, and one letter of them is no reason to refuse a corpus.
    """
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _up_to(max_bytes: int | None, documents: Iterator[Document]) -> Iterator[Document]:
    left = max_bytes
    for document in documents:
        if left is None:
            yield document
            continue
        cut = document.text.encode()[:left]
        left -= len(cut)
        yield Document(document.name, cut.decode("utf-8", "ignore"))
        if left <= 0:
            return
