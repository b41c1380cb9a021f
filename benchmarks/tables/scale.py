"""The tables of several GPUs (steps/dist.py), and the cost model that they are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tables.gpu import Results, rows, source

NAMES = {
    "mlp": "MLP 784-256-100-10, 1000 samples a GPU, fp32",
    "lenet-1000": "LeNet-5, 1000 samples a GPU, fp32",
    "resnet50": "ResNet-50, 128 images a GPU, bf16",
    "gpt2": "GPT-2 124M, 16 × 1,024 tokens a GPU, bf16",
}
HOST = 8  # GPUs that NVLink joins
NETWORK = 50e9  # bytes a second of each GPU between hosts: 400 Gbit/s
HOP = 5e-6  # seconds between hosts
BUCKET = 25 << 20  # bytes of a bucket between hosts
BACKWARD = 2 / 3  # of a step, beside which buckets travel between hosts
WORLDS = (8, 64, 1024)
ORIGIN = ("command", "date", "commit")


class Link:
    """The time of a sum as latency and bandwidth, from the smallest and the largest measured."""

    def __init__(self, small: tuple[float, float], large: tuple[float, float]) -> None:
        (s, s_time), (t, t_time) = small, large  # bytes that pass, and seconds
        self.bandwidth = (t - s) / (t_time - s_time)
        self.latency = max(s_time - s / self.bandwidth, 0.0)

    def seconds(self, nbytes: float, ranks: int, name: str = "all_reduce") -> float:
        """A sum of so many bytes: within one host, and then by a tree between hosts. An update that
        makes it reads the other rank's array for nothing, or first sums a share of those of several
        ranks.
        """
        near = min(ranks, HOST)
        if name.startswith("all_reduce_") and ranks <= HOST:
            share = (near - 1) / near * nbytes if near > 2 else 0.0
            return self.latency * math.log2(near) + share / self.bandwidth
        time = self.latency * math.log2(near) + 2 * (near - 1) / near * nbytes / self.bandwidth
        hosts = ranks // HOST
        if hosts > 1:  # each GPU of a host takes its eighth part of the bytes to the others
            part = nbytes / HOST
            time += 2 * math.log2(hosts) * HOP + 2 * (hosts - 1) / hosts * part / NETWORK
        return time


def efficiency(link: Link, step: float, buckets: Sequence[tuple[int, str]], ranks: int) -> float:
    """The time at one GPU over that at so many. Within a host all sums are added, behind backward;
    between hosts what does not fit beside it, and at least the largest bucket, as if it came last.
    buckets: the bytes of each within a host, and what makes its sum.
    """
    if ranks > HOST:
        parts = [(nbytes, at) for nbytes, _ in buckets for at in range(0, nbytes, BUCKET)]
        buckets = [(min(nbytes - at, BUCKET), "all_reduce") for nbytes, at in parts]
    times = [link.seconds(nbytes, ranks, name) for nbytes, name in buckets]
    beside = BACKWARD * step if ranks > HOST else 0.0
    return step / (step + max(*times, sum(times) - beside))


def _found(record: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Each measurement by its side, work and number of GPUs; of several ways the quickest."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for each in sorted(record["steps"], key=lambda each: -each.get("ms", 0.0)):
        if "work" in each:
            side = "ours" if each["side"] == "dlsys" else "torch"
            found[side, each["work"], each["gpus"]] = each
    return found


def _source(record: dict[str, Any], step: dict[str, Any]) -> str:
    """The origin of steps like this one, which may be of an earlier call than the record's."""
    return source({**record, **{key: step[key] for key in ORIGIN if key in step}})


def _worlds(found: dict[tuple[str, str, int], Any]) -> list[int]:
    """The numbers of GPUs beside 1."""
    return sorted({gpus for side, _, gpus in found if side == "ours"} - {1})


def _sums(found: dict[tuple[str, str, int], Any]) -> list[tuple[int, str]]:
    """The KiB of each sum, and its work."""
    works = {work for side, work, _ in found if side == "ours" and work.startswith("allreduce")}
    units = {"KiB": 1, "MiB": 1024}
    return sorted(
        (int(work.removeprefix("allreduce-")[:-3]) * units[work[-3:]], work) for work in works
    )


