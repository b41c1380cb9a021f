"""The networks of the race: what every contestant trains, by name.

A step is: take a batch, forward, mean softmax cross-entropy over ten classes, backward, plain SGD.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shared import measure

CLASSES = 10
SAMPLES = 60_000  # of 784 bytes each, as MNIST's training set
RATE = 1e-3
PRECISIONS = ("fp32", "tf32")


class Work(NamedTuple):
    """A network and its batch. kind: dense (sizes are its widths), lenet (sizes are the planes of
    its two convolutions) or residual.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    batch: int

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those at which it is raced: of 16 bits where activations are what a step moves."""
        return (*PRECISIONS, "bf16") if self.kind == "residual" else PRECISIONS


NAMED = (
    Work("logreg", "dense", (784, 10), 1000),
    Work("mlp", "dense", (784, 256, 100, 10), 1000),
    Work("lenet-128", "lenet", (6, 16), 128),
    Work("lenet-1000", "lenet", (6, 16), 1000),
    Work("residual-512", "residual", (), 512),
)


def drawn(count: int, seed: int) -> Iterator[Work]:
    """Networks that nobody tuned for."""
    rng = np.random.default_rng(seed)
    for k in range(count):
        batch = int(rng.integers(100, 1500))
        if k % 2:
            sizes = tuple(int(n) for n in rng.integers(3, 33, 2))
            yield Work(f"lenet {sizes[0]}-{sizes[1]}, batch {batch}", "lenet", sizes, batch)
        else:
            hidden = [int(n) for n in rng.integers(16, 600, int(rng.integers(1, 4)))]
            sizes = (784, *hidden, CLASSES)
            yield Work(f"{'-'.join(map(str, sizes))}, batch {batch}", "dense", sizes, batch)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Random images (SAMPLES, 784) uint8 and classes (SAMPLES,) int64."""
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (SAMPLES, 784), dtype=np.uint8)
    return images, rng.integers(0, CLASSES, SAMPLES)


def arguments(description: str | None) -> argparse.Namespace:
    """The options that the driver passes to every contestant."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--works", default="", help="names, separated by commas; default: all")
    parser.add_argument("--drawn", type=int, default=0, help="how many random networks besides")
    parser.add_argument("--seed", type=int, default=0, help="of the random networks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--modes", default="", help="of a contestant; default: all of them")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Work]:
    """The works that the options ask for."""
    wanted = options.works.split(",") if options.works else [work.name for work in NAMED]
    unknown = set(wanted) - {work.name for work in NAMED}
    if unknown:
        raise SystemExit(f"no such works: {sorted(unknown)}; there are {[w.name for w in NAMED]}")
    named = [work for work in NAMED if work.name in wanted]
    return [*named, *drawn(options.drawn, options.seed)]


def queued_ms(
    queue: Callable[[int], Any], wait: Callable[[], Any], rounds: int, seconds: float = 0.05
) -> tuple[measure.Summary, int]:
    """Milliseconds a step when `queue(n)` queues n steps that are waited for once; and n."""
    queue(10)
    wait()
    start = time.perf_counter()
    queue(10)
    wait()
    steps = max(10, min(2000, int(seconds / max((time.perf_counter() - start) / 10, 1e-6))))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        queue(steps)
        wait()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    return measure.summary(times), steps


def host_us(step: Callable[[], Any], wait: Callable[[], Any], steps: int = 20) -> float:
    """Microseconds that a step keeps the host; the device's work is not waited for. The median of a
    quarter of a second at least: a shared host's processor is slower for milliseconds at a time.
    """
    times: list[float] = []
    end = time.perf_counter() + 0.25
    while len(times) < 25 or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        times.append((time.perf_counter() - start) * 1e6 / steps)
    wait()
    return round(statistics.median(times), 2)


def tell(work: Work, precision: str, mode: str, **found: Any) -> None:
    """One result, as a line for the driver."""
    named = {"work": work.name, "precision": precision, "mode": mode}
    print(json.dumps({**named, **found}), flush=True)
