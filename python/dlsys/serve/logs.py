"""Structured logs: one JSON object a line, of the service and of the server below it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
import traceback
from functools import lru_cache
from typing import IO, Any

_TOGETHER = 0.1  # seconds


class Log:
    """Writes lines of JSON; what cannot be written is dropped, since nobody could be told.

    stream: standard error by default. requests: whether `request` writes anything.
    """

    def __init__(self, stream: IO[str] | None = None, requests: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.requests = requests
        self._lines: list[str] = []

    def write(self, event: str, level: str = "info", **fields: Any) -> None:
        """Writes an event with its fields, JSON values. level: info, warning or error."""
        self._lines.append(_line(event, level, fields))
        self.flush()

    def request(self, **fields: Any) -> None:
        """Writes a request that was answered, with its fields: together with others of the same
        tenth of a second, since a write for each would take longer than a small model.
        """
        if not self.requests:
            return
        self.lines(_line("request", "info", fields))

    def lines(self, text: str) -> None:
        """Writes lines of requests, together with others as `request` does.

        text: JSON objects, each with its end of line.
        """
        self._lines.append(text)
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_later(_TOGETHER, self.flush)

    def flush(self) -> None:
        """Writes the lines that wait."""
        text, self._lines = "".join(self._lines), []
        with contextlib.suppress(OSError, ValueError):  # a disk that is full, a stream that is shut
            self._stream.write(text)
            self._stream.flush()

    def fault(self, error: BaseException, **fields: Any) -> None:
        """Writes an error of the service itself, with where it was raised and further fields."""
        trace = "".join(traceback.format_exception(error))
        self.write("fault", "error", error=repr(error), trace=trace, **fields)


def _line(event: str, level: str, fields: dict[str, Any]) -> str:
    row = {"time": stamp(time.time()), "level": level, "event": event}
    return json.dumps(row | fields, default=str) + "\n"


def stamp(now: float) -> str:
    """A time of the clock as lines have it."""
    return f"{_second(int(now))}.{int(now % 1 * 1e6):06d}Z"


@lru_cache(maxsize=1)
def _second(now: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))


class Forwarding(logging.Handler):
    """Brings what uvicorn and asyncio log into the same lines, from warnings up."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write(record.name, record.levelname.lower(), message=record.getMessage())
