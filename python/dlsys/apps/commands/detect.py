"""Train a network that finds things in photographs, find some, or measure it."""

from __future__ import annotations

import argparse

from .. import usage
from ..devices import add_device, choose_device
from ..setup import PRECISIONS
from ..usage import Parser

_MORE = """\
train    writes to DIR: checkpoints, log.jsonl and run.json. Without --data it takes digits and
         textures on photos of packages. Ctrl-C ends it, --resume goes on.
run      draws boxes in photos, files or folders of them: detect run DIR photo.jpg; each becomes
         NAME_found.png beside it or in --out.
evaluate COCO's figures, mAP among them, on what was held out."""


def add_arguments(parser: Parser) -> None:
    parser.epilog = _MORE
    actions = ("train", "run", "evaluate")
    parser.add_argument("action", choices=actions, help="train, run or evaluate")
    parser.add_argument("folder", type=usage.path, metavar="DIR", help="of the run")
    parser.add_argument("paths", type=usage.path, nargs="*", metavar="PATH", help="photos")
    _add_training(parser)
    group = parser.add_argument_group("run and evaluate")
    group.add_argument("-o", "--out", type=usage.path, metavar="DIR", help="for drawn photos")
    group.add_argument("--least", type=usage.not_negative, metavar="SCORE", help="default: 0.4")
    group.add_argument(
        "--suppression", choices=("hard", "soft", "none"), default="hard",
        help="of boxes that overlap a better one: NMS, Soft-NMS or none; default: hard",
    )  # fmt: skip
    group.add_argument("--json", type=usage.path, metavar="FILE", help="the figures as JSON")
    group.add_argument(
        "--pictures", type=usage.path, metavar="FILE", help="some photos: PNG, JPEG or WebP"
    )
    add_device(parser.add_argument_group("where"))


def _add_training(parser: Parser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    for name, what in (("data", "train on"), ("held", "measure it on")):
        group.add_argument(
            f"--{name}", type=usage.path, metavar="FILE",
            help=f"to {what}: a list of VOC, ImageSets/Main/*.txt, or COCO's JSON",
        )  # fmt: skip
    group.add_argument(
        "--images", type=usage.whole, metavar="N",
        help="made scenes, 0 for new ones in each batch; default: 2000",
    )  # fmt: skip
    for name, what in (
        ("steps", "updates in all"),
        ("every", "updates between validations"),
        ("batch-size", "photos"),
        ("size", "pixels of the square that photos are scaled into; default: 128"),
        ("width", "channels of the feature pyramid; default: 48"),
    ):
        group.add_argument(f"--{name}", type=usage.positive, metavar="N", help=what)
    group.add_argument("--flip", type=int, choices=(0, 1), help="1: half of the photos mirrored")
    group.add_argument("--lr", type=usage.not_negative, metavar="RATE", help="the highest")
    group.add_argument("--precision", choices=PRECISIONS, help="default: fp32")
    group.add_argument("--seed", type=usage.seed, metavar="N", help="of weights and scenes")


def run(options: argparse.Namespace, parser: Parser) -> int:
    """Does what the action says."""
    from ..detect import finding, training

    ctx = choose_device(options.device)
    if options.action == "run":
        return finding.run(options, ctx)
    if options.action == "evaluate":
        finding.evaluate(options, ctx)
    else:
        training.run(options, ctx)
    return 0
