"""A timeline of runs, step by step, for chrome://tracing and ui.perfetto.dev.

The format is Chrome's "Trace Event Format": complete events ("X") in microseconds, and metadata
events ("M") that name the rows.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..describe import counted
from ..executor.debug.observe import flops, traffic
from ..executor.plan.memory import Plan, Step, Value
from ..files import replacing
from ..runtime.device import Context

_HOST, _DEVICE = 0, 1  # the two processes that the viewer shows


class Trace:
    """A recorder of every step of every run: `executor.recorder = profile.Trace(executor.ctx)`.

    The device has its steps with shapes, bytes and operations; the host its runs, the steps that
    Python computed within them, and what `span` names. Both have a row for each thread that calls.

    A run is known when it is over, with the time that each step took: its steps lie back to back
    and end where the run ended. `limit` bounds the events that are kept; `dropped` counts those
    that came later.
    """

    def __init__(self, ctx: Context | None = None, limit: int = 200_000) -> None:
        self.ctx = ctx
        self.runs = 0
        self.dropped = 0
        self._limit = limit
        self._start = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, int], str] = {}  # process and thread → name
        self._steps: dict[Plan, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        counts = f"{counted(self.runs, 'run')}, {counted(len(self._events), 'event')}"
        return f"Trace({counts}, ctx={self.ctx})"

    def add(self, plan: Plan, ms: list[float]) -> None:
        """Adds a run that ends now; `ms` has the milliseconds of each of the plan's steps."""
        end = self._now()
        if plan not in self._steps:
            self._steps[plan] = [self._described(step) for step in plan.steps]
        start = max(end - sum(ms) * 1e3, 0.0)
        with self._lock:
            self.runs += 1
            name = f"run {self.runs}"
        self._append(_HOST, name, start, end - start, {"steps": len(plan.steps)})
        for described, t in zip(self._steps[plan], ms):
            row = _HOST if described["cat"] == "python" else _DEVICE
            self._append(row, described["name"], start, t * 1e3, described["args"])
            start += t * 1e3

    @contextmanager
    def span(self, name: str, **arguments: Any) -> Iterator[None]:
        """Shows what the block does on the host's row, such as the making of a batch. Arguments
        that JSON does not know become text. arguments: what the span shows besides its name.
        """
        plain = {key: _plain(value) for key, value in arguments.items()}
        start = self._now()
        try:
            yield
        finally:
            self._append(_HOST, name, start, self._now() - start, plain)

    def json(self) -> dict[str, Any]:
        """The trace as the viewers read it."""
        device = repr(self.ctx) if self.ctx is not None else "numpy"
        with self._lock:
            rows, events = list(self._rows.items()), list(self._events)
        names = [
            _named("process_name", _HOST, 0, "host"),
            _named("process_name", _DEVICE, 0, device),
            *(_named("thread_name", *row, name) for row, name in rows),
        ]
        return {
            "traceEvents": [*names, *events],
            "displayTimeUnit": "ms",
            "otherData": {"runs": self.runs, "device": device, "dropped events": self.dropped},
        }

    def write(self, path: str | os.PathLike) -> None:
        """Writes the trace as a JSON file; an earlier one is replaced only by a complete one."""
        with replacing(Path(path)) as file:
            file.write(json.dumps(self.json(), allow_nan=False, separators=(",", ":")).encode())

    def _described(self, step: Step) -> dict[str, Any]:
        node = step.node
        python = self.ctx is not None and node.op.kernel is None
        written = step.outputs or [step.inputs[k] for k in node.op.writes]
        arguments = {
            "node": node.name,
            "inputs": [_text(value) for value in step.inputs],
            "outputs": [_text(value) for value in written],
            "bytes": traffic(step),
            "flops": flops(step),
            "line": node.where,
        }
        return {"name": node.op.name, "cat": "python" if python else "device", "args": arguments}

    def _append(self, pid: int, name: str, ts: float, dur: float, arguments: dict) -> None:
        tid = threading.get_native_id()
        event = {"name": name, "ph": "X", "ts": round(ts, 3), "dur": round(dur, 3)}
        with self._lock:
            if len(self._events) >= self._limit:
                self.dropped += 1
                return
            self._rows.setdefault((pid, tid), threading.current_thread().name)
            self._events.append(event | {"pid": pid, "tid": tid, "args": arguments})

    def _now(self) -> float:
        return (time.perf_counter() - self._start) * 1e6


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _plain(value: Any) -> Any:
    """A value as JSON has it: `NaN` is none, and viewers refuse the whole file for it."""
    if isinstance(value, (str, bool, int, type(None))):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def _text(value: Value) -> str:
    return f"{value.node.name} {value.spec.dtype} {value.spec.shape}"
