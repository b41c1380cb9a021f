"""Standard output and error as programs find them: perhaps closed, perhaps on a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import IO, Any


def guarded(program: Callable[[], int]) -> int:
    """The exit status of a program that prints. One sentence on standard error, and status 1, where
    standard output is closed, which is told before the program begins, or cannot be written; a
    reader that goes away ends it quietly. OSErrors of the program become a sentence too.
    """
    _open_closed()
    if sys.stdout is None:
        say("standard output is closed: leave it open, or use >/dev/null")
        return 1
    try:
        status = program()
    except SystemExit as end:  # of argparse, which has told why
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except OSError as error:
        status = 1
        if _fault(sys.stdout) is None and not isinstance(error, BrokenPipeError):
            say(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    fault = _fault(sys.stdout)
    if fault is not None:
        status = status or 1
        if not isinstance(fault, BrokenPipeError):
            say(f"standard output cannot be written: {fault.strerror or fault}")
        _drop(sys.stdout)
    if _fault(sys.stderr) is not None:
        _drop(sys.stderr)
    return status


def say(sentence: str) -> None:
    """Tells an error on standard error, if anybody can read it."""
    with contextlib.suppress(OSError):
        print(f"error: {sentence}", file=sys.stderr, flush=True)


def _open_closed() -> None:
    """Closed descriptors become /dev/null: the next file to be opened would have their number, and
    whatever a library prints would go into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)


def _fault(stream: IO[str] | Any) -> OSError | None:
    """What keeps a stream from being written, if something does: it is still in its buffer."""
    try:
        stream.flush()
    except OSError as error:
        return error
    return None


def _drop(stream: IO[str] | Any) -> None:
    """Sends what a stream still has to nobody, for Python writes it once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
