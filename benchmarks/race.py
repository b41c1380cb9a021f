"""Whole training steps on one GPU against PyTorch and JAX, each in a process of its own, in turn.

    python benchmarks/race.py [--works mlp,lenet-128] [--contestants dlsys,torch,jax] [--drawn 4]

Leaves results/race.json; as a part of gpu.py, its results are there. A time is wall time a step
over many that are queued together and waited for once, the median of the rounds. dlsys and JAX's
scan take shuffled batches from data on the device; the others are fed one batch that lies there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import measure

CONTESTANTS = {"dlsys": "race_dlsys.py", "torch": "race_torch.py", "jax": "race_jax.py"}


def results_of(name: str, passed: list[str], seconds: float) -> list[dict[str, Any]]:
    """The lines of one contestant; a line that failed or is missing shows as `error`."""
    command = [sys.executable, str(measure.HERE / CONTESTANTS[name]), *passed]
    package = str(measure.ROOT / "python")
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found: list[dict[str, Any]] = []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env)
        text, trouble = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        text, trouble = (late.stdout or b"").decode(), f"stopped after {seconds:.0f} s"
    for line in text.splitlines():
        if line.startswith("{"):
            found.append({"contestant": name, **json.loads(line)})
            ms = found[-1]["ms"]["median"]
            print(
                f"{name:>6} {found[-1]['mode']:<9} {found[-1]['precision']} "
                f"{found[-1]['work']:<32} {ms:9.4f} ms",
                flush=True,
            )
    if trouble:
        print(trouble, file=sys.stderr)
        found.append({"contestant": name, "error": trouble[-2000:]})
    return found


def versions(contestants: list[str]) -> dict[str, str]:
    """Of the packages that take part."""
    from importlib import metadata

    wanted = [
        name for name in ("torch", "jax", "jaxlib") if name[:3] in {c[:3] for c in contestants}
    ]
    return {name: metadata.version(name) for name in wanted}


def race(options: argparse.Namespace, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """All contestants one after the other; `keep` gets the results after each of them."""
    modes = dict(part.split(":") for part in options.modes.split(",") if part)
    names = options.contestants.split(",")
    found: list[dict[str, Any]] = []
    for name in names:
        passed = ["--works", options.works, "--rounds", str(options.rounds)]
        passed += ["--modes", modes.get(name, "").replace("+", ",")]
        if name == "dlsys":
            passed += ["--drawn", str(options.drawn), "--seed", str(options.seed)]
        found += results_of(name, passed, options.seconds)
        keep({"versions": versions(names), "times": found})
    return {"versions": versions(names), "times": found}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be asked of a race."""
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--works", default="", help="names, separated by commas; default: all")
    parser.add_argument("--drawn", type=int, default=6, help="random networks, dlsys only")
    parser.add_argument("--seed", type=int, default=0, help="of the random networks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--modes", default="", help="for example torch:eager+graph")
    parser.add_argument("--seconds", type=float, default=280.0, help="for each contestant")


def main() -> int:
    parser = measure.arguments(__doc__)
    add_options(parser)
    options = parser.parse_args()
    found = race(options, lambda results: measure.save("race", options, results))
    return int(any("error" in each for each in found["times"]))


if __name__ == "__main__":
    sys.exit(main())
