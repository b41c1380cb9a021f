"""Train a network that enlarges photographs, enlarge some, or measure it."""

from __future__ import annotations

import argparse

from .. import usage
from ..devices import add_device, choose_device
from ..setup import PRECISIONS
from ..usage import Parser

_MORE = """\
train    writes to DIR: checkpoints, log.jsonl and run.json. Without --photos it takes those that
         scikit-image and scikit-learn ship; each third by name is held out. Ctrl-C ends it,
         --resume goes on.
run      enlarges photos, files or folders of them: superres run DIR photo.jpg; each becomes
         NAME_2x.png beside it or in --out.
evaluate the table of PSNR and SSIM against bicubic on the photos that were held out, or on all of
         --photos; several runs may follow: superres evaluate DIR DIR2 DIR3.
export   writes the network as an ONNX file: superres export DIR FILE.onnx."""


def add_arguments(parser: Parser) -> None:
    parser.epilog = _MORE
    actions = ("train", "run", "evaluate", "export")
    parser.add_argument("action", choices=actions, help="train, run, evaluate or export")
    parser.add_argument("folder", type=usage.path, metavar="DIR", help="of the run")
    parser.add_argument(
        "paths", type=usage.path, nargs="*", metavar="PATH", help="photos, runs, or an ONNX file"
    )
    _add_training(parser)
    group = parser.add_argument_group("run and evaluate")
    group.add_argument("-o", "--out", type=usage.path, metavar="DIR", help="for enlarged photos")
    group.add_argument("--tile", type=usage.positive, metavar="N", help="pixels; default: 256")
    group.add_argument("--json", type=usage.path, metavar="FILE", help="the table as JSON")
    group.add_argument(
        "--pictures", type=usage.path, metavar="FILE", help="photos side by side: PNG, JPEG or WebP"
    )
    add_device(parser.add_argument_group("where"))


def _add_training(parser: Parser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    group.add_argument("--network", choices=("espcn", "srcnn"), help="default: espcn")
    group.add_argument("--scale", type=int, choices=(2, 3, 4), help="default: 2")
    group.add_argument(
        "--photos", type=usage.path, nargs="+", metavar="PATH", help="files, folders"
    )
    group.add_argument("--steps", type=usage.positive, metavar="N", help="updates in all")
    group.add_argument(
        "--every", type=usage.positive, metavar="N", help="updates between validations"
    )
    group.add_argument("--batch-size", type=usage.positive, metavar="N", help="patches")
    group.add_argument(
        "--patch", type=usage.positive, metavar="N", help="pixels of a large photo; default: 72"
    )
    group.add_argument("--lr", type=usage.not_negative, metavar="RATE", help="the highest")
    group.add_argument("--precision", choices=PRECISIONS, help="default: fp32")
    group.add_argument("--seed", type=usage.seed, metavar="N", help="of weights and patches")


def run(options: argparse.Namespace, parser: Parser) -> int:
    """Does what the action says."""
    from ..superres import enlarging, evaluation, training

    if options.action == "export":
        enlarging.export(options)
        return 0
    ctx = choose_device(options.device)
    if options.action == "run":
        return enlarging.run(options, ctx)
    if options.action == "evaluate":
        evaluation.evaluate(options, ctx)
    else:
        training.run(options, ctx)
    return 0
