"""The rungs of the matrix product, side by side with cuBLAS in one run: time, rate, error.

    python benchmarks gemm [--shapes squares,gpt2,skinny] [--precisions fp32,tf32,bf16]
    python benchmarks gemm --variants warp --shapes squares     # every tile and split of a rung

Leaves results/gemm.json and, of it, the text and docs/learn/pictures/gemm.svg.
"""

from __future__ import annotations

from typing import Any

from shared import measure

# Rows, columns, K, and whether A and B are stored transposed.
SHAPES = {
    "squares": [(512,) * 3, (1024,) * 3, (2048,) * 3, (4096,) * 3, (5000,) * 3, (8192,) * 3],
    "transposed": [
        (4096, 4096, 4096, False, True),
        (4096, 4096, 4096, True, False),
        (4096, 4096, 4096, True, True),
    ],
    "gpt2": [
        (16384, 768, 768),
        (16384, 2304, 768),
        (16384, 3072, 768),
        (16384, 768, 3072),
        (16384, 50304, 768),
        (16384, 768, 2304, False, True),
        (768, 2304, 16384, True, False),
        (768, 50304, 16384, True, False),
    ],
    "skinny": [
        (784, 128, 60000, True, False),
        (128, 10, 60000, True, False),
        (60000, 128, 784),
        (128, 128, 60000, True, False),
        (64, 1024, 8192),
        (16, 4096, 4096),
        (1, 4096, 4096),
    ],
}


def main() -> None:
    """Measures, prints and writes."""
    from dlsys.learn.gemm import Shape, climb, limit_of
    from dlsys.runtime.device import best_context, device_name

    parser = measure.arguments(__doc__)
    parser.add_argument("--shapes", default="squares,transposed,gpt2,skinny")
    parser.add_argument("--precisions", default="fp32,3xtf32,tf32,bf16")
    parser.add_argument("--variants", default="", help="a rung, of which every variant is measured")
    options = parser.parse_args()
    ctx, _ = best_context()
    assert ctx is not None, "the ladder is that of a native device"
    chip = device_name(ctx)
    works: list[dict[str, Any]] = []
    for kind in options.shapes.split(","):
        for numbers in SHAPES[kind]:
            shape = Shape(*numbers)
            work: dict[str, Any] = {"kind": kind, "shape": list(numbers), "rungs": []}
            works.append(work)
            print(f"\n{shape}", flush=True)
            for found in climb(ctx, shape, options.precisions.split(","), options.variants):
                limit = limit_of(chip, found.precision)
                row = {**found._asdict(), "of_limit": found.tflops / limit if limit else None}
                work["rungs"].append(row)
                print(_line(row), flush=True)
            _compare(work["rungs"])
    if not options.variants:
        measure.save("gemm", options, {"device": chip, "works": works})


def _compare(rungs: list[dict[str, Any]]) -> None:
    """Gives each the share of cuBLAS at its precision; 3xtf32 is compared with fp32."""
    peers = {row["precision"]: row["tflops"] for row in rungs if row["algorithm"] == "cublas"}
    for row in rungs:
        peer = peers.get("fp32" if row["precision"] == "3xtf32" else row["precision"])
        row["of_cublas"] = row["tflops"] / peer if peer else None


def _line(row: dict[str, Any]) -> str:
    share = f"{row['of_limit']:6.1%}" if row["of_limit"] else "     -"
    return (
        f"  {row['algorithm']:<26} {row['precision']:<7} {row['ms']:10.4f} ms "
        f"{row['tflops']:8.2f} TFLOP/s {share} of the limit, error {row['error']:9.2f} "
        f"(mean {row['mean_error']:8.3f}) x 2^-24, {row['workspace_nbytes']:,} bytes"
    )
