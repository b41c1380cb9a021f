"""Several GPUs of one host: the bandwidth of sums over ranks, and steps of 1 GPU beside those of n.

    python benchmarks dist [--gpus 2 4] [--works mlp,lenet-1000,gpt2] [--peers 0] [--prepare]

GPUs are 2, 4 and 8 at a time, as far as the machine has them, beside 1.
Each side is started as one rank a GPU (dist_dlsys.py by `python -m dlsys.dist launch`,
dist_torch.py by torchrun, its DistributedDataParallel), with the same batch a GPU for any number of
them, on data of the device. PyTorch's steps are compiled, and these captured as CUDA graphs, of
which the quicker counts. Most of the call is compilation, which `--prepare` makes ahead, all starts
at once: PyTorch keeps it in the folder for temporary files. Leaves results/dist.json: the bus
bandwidth of all_reduce, milliseconds a step, and how much of the communication lies beside other
kernels in a trace; and prints the efficiency of steps, time at 1 GPU over that at n.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from dlsys.runtime.device import device_count
from dlsys.runtime.library import DL_GPU
from shared import measure
from tables import scale
from tables.gpu import Results

TRACED = ("trace-mlp", "trace-lenet-1000", "trace-gpt2")
WORKS = ("allreduce", "mlp", "lenet-1000", "resnet50", "gpt2", *TRACED)


def started(side: str, gpus: int, works: str, rounds: int) -> subprocess.Popen[str]:
    """The ranks of a side."""
    starts = {
        "dist_dlsys": ["dlsys.dist", "launch", "-n", str(gpus)],
        "dist_torch": ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)],
    }
    ours = side == "dist_dlsys"
    asked = [work for work in works.split(",") if ours or not work.startswith("trace-")]
    program = measure.program(side, ",".join(asked), str(rounds))
    path = [str(measure.ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [program[0], "-m", *starts[side], *program[1:]], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip


def lines_of(side: str, gpus: int, works: str, rounds: int) -> Iterator[dict[str, Any]]:
    """What rank 0 of a side prints, a JSON object a line, as they come."""
    ranks = started(side, gpus, works, rounds)
    assert ranks.stdout is not None
    for line in ranks.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    if ranks.wait():
        yield {"side": side, "gpus": gpus, "error": f"ended with status {ranks.returncode}"}


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--gpus", type=int, nargs="+", help="beside 1; without it 2, 4 and 8, as far as there are"
    )
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=int, default=1, help="0: only ours")
    parser.add_argument("--prepare", action="store_true", help="compile PyTorch's models, no more")
    options = parser.parse_args()
    if options.gpus is None:
        options.gpus = [n for n in (2, 4, 8) if n <= device_count(DL_GPU)]
    worlds = 1, *options.gpus
    if options.prepare:
        for ranks in [started("dist_torch", gpus, options.works, 0) for gpus in worlds]:
            ranks.communicate()
        return 0
    steps: list[dict[str, Any]] = []
    for side in ("dist_dlsys", *(["dist_torch"] if options.peers else [])):
        for gpus in worlds:
            for line in lines_of(side, gpus, options.works, options.rounds):
                steps.append(line)
                print(json.dumps(line), flush=True)
                path = measure.save("dist", options, {"steps": steps})  # as far as it came
    print(path, file=sys.stderr)
    print(scale.steps(Results(options.out)))
    return int(any("error" in line for line in steps))
