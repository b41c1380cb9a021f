"""The tables of several GPUs (speed/dist.py), and the cost model that they are held against."""

from __future__ import annotations

import math
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
BACKWARD = 2 / 3  # of a step, beside which buckets travel between hosts
WORLDS = (8, 64, 1024)


class Link:
    """The time of a sum as latency and bandwidth, from the smallest and the largest measured."""

    def __init__(self, small: tuple[float, float], large: tuple[float, float]) -> None:
        (s, s_time), (t, t_time) = small, large  # bytes that pass, and seconds
        self.bandwidth = (t - s) / (t_time - s_time)
        self.latency = max(s_time - s / self.bandwidth, 0.0)

    def seconds(self, nbytes: float, ranks: int) -> float:
        """A sum of so many bytes: within one host, and then by a tree between hosts."""
        near = min(ranks, HOST)
        time = self.latency * math.log2(near) + 2 * (near - 1) / near * nbytes / self.bandwidth
        hosts = ranks // HOST
        if hosts > 1:  # each GPU of a host takes its eighth part of the bytes to the others
            part = nbytes / HOST
            time += 2 * math.log2(hosts) * HOP + 2 * (hosts - 1) / hosts * part / NETWORK
        return time


def efficiency(link: Link, step: float, buckets: list[int], ranks: int) -> float:
    """The time at one GPU over that at so many. Within a host all sums are added, behind backward;
    between hosts what does not fit beside it, and at least the largest bucket, as if it came last.
    """
    times = [link.seconds(nbytes, ranks) for nbytes in buckets]
    beside = BACKWARD * step if ranks > HOST else 0.0
    return step / (step + max(*times, sum(times) - beside))


def _found(record: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Each measurement by its side, work and number of GPUs."""
    return {
        ("ours" if each["side"] == "dlsys" else "torch", each["work"], each["gpus"]): each
        for each in record["steps"]
        if "work" in each
    }


def _sizes(found: dict[tuple[str, str, int], Any]) -> list[int]:
    return sorted(
        int(work.removeprefix("allreduce-").removesuffix("MiB"))
        for side, work, _ in found
        if side == "ours" and work.startswith("allreduce")
    )


def bandwidth(results: Results) -> str:
    """The bus bandwidth of sums."""
    record = results.read("dist")
    found, gpus = _found(record), record["gpus"]
    body = []
    for mib in _sizes(found):
        sides = [found.get((side, f"allreduce-{mib}MiB", gpus)) for side in ("ours", "torch")]
        cells = [each["busbw_gbs"] if each else "not run" for each in sides]
        body.append([f"{mib} MiB", f"{sides[0]['ms'] * 1e3:.1f}", *cells])
    head = ["sum of", "µs", "GB/s on the bus", "through PyTorch"]
    return f"{rows(head, body)}\n\n{source(record)}"


def steps(results: Results) -> str:
    """Milliseconds a step at 1 GPU and at several, and the efficiency, ours and PyTorch's."""
    record = results.read("dist")
    found, gpus = _found(record), record["gpus"]
    body = []
    for work, name in NAMES.items():
        cells = []
        for side in ("ours", "torch"):
            alone, together = found.get((side, work, 1)), found.get((side, work, gpus))
            if alone and together:
                share = f"{alone['ms'] / together['ms']:.1%}"
                cells += [f"{alone['ms']:.3f}", f"{together['ms']:.3f}", share]
            else:
                cells += ["not run"] * 3
        body.append([name, *cells])
    head = ["training step", "1 GPU, ms", f"{gpus} GPUs, ms", "efficiency"]
    head += ["PyTorch DDP, 1", f"{gpus}", "efficiency"]
    return f"{rows(head, body)}\n\n{source(record)}"


def traces(results: Results) -> str:
    """How much of the communication lies beside other kernels, and the host's calls of CUDA."""
    record = results.read("dist")
    body = [
        [
            NAMES[each["work"].removeprefix("trace-")],
            f"{each['collectives'] / each['steps']:.0f}",
            each["communication_us"],
            each["kernels_us"],
            f"{each['share']:.0%}",
        ]
        for each in record["steps"]
        if each.get("work", "").startswith("trace-")
    ]
    if not body:
        raise KeyError("traces")
    head = ["training step", "sums", "µs of sums", "µs of other kernels", "of sums beside them"]
    return f"{rows(head, body)}\n\n{source(record)}"


def model(results: Results) -> str:
    """The efficiency that the model says, beside the measured, and that of larger worlds."""
    record = results.read("dist")
    found, gpus = _found(record), record["gpus"]
    ring, sizes = 2 * (gpus - 1) / gpus, _sizes(found)
    points = [
        (ring * (mib << 20), found["ours", f"allreduce-{mib}MiB", gpus]["ms"] * 1e-3)
        for mib in (sizes[0], sizes[-1])
    ]
    link = Link(*points)
    body = []
    for work, name in NAMES.items():
        alone, together = found.get(("ours", work, 1)), found.get(("ours", work, gpus))
        if alone and together:
            step, buckets = alone["ms"] * 1e-3, together["exchanged"]
            said = [f"{efficiency(link, step, buckets, n):.1%}" for n in (gpus, *WORLDS)]
            mb = f"{sum(buckets) / 1e6:.1f}"
            body.append([name, mb, f"{alone['ms'] / together['ms']:.1%}", *said])
    head = ["training step", "MB reduced", f"{gpus} GPUs, measured", f"{gpus}, model"]
    head += [f"{n:,}" for n in WORLDS]
    note = (
        f"Fitted: {link.bandwidth / 1e9:.0f} GB/s and {link.latency * 1e6:.0f} µs a sum within a "
        f"host. {source(record)}"
    )
    return f"{rows(head, body)}\n\n{note}"
