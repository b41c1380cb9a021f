"""Runs the benchmarks that this machine can run, then writes the tables: `make bench`.

python benchmarks/run.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import measure


def main() -> int:
    """Returns the status of the first benchmark that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=measure.HERE / "results")
    options = parser.parse_args()
    from dlsys.runtime.device import gpu, unavailable

    names = ["overhead", "cpu"]
    if importlib.util.find_spec("torch"):
        names.append("operators")
    else:
        print("benchmarks/operators.py is left out: there is no PyTorch", flush=True)
    reason = unavailable(gpu(0))
    if reason is None:
        names += ["gpu", "overlap", "losses"]
    else:
        print(f"benchmarks/gpu.py, overlap.py and losses.py are left out: {reason}", flush=True)
    for name in names:
        print(f"benchmarks/{name}.py", flush=True)
        command = [sys.executable, str(measure.HERE / f"{name}.py"), "--out", str(options.out)]
        status = subprocess.run(command).returncode
        if status:
            return status
    command = [sys.executable, str(measure.HERE / "table.py"), "--results", str(options.out)]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
