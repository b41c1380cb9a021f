"""Runs the generators: python tests/fuzz [operators|training|formats|options|kills ...] [options]

Without names all of them share the time. The seed is printed; the same seed, number of workers and
batches draw the same cases. A finding ends with the command that repeats it, and the exit status is
1 if there is one. --record FILE adds the counts to a JSON file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "python"), str(ROOT)]
if str(HERE) in sys.path:  # this folder's files are fuzz.NAME, and one of them is like a library's
    sys.path.remove(str(HERE))

from fuzz.campaign import GENERATORS, Campaign, Options  # noqa: E402


def options_of(arguments: list[str] | None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("generators", nargs="*", metavar="GENERATOR", help=", ".join(GENERATORS))
    parser.add_argument("--seconds", type=float, help="of all together; default: 60")
    parser.add_argument("--cases", type=int, help="of each; default: as many as the time allows")
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; default: 1")
    parser.add_argument("--devices", default="numpy,cpu", help="default: numpy,cpu; gpu is another")
    parser.add_argument("--only", default="", help="names of operators, readers, … (parts of them)")
    parser.add_argument("--batch", type=int, help="only this one, of --worker")
    parser.add_argument("--worker", type=int, help="whose batch")
    parser.add_argument("--replay", help="the one case that this text of a finding stands for")
    parser.add_argument("--verbose", action="store_true", help="print what does not hold at once")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="JSON to which counts are added"
    )
    given = parser.parse_args(arguments)
    for name in given.generators:
        if name not in GENERATORS:
            parser.error(f"there is no generator {name}; there are {', '.join(GENERATORS)}")
    if (given.batch is None) != (given.worker is None):
        parser.error("--batch and --worker go together")
    if given.replay and len(given.generators) != 1:
        parser.error("--replay is of one generator: name it")
    given.generators = given.generators or list(GENERATORS)
    if given.seed is None:
        given.seed = int.from_bytes(os.urandom(4), "little")
    if given.seconds is None:
        given.seconds = float("inf") if given.cases else 60.0
    return Options(**vars(given))


def main(arguments: list[str] | None = None) -> int:
    """1 where something did not hold."""
    if not importlib.util.find_spec("hypothesis"):
        print("fuzz: needs hypothesis: pip install 'hypothesis>=6.100,<7'", file=sys.stderr)
        return 2
    if (arguments or sys.argv[1:])[:1] == ["--as-worker"]:
        return _as_worker((arguments or sys.argv[1:])[1:])
    options = options_of(arguments)
    print(f"fuzz: seed {options.seed}", flush=True)
    return Campaign(options).run()


def _as_worker(arguments: list[str]) -> int:
    """A child process of a campaign: generator, seed, worker, size, seconds, cases, first batch,
    devices, parts of names, whether to tell everything.
    """
    from fuzz import harness

    name, seed, worker, size, seconds, cases, first, devices, only, verbose = arguments
    module: Any = importlib.import_module(f"fuzz.{name}")
    trial = module.trial(devices.split(","), [part for part in only.split(",") if part])
    harness.work(
        trial, name, int(seed), int(worker), int(size), float(seconds), int(cases), int(first),
        verbose == "1",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
