"""Several GPUs of one host: the bandwidth of sums over ranks, and steps of 1 GPU beside those of n.

    python benchmarks dist [--gpus 2 4] [--works mlp,lenet-1000,resnet50,gpt2] [--peers 0]

Each side is started as one rank a GPU (dist_dlsys.py by `python -m dlsys.dist launch`,
dist_torch.py by torchrun, its DistributedDataParallel), with the same batch a GPU for any number of
them, on data of the device. Leaves results/dist.json: the bus bandwidth of all_reduce, milliseconds
a step and its efficiency, time at 1 GPU over that at n, and how much of the communication lies
beside other kernels in a trace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from shared import measure

WORKS = ("allreduce", "mlp", "lenet-1000", "resnet50", "gpt2", "trace-lenet-1000", "trace-gpt2")


def lines_of(side: str, gpus: int, works: str, rounds: int) -> list[dict[str, Any]]:
    """What rank 0 of a side prints, a JSON object a line."""
    starts = {
        "dist_dlsys": ["dlsys.dist", "launch", "-n", str(gpus)],
        "dist_torch": ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)],
    }
    ours = side == "dist_dlsys"
    asked = [work for work in works.split(",") if ours or not work.startswith("trace-")]
    program = measure.program(side, ",".join(asked), str(rounds))
    path = [str(measure.ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = subprocess.run(
        [program[0], "-m", *starts[side], *program[1:]], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    if found.returncode:
        lines.append({"side": side, "gpus": gpus, "error": f"ended with status {found.returncode}"})
    return lines


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="beside 1")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=int, default=1, help="0: only ours")
    options = parser.parse_args()
    steps: list[dict[str, Any]] = []
    for side in ("dist_dlsys", *(["dist_torch"] if options.peers else [])):
        for gpus in (1, *options.gpus):
            for line in lines_of(side, gpus, options.works, options.rounds):
                steps.append(line)
                print(json.dumps(line), flush=True)
    print(measure.save("dist", options, {"steps": steps}), file=sys.stderr)
    return int(any("error" in line for line in steps))
