"""Structured logs: one JSON object a line, of the service and of the server below it."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import traceback
from typing import IO, Any


class Log:
    """Writes lines of JSON; what cannot be written is dropped, since nobody could be told.

    stream: standard error by default. requests: whether `request` writes anything.
    """

    def __init__(self, stream: IO[str] | None = None, requests: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.requests = requests

    def write(self, event: str, level: str = "info", **fields: Any) -> None:
        """Writes an event with its fields, JSON values. level: info, warning or error."""
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e6):06d}Z"
        line = json.dumps({"time": stamp, "level": level, "event": event, **fields}, default=str)
        with contextlib.suppress(OSError, ValueError):  # a disk that is full, a stream that is shut
            self._stream.write(line + "\n")
            self._stream.flush()

    def request(self, **fields: Any) -> None:
        """Writes a request that was answered, with its fields."""
        if self.requests:
            self.write("request", **fields)

    def fault(self, error: BaseException, **fields: Any) -> None:
        """Writes an error of the service itself, with where it was raised and further fields."""
        trace = "".join(traceback.format_exception(error))
        self.write("fault", "error", error=repr(error), trace=trace, **fields)


class Forwarding(logging.Handler):
    """Brings what uvicorn and asyncio log into the same lines, from warnings up."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write(record.name, record.levelname.lower(), message=record.getMessage())
