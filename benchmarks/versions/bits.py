"""The bits that training steps leave on every device here, to be compared with another version's.

    python benchmarks bits --out before.json                 # of this checkout
    PYTHONPATH=/other/python python benchmarks bits --out after.json
    python benchmarks bits --compare before.json after.json  # status 1 where they differ

Each case of bits_cases.py makes three steps on numpy, the CPU and the GPU, real or emulated,
whichever the library has; every fetched value, parameter, slot of an optimizer and running
statistic leaves a SHA-256. Algorithms are chosen by heuristic, the count of threads is fixed, and
every DLSYS_* variable but those that name libraries is ignored, so that on one machine the same
code leaves the same file. With --arrays the arrays are kept beside it, and a comparison of two such
files says how far apart they are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shared import measure

KEPT = ("DLSYS_LIBRARY", "DLSYS_CUDA_LIBRARY_PATH", "DLSYS_EMULATED_")
FIXED = {
    **{"DLSYS_TUNE": "off", "DLSYS_THREADS": "2"},
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
DEVICES = ("numpy", "cpu", "gpu")


class Job(NamedTuple):
    """A case on a device in a precision."""

    case: str
    device: str
    precision: str
    arrays: bool

    @property
    def where(self) -> str:
        return self.device if self.precision == "fp32" else f"{self.device} {self.precision}"


def set_environment() -> None:
    """Sets the environment, of this process before it loads numpy, and of those it starts."""
    for name in [name for name in os.environ if name.startswith("DLSYS_")]:
        if not name.startswith(KEPT):
            del os.environ[name]
    os.environ.update(FIXED)


def context(device: str) -> Any:
    """The argument that an Executor takes for it."""
    from dlsys import ndarray

    return {"numpy": None, "cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}[device]


def reason_against(device: str) -> str | None:
    """Why a device cannot be used, in the package's words."""
    from dlsys import ndarray

    try:
        if device != "numpy":
            ndarray.array([0.0], context(device))
    except Exception as error:
        return str(error)
    return None


def jobs(options: argparse.Namespace, devices: list[str]) -> Iterator[Job]:
    """All that there is to run here; those that take longest first."""
    from versions.bits_cases import cases

    emulated = measure.nvidia("name") is None
    wanted = [case for case in cases() if options.only in case.name]
    for case in sorted(wanted, key=lambda case: len(case.gpu), reverse=True):
        for device in devices:
            several = ("fp32",) if case.native or device == "numpy" else ()
            if several and device == "gpu":
                several = case.emulated if emulated else case.gpu
            for precision in several:
                yield Job(case.name, device, precision, options.arrays)


def run(job: Job) -> tuple[Job, dict[str, str], dict[str, Any]]:
    """The digests of what a case leaves, and the arrays where they are asked for."""
    from versions.bits_cases import cases

    (case,) = (case for case in cases() if case.name == job.case)
    try:
        found = case.run(context(job.device), job.precision)
    except Exception:
        return job, {"error": traceback.format_exc()}, {}
    digests = {name: digest(value) for name, value in found.items()}
    return job, digests, found if job.arrays else {}


def digest(array: Any) -> str:
    """A SHA-256 of dtype, shape and bytes."""
    return hashlib.sha256(
        f"{array.dtype.str} {array.shape} ".encode() + array.tobytes()
    ).hexdigest()


