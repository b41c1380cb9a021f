"""Training steps of GPT-2 124M and ResNet-50 on a GPU, beside PyTorch at its best.

    python benchmarks large [--works gpt2,resnet50] [--precisions bf16,tf32] [--peers 0] [--tune 1]

Each side is a process of its own (large_dlsys.py, large_torch.py), one after the other, on the same
machine: random data on the device, AdamW for GPT-2 (16 sequences of 1,024 tokens) and SGD with
momentum for ResNet-50 (128 images). Leaves results/large.json: milliseconds a step, the first two
steps' seconds, the peak of memory, and of ours the time of each kernel. Ours goes by the
heuristics; with `--tune 1` it takes part twice more, as `dlsys tuned`, which measures its
algorithms first (DLSYS_TUNE=full, from nothing), and as `dlsys tuned before`, a new process that
finds them.
What an earlier call on this machine left in the record stays, but for what is measured anew; each
step names its command and commit. A side that fails changes nothing there, and the status is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from shared import measure

WORKS = ("gpt2", "resnet50")
PRECISIONS = ("bf16", "tf32")
# Ours, by DLSYS_TUNE: `dlsys tuned before` finds what `dlsys tuned` has kept.
OURS = {"dlsys": "off"}
TUNED = {"dlsys tuned": "full", "dlsys tuned before": "cached"}


def lines_of(name: str, *arguments: str, tune: dict[str, str]) -> list[dict[str, Any]]:
    """What a side prints, a JSON object a line; what it says of errors goes to this process's."""
    command, env = measure.program(name, *arguments), {**os.environ, **tune}
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    if found.returncode:
        lines.append({"error": f"{name} ended with status {found.returncode}"})
    return lines


def sides(
    work: str, precision: str, rounds: int, tune: bool, peers: bool
) -> Iterator[dict[str, Any]]:
    """The lines of all sides of a work, ours first."""
    asked = work, precision, str(rounds)
    with tempfile.TemporaryDirectory() as folder:
        for side, mode in {**OURS, **(TUNED if tune else {})}.items():
            settings = {"DLSYS_TUNE": mode, "DLSYS_TUNE_CACHE": f"{folder}/tuning.json"}
            for line in lines_of("large_dlsys", *asked, tune=settings):
                if side != "dlsys":
                    line.pop("kernels", None)  # but for their choices those of the heuristics
                yield {**line, "side": side}
    if peers:
        yield from lines_of("large_torch", *asked, tune={})


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=int, default=1, help="0: only ours")
    parser.add_argument("--tune", type=int, default=0, help="1: ours with measured algorithms too")
    options = parser.parse_args()
    steps = measure.earlier_works(options.out / "large.json", of="steps")
    works = measure.choices(parser, "--works", options.works, WORKS)
    precisions = measure.choices(parser, "--precisions", options.precisions, PRECISIONS)
    failed = False
    for work in works:
        for precision in precisions:
            for line in sides(work, precision, options.rounds, options.tune, options.peers):
                shown = {key: value for key, value in line.items() if key != "kernels"}
                print(json.dumps(shown), flush=True)
                if "error" in line:
                    failed = True
                    continue
                key = work, precision, line["side"]
                steps = [x for x in steps if (x["work"], x["precision"], x["side"]) != key]
                steps.append({**line, **measure.origin(options)})
    print(measure.save("large", options, {"steps": steps}), file=sys.stderr)
    return int(failed)
