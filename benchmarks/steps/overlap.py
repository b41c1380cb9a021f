"""Training from host arrays on a GPU: are batches copied while earlier steps compute?

    python benchmarks overlap [--rounds 9]

A step is timed with its batches on the device, copied ahead by threads (`on_device`, as train.fit
does), and copied by the run that they are fed to. CUPTI traces the second way, and how much of
the copies' time lies beside kernels is read from that. Leaves
results/overlap.json, the table and the picture.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np

from contestants import race_dlsys
from contestants.race_dlsys import GPU
from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.data.prefetch import on_device
from shared import cupti, measure, workloads
from shared.cupti import Activity
from shared.workloads import Work

FED = (("lenet-1000", "uint8"), ("lenet-1000", "float32"), ("residual-512", "float32"))
DRAWN = ("lenet-1000", "float32")
RESIDENT = 8  # batches on the device
TRACED = 60  # steps
SHOWN = 4  # steps in the picture
PAUSE_S = 0.1  # between what warms up and what is looked at
NOT_KERNELS = ("Memcpy", "Memset", "Context Sync", "Stream ", "Event ")

Feed = dict[ad.Node, Any]
Span = tuple[float, float]  # microseconds


class Training:
    """A network whose feeds are slices of arrays on the host, which no cache holds."""

    def __init__(self, work: Work, dtype: str) -> None:
        images, self._labels = workloads.data()
        self._images = images if dtype == "uint8" else images.astype(np.float32) / 255
        self._batch = work.batch
        self._inputs = (
            ad.Variable("images", shape=(None, images.shape[1]), dtype=self._images.dtype),
            ad.Variable("labels", shape=(None,), dtype=np.int64),
        )
        x, y = self._inputs
        floats = ad.cast_op(x, np.float32) * (1 / 255) if dtype == "uint8" else x
        self.executor = race_dlsys.step(work, "fp32", (floats, y))
        self.nbytes = sum(value.nbytes for value in next(self.batches()).values())

    def batches(self) -> Iterator[Feed]:
        """Feeds, one after the other, over and over; not copied."""
        for at in cycle(range(0, len(self._labels) - self._batch + 1, self._batch)):
            part = slice(at, at + self._batch)
            yield dict(zip(self._inputs, (self._images[part], self._labels[part])))

    def ways(self) -> dict[str, Callable[[int], None]]:
        """A function that queues n steps."""
        there = [
            {node: ndarray.array(value, GPU) for node, value in feed.items()}
            for feed in islice(self.batches(), RESIDENT)
        ]
        return {
            "device": lambda n: self._run(islice(cycle(there), n)),
            "ahead": self.ahead,
            "fed": lambda n: self._run(islice(self.batches(), n)),
        }

    def ahead(self, n: int) -> None:
        """Queues n steps whose batches threads copy."""
        self._run(on_device(islice(self.batches(), n), GPU))

    def _run(self, feeds: Iterable[Feed]) -> None:
        for feed in feeds:
            self.executor.run(feed)


def times(work: Work, dtype: str, rounds: int) -> dict[str, Any]:
    """Milliseconds a step of each way."""
    training = Training(work, dtype)
    found: dict[str, Any] = {"work": work.name, "images": dtype, "nbytes": training.nbytes}
    found |= {"ms": {}, "steps": {}}
    for name, queue in training.ways().items():
        ms, steps = workloads.queued_ms(queue, race_dlsys.wait, rounds, seconds=0.2)
        found["ms"][name], found["steps"][name] = ms, steps
        print(f"{work.name} {dtype} {name:<6} {ms['median']:.4f} ms", flush=True)
    return found


# ---- the trace ----


def trace(work: Work, dtype: str) -> dict[str, Any]:
    """The overlap in a trace of steps whose batches are copied ahead."""
    activities = after_pause(traced(work, dtype))
    found: dict[str, Any] = {"trace": overlap(activities)}
    print(f"{work.name} {dtype} copies beside kernels: {found['trace']['share']:.0%}", flush=True)
    if (work.name, dtype) == DRAWN:
        found["timeline"] = timeline(activities)
    return found


def traced(work: Work, dtype: str) -> list[Activity]:
    """The activities of the GPU, in the order of their beginning: steps, a pause, as many steps.
    The step is captured while CUPTI looks on, which else might not see into it.
    """
    with cupti.Trace() as found:
        training = Training(work, dtype)
        training.ahead(TRACED)
        race_dlsys.wait()
        time.sleep(PAUSE_S)
        training.ahead(TRACED)
        race_dlsys.wait()
    return found.activities


def after_pause(activities: Sequence[Activity]) -> list[Activity]:
    """Those behind the last pause; times count from the first of them."""
    first = max(
        (
            k
            for k in range(1, len(activities))
            if activities[k].start - activities[k - 1].end > PAUSE_S / 2 * 1e6
        ),
        default=0,
    )
    zero = activities[first].start if activities else 0.0
    return [Activity(each.name, each.start - zero, each.end - zero) for each in activities[first:]]


def copies_and_kernels(
    activities: Iterable[Activity],
) -> tuple[list[Activity], list[Activity]]:
    """Copies from the host; kernels."""
    every = list(activities)
    copies = [each for each in every if each.name.startswith("Memcpy HtoD")]
    return copies, [each for each in every if not each.name.startswith(NOT_KERNELS)]


def overlap(activities: Iterable[Activity]) -> dict[str, Any]:
    """The share of the time of copies from the host in which there are kernels too. A step
    begins when its own batch is there: those kernels are of other steps.
    """
    copies, kernels = copies_and_kernels(activities)
    if not copies or not kernels:
        raise ValueError(f"the trace shows {len(copies)} copies and {len(kernels)} kernels")
    copying, computing = merged(copies), merged(kernels)
    copy_us, beside_us = length(copying), length(common(copying, computing))
    return {
        "steps": TRACED,
        "copies": len(copies),
        "kernels": len(kernels),
        "copy_us": round(copy_us, 1),
        "kernel_us": round(length(computing), 1),
        "beside_us": round(beside_us, 1),
        "share": round(beside_us / copy_us, 4),
    }


def merged(activities: Iterable[Activity]) -> list[Span]:
    """When at least one of them was, as spans apart from each other."""
    spans: list[Span] = []
    for _, start, end in sorted(activities, key=lambda each: each.start):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The intersection of two lists of merged spans."""
    found, j = [], 0
    for start, end in some:
        while j < len(others) and others[j][1] <= start:
            j += 1
        for other in others[j:]:
            if other[0] >= end:
                break
            found.append((max(start, other[0]), min(end, other[1])))
    return found


