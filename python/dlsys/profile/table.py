"""The time of a run by operator, as a table, from the device's own clock."""

from __future__ import annotations

import threading
from typing import NamedTuple

from ..describe import counted, drawn_by
from ..executor.debug.observe import flops, traffic
from ..executor.plan.memory import Plan


class Row(NamedTuple):
    """One operator over all runs: calls, milliseconds, bytes moved at least, floating-point
    operations.

    ms, nbytes, flops: of all calls together.
    """

    name: str
    calls: int
    ms: float
    nbytes: int
    flops: int

    @property
    def gigabytes_per_second(self) -> float:
        """The speed at which it moved its bytes."""
        return self._rate(self.nbytes)

    @property
    def gigaflops(self) -> float:
        """10⁹ floating-point operations a second."""
        return self._rate(self.flops)

    def _rate(self, amount: int) -> float:
        return amount / max(self.ms, 1e-9) * 1e-6


class Profile:
    """Adds up what every step of every run took; executors in several threads may share one. Timing
    the steps makes the runs themselves slower, and a run that fails is not counted.
    """

    def __init__(self) -> None:
        self.runs = 0
        self._lock = threading.Lock()
        self._totals: dict[str, list[float]] = {}
        self._costs: dict[Plan, list[tuple[str, int, int]]] = {}
        self._times: dict[Plan, tuple[int, list[float]]] = {}  # runs, and milliseconds a step

    def add(self, plan: Plan, ms: list[float]) -> None:
        """Adds one run of a plan; `ms` has the milliseconds of each of its steps."""
        with self._lock:
            if plan not in self._costs:
                self._costs[plan] = [
                    (step.node.op.name, traffic(step), flops(step)) for step in plan.steps
                ]
            self.runs += 1
            runs, times = self._times.get(plan, (0, [0.0] * len(ms)))
            self._times[plan] = runs + 1, [total + t for total, t in zip(times, ms)]
            for (name, nbytes, operations), t in zip(self._costs[plan], ms):
                total = self._totals.setdefault(name, [0, 0.0, 0, 0])
                for k, amount in enumerate((1, t, nbytes, operations)):
                    total[k] += amount

    def step_ms(self, plan: Plan) -> list[float] | None:
        """The mean milliseconds of each step of a plan; None where none of its runs was timed."""
        with self._lock:
            runs, times = self._times.get(plan, (0, []))
        return [total / runs for total in times] if runs else None

    def rows(self) -> list[Row]:
        """One row an operator, the slowest first."""
        with self._lock:
            rows = [
                Row(name, int(calls), ms, int(nbytes), int(operations))
                for name, (calls, ms, nbytes, operations) in self._totals.items()
            ]
        return sorted(rows, key=lambda row: -row.ms)

    _repr_html_ = drawn_by("profile_html")

    def __repr__(self) -> str:
        rows = self.rows()
        counts = f"{counted(self.runs, 'run')}, {counted(len(rows), 'operator')}"
        return f"Profile({counts}, {sum(row.ms for row in rows):.3f} ms)"

    def __str__(self) -> str:
        rows = self.rows()
        total = sum(row.ms for row in rows)
        lines = [
            f"{'operator':<38} {'calls':>8} {'ms':>11} {'share':>7} {'GB/s':>9} {'GFLOP/s':>10}"
        ]
        for row in rows:
            lines.append(
                f"{row.name:<38} {row.calls:>8,} {row.ms:>11.3f} {row.ms / (total or 1):>7.1%} "
                f"{row.gigabytes_per_second:>9.1f} {row.gigaflops:>10.1f}"
            )
        calls = sum(row.calls for row in rows)
        lines.append(
            f"{f'total of {self.runs:,} runs':<38} {calls:>8,} {total:>11.3f} {bool(total):>7.1%}"
        )
        return "\n".join(lines)
