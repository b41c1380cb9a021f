"""The tables of docs/reliability.md: what was tried and held, the sanitizers, and the soak."""

from __future__ import annotations

from typing import Any

from .gpu import Results, rows


def attacks(results: Results) -> str:
    """A row a generator, with the command that repeats it."""
    record = results.read("reliability")
    body = [
        [
            each["what"],
            f"{each['tried']:,}",
            f"{each['held']:,}",
            f"{each['unjudged']:,}",
            ", ".join(f"{kind} ({count:,})" for kind, count in each["found"].items()) or "none",
            f"{each['seconds']:.0f}",
            f"`{each['command']}`",
        ]
        for each in record["attacks"]
    ]
    head = ["what", "tried", "held", "no answer", "did not hold", "s", "again"]
    return f"{rows(head, body)}\n\n{_source(record['attacks'][-1])}"


def sanitizers(results: Results) -> str:
    """A row a tool."""
    runs = results.read("sanitizers")["runs"]
    body = [
        [
            f"`{run['command']}`",
            "stopped" if run["passed"] is None else f"{run['passed']:,}",
            "" if run["failed"] is None else f"{run['failed']:,}",
            "; ".join(run["found"]) or "nothing",
            "" if run["seconds"] is None else f"{run['seconds']:.0f}",  # not timed by itself
        ]
        for run in runs
    ]
    return f"{rows(['tool', 'passed', 'failed', 'found', 's'], body)}\n\n{_source(runs[-1])}"


def soak(results: Results) -> str:
    """A row a count of memory."""
    record = results.read("soak")
    body = [
        [
            name.replace("_", " "),
            f"{each['at'][record['warm'] - 1]:,}",
            f"{each['at'][-1]:,}",
            f"{each['rise']:,.0f}",
            f"{each['limit']:,}",
        ]
        for name, each in record["counts"].items()
    ]
    first, last = record["steps"] * record["warm"] // record["windows"], record["steps"]
    head = ["count", f"at step {first:,}", f"at step {last:,}", "fitted rise", "at most"]
    note = f"Device {record['device']}, {record['seconds']:.0f} s, `{record['command']}`"
    return f"{rows(head, body)}\n\n{note}; {_source(record)}"


def _source(record: dict[str, Any]) -> str:
    machine = record["machine"]
    known = ("python", "numpy", "torch", "hypothesis")
    versions = [f"{name} {machine[name]}" for name in known if name in machine]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {', '.join(versions)}; {record['date']}, "
        f"commit {record['commit']}"
    )
