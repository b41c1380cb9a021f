"""The options of a training run on MNIST."""

from __future__ import annotations

import argparse

from ..rungs import CONV
from . import usage
from .devices import add_device
from .setup import AUGMENTATIONS, DATASETS, INTEGRAL, MODELS, OPTIMIZERS, PRECISIONS, SCHEDULES

_LAYERS = 100
_USAGE = """\
%(prog)s [-m MODEL] [-c DEVICE] [-e EPOCHS] [-l] [options]
       %(prog)s predict CHECKPOINT FILE...
       %(prog)s evaluate CHECKPOINT [IMAGES LABELS]"""
_MODERN = """\
One of these makes logreg and mlp train as cnn and resnet do: with momentum, one cycle of the
rate, shuffled batches of 100, He's initial weights."""
_EXAMPLES = """\
examples:
  %(prog)s -m mlp --device gpu --epochs 10 -l
  %(prog)s -m cnn -e 10 --checkpoint runs/cnn --report runs/cnn.html
  %(prog)s --resume runs/cnn
  %(prog)s --init-from runs/cnn -e 3 --lr 0.01 --checkpoint runs/more
  %(prog)s -m resnet -e 3 --augment shift,rotate
  %(prog)s predict runs/cnn digit.png
  %(prog)s evaluate runs/cnn

predict and evaluate have a help of their own: %(prog)s predict --help
"""


def add_training(parser: usage.Parser) -> None:
    """Declares the command line of a training run."""
    parser.usage, parser.epilog = _USAGE, _EXAMPLES
    parser.add_version()
    _add_run(parser.add_argument_group("the run"))
    _add_training(parser.add_argument_group("training", _MODERN))
    _add_keeping(parser.add_argument_group("what is kept and shown"))


def add_data_dir(group: argparse._ArgumentGroup) -> None:
    """Of the commands that read a data set."""
    group.add_argument(
        "--data-dir", type=usage.path, metavar="DIR", help="folder of the set's four IDX files"
    )


def _sizes(text: str) -> tuple[int, ...]:
    """Layer sizes: 256,100"""
    parts = text.split(",")
    if len(parts) > _LAYERS:
        raise argparse.ArgumentTypeError(f"expected at most {_LAYERS} sizes, got {len(parts)}")
    return tuple(map(usage.positive, parts))


def _augmentations(text: str) -> tuple[tuple[str, float], ...]:
    """Names, each with its own number if wanted: shift=3,rotate"""
    found = []
    for part in text.split(","):
        name, sign, number = part.partition("=")
        if name not in AUGMENTATIONS:
            known = ", ".join(AUGMENTATIONS)
            raise argparse.ArgumentTypeError(f"unknown {name!r}, expected names of {known}")
        found.append((name, _strength(name, number) if sign else AUGMENTATIONS[name][0]))
    return tuple(sorted(found, key=lambda item: item[0] == "mixup"))  # which must come last


def _strength(name: str, text: str) -> float:
    most, integral = AUGMENTATIONS[name][1], name in INTEGRAL
    kind = "an integer" if integral else "a number"
    return usage.read(
        float,
        text,
        lambda value: 0 < value <= most and (not integral or value.is_integer()),
        f"{name}= with {kind} above 0, at most {most:g}",
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    """Which network, where, how long."""
    group.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        choices=[*MODELS, "all"],
        help="logreg, mlp, cnn (LeNet-5), resnet (a small residual network), or all, the default: "
        "logreg and mlp",
    )
    group.add_argument(
        "-e", "--epochs", "--num-epochs", dest="epochs", type=usage.positive, help="default: 10"
    )
    group.add_argument(
        "-l",
        "--print-loss-val-each-epoch",
        dest="loss",
        action="store_true",
        help="print the loss and the validation accuracy of each epoch",
    )
    add_device(group)
    group.add_argument(
        "--conv-algo",
        metavar="NAME",
        choices=CONV.words,
        help="the rung by which cnn and resnet convolve: " + ", ".join(CONV.words) + "; default: "
        "DLSYS_CONV, or auto",
    )
    group.add_argument(
        "--precision",
        metavar="NAME",
        choices=PRECISIONS,
        help=f"{', '.join(PRECISIONS)}; default: fp32",
    )
    group.add_argument(
        "--dataset", metavar="NAME", choices=DATASETS, help="mnist, the default, or fashion"
    )
    add_data_dir(group)
    group.add_argument(
        "--batch-size",
        type=usage.positive,
        metavar="N",
        help="default: 1000; 100 for cnn and resnet, and with an option of training",
    )
    group.add_argument(
        "--lr",
        type=usage.not_negative,
        metavar="RATE",
        help="of the mean loss, the peak of the schedule; default: batch size / 1000; with an "
        "option of training the optimizer's usual one",
    )
    group.add_argument(
        "--seed",
        type=usage.seed,
        metavar="N",
        help="of weights, order, dropout and augmentation; default: 123",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    """The options of training."""
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        choices=OPTIMIZERS,
        help=f"{', '.join(OPTIMIZERS)}; default: momentum",
    )
    group.add_argument(
        "--schedule",
        metavar="NAME",
        choices=SCHEDULES,
        help=f"of the rate: {', '.join(SCHEDULES)}; default: one-cycle",
    )
    group.add_argument(
        "--warmup",
        type=usage.not_negative,
        metavar="EPOCHS",
        help="raise the rate in them; default: 0",
    )
    group.add_argument("--momentum", type=usage.share, metavar="SHARE", help="default: 0.9")
    group.add_argument(
        "--weight-decay",
        type=usage.not_negative,
        metavar="SHARE",
        help="L2, decoupled for adamw and lion; default: 0, 0.01 for adamw",
    )
    group.add_argument("--hidden", type=_sizes, metavar="SIZES", help="of mlp; default: 256,100")
    group.add_argument("--dropout", type=usage.share, metavar="SHARE", help="default: 0")
    known = ", ".join(f"{name}={usual:g}" for name, (usual, _) in AUGMENTATIONS.items())
    group.add_argument(
        "--augment",
        type=_augmentations,
        metavar="NAMES",
        help=f"what changes the images, such as shift,rotate or shift=3; known are {known}",
    )


def _add_keeping(group: argparse._ArgumentGroup) -> None:
    """The options of a run's outputs."""
    group.add_argument(
        "--checkpoint",
        type=usage.path,
        metavar="DIR",
        help="keep last.safetensors and best.safetensors there, after each epoch and Ctrl-C",
    )
    group.add_argument(
        "--resume",
        type=usage.path,
        nargs="?",
        const=True,
        metavar="DIR",
        help="go on from a checkpoint, with the options that it has; default: the --checkpoint one",
    )
    group.add_argument(
        "--init-from",
        type=usage.path,
        metavar="DIR",
        help="begin another run with the weights of a checkpoint, and its network",
    )
    group.add_argument(
        "--early-stop",
        type=usage.positive,
        metavar="N",
        help="stop when the validation loss has not fallen for N epochs, and take the best weights",
    )
    group.add_argument(
        "--log", type=usage.path, metavar="DIR", help="log.jsonl, and TensorBoard with tensorboardX"
    )
    group.add_argument(
        "--report",
        type=usage.page_path,
        metavar="FILE",
        help="one HTML page about the run; needs matplotlib",
    )
    group.add_argument("--profile", action="store_true", help="print the time of each operator")
    group.add_argument(
        "--hints",
        action=argparse.BooleanOptionalAction,
        help="end with what to try next; default: on a terminal",
    )
