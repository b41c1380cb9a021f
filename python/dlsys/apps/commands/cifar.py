"""Train a residual network on CIFAR-10 fast, or measure it."""

from __future__ import annotations

import argparse

from .. import usage
from ..devices import add_device, choose_device
from ..setup import PRECISIONS
from ..usage import Parser

_MORE = """\
train    writes to DIR: checkpoints, log.jsonl and run.json, and prints accuracies. CIFAR-10 is
         taken from --data-dir, its binary or its Python version, or downloaded and checked;
         --made N trains on N made images of the same shape instead, which take as long. Ctrl-C
         ends it, --resume goes on.
evaluate the accuracies of a run."""


def add_arguments(parser: Parser) -> None:
    parser.epilog = _MORE
    parser.add_argument("action", choices=("train", "evaluate"), help="train or evaluate")
    parser.add_argument("folder", type=usage.path, metavar="DIR", help="of the run")
    group = parser.add_argument_group("training")
    group.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    group.add_argument("--data-dir", type=usage.path, metavar="DIR", help="that has CIFAR-10")
    group.add_argument("--made", type=usage.positive, metavar="N", help="made images instead")
    group.add_argument("-e", "--epochs", type=usage.positive, metavar="N", help="default: 15")
    group.add_argument("--batch-size", type=usage.positive, metavar="N", help="default: 512")
    group.add_argument("--width", type=usage.positive, metavar="N", help="channels; default: 64")
    group.add_argument("--lr", type=usage.not_negative, metavar="RATE", help="the highest")
    group.add_argument("--decay", type=usage.not_negative, metavar="SHARE", help="of weights")
    group.add_argument("--precision", choices=PRECISIONS, help="default: bf16")
    group.add_argument("--seed", type=usage.seed, metavar="N", help="of weights and order")
    add_device(parser.add_argument_group("where"))


def run(options: argparse.Namespace, parser: Parser) -> None:
    """Does what the action says."""
    from ..cifar import training

    ctx = choose_device(options.device)
    (training.run if options.action == "train" else training.evaluate)(options, ctx)
