"""The command line of `mnist_dlsys.py`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .. import __version__
from .setup import AUGMENTATIONS, DATASETS, INTEGRAL, MODELS, OPTIMIZERS, SCHEDULES

Number = TypeVar("Number", int, float)

COMMANDS = ("predict", "evaluate")
_MOST = 10**9  # of whatever is counted
_LAYERS = 100
_MOST_LETTERS = 40  # letters of an argument that is refused
_USAGE = """\
mnist_dlsys.py [-m MODEL] [-c DEVICE] [-e EPOCHS] [-l] [options]
       mnist_dlsys.py predict CHECKPOINT FILE...
       mnist_dlsys.py evaluate CHECKPOINT [IMAGES LABELS]"""
_MODERN = """\
One of these makes logreg and mlp train as cnn and resnet do: with momentum, one cycle of the
rate, shuffled batches of 100, He's initial weights."""
_EXAMPLES = """\
examples:
  mnist_dlsys.py -m mlp -c gpu -e 10 -l
  mnist_dlsys.py -m cnn -e 10 --checkpoint runs/cnn --report runs/cnn.html
  mnist_dlsys.py --resume runs/cnn
  mnist_dlsys.py -m resnet -e 3 --augment shift,rotate
  mnist_dlsys.py predict runs/cnn digit.png
  mnist_dlsys.py evaluate runs/cnn

predict and evaluate have a help of their own: mnist_dlsys.py predict --help
"""
_FOOT = "a checkpoint is a file, or the folder of a run, which means its best one"


def read(arguments: list[str]) -> tuple[str | None, argparse.ArgumentParser, argparse.Namespace]:
    """The command, None for a training run; the parser for errors; the options. SystemExit with
    status 2 and a message for what is not understood.
    """
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    parser = _asking_parser(command) if command else _training_parser()
    return command, parser, parser.parse_args(arguments[1:] if command else arguments)


# ---- the values of options ----
def _read(
    kind: Callable[[str], Number], text: str, fits: Callable[[Number], bool], what: str
) -> Number:
    with contextlib.suppress(ValueError, OverflowError):
        value = kind(text)
        if fits(value):
            return value
    cut = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
    raise argparse.ArgumentTypeError(f"expected {what}, got {cut or 'nothing'}")


def _positive(text: str) -> int:
    """An argument that counts something."""
    value = _read(int, text, lambda value: value >= 1, "a positive number")
    return _read(int, text, lambda _: value <= _MOST, f"at most {_MOST}")


