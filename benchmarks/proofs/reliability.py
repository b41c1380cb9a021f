"""The campaign of docs/reliability.md: every generator of tests/fuzz/, and the sanitizers.

    python benchmarks reliability [--seed N] [--jobs 2] [--sanitizers] [--share 1.0]

The counts go into results/reliability.json, from which table.py makes the page's tables. A seed is
drawn unless it is given; the same seed and number of jobs draw the same cases. --share takes a part
of the cases. --sanitizers runs make asan, ubsan and tsan instead, which takes longer than the rest.
The exit status is 1 where something did not hold.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shared.measure import ROOT, arguments, as_json, commit, machine

CASES = {
    "operators": 50_000, "training": 3_000, "formats": 200_000, "options": 3_000, "kills": 500,
}  # fmt: skip
SANITIZERS = ("asan", "ubsan", "tsan")
FOUND = re.compile(
    r"^.*(?:ERROR: AddressSanitizer|runtime error|WARNING: ThreadSanitizer).*$", re.M
)


def attack(name: str, record: Path, cases: int, seed: int, jobs: int) -> bool:
    """Runs a generator, which adds its counts to the record; whether everything held."""
    command = [sys.executable, str(ROOT / "tests" / "fuzz"), name, "--cases", str(cases)]
    command += ["--seed", str(seed), "--jobs", str(jobs), "--record", str(record)]
    print(f"$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT).returncode == 0


def sanitize(tool: str) -> dict[str, Any]:
    """Runs `make TOOL` with this interpreter: how many tests passed, and what was found."""
    command = ["make", tool, "VENV=", f"PYTHON={sys.executable}"]
    print(f"$ {shlex.join(command)}", flush=True)
    start = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    output = done.stdout + done.stderr
    counts = re.search(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", output, re.M)
    found = [re.sub(r"^.*?src/", "src/", line.strip("= ")) for line in FOUND.findall(output)]
    return {
        "tool": tool, "command": f"make {tool}", "status": done.returncode,
        "passed": int(counts[1]) if counts else None,
        "failed": int(counts[2]) if counts else None,
        "skipped": int(counts[3]) if counts else None, "found": sorted(set(found))[:20],
        "seconds": round(time.monotonic() - start),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit(), "machine": machine(),
    }  # fmt: skip


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--sanitizers", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.sanitizers:
        runs = [sanitize(tool) for tool in SANITIZERS]
        path = options.out / "sanitizers.json"
        path.write_text(as_json({"runs": runs}))
        for run in runs:
            print(run["tool"], run["passed"], "passed", run["failed"], "failed", *run["found"])
        return int(any(run["status"] for run in runs))
    record = options.out / "reliability.json"
    record.unlink(missing_ok=True)
    held = [
        attack(name, record, max(1, round(cases * options.share)), options.seed, options.jobs)
        for name, cases in CASES.items()
    ]
    return int(not all(held))
