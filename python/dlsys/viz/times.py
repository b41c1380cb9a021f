"""The time of each operator, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..describe import counted
from .svg import BLUE, GRAY, MONO, MONO_WIDTH, drawing, element, label, time_text

_WIDTH, _ROW, _TOP = 420.0, 22.0, 30.0


class Timed(Protocol):
    """An object with rows of name, calls and ms, such as a `profile.Profile`."""

    runs: int

    def rows(self) -> Sequence[Any]:
        """One row an operator, the slowest first."""


def operator_times(profile: Timed, limit: int = 20) -> str:
    """Milliseconds an operator of a `profile.Profile` as SVG bars, the slowest first; those beyond
    the limit are one bar.
    """
    rows = profile.rows()
    bars = [(row.name, row.ms, row.calls) for row in rows[:limit]]
    rest = rows[limit:]
    if rest:
        ms, calls = sum(row.ms for row in rest), sum(row.calls for row in rest)
        bars.append((f"{len(rest)} more operators", ms, calls))
    total = sum(ms for _, ms, _ in bars)
    longest = max((ms for _, ms, _ in bars), default=0.0) or 1.0
    runs = max(profile.runs, 1)
    left = 20 + 12 * MONO_WIDTH * max((len(name) for name, _, _ in bars), default=0)
    head = f"{time_text(total)} in {counted(profile.runs, 'run')}, {time_text(total / runs)} a run"
    parts = [label(10, 18, head, font_weight="bold")]
    for k, (name, ms, calls) in enumerate(bars):
        y, width = _TOP + _ROW * k, _WIDTH * ms / longest
        color = GRAY if rest and k == limit else BLUE
        words = f"{ms / (total or 1.0):.1%}, {time_text(ms / runs)} a run, {counted(calls, 'call')}"
        parts += [
            label(left - 8, y + 13, name, text_anchor="end", font_family=MONO),
            element("rect", x=left, y=y + 2, width=width, height=_ROW - 6, rx=2, fill=color),
            label(left + width + 6, y + 13, words, opacity=0.8),
        ]
    return drawing(left + _WIDTH + 270, _TOP + _ROW * len(bars) + 8, "operator times", parts)
