"""The race's training steps, kernel by kernel, beside what the hardware would allow.

A kernel is timed between two events, which lengthens a small one by a microsecond or two: in a
recorded program it starts while the one before it ends. A floor is the larger of the time for the
floating-point operations and the time for the bytes that have to move once.
"""

from __future__ import annotations

import statistics
from typing import Any

RUNS = 40
PEAK_FLOPS = 61e12  # fp32 of an H200, measured
PEAK_BYTES = 4.28e12  # read and written a second, measured


class StepTimes:
    """An executor's recorder: the device's milliseconds of every step of the plan."""

    def __init__(self) -> None:
        self.plan: Any = None
        self.runs: list[list[float]] = []

    def add(self, plan: Any, ms: list[float]) -> None:
        """One run."""
        self.plan = plan
        self.runs.append(ms)


def rows_of(times: StepTimes) -> list[dict[str, Any]]:
    """One row an operator and kind of shape, in the order of the plan."""
    from dlsys.executor.debug.observe import flops, traffic

    rows: dict[str, dict[str, Any]] = {}
    for k, step in enumerate(times.plan.steps):
        us = statistics.median(run[k] for run in times.runs) * 1e3
        floor = max(flops(step) / PEAK_FLOPS, traffic(step) / PEAK_BYTES) * 1e6
        name = step.node.op.name
        row = rows.setdefault(name, {"operator": name, "calls": 0, "us": 0.0, "floor_us": 0.0})
        row["calls"] += 1
        row["us"] += us
        row["floor_us"] += floor
    return [
        {**row, "us": round(row["us"], 2), "floor_us": round(row["floor_us"], 2)}
        for row in rows.values()
    ]


def measured() -> dict[str, Any]:
    """Every named work of the race, fp32."""
    from contestants import race_dlsys
    from dlsys.data import Dataset, DeviceLoader
    from shared import workloads

    dataset = Dataset(*workloads.data())
    found: dict[str, Any] = {"runs": RUNS, "works": {}}
    for work in workloads.NAMED:
        loader = DeviceLoader(dataset, work.batch, shuffle=True, normalize=(0.0, 1.0))
        executor = race_dlsys.step(work, "fp32", loader.inputs())
        for _ in range(5):
            executor.run()
        times = StepTimes()
        executor.recorder = times
        for _ in range(RUNS):
            executor.run()
        found["works"][work.name] = rows_of(times)
    return found
