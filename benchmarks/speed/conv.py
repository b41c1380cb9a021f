"""The rungs of convolution, side by side with cuDNN in one run: time, rate, workspace, error.

    python benchmarks conv [--nets resnet50,vgg,depthwise,lenet,residual] [--precisions fp32,tf32]
    python benchmarks conv --nets resnet50_all --precisions bf16   # channels last, beside PyTorch's
    python benchmarks conv --device cpu --batch 4            # the CPU's and numpy's: conv_cpu.json
    python benchmarks conv --variants                        # every tile and algorithm of a rung

Leaves results/conv.json, of which `python benchmarks table` makes the tables and the picture of
docs/learn/conv.md. A row of --variants says how far the heuristic, `auto`, is from the fastest. At
bf16 cuDNN is PyTorch's, where that is installed with CUDA; of resnet50_all the sum over the network
is printed, forward and both gradients but that of the images.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from shared import measure

# Of ResNet-50 at a batch of 128, as below, and how often each convolution is in it.
RESNET50 = {
    (128, 3, 224, 64, 7, 2, 3): 1,
    (128, 64, 56, 64, 1): 1,
    (128, 64, 56, 64, 3, 1, 1): 3,
    (128, 64, 56, 256, 1): 4,
    (128, 256, 56, 64, 1): 2,
    (128, 256, 56, 128, 1): 1,
    (128, 128, 56, 128, 3, 2, 1): 1,
    (128, 256, 56, 512, 1, 2): 1,
    (128, 128, 28, 128, 3, 1, 1): 3,
    (128, 128, 28, 512, 1): 4,
    (128, 512, 28, 128, 1): 3,
    (128, 512, 28, 256, 1): 1,
    (128, 256, 28, 256, 3, 2, 1): 1,
    (128, 512, 28, 1024, 1, 2): 1,
    (128, 256, 14, 256, 3, 1, 1): 5,
    (128, 256, 14, 1024, 1): 6,
    (128, 1024, 14, 256, 1): 5,
    (128, 1024, 14, 512, 1): 1,
    (128, 512, 14, 512, 3, 2, 1): 1,
    (128, 1024, 14, 2048, 1, 2): 1,
    (128, 512, 7, 512, 3, 1, 1): 2,
    (128, 512, 7, 2048, 1): 3,
    (128, 2048, 7, 512, 1): 2,
}
# n, c, H = W, filters, kernel, stride, padding, groups
SHAPES = {
    "resnet50": [
        (128, 3, 224, 64, 7, 2, 3),
        (128, 64, 56, 64, 1),
        (128, 64, 56, 64, 3, 1, 1),
        (128, 64, 56, 256, 1),
        (128, 256, 56, 512, 1, 2),
        (128, 128, 28, 128, 3, 1, 1),
        (128, 256, 28, 256, 3, 2, 1),
        (128, 1024, 14, 256, 1),
        (128, 256, 14, 256, 3, 1, 1),
        (128, 512, 7, 512, 3, 1, 1),
        (128, 512, 7, 2048, 1),
    ],
    "resnet50_all": list(RESNET50),
    "vgg": [(16, 64, 224, 64, 3, 1, 1), (16, 256, 56, 256, 3, 1, 1), (16, 512, 14, 512, 3, 1, 1)],
    "depthwise": [
        (64, 32, 112, 32, 3, 1, 1, 32),
        (64, 144, 56, 144, 3, 2, 1, 144),
        (64, 576, 14, 576, 3, 1, 1, 576),
        (32, 256, 56, 256, 3, 1, 1, 32),
    ],
    "lenet": [(128, 1, 28, 6, 5, 1, 2), (128, 6, 14, 16, 5), (1000, 6, 14, 16, 5)],
    "residual": [
        (512, 1, 28, 32, 3, 1, 1),
        (512, 64, 14, 64, 3, 1, 1),
        (512, 128, 7, 128, 3, 1, 1),
    ],
}


def main() -> None:
    """Measures, prints and writes."""
    from dlsys.learn.conv import DIRECTIONS, Shape, climb
    from dlsys.learn.gemm import limit_of
    from dlsys.runtime.device import best_context, cpu, device_name, gpu

    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=["gpu", "cpu"], help="the best one there is")
    parser.add_argument("--nets", default=",".join(SHAPES))
    parser.add_argument("--precisions", help="fp32,tf32 on a GPU, fp32 elsewhere")
    parser.add_argument("--batch", type=int, help="images, in place of each shape's own number")
    parser.add_argument("--variants", action="store_true", help="every algorithm, not the rungs")
    parser.add_argument("--seconds", type=float, default=1e9, help="no shape begins after these")
    options = parser.parse_args()
    ctx = {"gpu": gpu, "cpu": cpu}[options.device](0) if options.device else best_context()[0]
    assert ctx is not None, "the ladder is that of a native device"
    precisions = (options.precisions or ("fp32,tf32" if ctx.name == "gpu" else "fp32")).split(",")
    chip, start = device_name(ctx), time.monotonic()
    works: list[dict[str, Any]] = []
    for net, numbers in ((name, one) for name in options.nets.split(",") for one in SHAPES[name]):
        if time.monotonic() - start > options.seconds:
            print(f"left out for want of time: {net} {numbers}", flush=True)
            continue
        shape = Shape(*numbers)
        shape = shape._replace(n=options.batch or shape.n)
        print(f"\n{net}: {shape}", flush=True)
        for direction in DIRECTIONS:
            work: dict[str, Any] = dict(net=net, shape=list(shape), direction=direction, rungs=[])
            works.append(work)
            climbing = climb(ctx, shape, direction, precisions, options.variants)
            if ctx.name == "cpu" and not options.variants:
                climbing = itertools.chain(climbing, _of_numpy(shape, direction))
            if ctx.name == "gpu" and "bf16" in precisions:
                climbing = itertools.chain(climbing, _of_torch(shape, direction))
            for found in climbing:
                limit = limit_of(chip, found.precision)
                row = {**found._asdict(), "of_limit": found.tflops / limit if limit else None}
                work["rungs"].append(row)
                print(_line(direction, row), flush=True)
            _compare(work["rungs"])
    name = "conv" if ctx.name == "gpu" else "conv_cpu"
    if not options.variants:
        measure.save(name, options, {"device": chip, "works": works})
    _tell_auto(works)
    _tell_network(works)


def _of_numpy(shape: Any, direction: str) -> Iterator[Any]:
    """The figures of numpy's rungs."""
    from dlsys.learn.conv import climb

    for found in climb(None, shape, direction):
        yield found._replace(algorithm=f"numpy {found.algorithm}")