def measured(options: argparse.Namespace) -> int:
    """Runs everything and writes the file; returns how many jobs failed."""
    import numpy as np

    import dlsys

    start = time.monotonic()
    against = {device: reason_against(device) for device in options.devices.split(",")}
    devices = [device for device, reason in against.items() if reason is None]
    every = list(jobs(options, devices))
    bits: dict[str, dict[str, dict[str, str]]] = {job.case: {} for job in every}
    arrays: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for job, digests, found in pool.imap_unordered(run, every):
            bits[job.case][job.where] = digests
            arrays.update({f"{job.case} | {job.where} | {k}": value for k, value in found.items()})
    failed = [job for job in every if "error" in bits[job.case][job.where]]
    for job in failed:
        print(f"{job.case} on {job.where}: {bits[job.case][job.where]['error']}", file=sys.stderr)
    package = Path(dlsys.__file__).parent
    gpu = measure.nvidia("name"), measure.nvidia("driver_version")
    used = None if "gpu" not in devices else gpu if gpu[0] else "emulated"
    record = {
        "benchmark": "bits",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": options.commit or measure.commit(package),
        "package": f"{package} {dlsys.__version__}",
        "library": os.environ.get("DLSYS_LIBRARY", "the package's"),
        "machine": {**measure.host(), "gpu": used},
        "environment": FIXED,
        "left_out": {device: reason for device, reason in against.items() if reason},
        "bits": {name: dict(sorted(found.items())) for name, found in sorted(bits.items())},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(measure.as_json(record))
    if options.arrays:
        np.savez(options.out.with_suffix(".npz"), **arrays)
    count = sum(len(digests) for found in bits.values() for digests in found.values())
    seconds = time.monotonic() - start
    print(f"{options.out}: {len(bits)} cases on {', '.join(devices)}, {count} digests, "
          f"{len(failed)} failed, {seconds:.0f} s")  # fmt: skip
    return len(failed)


# ---- comparing ----
def compared(before: Path, after: Path) -> int:
    """Prints what differs; returns how many quantities do, or are in one of the files only."""
    records = [json.loads(path.read_text()) for path in (before, after)]
    for key in ("machine", "environment", "left_out"):
        if records[0][key] != records[1][key]:
            print(f"{key}: {records[0][key]}\n   and {records[1][key]}")
    first, second = (flat(record["bits"]) for record in records)
    held = [Arrays(path) for path in (before, after)]
    names = list(dict.fromkeys((*first, *second)))
    different = [name for name in names if first.get(name) != second.get(name)]
    for name in different:
        sides = [path for path, found in zip((before, after), (first, second)) if name in found]
        print(f"{name}: " + (f"only in {sides[0]}" if len(sides) == 1 else apart(name, held)))
    print(f"{len(different)} of {len(names)} differ")
    return len(different)


def flat(bits: dict[str, Any]) -> dict[str, str]:
    """Digests by "case | device | quantity"."""
    return {
        f"{case} | {where} | {quantity}": value
        for case, found in bits.items()
        for where, digests in found.items()
        for quantity, value in digests.items()
    }


class Arrays:
    """Those that were kept beside a file of digests, if any were."""

    def __init__(self, path: Path) -> None:
        import numpy as np

        self._path = path.with_suffix(".npz")
        self._held = np.load(self._path) if self._path.is_file() else None

    def get(self, name: str) -> Any:
        """The array of that name, or None."""
        return self._held[name] if self._held is not None and name in self._held else None


def apart(name: str, held: Iterable[Arrays]) -> str:
    """The distance of the arrays of that name, where both were kept."""
    import numpy as np

    one, other = (arrays.get(name) for arrays in held)
    if one is None or other is None:
        return "other bits"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {one.shape} and {other.dtype} {other.shape}"
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    largest = float(np.abs(one).max())
    share = float(np.abs(one - other).max()) / largest if largest else np.inf
    return f"apart by {share:.1e} of the largest, {(one != other).mean():.1%} of the elements"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON to write")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--arrays", action="store_true", help="keep the arrays too, as .npz")
    parser.add_argument("--devices", default=",".join(DEVICES), help="separated by commas")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--commit", default=None, help="the commit, where there is no git")
    options = parser.parse_args()
    if options.compare:
        return int(compared(*options.compare) > 0)
    if not options.out:
        parser.error("--out FILE, or --compare BEFORE AFTER")
    set_environment()
    return int(measured(options) > 0)
