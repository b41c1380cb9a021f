"""Trains the command line's networks and holds their test accuracies against what is expected.

    python benchmarks accuracy --device gpu --out FOLDER [--proofs mlp,cnn-3] [--seeds 123,1,2]

Each run is one command, which the record names; the first seed is the command line's own. Their
settings were chosen on the validation set. Writes accuracy.json. The exit status is 0 when every
run reached its accuracy.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from typing import Any, NamedTuple

from shared import measure

LIMIT = 1200.0  # seconds a run


class Proof(NamedTuple):
    """A network, how it is trained, and the test accuracy that every seed must reach."""

    network: str
    options: str
    accuracy: float


PROOFS = {
    "mlp": Proof("MLP 784-128-10", "-m mlp --hidden 128 -e 10", 0.975),
    "cnn-3": Proof("LeNet-5", "-m cnn -e 3 --batch-size 50 --augment shift=1", 0.988),
    "cnn-10": Proof("LeNet-5", "-m cnn -e 10 --batch-size 50 --augment shift=1", 0.99),
    "resnet": Proof(
        "ResNetMNIST", "-m resnet -e 3 --augment shift,rotate --schedule one-cycle", 0.993
    ),
}


def run(proof: Proof, seed: int, device: str) -> dict[str, Any]:
    """One training: its command, status, seconds, accuracies, and images/s of its last epoch."""
    program = ["mnist_dlsys.py", *shlex.split(proof.options), "--seed", str(seed), "-c", device]
    result: dict[str, Any] = {"command": shlex.join(["python", *program]), "seed": seed}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *program],
            cwd=measure.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return result | {"status": None, "seconds": LIMIT}
    result |= {"status": done.returncode, "seconds": round(time.monotonic() - start, 1)}
    if done.returncode != 0:
        return result | {"tail": done.stdout[-2000:]}
    found = re.findall(r"^(\w+) set accuracy=(\S+)$", done.stdout, re.M)
    speeds = re.findall(r"([\d,]+) images/s$", done.stdout, re.M)
    result["images_per_second"] = int(speeds[-1].replace(",", ""))
    return result | {f"{name}_accuracy": float(value) for name, value in found}


def prove(proof: Proof, seeds: list[int], device: str) -> dict[str, Any]:
    """The runs of all seeds, and whether each reached the accuracy."""
    runs = []
    for seed in seeds:
        runs.append(run(proof, seed, device))
        print(line(proof, runs[-1]), flush=True)
    reached = all(one.get("test_accuracy", 0.0) >= proof.accuracy for one in runs)
    return {"network": proof.network, "expected": proof.accuracy, "ok": reached, "runs": runs}


def line(proof: Proof, one: dict[str, Any]) -> str:
    """A run as text."""
    if "test_accuracy" not in one:
        return f"{one['command']}\n  status {one['status']}\n{one.get('tail', '')}"
    verdict = "ok" if one["test_accuracy"] >= proof.accuracy else "TOO LOW"
    return (
        f"{one['command']}\n  test {one['test_accuracy']:.4f} (at least {proof.accuracy}: "
        f"{verdict}), validation {one['validation_accuracy']:.4f}, {one['seconds']} s, "
        f"{one['images_per_second']:,} images/s"
    )


def main() -> int:
    """Returns 0 when every run reached its accuracy."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=["numpy", "cpu", "gpu"], default="gpu")
    parser.add_argument("--proofs", default=",".join(PROOFS), help=f"of {', '.join(PROOFS)}")
    parser.add_argument("--seeds", default="123,1,2")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    names = options.proofs.split(",")
    unknown = [name for name in names if name not in PROOFS]
    if unknown:
        parser.error(f"unknown proofs {', '.join(unknown)}; there are {', '.join(PROOFS)}")
    proofs = {name: prove(PROOFS[name], seeds, options.device) for name in names}
    ok = all(proof["ok"] for proof in proofs.values())
    path = measure.save("accuracy", options, {"device": options.device, "ok": ok, "proofs": proofs})
    print(f"{'ok' if ok else 'NOT REACHED'}, written to {path}")
    return 0 if ok else 1
