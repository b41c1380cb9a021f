"""Grouped products on a GPU against a loop of cuBLAS's and PyTorch's own, forward and gradients.

    python benchmarks grouped [--precisions bf16,tf32,fp32] [--rounds 5]

Groups are of uneven sizes, drawn once. The loop is PyTorch's product of each group in one captured
graph, which knows the sizes; torch._grouped_mm, where it is, reads them on the device as ours does
and takes bfloat16. All take turns; the median of the rounds counts. Leaves results/grouped.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shared import measure

SHAPES = ((8, 16384, 768, 3072), (64, 8192, 1024, 1024))  # groups, rows, K, N
RUNGS = {"bf16": ("hopper",), "tf32": ("tensor", "hopper"), "fp32": ("warp",)}
LAUNCHES = 20  # of a measurement, behind one that is not counted
KINDS = ("y", "dx", "dw")


def uneven(groups: int, rows: int) -> np.ndarray:
    """Sizes of groups, of which the largest is a few times the smallest."""
    shares = np.random.default_rng(0).dirichlet(np.full(groups, 4.0))
    sizes = np.floor(shares * rows).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return sizes


def ours(arrays: dict[str, np.ndarray], precision: str) -> dict[str, Callable[[], None]]:
    """Launches of each rung, by kind and rung."""
    from dlsys.dtypes import bfloat16
    from dlsys.ndarray import array, empty, launch
    from dlsys.ops.matmul import PRECISIONS
    from dlsys.runtime.device import gpu
    from dlsys.runtime.library import load

    ctx = gpu(0)
    dtype = bfloat16 if precision == "bf16" else np.dtype(np.float32)
    x, w, dy = (array(arrays[name], ctx, dtype) for name in ("x", "w", "dy"))
    sizes = array(arrays["sizes"], ctx)
    y, dx, dw = (empty(of.shape, ctx, dtype) for of in (dy, x, w))
    names = load().algorithms(ctx.kernel_device, "grouped_matmul")
    how = 0 if precision == "bf16" else PRECISIONS[precision]

    def calls(number: int) -> tuple[Callable[[], None], ...]:
        return (
            lambda: launch("grouped_matmul", ctx, x, w, sizes, 0, number, how, y),
            lambda: launch("grouped_matmul", ctx, dy, w, sizes, 1, number, how, dx),
            lambda: launch("grouped_contraction", ctx, x, dy, sizes, number, how, dw),
        )

    found = {}
    for rung in RUNGS[precision]:
        for kind, call in zip(KINDS, calls(names.index(rung) + 1)):
            found[f"{kind} {rung}"] = call
    return found


def theirs(arrays: dict[str, np.ndarray], precision: str) -> dict[str, Callable[[], None]]:
    """PyTorch's loops in captured graphs, and its grouped products where it has them."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, w, dy = (torch.tensor(arrays[name]).to("cuda", dtype) for name in ("x", "w", "dy"))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.zeros_like(w)
    ends = np.cumsum(arrays["sizes"]).tolist()
    rows = [slice(a, b) for a, b in zip([0, *ends], ends)]

    def loop(kind: str) -> None:
        for g, one in enumerate(rows):
            if kind == "y":
                torch.mm(x[one], w[g], out=y[one])
            elif kind == "dx":
                torch.mm(dy[one], w[g].t(), out=dx[one])
            else:
                torch.mm(x[one].t(), dy[one], out=dw[g])

    found: dict[str, Callable[[], None]] = {}
    for kind in KINDS:
        loop(kind)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop(kind)
        found[f"{kind} cublas loop"] = graph.replay
    if precision == "bf16" and hasattr(torch, "_grouped_mm"):
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        found["y torch"] = lambda: torch._grouped_mm(x, w, offs=offsets)
        found["dx torch"] = lambda: torch._grouped_mm(dy, w.transpose(1, 2), offs=offsets)
        found["dw torch"] = lambda: torch._grouped_mm(x.t(), dy, offs=offsets)
    return found


def main() -> None:
    """Measures, prints and writes."""
    import torch

    from dlsys.runtime.device import device_name, gpu, synchronize

    parser = measure.arguments(__doc__)
    parser.add_argument("--precisions", default="bf16,tf32,fp32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    precisions = measure.choices(parser, "--precisions", options.precisions, RUNGS)

    def wait() -> None:
        synchronize(gpu(0))
        torch.cuda.synchronize()

    def us_of(call: Callable[[], None]) -> float:
        call()
        wait()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        wait()
        return (time.perf_counter() - start) / LAUNCHES * 1e6

    works: list[dict[str, Any]] = []
    rng = np.random.default_rng(1)
    for groups, m, k, n in SHAPES:
        shapes = {"x": (m, k), "w": (groups, k, n), "dy": (m, n)}
        arrays = {name: rng.standard_normal(s, np.float32) for name, s in shapes.items()}
        arrays["sizes"] = uneven(groups, m)
        for precision in precisions:
            calls = ours(arrays, precision) | theirs(arrays, precision)
            for call in calls.values():
                us_of(call)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(options.rounds):
                for name, call in calls.items():
                    times[name].append(us_of(call))
            us = {name: round(statistics.median(found), 1) for name, found in times.items()}
            for name in sorted(us):
                rate = 2 * m * k * n / us[name] / 1e6
                print(f"{groups} groups of {m} x {n} x {k} {precision} {name:14} "
                      f"{us[name]:8.1f} us {rate:6.1f} TFLOP/s", flush=True)  # fmt: skip
            works.append({"shape": [groups, m, k, n], "precision": precision, "us": us})
    measure.save("grouped", options, {"device": device_name(gpu(0)), "works": works})


if __name__ == "__main__":
    main()
