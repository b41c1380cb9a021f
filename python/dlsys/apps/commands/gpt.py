"""Train a GPT on text, write with it, or measure it."""

from __future__ import annotations

import argparse

from .. import usage
from ..devices import add_device, choose_device
from ..setup import PRECISIONS
from ..usage import Parser

_MORE = """\
train    writes to DIR: tokens/, checkpoints, log.jsonl and run.json; without --text it reads the
         source of Python's standard library. Ctrl-C ends it, --resume goes on.
sample   writes text behind --prompt, with the best model in DIR, or with the GPT-2 whose files
         (model.safetensors, config.json, vocab.json, merges.txt) are there.
evaluate the loss over the text that training held back, or over --text."""


def add_arguments(parser: Parser) -> None:
    parser.epilog = _MORE
    actions = ("train", "sample", "evaluate")
    parser.add_argument("action", choices=actions, help="train, sample or evaluate")
    parser.add_argument("folder", type=usage.path, metavar="DIR", help="of the run")
    _add_text(parser)
    _add_model(parser)
    _add_training(parser)
    _add_sampling(parser)
    add_device(parser.add_argument_group("where"))


def _add_text(parser: Parser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument("--text", type=usage.path, nargs="+", metavar="PATH", help="files, folders")
    group.add_argument("--max-bytes", type=usage.positive, metavar="N", help="of text, at most")
    group.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="char, the default, byte, or the folder of GPT-2's vocab.json and merges.txt",
    )


def _add_model(parser: Parser) -> None:
    group = parser.add_argument_group("model, for train")
    for name in ("layers", "heads", "features", "context"):
        group.add_argument(f"--{name}", type=usage.positive, metavar="N")
    group.add_argument("--dropout", type=usage.share, metavar="P")
    group.add_argument("--positions", choices=("learned", "rotary"))
    group.add_argument("--norm", choices=("layer", "rms"))
    group.add_argument("--mlp", choices=("gelu", "swiglu"))


def _add_training(parser: Parser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--preset", choices=("30m",), help="30 million parameters, for a GPU")
    group.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    group.add_argument("--steps", type=usage.positive, metavar="N", help="updates in all")
    group.add_argument(
        "--every", type=usage.positive, metavar="N", help="updates between validations"
    )
    group.add_argument("--batch-size", type=usage.positive, metavar="N", help="sequences")
    group.add_argument(
        "--accumulate", type=usage.positive, metavar="N", help="batches an update averages over"
    )
    group.add_argument("--lr", type=usage.not_negative, metavar="RATE", help="the highest")
    group.add_argument("--warmup", type=usage.positive, metavar="N", help="updates up to it")
    group.add_argument("--weight-decay", type=usage.not_negative, metavar="X", help="of matrices")
    group.add_argument("--precision", choices=PRECISIONS, help="default: fp32")
    group.add_argument("--clip", type=usage.not_negative, metavar="NORM", help="of gradients")


def _add_sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--seed", type=usage.seed, metavar="N", help="of weights, order, samples")
    group.add_argument("--prompt", metavar="TEXT", help="what samples go on from")
    group.add_argument("-n", "--tokens", type=usage.positive, metavar="N", help="to write")
    group.add_argument("--temperature", type=usage.not_negative, metavar="T")
    group.add_argument("--top-k", type=usage.positive, metavar="K")
    group.add_argument("--top-p", type=usage.not_negative, metavar="P")


def run(options: argparse.Namespace, parser: Parser) -> None:
    """Does what the action says."""
    from ..gpt import sampling, training

    ctx = choose_device(options.device)
    if options.action == "train":
        training.run(options, ctx)
    elif options.action == "sample":
        sampling.write(options, ctx)
    else:
        sampling.evaluate(options, ctx)
