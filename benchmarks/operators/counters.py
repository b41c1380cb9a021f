"""The profiler's counters of each rung of the ladders: what holds it, as Nsight Compute sees it.

    python benchmarks counters [--ladders gemm,conv,depthwise]

Needs a GPU and `ncu`, which runs each kernel of a rung several times and reads what its passes
count. Of a rung with several kernels the one that takes longest is told. Leaves
results/counters.json, of which `python benchmarks table` makes the tables of docs/learn/gemm.md and
conv.md: shares are of the most that the unit could do while the kernel ran, and the stall is the
reason for which warps waited longest, in cycles for each instruction that one issued.
"""

from __future__ import annotations

import csv
import ctypes
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shared import measure

# The rungs of each ladder with their precisions, in its order.
LADDERS = {
    "gemm": [
        *(("naive", "fp32"), ("tiled", "fp32"), ("register", "fp32"), ("warp", "fp32")),
        *(("cublas", "fp32"), ("tensor", "tf32"), ("hopper", "tf32"), ("cublas", "tf32")),
        *(("hopper", "bf16"), ("cublas", "bf16")),
    ],
    "conv": [
        *(("naive", "fp32"), ("im2col", "fp32"), ("winograd", "fp32"), ("fft", "fp32")),
        *(("implicit", "fp32"), ("cudnn", "fp32"), ("implicit", "tf32"), ("cudnn", "tf32")),
        *(("implicit wgmma", "tf32"), ("implicit wgmma", "bf16")),
    ],
    "depthwise": [("naive", "fp32"), ("implicit", "fp32"), ("depthwise", "fp32")],
}
PRODUCT = (4096, 4096, 4096)
CONVOLUTIONS = {
    "conv": (128, 256, 14, 256, 3, 1, 1),
    "depthwise": (64, 32, 112, 32, 3, 1, 1, 32),
}
LAST = ("implicit wgmma",)  # of images with their channels last

# What is told, by Nsight Compute's name: the first two are a time and a share of issue slots.
TIME = "gpu__time_duration.sum"
SHARES = {
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
# Reasons for which warps wait; of a warp that could issue while another one does nothing is told.
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    *("long_scoreboard", "short_scoreboard", "lg_throttle", "mio_throttle", "math_pipe_throttle"),
    *("barrier", "wait", "dispatch_stall", "no_instruction", "tex_throttle", "gmma"),
    *("sleeping", "membar"),
)
METRICS = [TIME, *SHARES.values(), *map(STALL.format, STALLS)]
_MARK = "FillKernel"  # runs before each rung
_NAME = 32  # letters of a kernel's name; those of libraries are longer


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--ladders", default=",".join(LADDERS))
    parser.add_argument("--run", help="a ladder whose rungs run once, for the profiler")
    parser.add_argument("--raw", type=Path, help="a folder for what the profiler prints")
    options = parser.parse_args()
    ladders = measure.choices(parser, "--ladders", options.ladders, LADDERS)
    if options.run:
        run(options.run)
        return 0
    profiler = shutil.which("ncu")
    if profiler is None:
        print("counters: there is no ncu on this machine", file=sys.stderr)
        return 1
    works = []
    for ladder in ladders:
        command = [profiler, "--profile-from-start", "off", "--csv", "--page", "raw"]
        command += ["--metrics", ",".join(METRICS), *measure.program("counters", "--run", ladder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if options.raw:
            (options.raw / f"{ladder}.csv").write_text(done.stdout + done.stderr)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
            return done.returncode
        served = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("rung ")]
        names = [(" ".join(words[:-1]), words[-1]) for words in served]
        rows = list(told(table_of(done.stdout), names))
        for row in rows:
            print(row, flush=True)
        works.append({"ladder": ladder, "rungs": rows})
    print(measure.save("counters", options, {"works": works}), file=sys.stderr)
    return 0


def run(ladder: str) -> None:
    """Runs each rung of a ladder once while the profiler looks, and prints which could serve."""
    from dlsys.errors import DeviceError, KernelError
    from dlsys.executor.tune.microbenchmark import Microbenchmark
    from dlsys.ndarray import empty, launch
    from dlsys.rungs import Algorithm
    from dlsys.runtime.device import gpu
    from dlsys.runtime.library import load

    driver, mark = ctypes.CDLL("libcuda.so.1"), empty((1,), gpu(0))
    for rung, precision in LADDERS[ladder]:
        node = _node(ladder, rung, precision)
        names = load().algorithms("cuda", node.op.kernel)
        if rung not in names:
            continue
        algorithm = Algorithm(names.index(rung) + 1, rung)
        try:
            benchmark = Microbenchmark(node, gpu(0))
            benchmark.results(algorithm)  # what is loaded at the first use
        except (KernelError, DeviceError) as error:
            print(f"{rung} {precision}: {error}", file=sys.stderr)
            continue
        driver.cuProfilerStart()
        launch("fill", gpu(0), 0.0, mark)
        benchmark.results(algorithm)
        driver.cuProfilerStop()
        print(f"rung {rung} {precision}", flush=True)


def _node(ladder: str, rung: str, precision: str) -> Any:
    """The product or convolution that a ladder's rungs compute."""
    from dlsys import autodiff as ad
    from dlsys.dtypes import FLOAT32
    from dlsys.graph.spec import Spec
    from dlsys.learn.conv import Shape, node_of
    from dlsys.learn.gemm import NARROW

    if ladder in CONVOLUTIONS:
        last = True if rung in LAST else None
        return node_of(Shape(*CONVOLUTIONS[ladder]), "forward", precision, last)
    m, n, k = PRODUCT
    dtype = NARROW.get(precision, FLOAT32)
    a, b = (ad.Variable(name, shape, dtype=dtype) for name, shape in (("a", (m, k)), ("b", (k, n))))
    node = ad.matmul_op(a, b)
    node.spec = Spec((m, n), dtype)
    if precision not in NARROW:
        node.attrs = {**node.attrs, "precision": precision}
    return node


def table_of(printed: str) -> list[dict[str, str]]:
    """The rows of the profiler's CSV, a kernel each; the row of units is left out."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row["ID"]]


def told(
    kernels: Sequence[dict[str, str]], names: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """What a record has of each rung: `kernels` are those of all of them, each rung's behind a
    mark.
    """
    parts: list[list[dict[str, str]]] = []
    for kernel in kernels:
        if _MARK in kernel["Kernel Name"]:
            parts.append([])
        else:
            parts[-1].append(kernel)
    for (rung, precision), part in zip(names, parts, strict=True):
        longest = max(part, key=lambda kernel: _number(kernel[TIME]))
        stalls = {name: _number(longest.get(STALL.format(name), "")) for name in STALLS}
        stall = max(stalls, key=stalls.__getitem__)
        yield {
            "rung": rung,
            "precision": precision,
            "kernel": _short(longest["Kernel Name"]),
            "kernels": len(part),
            "share": round(_number(longest[TIME]) / sum(_number(one[TIME]) for one in part), 3),
            **{name: round(_number(longest.get(key, "")), 1) for name, key in SHARES.items()},
            "stall": stall,
            "stall_cycles": round(stalls[stall], 2),
        }


def _short(name: str) -> str:
    """A kernel's name without its result, its namespaces and its arguments."""
    spaces = r"^(void )?(\w+::|<?unnamed>::|\(anonymous namespace\)::)*"
    bare = re.match(r"\w+", re.sub(spaces, "", name))
    return bare[0][:_NAME] if bare else name


def _number(text: str) -> float:
    """A value of the profiler's, which groups thousands; 0 for what it does not have."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0
