"""Measure a trained network on its validation and test set, or on two IDX files."""

from __future__ import annotations

import argparse

from ..devices import add_device, choose_device
from ..options import add_data_dir
from ..usage import CHECKPOINT, Parser, UsageError, path


def add_arguments(parser: Parser) -> None:
    parser.epilog = CHECKPOINT
    parser.add_argument("checkpoint", type=path, nargs="?", metavar="CHECKPOINT")
    files = "two IDX files: images and their labels"
    parser.add_argument("files", type=path, nargs="*", metavar="IDX", help=files)
    where = parser.add_argument_group("where")
    add_device(where)
    add_data_dir(where)


def run(options: argparse.Namespace, parser: Parser) -> None:
    """Prints the accuracies."""
    if options.checkpoint is None:
        raise UsageError("evaluate needs a checkpoint; -m cnn --checkpoint DIR makes one")
    if len(options.files) not in (0, 2):
        raise UsageError("evaluate takes two IDX files, IMAGES LABELS, or none for the test set")
    if options.files and options.data_dir:
        raise UsageError("evaluate takes IMAGES LABELS or the set in --data-dir: leave one out")
    from .. import trained

    ctx = choose_device(options.device)
    trained.evaluate(options.checkpoint, options.files, options.data_dir, ctx)
