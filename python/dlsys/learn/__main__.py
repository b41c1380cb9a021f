"""Runs a ladder on the machine at hand, draws it, and says what its rungs reach.

python -m dlsys.learn gemm [--size 2048] [--device gpu] [--precision fp32,3xtf32,tf32]
python -m dlsys.learn conv [--shape 32,256,14,256,3,1,1] [--direction data] [--precision fp32,tf32]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import DlsysError, ShapeError
from ..ops.matmul import PRECISIONS
from ..runtime.device import Context, best_context, cpu, device_name, emulated, gpu
from . import conv, gemm
from .chart import bars, picture
from .gemm import Figures, limit_of

_PRECISIONS = (*PRECISIONS, *gemm.NARROW)

# What takes seconds: rows, columns and K of a product; a convolution's shape.
_SIZES = {"numpy": 512, "cpu": 512, "gpu": 4096, "emulated": 96}
_SHAPES = {
    "numpy": conv.Shape(4, 64, 14, 64, 3, 1, 1),
    "cpu": conv.Shape(16, 64, 14, 64, 3, 1, 1),
    "gpu": conv.Shape(32, 256, 14, 256, 3, 1, 1),
    "emulated": conv.Shape(1, 9, 8, 12, 3, 1, 1),
}


def main() -> int:
    """The command; 2 where the device or an argument is of no use."""
    parser = argparse.ArgumentParser(
        prog="python -m dlsys.learn", description="Runs a ladder of kernels and draws it."
    )
    about = "gemm: the matrix product; conv: convolution"
    parser.add_argument("ladder", choices=["gemm", "conv"], help=about)
    parser.add_argument("--device", choices=["gpu", "cpu", "numpy"], help="default: the best")
    parser.add_argument("--size", type=int, help="gemm: rows, columns and K of the product")
    fields = ",".join(conv.Shape._fields)
    about = f"conv: the convolution's {fields}; the last three may be absent"
    parser.add_argument("--shape", help=about)
    about = f"conv: {', '.join(conv.DIRECTIONS)}: y, or the gradient of x or of the filters"
    parser.add_argument("--direction", choices=conv.DIRECTIONS, help=about)
    parser.add_argument(
        "--precision",
        default="fp32",
        help=f"one or more of {', '.join(_PRECISIONS)}, of gemm fp8; fp32 alone on numpy",
    )
    parser.add_argument("--picture", type=Path, help="an SVG file to draw into")
    options = parser.parse_args()
    try:
        _run(options)
    except (DlsysError, MemoryError, OSError) as error:
        print(f"dlsys.learn: {error}", file=sys.stderr)
        return 2
    return 0


def _check(options: argparse.Namespace, ctx: Context | None) -> None:
    """Refuses what is of the other ladder, or no size, precision or folder."""
    others = {"gemm": ("shape", "direction"), "conv": ("size",)}[options.ladder]
    for name in others:
        if getattr(options, name) is not None:
            raise DlsysError(f"--{name} is not of {options.ladder}; --help says which options are")
    if options.size is not None and options.size < 1:
        raise ShapeError(f"--size: expected an integer from 1 on, got {options.size}")
    of_ladder = {"gemm": (*_PRECISIONS, "fp8"), "conv": _PRECISIONS}[options.ladder]
    known = ("fp32",) if ctx is None else of_ladder
    for one in options.precision.split(","):
        if one not in known:
            where = "on numpy" if ctx is None else "here"
            raise DlsysError(f"--precision: expected {', '.join(known)} {where}, got {one!r}")
    if options.picture and not options.picture.parent.is_dir():
        raise DlsysError(f"--picture: there is no folder {options.picture.parent}")


def _run(options: argparse.Namespace) -> None:
    ctx = _context(options.device)
    _check(options, ctx)
    precisions = options.precision.split(",")
    kind = "numpy" if ctx is None else ctx.name
    if kind == "gpu" and emulated():
        kind = "emulated"
    chip = "numpy" if ctx is None else device_name(ctx)
    scale, unit = (1e3, "GFLOP/s") if kind in ("cpu", "numpy") else (1.0, "TFLOP/s")
    work, climbing = _work(options, ctx, kind, precisions)
    title = f"{work} on {chip}"
    print(title, flush=True)
    found: list[Figures] = []
    for figures in climbing:
        found.append(figures)
        limit = limit_of(chip, figures.precision)
        share = f", {figures.tflops / limit:.0%} of the chip's limit" if limit else ""
        name = f"{figures.algorithm} ({figures.precision})"
        print(
            f"{name:<22} {figures.ms:10.3f} ms{share}; error at most {figures.error:.1f} x 2^-24, "
            f"workspace {figures.workspace_nbytes / 2**20:.1f} MiB",
            flush=True,
        )
    rates = [(_name(one), one.tflops * scale) for one in found]
    print(bars(rates, unit))
    if kind == "emulated":
        print("An emulated GPU shows that kernels are right; its times say nothing of a GPU.")
    if options.picture:
        options.picture.write_text(picture(title, rates, unit))
        print(options.picture)


def _work(
    options: argparse.Namespace, ctx: Context | None, kind: str, precisions: Sequence[str]
) -> tuple[str, Iterator[Figures]]:
    """Tells in words what is computed, and the figures of each rung that computes it."""
    if options.ladder == "gemm":
        size = options.size or _SIZES[kind]
        product = gemm.Shape(size, size, size)
        return str(product), gemm.climb(ctx, product, precisions)
    shape = _SHAPES[kind] if options.shape is None else _shape(options.shape)
    direction = options.direction or conv.DIRECTIONS[0]
    return f"{shape}, {direction}", conv.climb(ctx, shape, direction, precisions)


def _shape(text: str) -> conv.Shape:
    try:
        shape = conv.Shape(*map(int, text.split(",")))
    except (TypeError, ValueError):
        raise ShapeError(
            f"--shape: expected {','.join(conv.Shape._fields)} as integers, got {text!r}"
        ) from None
    sizes = shape._replace(padding=1)
    fits = min(sizes) > 0 <= shape.padding and shape.c % shape.groups == 0 < shape.out
    if not fits or shape.o % shape.groups:
        raise ShapeError(f"--shape: {text} is no convolution")
    return shape


def _name(figures: Figures) -> str:
    return f"{figures.algorithm}, {figures.precision}"


def _context(name: str | None) -> Context | None:
    """The device that was asked for, None for numpy, or the best one."""
    if name == "numpy":
        return None
    if name is not None:
        return {"gpu": gpu, "cpu": cpu}[name](0)
    ctx, reasons = best_context()
    if ctx is None:
        raise DlsysError("; ".join(reasons))
    return ctx


if __name__ == "__main__":
    sys.exit(main())
