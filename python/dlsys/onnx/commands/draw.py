"""Draw the graph of an ONNX file as SVG."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...files import replacing
from ..drawing import picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, the picture, and how many nodes it has at most."""
    parser.add_argument("file", type=Path, help="the ONNX file")
    parser.add_argument("--out", type=Path, help=".svg to write, beside the file by default")
    parser.add_argument("--limit", type=int, default=240, help="nodes that are drawn one by one")


def run(options: argparse.Namespace) -> None:
    """Draws, and prints where."""
    out = options.out or options.file.with_suffix(".svg")
    drawn = picture(options.file, options.limit)
    with replacing(out) as file:
        file.write(drawn.encode())
    print(out)
