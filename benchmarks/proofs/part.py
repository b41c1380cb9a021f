"""A part of the record that gpu_record.py makes: what it found so far, and how it runs things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import measure

ROOT = measure.ROOT
# Each with few threads of its own: pools that spin beside each other slow all of them down.
FEW_THREADS = {"OPENBLAS_NUM_THREADS": "2", "DLSYS_THREADS": "2"}


class Part:
    """One part of the record: its results so far, kept on disk."""

    def __init__(self, name: str, out: Path, limit: float) -> None:
        self.result: dict[str, Any] = {"ok": False}
        self._name = name
        self._out = out
        self._end = time.monotonic() + limit
        self._lock = threading.Lock()

    def save(self) -> None:
        """Writes the part's file."""
        with self._lock:
            path = self._out / f"{self._name}.json"
            path.write_text(measure.as_json(self.result))

    def run(
        self,
        command: Sequence[str],
        limit: float = 600.0,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Runs a command within its limit and the part's; returns status, seconds and output.

        The status is None when a limit ended it. All its output goes to output.log.
        """
        limit = max(1.0, min(limit, self._end - time.monotonic()))
        path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path.rstrip(":"), **(env or {})}
        start = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as stream:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            stream.seek(0)
            output = stream.read()
        seconds = round(time.monotonic() - start, 1)
        shown = " ".join([*(f"{key}={value}" for key, value in (env or {}).items()), *command])
        self._log(f"$ {shown}\n{output}\n[status {status}, {seconds} s]\n\n")
        shown = shown.replace(sys.executable, "python")
        return {"command": shown, "status": status, "seconds": seconds, "output": output}

    def _log(self, text: str) -> None:
        with self._lock, open(self._out / "output.log", "a") as log:
            log.write(text)


def brief(done: dict[str, Any]) -> dict[str, Any]:
    """A command's record: the end of a failure's output, one line of a success's."""
    tail = done["output"].strip()[-6000:] if done["status"] else done["output"].strip()[-500:]
    return {**{key: done[key] for key in ("command", "status", "seconds")}, "tail": tail}