def bandwidth(results: Results) -> str:
    """The bus bandwidth of sums."""
    record = results.read("dist")
    found = _found(record)
    body = []
    for gpus in _worlds(found):
        for kib, work in _sums(found):
            ours, theirs = (found.get((side, work, gpus)) for side in ("ours", "torch"))
            if ours:
                size = f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"
                peer = theirs["busbw_gbs"] if theirs else "not run"
                body.append([size, gpus, f"{ours['ms'] * 1e3:.1f}", ours["busbw_gbs"], peer])
    head = ["sum of", "GPUs", "µs", "GB/s on the bus", "through PyTorch"]
    measured = found["ours", _sums(found)[0][1], _worlds(found)[0]]
    return f"{rows(head, body)}\n\n{_source(record, measured)}"


def steps(results: Results) -> str:
    """Milliseconds a step at 1 GPU and at several, and the efficiency, ours and PyTorch's. Ours is
    also told against the slowest of the same GPUs, each for itself: at the same time, and in turn.
    """
    record = results.read("dist")
    found = _found(record)
    worlds, body = _worlds(found), []
    for work, name in NAMES.items():
        cells = []
        for side in ("ours", "torch"):
            alone = found.get((side, work, 1))
            cells.append(f"{alone['ms']:.3f}" if alone else "not run")
            for gpus in worlds:
                together = found.get((side, work, gpus))
                if alone and together:
                    cells += [f"{together['ms']:.3f}", f"{alone['ms'] / together['ms']:.1%}"]
                else:
                    cells += ["not run"] * 2
                if side == "ours":
                    known = together or {}
                    each = [
                        known.get("alone_ms"),
                        max(known.get("alone_in_turn_ms", ()), default=None),
                    ]
                    shown = [f"{ms / known['ms']:.1%}" for ms in each if ms]
                    cells.append(", ".join(shown) or "not run")
        body.append([name, *cells])
    head = ["training step", "1 GPU, ms"]
    beside = "to the slowest of these, each for itself: all at once, in turn"
    head += [text for gpus in worlds for text in (f"{gpus} GPUs, ms", "efficiency", beside)]
    head.append("PyTorch DDP, 1")
    head += [text for gpus in worlds for text in (f"{gpus}", "efficiency")]
    return f"{rows(head, body)}\n\n{source(record)}"


def traces(results: Results) -> str:
    """How much of the communication lies beside other kernels, where it is not a part of them."""
    record = results.read("dist")
    traced = [x for x in record["steps"] if x.get("work", "").startswith("trace-")]
    if not traced:
        raise KeyError("traces")
    body = [
        [
            NAMES[each["work"].removeprefix("trace-")],
            each["gpus"],
            f"{each['collectives'] / each['steps']:.0f}",
            each["communication_us"] if each["collectives"] else "in the update",
            each["kernels_us"],
            f"{each['share']:.0%}" if each["collectives"] else "",
        ]
        for each in traced
    ]
    head = [
        "training step",
        "GPUs",
        "sums",
        "µs of sums",
        "µs of other kernels",
        "of sums beside them",
    ]
    return f"{rows(head, body)}\n\n{_source(record, traced[0])}"


def model(results: Results) -> str:
    """The efficiency that the model says, beside the measured, and that of larger worlds."""
    record = results.read("dist")
    found = _found(record)
    worlds, sums = _worlds(found), _sums(found)
    gpus = worlds[0]
    ring = 2 * (gpus - 1) / gpus
    points = [
        (ring * (kib << 10), found["ours", work, gpus]["ms"] * 1e-3)
        for kib, work in (sums[0], sums[-1])
    ]
    link = Link(*points)
    body = []
    for work, name in NAMES.items():
        if any(("ours", work, n) not in found for n in (1, *worlds)):
            continue
        alone, *each = (found["ours", work, n] for n in (1, *worlds))
        step, cells = alone["ms"] * 1e-3, []
        for n, together in zip(worlds, each):
            names = together.get("exchanges", ["all_reduce"] * len(together["exchanged"]))
            buckets = [*zip(together["exchanged"], names)]
            cells += [f"{alone['ms'] / together['ms']:.1%}", efficiency(link, step, buckets, n)]
        cells += [efficiency(link, step, buckets, n) for n in WORLDS if n not in worlds]
        mb = f"{sum(together['exchanged']) / 1e6:.1f}"
        body.append([name, mb, *(x if isinstance(x, str) else f"{x:.1%}" for x in cells)])
    head = ["training step", "MB reduced"]
    head += [text for n in worlds for text in (f"{n} GPUs, measured", f"{n}, model")]
    head += [f"{n:,}" for n in WORLDS if n not in worlds]
    note = (
        f"Fitted: {link.bandwidth / 1e9:.0f} GB/s and {link.latency * 1e6:.0f} µs a sum within a "
        f"host. {source(record)}"
    )
    return f"{rows(head, body)}\n\n{note}"
