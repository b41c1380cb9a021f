"""Show versions, devices, the native library and optional libraries."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

from ... import __version__
from ...errors import PACKAGES, DlsysError, how_to_install
from ...runtime import device, library
from ..usage import Parser

_REQUIRED = ("numpy", "safetensors", "tqdm")


def add_arguments(parser: Parser) -> None:
    """It takes nothing."""


def run(options: argparse.Namespace, parser: Parser) -> None:
    """Prints a table of names and what was found."""
    native = _library()
    rows = [
        ("dlsys", f"{__version__}, {Path(__file__).parents[2]}"),
        ("python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        *((name, _version(name, f"pip install {name}")) for name in _REQUIRED),
        *((name, _version(name, how_to_install(module))) for module, name in PACKAGES.items()),
        ("native library", native),
        ("numpy device", "always there"),
        *_devices(native),
        ("best device", str(device.best_context()[0] or "numpy")),
    ]
    width = max(len(name) for name, _ in rows)
    for name, found in rows:
        print(f"{name:<{width}}  {found}")


def _version(package: str, install: str) -> str:
    """The version of a package, or the command that installs it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed: {install}"


def _library() -> str:
    try:
        return f"{library.load().version}, {library.library_path()}"
    except DlsysError as error:
        return str(error)


def _devices(found: str) -> Iterator[tuple[str, str]]:
    """A row a native device, or one with the reason why there is none of a kind. found: what is
    said of the native library.
    """
    for make in (device.cpu, device.gpu):
        reason = device.unavailable(make(0))
        if reason is not None:
            yield str(make(0)), "needs the native library" if reason == found else reason
        for ctx in takewhile(lambda ctx: device.unavailable(ctx) is None, map(make, count())):
            yield str(ctx), device.device_name(ctx)
