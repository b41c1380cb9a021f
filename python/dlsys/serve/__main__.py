"""Serve trained models: REST and gRPC by the Open Inference Protocol, and a page to try them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..apps import streams
from ..apps.devices import add_device
from ..apps.usage import Parser, not_negative, path, positive
from ..errors import DataError, DlsysError
from ..runtime import device
from .models.repository import named_paths
from .server import run
from .settings import Limits, Settings

_EPILOG = """\
A model is a checkpoint, the folder of a run (its best one), an ONNX file, or a folder of versions
(subfolders 1, 2, … with one of these each). Its name is the last part of its path, or NAME=PATH.

SIGHUP loads all models anew while requests run; SIGINT and SIGTERM answer what has begun, then end.
It listens on this machine alone unless --host says otherwise; there, use --api-key-file, and a
proxy with TLS in front."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is told to end; returns the exit status, 1 for an error that was explained.

    arguments: what follows the program's name; those of the process by default.
    """
    return streams.guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = Parser(
        prog="python -m dlsys.serve",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        run(_settings(options))
    except DlsysError as error:
        streams.say(str(error))
        return 1
    return 0


def _add_arguments(parser: Parser) -> None:
    limits = Limits()
    parser.add_version()
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help="see below")
    where = parser.add_argument_group("where")
    add_device(where)
    where.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    where.add_argument("--port", type=_port, default=8000, help="0 is a free one; default: 8000")
    where.add_argument("--grpc-port", type=_port_or_off, default=8001, help="or off; default: 8001")
    who = parser.add_argument_group("who may use it")
    who.add_argument("--api-key-file", type=path, metavar="FILE", help="a key a line; default: all")
    who.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="of other pages")
    most = parser.add_argument_group("limits")
    most.add_argument("--max-body", type=positive, metavar="BYTES", default=limits.body)
    most.add_argument("--max-pixels", type=positive, metavar="N", default=limits.pixels)
    most.add_argument("--timeout", type=not_negative, metavar="SECONDS", default=limits.seconds)
    most.add_argument(
        "--max-queue", type=positive, metavar="N", default=limits.waiting, help="waiting requests"
    )
    most.add_argument(
        "--max-requests", type=positive, metavar="N", default=limits.requests, help="in progress"
    )
    most.add_argument(
        "--max-batch", type=positive, metavar="N", default=limits.batch, help="1: no batching"
    )
    parser.add_argument("--quiet", action="store_true", help="no line for each request")


def _settings(options: argparse.Namespace) -> Settings:
    ctx = device.context_of(options.device) if options.device != "auto" else None
    if options.device == "auto":
        ctx, _ = device.best_context()
    return Settings(
        named_paths(options.models),
        ctx,
        options.host,
        options.port,
        options.grpc_port,
        _keys(options.api_key_file),
        options.cors,
        not options.quiet,
        Limits(
            options.max_body,
            options.max_pixels,
            options.timeout,
            options.max_queue,
            options.max_requests,
            options.max_batch,
        ),
    )


def _keys(file: Path | None) -> list[str]:
    """The keys of a file, a line each. DataError for a file without any."""
    if file is None:
        return []
    try:
        keys = [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    if not keys:
        raise DataError(f"{file} has no keys: write one a line, or leave --api-key-file out")
    return keys


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text[:40]}")
    return int(text)


def _port_or_off(text: str) -> int | None:
    return None if text == "off" else _port(text)


if __name__ == "__main__":
    sys.exit(main())
