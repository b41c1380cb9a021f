"""Runs a ladder on the machine at hand, draws it, and says what its rungs reach.

python -m dlsys.learn gemm [--size 2048] [--device gpu] [--precision fp32,3xtf32,tf32]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import DlsysError
from ..passes.precision import check_precision
from ..runtime.device import Context, best_context, cpu, device_name, emulated, gpu
from .chart import bars, picture
from .gemm import Figures, Shape, climb, limit_of

_SIZES = {"cpu": 512, "gpu": 4096, "emulated": 96}  # rows, columns and K, which take seconds


def main() -> int:
    """The command; 2 where the device or an argument is of no use."""
    parser = argparse.ArgumentParser(
        prog="python -m dlsys.learn", description="Runs a ladder of kernels and draws it."
    )
    parser.add_argument("ladder", choices=["gemm"], help="gemm: the matrix product")
    parser.add_argument("--device", choices=["gpu", "cpu"], help="the best one there is")
    parser.add_argument("--size", type=int, help="rows, columns and K of the product")
    parser.add_argument("--precision", default="fp32", help="one or more of fp32, 3xtf32, tf32")
    parser.add_argument("--picture", type=Path, help="an SVG file to draw into")
    options = parser.parse_args()
    try:
        _run(options)
    except DlsysError as error:
        print(f"dlsys.learn: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    ctx = _context(options.device)
    precisions = [check_precision(one) for one in options.precision.split(",")]
    kind = "emulated" if ctx.name == "gpu" and emulated() else ctx.name
    size = options.size or _SIZES[kind]
    shape = Shape(size, size, size)
    title = f"{shape} on {device_name(ctx)}"
    print(title, flush=True)
    found: list[Figures] = []
    for figures in climb(ctx, shape, precisions):
        found.append(figures)
        limit = limit_of(device_name(ctx), figures.precision)
        share = f", {figures.tflops / limit:.0%} of the chip's limit" if limit else ""
        name = f"{figures.algorithm} ({figures.precision})"
        print(
            f"{name:<18} {figures.ms:10.3f} ms{share}; error at most {figures.error:.1f} x 2^-24",
            flush=True,
        )
    print(bars([(_name(one), one.tflops) for one in found], "TFLOP/s"))
    if kind == "emulated":
        print("An emulated GPU shows that kernels are right; its times say nothing of a GPU.")
    if options.picture:
        options.picture.write_text(picture(title, [(_name(one), one.tflops) for one in found]))
        print(options.picture)


def _name(figures: Figures) -> str:
    return f"{figures.algorithm}, {figures.precision}"


def _context(name: str | None) -> Context:
    if name is not None:
        return {"gpu": gpu, "cpu": cpu}[name](0)
    ctx, reasons = best_context()
    if ctx is None:
        raise DlsysError("; ".join(reasons))
    return ctx


if __name__ == "__main__":
    sys.exit(main())
