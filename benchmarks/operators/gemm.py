"""The rungs of the matrix product, side by side with the library's in one run: time, rate, error.

    python benchmarks gemm [--shapes squares,gpt2,skinny] [--precisions fp32,tf32,bf16]
    python benchmarks gemm --missing --seconds 100              # what the record lacks, in parts
    python benchmarks gemm --variants warp --shapes squares     # every tile and split of a rung
    python benchmarks gemm --device cpu                         # the CPU's rungs, and numpy's

Leaves results/gemm.json, of which `python benchmarks table` makes the tables and the picture of
docs/learn/gemm.md; of the CPU gemm_cpu.json. Rungs take turns, and the least time of all rounds
counts; on a GPU every other round goes down the ladder, for what comes behind a rung at the limit
of power finds a lower clock. Of a GPU there is `auto` too, what the heuristic takes. Kinds of
shapes take turns, so that --seconds leaves none of them out, and a product of a tenth of a second
is measured once. The record is written after each shape. What an earlier one of the same machine
and versions has stays in it unless it is measured anew, so that a record can be made in parts: each
work says by precision which command and commit measured it. Rungs that multiply in float32 at any
precision are measured at fp32. The library is cuBLAS on a GPU; on the CPU it is the one that
numpy's products run on.
"""

from __future__ import annotations

import itertools
import time
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
        # The gradients of the operands of each: dy by the transposed weights, and x by dy.
        (16384, 768, 768, False, True),
        (16384, 768, 2304, False, True),
        (16384, 768, 3072, False, True),
        (16384, 3072, 768, False, True),
        (16384, 768, 50304, False, True),
        (768, 768, 16384, True, False),
        (768, 2304, 16384, True, False),
        (768, 3072, 16384, True, False),
        (3072, 768, 16384, True, False),
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
CPU_SHAPES = {
    "squares": [(size,) * 3 for size in (128, 256, 512, 1024)],
    "transposed": [(512, 512, 512, *flags) for flags in ((False, True), (True, False))],
    "gpt2": [(128, 2304, 768), (128, 768, 3072), (1, 3072, 768), (768, 2304, 128, True, False)],
    "skinny": [
        *((1000, 256, 784), (784, 256, 1000, True, False), (1000, 10, 256)),
        *((32, 32, 60000, True, False), (60000, 16, 16), (97, 101, 103)),
    ],
}
ROUNDS = {"cpu": 3, "gpu": 2}
COMPARED_AT = {"3xtf32": "fp32", "fp8": "bf16"}  # the library's precision, where it is another one


def main() -> None:
    """Measures, prints and writes."""
    from dlsys.learn.gemm import Shape
    from dlsys.rungs import rungs_among
    from dlsys.runtime.device import best_context, cpu, device_name, gpu
    from dlsys.runtime.library import load

    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=["gpu", "cpu"], help="the best one there is")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--precisions", help="fp32,3xtf32,tf32,bf16,fp8 on a GPU, fp32 elsewhere")
    parser.add_argument("--missing", action="store_true", help="what the record lacks only")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no shape after so many"
    )
    parser.add_argument("--variants", default="", help="a rung, of which every variant is measured")
    options = parser.parse_args()
    ctx = {"gpu": gpu, "cpu": cpu}[options.device](0) if options.device else best_context()[0]
    assert ctx is not None, "the ladder is that of a native device"
    on_gpu, chip = ctx.name == "gpu", device_name(ctx)
    precisions = options.precisions or ("fp32,3xtf32,tf32,bf16,fp8" if on_gpu else "fp32")
    name = "gemm" if on_gpu else "gemm_cpu"
    known = measure.earlier_works(options.out / f"{name}.json", device=chip)
    works = {_identity(work): work for work in known}
    kinds = measure.choices(parser, "--shapes", options.shapes, SHAPES)
    wanted_precisions = measure.choices(parser, "--precisions", precisions, measure.PRECISIONS)
    if options.variants:
        rungs_here = rungs_among(load().algorithms(ctx.kernel_device, "matmul"))
        measure.choices(parser, "--variants", options.variants, rungs_here)
    turns = itertools.zip_longest(*([(kind, one) for one in _of(kind, on_gpu)] for kind in kinds))
    asked = [one for turn in turns for one in turn if one is not None]
    end = time.monotonic() + options.seconds
    for kind, numbers in asked:
        work = {"kind": kind, "shape": list(numbers), "rungs": [], "measured": {}}
        work = works.get(_identity(work), work)
        wanted = wanted_precisions
        if options.missing:
            wanted = [one for one in wanted if one not in work.get("measured", {})]
        if not wanted:
            continue
        if time.monotonic() > end:
            print(f"\nstopped after {options.seconds:.0f} s; --missing measures the others")
            break
        print(f"\n{Shape(*numbers)}", flush=True)
        rungs = _rungs(ctx, Shape(*numbers), wanted, options.variants)
        if not options.variants:
            measured = dict.fromkeys(wanted, measure.origin(options))
            library = "cublas" if on_gpu else "blas"
            works[_identity(work)] = measure.merged(work, rungs, measured, library, COMPARED_AT)
            order = [(kind, *numbers) for kind in SHAPES for numbers in _of(kind, on_gpu)]
            kept = [works[one] for one in order if one in works]
            measure.save(name, options, {"device": chip, "works": kept})


def _of(kind: str, on_gpu: bool) -> list[tuple[Any, ...]]:
    return (SHAPES if on_gpu else CPU_SHAPES)[kind]


def _identity(work: dict[str, Any]) -> tuple[Any, ...]:
    return (work["kind"], *work["shape"])


def _rungs(ctx: Any, shape: Any, precisions: list[str], variants: str) -> list[dict[str, Any]]:
    """A row for each rung, on the CPU numpy's too: the best of several rounds."""
    from dlsys.learn.gemm import climb, limit_of
    from dlsys.runtime.device import device_name

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    of_rungs = {"once": not variants, "auto": ctx.name == "gpu" and not variants}
    for k in range(ROUNDS[ctx.name]):
        of_rungs["down"] = ctx.name == "gpu" and k % 2 == 1
        found = [("", one) for one in climb(ctx, shape, precisions, variants, **of_rungs)]
        if ctx.name == "cpu" and not variants:
            found += [("numpy ", one) for one in climb(None, shape)]
        for device, one in found:
            limit = limit_of(device_name(ctx), one.precision)
            row = {**one._asdict(), "of_limit": one.tflops / limit if limit else None}
            row["algorithm"] = device + one.algorithm
            key = row["algorithm"], one.precision
            if key not in rows or row["ms"] < rows[key]["ms"]:
                rows[key] = row
    for row in rows.values():
        print(_line(row), flush=True)
    return list(rows.values())


def _line(row: dict[str, Any]) -> str:
    share = f"{row['of_limit']:6.1%}" if row["of_limit"] else "     -"
    return (
        f"  {row['algorithm']:<26} {row['precision']:<7} {row['ms']:10.4f} ms "
        f"{row['tflops']:8.4g} TFLOP/s {share} of the limit, error {row['error']:9.2f} "
        f"(mean {row['mean_error']:8.3f}) x 2^-24, {row['workspace_nbytes']:,} bytes"
    )
