"""Fetches data files from public mirrors: resumed, checked, and only then given their names."""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from tqdm import tqdm

from ... import __version__
from ...errors import DataError
from .paths import one_at_a_time

TIMEOUT_S = 10.0
_TRIES = 3  # on one mirror, as long as each brings the file further
_CHUNK_NBYTES = 1 << 16
_MAX_NBYTES = 1 << 30
_HTTP_RANGE_NOT_SATISFIABLE = 416


class Remote(Protocol):
    """A file that mirrors have."""

    @property
    def file_name(self) -> str:
        """Its name on the mirrors and in the folder."""

    def check(self, path: Path) -> None:
        """Raises DataError unless the file at `path` has the right content."""


def download(
    files: Sequence[Remote], folder: Path, *, mirrors: Sequence[str], timeout_s: float = TIMEOUT_S
) -> None:
    """Fetches each file into `folder`, from the first mirror (a URL up to the name) that has it.

    A transfer that was cut is resumed, also by a later call. Raises DataError, with the files, the
    folder and what each mirror answered, where one cannot be had.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder):  # who start together must not share a partial file
            for file in files:
                failures = _fetch(file, folder, mirrors, timeout_s)
                if failures:
                    raise DataError(_failure_text(files, folder, failures))
    except OSError as error:
        raise DataError(_failure_text(files, folder, [str(error)])) from error


def _failure_text(files: Sequence[Remote], folder: Path, failures: Sequence[str]) -> str:
    missing = [file.file_name for file in files if not (folder / file.file_name).exists()]
    return (
        f"{', '.join(missing)} cannot be downloaded into {folder} ({'; '.join(failures)}); "
        f"put the files there by hand, or name a folder that has them (--data-dir)"
    )


def _fetch(file: Remote, folder: Path, mirrors: Sequence[str], timeout_s: float) -> list[str]:
    """Tries the mirrors in turn; returns what each answered, or nothing if the file is there."""
    target = folder / file.file_name
    partial = folder / f".{target.name}.part"
    if target.exists():
        return []
    failures: list[str] = []
    for mirror in mirrors:
        reason = _fetch_from(mirror + target.name, file, partial, timeout_s)
        if reason is None:
            os.replace(partial, target)
            return []
        failures.append(f"{mirror}: {' '.join(reason.split())}")
    return failures or ["no mirror is known"]


def _fetch_from(url: str, file: Remote, partial: Path, timeout_s: float) -> str | None:
    """Makes `partial` a complete, checked file; returns why that failed, or None."""
    reason = None
    for _ in range(_TRIES):
        start = _size(partial)
        try:
            _transfer(url, partial, timeout_s)
            file.check(partial)
            return None
        except DataError:
            # A resumed download may stem from a mirror that packs the file differently: once more.
            partial.unlink()
            reason = "the content is not that of the file"
            if start == 0:
                return reason
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: what urllib makes of a redirect to what is no URL.
            reason = _reason(error)
            if _size(partial) <= start:
                return reason
    return reason


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(url: str, partial: Path, timeout_s: float) -> None:
    """Appends to `partial` what it lacks; writes it anew if the server cannot resume."""
    start = _size(partial)
    request = urllib.request.Request(url, headers={"User-Agent": f"dlsys/{__version__}"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == _HTTP_RANGE_NOT_SATISFIABLE:
            return  # nothing is lacking; the check decides
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            start = 0
        total = None if response.length is None else start + response.length
        with open(partial, "ab" if start else "wb") as output:
            _copy(response, output, start, total, url)


def _copy(
    response: http.client.HTTPResponse,
    output: IO[bytes],
    start: int,
    total: int | None,
    url: str,
) -> None:
    quiet = not sys.stderr.isatty()
    if quiet:
        print(f"downloading {url}", file=sys.stderr, flush=True)
    done = start
    name = url.rsplit("/", 1)[-1]
    with tqdm(
        total=total, initial=start, unit="B", unit_scale=True, desc=name, disable=quiet
    ) as bar:
        while chunk := response.read1(_CHUNK_NBYTES):
            output.write(chunk)
            done += len(chunk)
            bar.update(len(chunk))
            if done > _MAX_NBYTES:
                raise DataError(f"{url}: more than {_MAX_NBYTES} bytes came")
    if total is not None and done < total:
        raise OSError(f"the connection ended after {done} of {total} bytes")