def length(spans: Iterable[Span]) -> float:
    """Microseconds in all."""
    return sum(end - start for start, end in spans)


def timeline(activities: Iterable[Activity]) -> dict[str, Any]:
    """A few steps in the middle of a trace: their beginnings, and the spans of copies and kernels,
    in microseconds from the first beginning.
    """
    copies, kernels = copies_and_kernels(activities)
    begins = step_begins(kernels)
    first = len(begins) // 2
    zero, last = begins[first], begins[first + SHOWN]

    def shown(several: Iterable[Activity]) -> list[list[float]]:
        within = [each for each in several if each.end > zero and each.start < last]
        return [
            [round(max(each.start - zero, 0.0), 2), round(min(each.end, last) - zero, 2)]
            for each in within
        ]

    return {
        "begins": [round(begin - zero, 2) for begin in begins[first : first + SHOWN + 1]],
        "copies": shown(copies),
        "kernels": shown(kernels),
    }


def step_begins(kernels: Sequence[Activity]) -> list[float]:
    """When each step began: the kernel that comes first of those that each step has once."""
    counts = Counter(each.name for each in kernels)
    once = next((each.name for each in kernels if counts[each.name] == TRACED), None)
    if once is None:
        raise ValueError(f"no kernel is in each of {TRACED} steps once: {counts}")
    return [each.start for each in kernels if each.name == once]


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    from dlsys.runtime.device import unavailable
    from dlsys.settings import settings

    reason = unavailable(GPU)
    if reason is not None:
        print(f"no GPU benchmark here: {reason}", file=sys.stderr)
        return 1
    settings.tune = "off"  # the heuristic, whatever this machine's user has measured
    works = {work.name: work for work in workloads.NAMED}
    found: list[dict[str, Any]] = []
    for name, dtype in FED:
        found.append(times(works[name], dtype, options.rounds))
        measure.save("overlap", options, {"works": found})
    try:
        for one, (name, dtype) in zip(found, FED):
            one |= trace(works[name], dtype)
            measure.save("overlap", options, {"works": found})
    except OSError as error:
        print(f"nothing is traced: {error}", file=sys.stderr)
    command = measure.program("table", "--results", str(options.out))
    return subprocess.run(command).returncode
