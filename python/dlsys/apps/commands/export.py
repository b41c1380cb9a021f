"""Write a trained network as an ONNX file, which other runtimes run."""

from __future__ import annotations

import argparse

from ..usage import CHECKPOINT, Parser, path


def add_arguments(parser: Parser) -> None:
    parser.epilog = CHECKPOINT
    parser.add_argument("checkpoint", type=path, metavar="CHECKPOINT")
    parser.add_argument("file", type=path, metavar="FILE", help="the ONNX file to write")
    parser.add_argument("--opset", type=int, default=21, help="version of ONNX's operators; 21")


def run(options: argparse.Namespace, parser: Parser) -> None:
    """Writes the file and prints what it has."""
    from ...onnx.commands.check import describe
    from ...onnx.exporter import export
    from .. import trained

    _, model = trained.load_model(options.checkpoint)
    export(model, options.file, opset=options.opset)
    print(describe(options.file))
