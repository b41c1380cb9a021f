"""The parts that benchmarks share: medians, facts of the machine, and the JSON record."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent

# Of products and convolutions, in the order of tables.
PRECISIONS = ("fp32", "3xtf32", "tf32", "bf16", "fp16", "fp8")

Summary = dict[str, float]


def summary(samples: Sequence[float], digits: int = 5) -> Summary:
    """Median and quartiles of the samples, and how many there are."""
    several = samples if len(samples) > 1 else [*samples, *samples]
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    rounded = {"median": middle, "q1": low, "q3": high}
    return {**{key: round(value, digits) for key, value in rounded.items()}, "n": len(samples)}


def step_ms(step: Callable[[], Any], seconds: float) -> list[float]:
    """Milliseconds of each call, for at least `seconds`. For steps that are done on return."""
    times = []
    end = time.perf_counter() + seconds
    now = time.perf_counter()
    while now < end:
        start = now
        step()
        now = time.perf_counter()
        times.append((now - start) * 1e3)
    return times


def program(name: str, *arguments: str) -> list[str]:
    """The command that runs a program of the rooms here."""
    return [sys.executable, str(HERE), name, *arguments]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the JSON")
    parser.add_argument("--commit", default=None, help="the commit, where there is no git")
    return parser


def choices(
    parser: argparse.ArgumentParser, option: str, given: str, known: Iterable[str]
) -> list[str]:
    """The names that an option has, separated by commas; ends with what is known for another."""
    names, there = given.split(","), list(known)
    for name in names:
        if name not in there:
            parser.error(f"argument {option}: invalid choice: {name!r} (choose from {there})")
    return names


def save(name: str, options: argparse.Namespace, results: dict[str, Any]) -> Path:
    """Writes `<out>/<name>.json` with the machine, the versions and the command."""
    record = {"benchmark": name, **origin(options), "machine": machine(), **results}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(as_json(record))
    return path


def earlier_works(path: Path, of: str = "works", **same: Any) -> list[dict[str, Any]]:
    """The works of a record that an earlier call left, so that one is made in parts: none where it
    is of another machine, of other versions, or differs in what `same` names. They are at `of`.
    """
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    known = {"machine": _deciding(machine()), **same}
    there = {**record, "machine": _deciding(record["machine"])}
    works: list[dict[str, Any]] = record[of]
    return works if all(there.get(key) == value for key, value in known.items()) else []


def _deciding(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that figures depend on: of a GPU its own, whatever host it is lent with. Of dlsys
    each part of a record has the commit.
    """
    left_out = {"dlsys", "torch"}  # the latter is known only where it has been imported
    if "gpu" in facts:
        left_out |= {"cpu", "cores", "system", "numpy_blas"}
    return {key: value for key, value in facts.items() if key not in left_out}


def merged(
    work: dict[str, Any],
    rungs: Sequence[dict[str, Any]],
    measured: dict[str, Any],
    library: str,
    library_precisions: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A work of a ladder with rows measured anew, which replace those of their precisions: these
    keep the order of PRECISIONS. `measured` has the origin of each; a row's share is that of the
    library's rate at its precision, or at the one that `library_precisions` names instead.
    """
    kept = [row for row in work["rungs"] if row["precision"] not in measured]
    rows = sorted([*kept, *rungs], key=lambda row: PRECISIONS.index(row["precision"]))
    rates = {row["precision"]: row["tflops"] for row in rows if row["algorithm"] == library}
    for row in rows:
        rate = rates.get((library_precisions or {}).get(row["precision"], row["precision"]))
        row[f"of_{library}"] = row["tflops"] / rate if rate else None
    return {**work, "rungs": rows, "measured": {**work.get("measured", {}), **measured}}


def origin(options: argparse.Namespace) -> dict[str, Any]:
    """The command, the date and the commit of a measurement."""
    return {
        "command": shlex.join(["python", *_relative(sys.argv)]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": options.commit or commit(),
    }


def as_json(value: Any) -> str:
    """Indented JSON with lists of numbers on one line."""
    text = json.dumps(value, indent=1)
    return re.sub(r"\[\s+([-+.\d\w,\s]+?)\s+\]", _on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r"\s+", " ", found[1]) + "]"


def commit(tree: Path = ROOT) -> str | None:
    """The commit of a checkout, with "-dirty" when files differ from it; None outside git."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return found.stdout.strip() or None


def machine() -> dict[str, Any]:
    """The hardware and the versions that a figure stands on."""
    facts = {**host(), **_native_facts()}
    if "torch" in sys.modules:
        facts["torch"] = sys.modules["torch"].__version__
    return facts


def host() -> dict[str, Any]:
    """The part of it that does not come from dlsys."""
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numpy_blas": f"{blas.get('name')} {blas.get('version')}",
    }


def _native_facts() -> dict[str, Any]:
    from dlsys import __version__
    from dlsys.errors import DeviceError
    from dlsys.runtime.device import device_name, gpu, unavailable
    from dlsys.runtime.library import load

    facts: dict[str, Any] = {"dlsys": __version__}
    try:
        facts["library"] = load().version
    except DeviceError as error:
        facts["library"] = str(error)
    if unavailable(gpu(0)) is None:
        facts["gpu"] = device_name(gpu(0))
        facts["driver"] = nvidia("driver_version")
    return facts


def nvidia(fact: str) -> str | None:
    """A fact that nvidia-smi has of the first GPU, such as its "name"; None where there is none."""
    command = ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError:
        return None
    return None if found.returncode else found.stdout.split("\n")[0].strip() or None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _relative(argv: Sequence[str]) -> list[str]:
    """A command as it is typed in a checkout, without where its record goes and what its commit is,
    which the record has by itself.
    """
    folder, _, name = argv[0].rpartition(" ")  # as __main__.py leaves it
    program = Path(folder or name).resolve()
    inside = program.is_relative_to(ROOT)
    shown = str(program.relative_to(ROOT) if inside else program)
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--out", "--commit"):
        known.add_argument(option)
    return [shown, *([name] if folder else []), *known.parse_known_args(argv[1:])[1]]
