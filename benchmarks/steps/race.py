"""Whole training steps on one GPU against PyTorch and JAX, each in a process of its own, in turn.

    python benchmarks race [--works mlp,lenet-128] [--contestants dlsys,torch,jax] [--drawn 4]

Leaves results/race.json; as a part of gpu.py, its results are there. A time is wall time a step
over many that are queued together and waited for once, the median of the rounds. dlsys and JAX's
scan take shuffled batches from data on the device; the others are fed one batch that lies there.

dlsys takes part with the algorithms of its kernels' heuristics; as `tuned` with those
that DLSYS_TUNE=full measures; and as `warm`, the first two steps of a new process that finds those
kept, in a file of the race's own: what was measured before does not enter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shared import measure

CONTESTANTS = {"dlsys": "race_dlsys", "torch": "race_torch", "jax": "race_jax"}
# Of dlsys: DLSYS_TUNE of each process, and its modes. `warm` stands on what `tuned` leaves.
TUNINGS = (("cached", ("run_many", "run")), ("full", ("tuned",)), ("cached", ("warm",)))

Settings = dict[str, str]


def results_of(
    name: str, passed: Sequence[str], settings: Settings, seconds: float
) -> list[dict[str, Any]]:
    """The lines of one process; a line that failed or is missing shows as `error`."""
    command = measure.program(CONTESTANTS[name], *passed)
    package = str(measure.ROOT / "python")
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **settings, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found: list[dict[str, Any]] = []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env)
        text, trouble = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        text, trouble = (late.stdout or b"").decode(), f"stopped after {seconds:.0f} s"
    for line in text.splitlines():
        if line.startswith("{"):
            found.append({"contestant": name, **json.loads(line)})
            print(_shown(found[-1]), flush=True)
    if trouble:
        print(trouble, file=sys.stderr)
        found.append({"contestant": name, "error": trouble[-2000:]})
    return found


def _shown(line: dict[str, Any]) -> str:
    name = f"{line['contestant']:>6} {line['mode']:<9} {line['precision']} {line['work']:<32}"
    if "ms" in line:
        return f"{name} {line['ms']['median']:9.4f} ms"
    return f"{name} {line['first_s']:9.3f} s, the first two steps"


def versions(contestants: list[str]) -> dict[str, str]:
    """Of the packages that take part."""
    from importlib import metadata

    wanted = [
        name for name in ("torch", "jax", "jaxlib") if name[:3] in {c[:3] for c in contestants}
    ]
    return {name: metadata.version(name) for name in wanted}


def processes(
    name: str, options: argparse.Namespace, choices: str
) -> Iterator[tuple[list[str], Settings]]:
    """The arguments and settings of each process of a contestant; `choices` is the file of what
    dlsys finds.
    """
    modes = dict(part.split(":") for part in options.modes.split(",") if part)
    wanted = modes.get(name, "").replace("+", ",")
    passed = ["--works", options.works, "--rounds", str(options.rounds)]
    if name != "dlsys":
        yield [*passed, "--modes", wanted], {}
        return
    known = [mode for _, several in TUNINGS for mode in several]
    asked = wanted.split(",") if wanted else known
    if not set(asked) <= set(known) or "warm" in asked and "tuned" not in asked:
        raise SystemExit(f"modes of dlsys: expected some of {known}, warm after tuned; got {asked}")
    for tune, several in TUNINGS:
        of_these = [mode for mode in several if mode in asked]
        drawn = ["--drawn", str(options.drawn), "--seed", str(options.seed)]
        if of_these:
            more = drawn if several is TUNINGS[0][1] else []  # those take the heuristic
            settings = {"DLSYS_TUNE": tune, "DLSYS_TUNE_CACHE": choices}
            yield [*passed, *more, "--modes", ",".join(of_these)], settings


def race(options: argparse.Namespace, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """All contestants one after the other; `keep` gets the results after each process."""
    names = options.contestants.split(",")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            end = time.monotonic() + options.seconds
            for passed, settings in processes(name, options, f"{folder}/tuning.json"):
                left = max(1.0, end - time.monotonic())
                found += results_of(name, passed, settings, left)
                keep({"versions": versions(names), "times": found})
    return {"versions": versions(names), "times": found}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a race."""
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--works", default="", help="names, separated by commas; default: all")
    parser.add_argument("--drawn", type=int, default=6, help="random networks, dlsys only")
    parser.add_argument("--seed", type=int, default=0, help="of the random networks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--modes", default="", help="for example dlsys:run_many+tuned,torch:graph")
    parser.add_argument("--seconds", type=float, default=280.0, help="for each contestant")


def main() -> int:
    parser = measure.arguments(__doc__)
    add_options(parser)
    options = parser.parse_args()
    found = race(options, lambda results: measure.save("race", options, results))
    return int(any("error" in each for each in found["times"]))
