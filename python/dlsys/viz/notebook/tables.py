"""Profiles, counters and reports in notebooks."""

from __future__ import annotations

from typing import Any

from ..page import folded, picture, table
from ..report import html
from ..svg import text_of
from ..times import operator_times
from .frame import framed, plain, sentence


def profile_html(profile: Any) -> str:
    """A `profile.Profile`: the time of each operator."""
    told = repr(profile).partition("(")[2].removesuffix(")")
    if not profile.runs:
        return framed("Profile", told, sentence("No run was timed yet: executor.recorder = it."))
    return framed("Profile", told, picture(operator_times(profile)), folded("table", str(profile)))


def counters_html(counters: Any) -> str:
    """A `profile.Counters`: every number of a device and its allocator."""
    rows = [(name, f"{value:,}") for name, value in counters.rows()]
    return framed("Counters", f"of {counters.device}", table(("counter", "value"), rows))


def text_html(told: Any) -> str:
    """An object whose text is a table, such as an executor's report."""
    return framed(type(told).__name__, "", plain(str(told)))


def report_html(report: Any) -> str:
    """A `viz.report.Report`: the page within the notebook, with a bar to scroll it."""
    page = f'<iframe title="{text_of(report.title)}" srcdoc="{text_of(html(report))}"></iframe>'
    return framed("Report", report.title, page)
