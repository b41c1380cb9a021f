"""Say what a trained network takes images for."""

from __future__ import annotations

import argparse

from ..devices import add_device, choose_device
from ..usage import CHECKPOINT, Parser, UsageError, path, positive

_PHOTOS = """\
Photos need Pillow. Ink and paper may have any color, the light may be uneven, the paper may be
transparent: a digit is found, cut out and centered as those of MNIST were.

A file that cannot be read is named on standard error, the others are shown, and the status is 1."""


def add_arguments(parser: Parser) -> None:
    parser.epilog = f"{_PHOTOS}\n\n{CHECKPOINT}"
    parser.add_argument("checkpoint", type=path, nargs="?", metavar="CHECKPOINT")
    files = "images, folders of images, or IDX files of images (n, 28, 28)"
    parser.add_argument("files", type=path, nargs="*", metavar="FILE", help=files)
    parser.add_argument(
        "-k", "--top", type=positive, metavar="N", default=3, help="classes an image; default: 3"
    )
    add_device(parser.add_argument_group("where"))


def run(options: argparse.Namespace, parser: Parser) -> int:
    """Prints a line an image."""
    if options.checkpoint is None:
        raise UsageError("predict needs a checkpoint; -m cnn --checkpoint DIR makes one")
    if not options.files:
        raise UsageError(
            "predict needs images: predict CHECKPOINT digit.png, a folder of images, or an IDX file"
        )
    from .. import trained

    ctx = choose_device(options.device)
    failed = trained.predict(options.checkpoint, options.files, options.top, ctx)
    return 1 if failed else 0
