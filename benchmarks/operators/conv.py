"""The rungs of convolution, side by side with cuDNN in one run: time, rate, workspace, error.

    python benchmarks conv [--nets resnet50,vgg,depthwise,lenet,residual] [--precisions fp32,tf32]
    python benchmarks conv --nets resnet50_all --precisions bf16   # channels last, beside PyTorch's
    python benchmarks conv --missing --seconds 100           # what the record lacks, in parts
    python benchmarks conv --device cpu --batch 4            # the CPU's and numpy's: conv_cpu.json
    python benchmarks conv --variants                        # every tile and algorithm of a rung

Leaves results/conv.json, of which `python benchmarks table` makes the tables and the picture of
docs/learn/conv.md. Rungs take turns, every other round down the ladder, and the least time of all
rounds counts. The record is written after each convolution. What an earlier call on this GPU left
stays in it unless it is measured anew; each work says by precision which command and commit
measured it. A row of --variants says how far the heuristic, `auto`, is from the fastest. Images are
NCHW, at bf16 and where a name says `channels last` NHWC: what a rung moves between the two is in
its time, and shares and sums are of rungs of one layout. Of NHWC cuDNN is PyTorch's, where that is
installed with CUDA. resnet50_all is every convolution of the network, of which one table has the
sum alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlsys.learn.conv import CHANNELS_LAST
from shared import measure

ROUNDS = {"cpu": 3, "gpu": 2}
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
IMAGE_CHANNELS = 3  # at most, of what a network is given

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
    from dlsys.learn.conv import DIRECTIONS, Shape
    from dlsys.runtime.device import best_context, cpu, device_name, gpu

    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=["gpu", "cpu"], help="the best one there is")
    parser.add_argument("--nets", default=",".join(SHAPES))
    parser.add_argument("--precisions", help="fp32,tf32 on a GPU, fp32 elsewhere")
    parser.add_argument("--batch", type=int, help="images, in place of each shape's own number")
    parser.add_argument("--missing", action="store_true", help="what the record lacks only")
    parser.add_argument("--variants", action="store_true", help="every algorithm, not the rungs")
    parser.add_argument("--seconds", type=float, default=1e9, help="no shape begins after these")
    options = parser.parse_args()
    ctx = {"gpu": gpu, "cpu": cpu}[options.device](0) if options.device else best_context()[0]
    assert ctx is not None, "the ladder is that of a native device"
    nets = measure.choices(parser, "--nets", options.nets, SHAPES)
    usual = "fp32,tf32" if ctx.name == "gpu" else "fp32"
    given = options.precisions or usual
    precisions = measure.choices(parser, "--precisions", given, measure.PRECISIONS)
    chip, start = device_name(ctx), time.monotonic()
    record = "conv" if ctx.name == "gpu" else "conv_cpu"
    known = measure.earlier_works(options.out / f"{record}.json", device=chip)
    works = {} if options.variants else {_identity(work): work for work in known}
    for net, numbers in ((name, one) for name in nets for one in SHAPES[name]):
        shape = Shape(*numbers)
        shape = shape._replace(n=options.batch or shape.n)
        for direction in DIRECTIONS:
            work: dict[str, Any] = dict(net=net, shape=list(shape), direction=direction, rungs=[])
            work = works.get(_identity(work), work)
            there = work.get("measured", {}) if options.missing else {}
            wanted = [one for one in precisions if one not in there]
            if not wanted:
                continue
            if time.monotonic() - start > options.seconds:
                print(f"left out for want of time: {net} {numbers}, {direction}", flush=True)
                continue
            print(f"\n{net}: {shape}, {direction}", flush=True)
            rungs = _rungs(ctx, shape, direction, wanted, options.variants)
            measured = dict.fromkeys(wanted, measure.origin(options))
            works[_identity(work)] = _compared(measure.merged(work, rungs, measured, "cudnn"))
            if not options.variants:
                measure.save(record, options, {"device": chip, "works": _in_order(works)})
    _tell(_in_order(works))


def _compared(work: dict[str, Any]) -> dict[str, Any]:
    """The work, whose rows over NHWC images have their share of cuDNN's rate over such."""
    rows = [row for row in work["rungs"] if row["algorithm"].startswith(CHANNELS_LAST)]
    name = f"{CHANNELS_LAST}cudnn"
    rates = {row["precision"]: row["tflops"] for row in rows if row["algorithm"] == name}
    for row in rows:
        rate = rates.get(row["precision"])
        row["of_cudnn"] = row["tflops"] / rate if rate else None
    return work


def _identity(work: dict[str, Any]) -> tuple[Any, ...]:
    return (work["net"], *work["shape"], work["direction"])


