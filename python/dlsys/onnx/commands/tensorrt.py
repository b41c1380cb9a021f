"""Build an engine of TensorRT from an ONNX file, on a machine without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..engine import RTX, build_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, the engine, its GPUs and the ranges of free extents."""
    parser.add_argument("file", type=Path, help="the ONNX file")
    parser.add_argument("--out", type=Path, required=True, help="the engine to write")
    parser.add_argument("--targets", default="sm_89", help="GPUs, such as sm_89,sm_120")
    parser.add_argument(
        "--extent", action="append", default=[], type=extent, metavar="NAME=LEAST,LIKELY,LARGEST",
        help="of a free extent; batch=1,8,32 by default",
    )  # fmt: skip
    parser.add_argument("--package", default=RTX, help="tensorrt_rtx, or tensorrt for the GPU here")


def extent(text: str) -> tuple[str, tuple[int, int, int]]:
    """A range such as `batch=1,8,32`."""
    name, _, numbers = text.partition("=")
    least, likely, largest = map(int, numbers.split(","))
    return name, (least, likely, largest)


def run(options: argparse.Namespace) -> None:
    """Builds, and prints what was written."""
    made = build_engine(
        options.file, options.out, targets=options.targets.split(","),
        extents=dict(options.extent), package=options.package,
    )  # fmt: skip
    print(
        f"{options.out}: {made.nbytes:,} bytes for {', '.join(made.targets)}, of {made.layers} "
        f"layers, {made.quantized} of which quantize"
    )
