"""Holds the losses of training on a device against the reference's, numpy in float64, on MNIST.

    python benchmarks losses --device gpu --out FOLDER [--works logreg,mlp,...] [--commit ID]

Two proofs for each network of the race, from equal weights, by plain SGD over the samples in order:

curve  three epochs at a gentle rate on both sides; the losses of every step are compared.
steps  three epochs at a brisk rate on the device alone; every so many steps the reference makes the
       same step from the device's state before it, and loss and update are compared. So rounding
       is held to what one step adds, also where training amplifies it until any two curves part.

Each proof is a process, and all run side by side. Writes losses.json. The exit status is 0 when all
that is judged holds, 2 when the device is not there.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from typing import Any

from dlsys.runtime.device import unavailable
from learning import losses_proofs
from learning.losses_proofs import DEVICES, KINDS, PROOFS, WORKS
from shared import measure

LIMIT = 500.0  # seconds a process
SIDE_BY_SIDE = 4  # processes that share the cores; those of the dense networks are soon done


def process(work: str, kind: str, device: str) -> dict[str, Any]:
    """The findings of a proof in a process of its own; `error` where that fails."""
    command = measure.program("losses_proofs", work, kind, "--device", device)
    threads = str(max(1, (os.cpu_count() or 1) // SIDE_BY_SIDE))
    env = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "DLSYS_THREADS": threads}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"stopped after {LIMIT:.0f} s"}
    if done.returncode:
        return {"ok": False, "error": f"status {done.returncode}: {done.stderr[-2000:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, found: dict[str, Any]) -> str:
    """The findings of a proof, as text."""
    verdict = "ok" if found["ok"] else "NOT OK"
    if "error" in found:
        return f"{name:18} {verdict}: {found['error']}"
    losses = ", ".join(f"{loss:.3f}" for loss in found["epoch_losses"])
    start = f"{name:18} {verdict:6} {found['seconds']:4.0f} s, rate {found['rate']}; loss {losses}"
    if "compared" not in found:
        return f"{start}; {found['largest_difference']:.1e} apart at most"
    loss, update = found["loss_error"], found["update_error"]
    return (
        f"{start}; wrong: loss {loss['largest']:.1e} at most, update {update['median']:.1e}, "
        f"at most {update['largest']:.1e}"
    )


def prove(names: list[str], device: str) -> dict[str, Any]:
    """Both proofs of all works, side by side."""
    works: dict[str, Any] = {
        name: {"batch": WORKS[name].batch, **PROOFS[name]._asdict()} for name in names
    }
    with concurrent.futures.ThreadPoolExecutor(len(names) * len(KINDS)) as pool:
        running = {
            pool.submit(process, name, kind, device): (name, kind)
            for name in names
            for kind in KINDS
        }
        for done in concurrent.futures.as_completed(running):
            name, kind = running[done]
            works[name][kind] = done.result()
            print(line(f"{name} {kind}", done.result()), flush=True)
    return works


def main() -> int:
    """Returns 0 when all that is judged holds, 2 when there is no such device."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=list(DEVICES), default="gpu")
    parser.add_argument("--works", default=",".join(PROOFS), help=f"of {', '.join(PROOFS)}")
    options = parser.parse_args()
    names = options.works.split(",")
    unknown = [name for name in names if name not in PROOFS]
    if unknown:
        parser.error(f"unknown works {', '.join(unknown)}; there are {', '.join(PROOFS)}")
    trouble = unavailable(DEVICES[options.device])
    if trouble:
        print(trouble, file=sys.stderr)
        return 2
    start = time.monotonic()
    works = prove(names, options.device)
    ok = all(works[name][kind]["ok"] for name in names for kind in KINDS)
    found = {
        "device": options.device,
        "ok": ok,
        "epochs": losses_proofs.EPOCHS,
        "bounds": losses_proofs.BOUNDS,
        "seconds": round(time.monotonic() - start, 1),
        "works": works,
    }
    path = measure.save("losses", options, found)
    print(f"{'ok' if ok else 'NOT OK'}, {found['seconds']} s, written to {path}")
    return 0 if ok else 1
