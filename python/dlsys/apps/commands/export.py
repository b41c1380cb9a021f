"""Write a trained network as an ONNX file, which other runtimes run."""

from __future__ import annotations

import argparse

from ..options import add_data_dir
from ..usage import CHECKPOINT, Parser, path

_SAMPLES = 512  # training images that --int8 reads


def add_arguments(parser: Parser) -> None:
    parser.epilog = CHECKPOINT
    parser.add_argument("checkpoint", type=path, metavar="CHECKPOINT")
    parser.add_argument("file", type=path, metavar="FILE", help="the ONNX file to write")
    parser.add_argument("--opset", type=int, default=21, help="version of ONNX's operators; 21")
    ranges = "integers of 8 bits, for ranges over training images: minmax, percentile or entropy"
    parser.add_argument("--int8", nargs="?", const="minmax", metavar="METHOD", help=ranges)
    add_data_dir(parser.add_argument_group("where"))


def run(options: argparse.Namespace, parser: Parser) -> None:
    """Writes the file and prints what it has."""
    from ...data import Loader
    from ...inference import quantize
    from ...onnx.commands.check import describe
    from ...onnx.exporter import export
    from .. import trained

    setup, model = trained.load_model(options.checkpoint)
    if options.int8 is not None:
        samples = trained.load_sets(setup, options.data_dir).train
        images, labels = samples.images[:_SAMPLES], samples.labels[:_SAMPLES]
        model = quantize(model, Loader((images, labels), 64), method=options.int8)
    export(model, options.file, opset=options.opset)
    print(describe(options.file))