def _in_order(works: dict[tuple[Any, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """The works by network, each network's as they were measured first."""
    return sorted(works.values(), key=lambda work: list(SHAPES).index(work["net"]))


def _rungs(
    ctx: Any, shape: Any, direction: str, precisions: list[str], variants: bool
) -> list[dict[str, Any]]:
    """A row for each rung, the library's too, numpy's beside the CPU's: the best of all rounds."""
    from dlsys.learn.conv import climb
    from dlsys.learn.gemm import limit_of
    from dlsys.runtime.device import device_name

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for k in range(ROUNDS[ctx.name]):
        down = k % 2 == 1
        parts = [climb(ctx, shape, direction, precisions, variants, down)]
        if ctx.name == "cpu" and not variants:
            parts.append(_of_numpy(shape, direction))
        if ctx.name == "gpu":
            parts += [_of_torch(shape, direction, one) for one in precisions if one in _TORCH]
        for found in itertools.chain(*(reversed(parts) if down else parts)):
            limit = limit_of(device_name(ctx), found.precision)
            row = {**found._asdict(), "of_limit": found.tflops / limit if limit else None}
            if np.isnan(found.error):
                row |= {"error": None, "mean_error": None}
            key = found.algorithm, found.precision
            if key not in rows or row["ms"] < rows[key]["ms"]:
                rows[key] = row
    for row in rows.values():
        print(_line(direction, row), flush=True)
    return list(rows.values())


def _of_numpy(shape: Any, direction: str) -> Iterator[Any]:
    """The figures of numpy's rungs."""
    from dlsys.learn.conv import climb

    for found in climb(None, shape, direction):
        yield found._replace(algorithm=f"numpy {found.algorithm}")


# The names of PyTorch's cuDNN and the types that it takes, by precision.
_TORCH = {"bf16": ("cudnn", "bfloat16"), "tf32": (f"{CHANNELS_LAST}cudnn", "float32")}


def _of_torch(shape: Any, direction: str, precision: str) -> Iterator[Any]:
    """The figures of PyTorch's cuDNN with channels last, where it is installed with CUDA; its error
    is not looked at.
    """
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    from dlsys.learn.gemm import Figures

    name, dtype = _TORCH[precision]
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    x, f, dy = (
        torch.randn(*extents, device="cuda", dtype=getattr(torch, dtype)).to(
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
    yield Figures(name, precision, least, shape.operations / least / 1e9, 0, np.nan, np.nan)


class Sums(NamedTuple):
    """Milliseconds of a direction over the convolutions of a network, at a precision.

    Attributes:
        count: of the convolutions.
        auto: by the heuristic's algorithms.
        fastest: by the fastest algorithm of each, the library's too.
        ours: by the fastest of our own.
        cudnn: by the library's own choice; None where it was not measured for all.
        worst: the largest share of `auto` in the fastest's time, of one convolution, and which.
    """

    count: int
    auto: float
    fastest: float
    ours: float
    cudnn: float | None
    worst: tuple[float, str]


def sums_of(works: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], Sums]:
    """The sums over each network, by network, direction and precision, which says where images have
    their channels last and others at it have not. The gradient of a network's images is left out,
    which no training computes.
    """
    from dlsys.learn.conv import Shape

    counts = {Shape(*numbers)[1:]: count for numbers, count in RESNET50.items()}
    sums: dict[tuple[str, str, str], Sums] = {}
    for work in works:
        shape, direction = Shape(*work["shape"]), work["direction"]
        if direction == "data" and shape.c <= IMAGE_CHANNELS:
            continue
        times = counts[shape[1:]] if work["net"] == "resnet50_all" else 1
        for setting, ms in _settings(work["rungs"]).items():
            auto, cudnn = ms.pop("auto"), ms.get("cudnn")
            fastest = min(ms, key=ms.__getitem__)
            ours = min((y for x, y in ms.items() if x != "cudnn"), default=auto)
            key = work["net"], direction, setting
            before = sums.get(key, Sums(0, 0.0, 0.0, 0.0, 0.0, (0.0, "")))
            sums[key] = Sums(
                before.count + times,
                before.auto + times * auto,
                before.fastest + times * ms[fastest],
                before.ours + times * ours,
                None if None in (cudnn, before.cudnn) else before.cudnn + times * cudnn,
                max(before.worst, (auto / ms[fastest], f"{shape}, by {fastest}")),
            )
    return sums


def _settings(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds by algorithm, numpy's left out, of each precision and layout that `auto` has."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        name, setting = row["algorithm"], row["precision"]
        if name.startswith(CHANNELS_LAST):
            name, setting = name.removeprefix(CHANNELS_LAST), f"{setting}, channels last"
        if not name.startswith("numpy "):
            found.setdefault(setting, {})[name] = row["ms"]
    return {setting: ms for setting, ms in found.items() if "auto" in ms}


def _tell(works: Sequence[dict[str, Any]]) -> None:
    """Prints the sums, and where the heuristic is furthest from the fastest."""
    print()
    for (net, direction, precision), found in sums_of(works).items():
        ratio, where = found.worst
        print(
            f"{net} {direction} {precision}: auto takes {found.auto / found.fastest:.2f} of the "
            f"fastest; {ratio:.2f} of {where}"
        )


def _line(direction: str, row: dict[str, Any]) -> str:
    share = f"{row['of_limit']:6.1%}" if row["of_limit"] else "     -"
    error = "unknown"
    if row["error"] is not None:
        error = f"{row['error']:9.2f} (mean {row['mean_error']:8.3f})"
    return (
        f"  {direction:<8}{row['algorithm']:<29} {row['precision']:<5} {row['ms']:9.4f} ms "
        f"{row['tflops']:8.2f} TFLOP/s {share} of the limit, error {error} x 2^-24, "
        f"{row['workspace_nbytes'] >> 20} MiB"
    )
