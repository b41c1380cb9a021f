"""Standard output and error as programs find them: perhaps closed, perhaps on a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any


def guarded(program: Callable[[], int]) -> int:
    """The exit status of a program that prints. One sentence on standard error, and status 1, where
    standard output is closed, which is reported before the program begins, or cannot be written; a
    reader that goes away ends it quietly. OSErrors of the program become a sentence too.
    """
    _open_closed()
    if sys.stdout is None:
        say("standard output is closed: leave it open, or use >/dev/null")
        return 1
    output: Any = _Watched(sys.stdout)
    with contextlib.redirect_stdout(output):
        try:
            status = program()
        except SystemExit as end:  # of argparse, which has said why
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except OSError as error:
            status = 1
            if error is not output.fault:
                say(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    _finish(output)
    if output.fault is not None and not isinstance(output.fault, BrokenPipeError):
        say(f"standard output cannot be written: {output.fault.strerror or output.fault}")
    _finish(sys.stderr)
    return status or int(output.fault is not None)


def say(sentence: str) -> None:
    """Prints an error on standard error, if anybody can read it."""
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


class _Watched:
    """A stream that remembers what kept it from being written, whoever catches that."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.fault: OSError | None = None

    def write(self, text: str) -> int:
        with self._remembering():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._remembering():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.fault = self.fault or error
            raise


def _finish(stream: IO[str] | Any) -> None:
    """Writes what a stream has, or discards it: Python tries once more at its end."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