def _path(text: str) -> Path:
    """The name of a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got nothing")
    return Path(text)


def _seed(text: str) -> int:
    """A seed, as every generator here takes it."""
    return _read(int, text, lambda value: 0 <= value < 2**32, "an integer from 0 to 4294967295")


def _not_negative(text: str) -> float:
    """A rate, a decay or a duration."""
    return _read(float, text, lambda value: 0 <= value < float("inf"), "a number from 0 on")


def _share(text: str) -> float:
    """A part of something, but not all of it."""
    return _read(float, text, lambda value: 0 <= value < 1, "0 or more and less than 1")


def _sizes(text: str) -> tuple[int, ...]:
    """Layer sizes: 256,100"""
    parts = text.split(",")
    if len(parts) > _LAYERS:
        raise argparse.ArgumentTypeError(f"expected at most {_LAYERS} sizes, got {len(parts)}")
    return tuple(map(_positive, parts))


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
    return _read(
        float,
        text,
        lambda value: 0 < value <= most and (not integral or value.is_integer()),
        f"{name}= with {kind} above 0, at most {most:g}",
    )


# ---- the commands ----
def _add_shared(group: argparse._ArgumentGroup) -> None:
    """The options of all commands."""
    group.add_argument(
        "-c",
        "--executor-context",
        dest="device",
        metavar="DEVICE",
        choices=["auto", "numpy", "cpu", "gpu"],
        default="auto",
        help="numpy, cpu, gpu, or auto, the default: the best one that is here",
    )


def _add_data_dir(group: argparse._ArgumentGroup) -> None:
    """Of the commands that read a data set."""
    group.add_argument(
        "--data-dir", type=_path, metavar="DIR", help="folder of the set's four IDX files"
    )


def _training_parser() -> argparse.ArgumentParser:
    """The command line of a training run."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        description="Train a network on MNIST, or ask one that was trained.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dlsys {__version__}")
    _add_run(parser.add_argument_group("the run"))
    _add_training(parser.add_argument_group("training", _MODERN))
    _add_keeping(parser.add_argument_group("what is kept and shown"))
    return parser


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
    group.add_argument("-e", "--num-epochs", dest="epochs", type=_positive, help="default: 10")
    group.add_argument(
        "-l",
        "--print-loss-val-each-epoch",
        dest="loss",
        action="store_true",
        help="print the loss of each epoch",
    )
    _add_shared(group)
    group.add_argument(
        "--dataset", metavar="NAME", choices=DATASETS, help="mnist, the default, or fashion"
    )
    _add_data_dir(group)
    group.add_argument(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="default: 1000; 100 for cnn and resnet, and with an option of training",
    )
    group.add_argument(
        "--lr",
        type=_not_negative,
        metavar="RATE",
        help="of the mean loss, the peak of the schedule; default: batch size / 1000; with an "
        "option of training the optimizer's usual one",
    )
    group.add_argument(
        "--seed",
        type=_seed,
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
        "--warmup", type=_not_negative, metavar="EPOCHS", help="raise the rate in them; default: 0"
    )
    group.add_argument("--momentum", type=_share, metavar="SHARE", help="default: 0.9")
    group.add_argument(
        "--weight-decay",
        type=_not_negative,
        metavar="SHARE",
        help="L2, decoupled for adamw and lion; default: 0, 0.01 for adamw",
    )
    group.add_argument("--hidden", type=_sizes, metavar="SIZES", help="of mlp; default: 256,100")
    group.add_argument("--dropout", type=_share, metavar="SHARE", help="default: 0")
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
        type=_path,
        metavar="DIR",
        help="keep last.safetensors and best.safetensors there, after each epoch and Ctrl-C",
    )
    group.add_argument(
        "--resume",
        type=_path,
        nargs="?",
        const=True,
        metavar="DIR",
        help="go on from a checkpoint, with the options that it has; default: the --checkpoint one",
    )
    group.add_argument(
        "--early-stop",
        type=_positive,
        metavar="N",
        help="stop when the validation loss has not fallen for N epochs, and take the best weights",
    )
    group.add_argument(
        "--log", type=_path, metavar="DIR", help="log.jsonl, and TensorBoard with tensorboardX"
    )
    group.add_argument(
        "--report", type=_path, metavar="FILE", help="one HTML page about the run; needs matplotlib"
    )
    group.add_argument("--profile", action="store_true", help="print the time of each operator")


def _asking_parser(command: str) -> argparse.ArgumentParser:
    """The command line of predict and evaluate."""
    what = {
        "predict": "Say what a trained network takes images for.",
        "evaluate": "Measure a trained network, on its validation and test set unless files are "
        "given.",
    }
    parser = argparse.ArgumentParser(
        prog=f"mnist_dlsys.py {command}", description=what[command], epilog=_FOOT
    )
    parser.add_argument("checkpoint", type=_path, nargs="?", metavar="CHECKPOINT")
    if command == "predict":
        files = "images, or IDX files of images (n, 28, 28)"
        parser.add_argument("files", type=_path, nargs="*", metavar="FILE", help=files)
        parser.add_argument(
            "-k",
            "--top",
            type=_positive,
            metavar="N",
            default=3,
            help="classes an image; default: 3",
        )
    else:
        files = "two IDX files: images and their labels"
        parser.add_argument("files", type=_path, nargs="*", metavar="IDX", help=files)
    where = parser.add_argument_group("where")
    _add_shared(where)
    if command == "evaluate":
        _add_data_dir(where)
    return parser
