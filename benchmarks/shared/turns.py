"""Processes that take turns: each measures for a while when it is told to, and sleeps otherwise.

Contestants in one process would share thread pools and a device's queue. In processes of their own
that take short turns, one after the other, a slower minute of the machine hits all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared import measure

DISTURBED = 0.1  # cores that others may use during a turn
PATIENCE = 100  # disturbed turns, of one contestant, until they are taken as they are

Sampler = Callable[[float], Sequence[float]]  # seconds to the milliseconds of each step


class Contestant:
    """A process that ends in `serve`; `turn` makes it run for a while."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        patience: int = PATIENCE,
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=measure.ROOT,
            env=environment,
        )
        self._patience = patience
        self.ready: dict[str, Any] = self._answer()
        self.disturbed = 0

    def turn(self, seconds: float, work: str = "") -> float:
        """The median of a step's milliseconds in a turn that nobody disturbs."""
        assert self._process.stdin is not None
        while True:
            self._process.stdin.write(json.dumps([seconds, work]) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            if answer["others"] <= DISTURBED or self.disturbed >= self._patience:
                return answer["ms"]
            self.disturbed += 1
            time.sleep(0.2)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a contestant ended early; its message is above")
        return json.loads(line)


def serve(sampler: Callable[[str], Sampler], **ready: Any) -> None:
    """The other end: says what is `ready`, then runs what each line asks for."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        seconds, work = json.loads(line)
        sample = sampler(work)
        sample(min(0.05, seconds))  # wakes the threads up and fills the caches
        start, before = time.perf_counter(), others_seconds()
        ms = statistics.median(sample(seconds))
        others = (others_seconds() - before) / (time.perf_counter() - start)
        print(json.dumps({"ms": ms, "others": others}), flush=True)


def others_seconds() -> float:
    """Processor time that everything but this process has used; on Linux only, else 0."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, _, _, *interrupts = map(int, stat.readline().split()[1:9])
    except OSError:
        return 0.0
    ticks = user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
