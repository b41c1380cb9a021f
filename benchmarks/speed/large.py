"""Training steps of GPT-2 124M and ResNet-50 on a GPU, beside PyTorch at its best.

    python benchmarks large [--works gpt2,resnet50] [--precisions bf16,tf32] [--peers 0]

Each side is a process of its own (large_dlsys.py, large_torch.py), one after the other, on the same
machine: random data on the device, AdamW for GPT-2 (16 sequences of 1,024 tokens) and SGD with
momentum for ResNet-50 (128 images). Leaves results/large.json: milliseconds a step, the first two
steps' seconds, the peak of memory, and of ours the time of each kernel. What an earlier call
on this machine left there stays, but for what is measured anew; each step names its command and
commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from shared import measure

WORKS = ("gpt2", "resnet50")
PRECISIONS = ("bf16", "tf32")


def lines_of(name: str, *arguments: str) -> list[dict[str, Any]]:
    """What a side prints, a JSON object a line; what it says of errors goes to this process's."""
    found = subprocess.run(measure.program(name, *arguments), stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    if found.returncode:
        lines.append({"side": name, "error": f"ended with status {found.returncode}"})
    return lines


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=int, default=1, help="0: only ours")
    options = parser.parse_args()
    sides = ["large_dlsys", *(["large_torch"] if options.peers else [])]
    known = measure.earlier_works(options.out / "large.json", of="steps")
    works, precisions = options.works.split(","), options.precisions.split(",")
    steps = [x for x in known if x["work"] not in works or x["precision"] not in precisions]
    for work in works:
        for precision in precisions:
            for side in sides:
                for line in lines_of(side, work, precision, str(options.rounds)):
                    steps.append({**line, **measure.origin(options)})
                    shown = {key: value for key, value in line.items() if key != "kernels"}
                    print(json.dumps(shown), flush=True)
    print(measure.save("large", options, {"steps": steps}), file=sys.stderr)
