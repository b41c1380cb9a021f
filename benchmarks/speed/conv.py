"""The rungs of convolution, side by side with cuDNN in one run: time, rate, workspace, error.

    python benchmarks conv [--nets resnet50,vgg,depthwise,lenet,residual] [--precisions fp32,tf32]

Leaves results/conv.json and, of it, the text and docs/learn/pictures/conv.svg.
"""

from __future__ import annotations

import time
from typing import Any

from shared import measure

# n, c, H = W, filters, kernel, stride, padding, groups
SHAPES = {
    "resnet50": [
        (32, 3, 224, 64, 7, 2, 3),
        (32, 64, 56, 64, 1),
        (32, 64, 56, 64, 3, 1, 1),
        (32, 64, 56, 256, 1),
        (32, 256, 56, 512, 1, 2),
        (32, 128, 28, 128, 3, 1, 1),
        (32, 256, 28, 256, 3, 2, 1),
        (32, 1024, 14, 256, 1),
        (32, 256, 14, 256, 3, 1, 1),
        (32, 512, 7, 512, 3, 1, 1),
        (32, 512, 7, 2048, 1),
    ],
    "vgg": [(16, 64, 224, 64, 3, 1, 1), (16, 256, 56, 256, 3, 1, 1), (16, 512, 14, 512, 3, 1, 1)],
    "depthwise": [
        (64, 32, 112, 32, 3, 1, 1, 32),
        (64, 144, 56, 144, 3, 2, 1, 144),
        (64, 576, 14, 576, 3, 1, 1, 576),
        (32, 256, 56, 256, 3, 1, 1, 32),
    ],
    "lenet": [(128, 1, 28, 6, 5, 1, 2), (128, 6, 14, 16, 5), (1000, 6, 14, 16, 5)],
    "residual": [(128, 32, 28, 32, 3, 1, 1), (128, 32, 28, 64, 3, 2, 1), (128, 32, 28, 64, 1, 2)],
}


def main() -> None:
    """Measures, prints and writes."""
    from dlsys.learn.conv import DIRECTIONS, Shape, climb
    from dlsys.learn.gemm import limit_of
    from dlsys.runtime.device import best_context, device_name

    parser = measure.arguments(__doc__)
    parser.add_argument("--nets", default=",".join(SHAPES))
    parser.add_argument("--precisions", default="fp32,tf32")
    parser.add_argument("--seconds", type=float, default=1e9, help="no shape begins after these")
    options = parser.parse_args()
    ctx, _ = best_context()
    assert ctx is not None, "the ladder is that of a native device"
    chip, start = device_name(ctx), time.monotonic()
    works: list[dict[str, Any]] = []
    for net, numbers in ((name, one) for name in options.nets.split(",") for one in SHAPES[name]):
        if time.monotonic() - start > options.seconds:
            print(f"left out for want of time: {net} {numbers}", flush=True)
            continue
        shape = Shape(*numbers)
        print(f"\n{net}: {shape}", flush=True)
        for direction in DIRECTIONS:
            work: dict[str, Any] = dict(net=net, shape=list(shape), direction=direction, rungs=[])
            works.append(work)
            for found in climb(ctx, shape, direction, options.precisions.split(",")):
                limit = limit_of(chip, found.precision)
                row = {**found._asdict(), "of_limit": found.tflops / limit if limit else None}
                work["rungs"].append(row)
                print(_line(direction, row), flush=True)
            _compare(work["rungs"])
    measure.save("conv", options, {"device": chip, "works": works})


def _compare(rungs: list[dict[str, Any]]) -> None:
    """Gives each the share of cuDNN's rate at its precision."""
    peers = {row["precision"]: row["tflops"] for row in rungs if row["algorithm"] == "cudnn"}
    for row in rungs:
        peer = peers.get(row["precision"])
        row["of_cudnn"] = row["tflops"] / peer if peer else None


def _line(direction: str, row: dict[str, Any]) -> str:
    share = f"{row['of_limit']:6.1%}" if row["of_limit"] else "     -"
    return (
        f"  {direction:<8}{row['algorithm']:<13} {row['precision']:<5} {row['ms']:9.4f} ms "
        f"{row['tflops']:8.2f} TFLOP/s {share} of the limit, error {row['error']:9.2f} "
        f"(mean {row['mean_error']:8.3f}) x 2^-24, {row['workspace_nbytes'] >> 20} MiB"
    )
