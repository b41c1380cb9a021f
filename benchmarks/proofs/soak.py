"""A long training loop of Tensors in one process, whose memory must stay flat.

    python benchmarks soak [--steps 100000] [--device cpu] [--out FOLDER]

A step takes a batch from the host, runs a small network with batch normalization and dropout
forward and backward, updates it by Adam and drops its gradients; every tenth step reads the loss,
every hundredth evaluates in inference mode under `no_grad`. At the end of each of 40 windows of
steps the process counts its resident bytes, its live bytes on the device and Python's memory
blocks. The first quarter warms up; a line is fitted to each count over the other windows, and its
rise over them must stay below the limit. The exit status is 1 where a count grows, or where the
loss does not fall. Writes soak.json.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared import measure

WINDOWS = 40
WARM = WINDOWS // 4
BATCH, FEATURES, CLASSES = 32, 16, 4
# By how much a fitted line may rise over the 75,000 measured steps of the default: one float64 a
# step would be 600,000 live bytes, one Python object a step 75,000 blocks. Pages come and go with
# the allocators, so that resident bytes have more room: 28 bytes a step.
LIMITS = {"resident_bytes": 2 << 20, "live_bytes": 0, "python_blocks": 1000}

Step = Callable[[int], None]
Counts = dict[str, list[float]]


def training(device: str) -> tuple[Step, list[float]]:
    """A step of training by its number, and the losses that steps read."""
    import dlsys as dl
    from dlsys import functional as F
    from dlsys import nn, optim

    dl.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32, rng=1), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1, rng=2),
        nn.Linear(32, 16, rng=3), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES, rng=4),
    )  # fmt: skip
    optimizer = optim.Adam(1e-3, params=model.parameters())
    batches, losses = itertools.cycle(samples(8)), list[float]()

    def step(number: int) -> None:
        x, y = (dl.tensor(values, device) for values in next(batches))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0:
            losses.append(loss.item())
            del losses[1:-1]  # the first and the last: the list itself must not grow
        if number % 100 == 0:
            with dl.no_grad():
                F.softmax(model.eval()(x), axis=1).numpy()
            model.train()

    return step, losses


def samples(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of normal samples (32, 16) with the class of the nearest of four directions."""
    rng = np.random.default_rng(7)
    directions = rng.normal(size=(FEATURES, CLASSES))
    xs = [rng.normal(size=(BATCH, FEATURES)).astype(np.float32) for _ in range(count)]
    return [(x, (x @ directions).argmax(axis=1)) for x in xs]


def resident_bytes() -> int:
    """The bytes of this process that are in physical memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(step: Step, steps: int, device: str) -> Counts:
    """What is counted at the end of each window of steps."""
    import dlsys as dl
    from dlsys.eager.device import context_of
    from dlsys.runtime.device import memory_stats

    ctx, counts = context_of(device), {name: list[float]() for name in LIMITS}
    numbers = itertools.count()
    for _ in range(WINDOWS):
        for number in itertools.islice(numbers, steps // WINDOWS):
            step(number)
        dl.synchronize()
        gc.collect()
        counts["resident_bytes"].append(resident_bytes())
        counts["live_bytes"].append(0 if ctx is None else memory_stats(ctx).in_use_nbytes)
        counts["python_blocks"].append(sys.getallocatedblocks())
    return counts


def rise(values: Sequence[float]) -> float:
    """How far a line that is fitted to the values behind the warm windows rises over them."""
    measured = np.asarray(values[WARM:])
    slope = np.polyfit(np.arange(len(measured)), measured, 1)[0]
    return round(float(slope) * (len(measured) - 1), 1) + 0.0  # no -0.0


def verdict(counts: Counts) -> dict[str, Any]:
    """Each count with its rise and its limit, and whether it is flat."""
    found: dict[str, Any] = {}
    for name, limit in LIMITS.items():
        rises = rise(counts[name])
        found[name] = {"rise": rises, "limit": limit, "flat": rises <= limit, "at": counts[name]}
    return found


def main() -> int:
    """Returns 0 when memory is flat and the network has learned."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--device", default="cpu", help="numpy, cpu, gpu, or gpu:1")
    options = parser.parse_args()
    if options.steps < WINDOWS:
        parser.error(f"--steps {options.steps}: expected at least {WINDOWS}, one a window")
    step, losses = training(options.device)
    start = time.monotonic()
    found = verdict(soak(step, options.steps, options.device))
    seconds = round(time.monotonic() - start, 1)
    learned = losses[-1] < losses[0]  # False for NaN too
    ok = learned and all(each["flat"] for each in found.values())
    facts = {
        "device": options.device, "steps": options.steps, "windows": WINDOWS, "warm": WARM,
        "seconds": seconds, "losses": [losses[0], losses[-1]], "ok": ok, "counts": found,
    }  # fmt: skip
    path = measure.save("soak", options, facts)
    for name, each in found.items():
        told = "flat" if each["flat"] else "GROWS"
        print(f"{name}: {told}, a rise of {each['rise']:,} (limit {each['limit']:,})")
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; {seconds} s; written to {path}")
    return 0 if ok else 1
