"""Write the model of a checkpoint as an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...train import load_model
from .check import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A checkpoint, the file, and what of its form can be chosen."""
    parser.add_argument("checkpoint", type=Path, help="a file, or the folder of a run")
    parser.add_argument("file", type=Path, help="the ONNX file to write")
    parser.add_argument("--opset", type=int, default=21, help="version of the operators")
    parser.add_argument(
        "--shape", type=shape, metavar="N,C,H,W",
        help="of the input with the batch, ? for a free extent; that of the training data if known",
    )  # fmt: skip


def shape(text: str) -> tuple[int | None, ...]:
    """A shape such as `?,1,28,28`."""
    return tuple(None if part.strip() == "?" else int(part) for part in text.split(","))


def run(options: argparse.Namespace) -> None:
    """Converts, and prints what was written."""
    from ..exporter import export

    export(load_model(options.checkpoint), options.file, options.shape, opset=options.opset)
    print(describe(options.file))