def _of_torch(shape: Any, direction: str) -> Iterator[Any]:
    """The figures of PyTorch's cuDNN at bf16 with channels last, where it is installed with CUDA;
    its error is not looked at.
    """
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    from dlsys.learn.gemm import Figures

    torch.backends.cudnn.benchmark = True
    x, f, dy = (
        torch.randn(*extents, device="cuda", dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )
        for extents in shape.arrays
    )
    same = [shape.stride] * 2, [shape.padding] * 2, [1, 1]
    if direction == "forward":

        def run() -> None:
            torch.ops.aten.convolution(x, f, None, *same, False, [0, 0], shape.groups)
    else:
        mask = [direction == "data", direction == "filter", False]

        def run() -> None:
            torch.ops.aten.convolution_backward(
                dy, x, f, None, *same, False, [0, 0], shape.groups, mask
            )

    launches, least = 8, float("inf")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()  # cuDNN measures its algorithms
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            run()
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / launches)
    yield Figures("cudnn", "bf16", least, shape.operations / least / 1e9, 0, np.nan, np.nan)


def _tell_network(works: list[dict[str, Any]]) -> None:
    """Prints the time of all convolutions of ResNet-50, of each algorithm that computes them."""
    sums: dict[tuple[str, str], float] = {}
    terms: dict[tuple[str, str], int] = {}
    for work in works:
        shape = tuple(work["shape"])
        count = next((n for key, n in RESNET50.items() if shape[: len(key)] == key), 0)
        if work["net"] != "resnet50_all" or (shape[1] == 3 and work["direction"] == "data"):
            continue
        for row in work["rungs"]:
            key = row["algorithm"], row["precision"]
            sums[key] = sums.get(key, 0.0) + count * row["ms"]
            terms[key] = terms.get(key, 0) + 1
    for key, ms in sums.items():
        if terms[key] == 3 * len(RESNET50) - 1:
            print(f"ResNet-50, all convolutions: {' '.join(key)} {ms:.3f} ms")


def _compare(rungs: list[dict[str, Any]]) -> None:
    """Gives each the share of cuDNN's rate at its precision."""
    peers = {row["precision"]: row["tflops"] for row in rungs if row["algorithm"] == "cudnn"}
    for row in rungs:
        peer = peers.get(row["precision"])
        row["of_cudnn"] = row["tflops"] / peer if peer else None


def _tell_auto(works: list[dict[str, Any]]) -> None:
    """Prints what the heuristic's algorithms take of the time of the fastest, network by network,
    and where it is furthest from them.
    """
    sums: dict[tuple[str, str], list[float]] = {}
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for work in works:
        for precision in {row["precision"] for row in work["rungs"]}:
            ms = {r["algorithm"]: r["ms"] for r in work["rungs"] if r["precision"] == precision}
            fastest = min(ms, key=ms.__getitem__)
            key = work["net"], precision
            of_key = sums.setdefault(key, [0.0, 0.0])
            of_key[0] += ms["auto"]
            of_key[1] += ms[fastest]
            ratio = ms["auto"] / ms[fastest]
            told = f"{work['shape']} {work['direction']}, where {fastest} is fastest"
            worst[key] = max(worst.get(key, (0.0, "")), (ratio, told))
    print()
    for (net, precision), (auto, best) in sums.items():
        ratio, told = worst[net, precision]
        print(
            f"{net} {precision}: auto takes {auto / best:.2f} of the fastest; {ratio:.2f} of {told}"
        )


def _line(direction: str, row: dict[str, Any]) -> str:
    share = f"{row['of_limit']:6.1%}" if row["of_limit"] else "     -"
    return (
        f"  {direction:<8}{row['algorithm']:<23} {row['precision']:<5} {row['ms']:9.4f} ms "
        f"{row['tflops']:8.2f} TFLOP/s {share} of the limit, error {row['error']:9.2f} "
        f"(mean {row['mean_error']:8.3f}) x 2^-24, {row['workspace_nbytes'] >> 20} MiB"
    )
