"""The tuning cache: the fastest algorithm of a kernel by the shapes and dtypes of its arrays.

One JSON file serves all processes, {environment: {key: measurement}}. It is replaced atomically,
under a lock and merged with the entries that others have added meanwhile, so that concurrent
processes lose nothing and one that is killed leaves a good file.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError, printable
from ..files import appending, replacing
from ..settings import settings
from ..system import lock

_FORMAT, _VERSION = "dlsys tuning cache", 1
_Table = dict[str, dict[str, "Measurement"]]


class Measurement(NamedTuple):
    """The name of the fastest algorithm, "" for the kernel's own heuristic; the library that it
    comes from, "" for this one; its microseconds, and those of the heuristic.
    """

    algorithm: str
    source: str
    us: float
    us_heuristic: float


class TuningCache:
    """The measurements in a file; one object may serve many threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own: _Table = {}  # added by this process, in case the file cannot be written
        self._seen: tuple[int, ...] | None = None
        self._read: _Table = {}
        self._warned = False

    def is_empty(self) -> bool:
        """True when it holds no measurement of any environment."""
        return not self._own and not self._load()

    def measurements(self, environment: str) -> dict[str, Measurement]:
        """The measurements of an environment (a chip, a library and its settings), by key."""
        return self._load().get(environment, {}) | self._own.get(environment, {})

    def add(self, environment: str, made: Mapping[str, Measurement]) -> None:
        """Adds measurements to the file. Where its folder cannot be written it warns once, and they
        hold in this process.
        """
        self._own.setdefault(environment, {}).update(made)
        try:
            self._check_file()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                table = dict(self._load())
                table[environment] = table.get(environment, {}) | dict(made)
                self._write(table)
        except (OSError, DataError) as error:
            if not self._warned:
                self._warned = True
                message = f"measurements of kernels cannot be kept in {self.path}: {error}"
                warnings.warn(printable(message), RuntimeWarning, stacklevel=3)

    def _check_file(self) -> None:
        """Raises OSError for a path that is no file: /dev/null would be replaced, a pipe block."""
        if self.path.exists() and not self.path.is_file():
            raise OSError("it is there and is no file")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A file of its own: the table's is another one after each replacement.
        with appending(self.path.with_name(self.path.name + ".lock")) as file:
            lock(file.fileno(), wait=True)  # let go when it is closed, or the process ends
            yield

    def _write(self, table: _Table) -> None:
        measurements = {
            environment: {key: made._asdict() for key, made in sorted(measured.items())}
            for environment, measured in sorted(table.items())
        }
        contents = {"format": _FORMAT, "version": _VERSION, "measurements": measurements}
        with replacing(self.path) as file:
            file.write(json.dumps(contents, indent=1).encode())

    def _load(self) -> _Table:
        """The table in the file; empty, with a warning, if the file is not of this format."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return {}
        seen = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if seen != self._seen:
            try:
                self._check_file()
                self._read = _parsed(self.path.read_bytes())
            except (OSError, ValueError) as error:
                self._read = {}
                spoilt = isinstance(error, ValueError)
                replaced = ", the next measurement replaces it" if spoilt else ""
                message = f"{self.path} is not used{replaced}: {error}"
                warnings.warn(printable(message), RuntimeWarning, stacklevel=4)
            self._seen = seen
        return self._read


def _parsed(data: bytes) -> _Table:
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        raise ValueError(f'it does not say "format": "{_FORMAT}"')
    if contents.get("version") != _VERSION:
        raise ValueError(f"it is of version {contents.get('version')}, expected {_VERSION}")
    try:
        return {
            environment: {key: _measurement(made) for key, made in measured.items()}
            for environment, measured in contents["measurements"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("it has another layout than its version says") from None


def _measurement(made: dict[str, Any]) -> Measurement:
    names = made["algorithm"], made["source"]
    if not all(isinstance(name, str) for name in names):
        raise ValueError
    return Measurement(*names, float(made["us"]), float(made["us_heuristic"]))


def default_path() -> str:
    """DLSYS_TUNE_CACHE, else tuning.json in dlsys under $XDG_CACHE_HOME or ~/.cache."""
    if settings.tune_cache:
        return settings.tune_cache
    # A home that the system does not know stays "~": a folder here, rather than a failure.
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(caches, "dlsys", "tuning.json")


_files: dict[str, TuningCache] = {}


def tuning_cache() -> TuningCache:
    """The cache of this process's settings."""
    path = default_path()
    if path not in _files:
        _files[path] = TuningCache(Path(path))
    return _files[path]
