"""Trains networks on MNIST: python mnist_dlsys.py -m mlp -c auto -e 10 -l"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # from a checkout, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

import dlsys
from dlsys import ndarray
from dlsys.apps import assignment
from dlsys.apps.setup import (
    AUGMENTATIONS,
    DATASETS,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    Setup,
    UsageError,
    choose,
)
from dlsys.data import load_fashion_mnist, load_mnist
from dlsys.errors import DlsysError
from dlsys.runtime import device

ALL = ("logreg", "mlp")  # the assignment's, in seconds on any device
COMMANDS = ("predict", "evaluate")
USAGE = """\
mnist_dlsys.py [-m MODEL] [-c DEVICE] [-e EPOCHS] [-l] [options]
       mnist_dlsys.py predict CHECKPOINT FILE...
       mnist_dlsys.py evaluate CHECKPOINT [IMAGES LABELS]"""
MODERN = """\
One of these makes logreg and mlp train as cnn and resnet do: with momentum, one cycle of the
rate, shuffled batches of 100, He's initial weights."""
EXAMPLES = """\
examples:
  mnist_dlsys.py -m mlp -c gpu -e 10 -l
  mnist_dlsys.py -m cnn -e 10 --checkpoint runs/cnn --report runs/cnn.html
  mnist_dlsys.py --resume runs/cnn
  mnist_dlsys.py -m resnet -e 3 --augment shift,rotate
  mnist_dlsys.py predict runs/cnn digit.png
  mnist_dlsys.py evaluate runs/cnn

predict and evaluate have a help of their own: mnist_dlsys.py predict --help
"""
FOOT = "a checkpoint is a file, or the folder of a run, which stands for its best one"


# ---- what is given ----
def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def not_negative(text: str) -> float:
    """A rate, a decay or a duration."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return value


def share(text: str) -> float:
    """A number from 0 to 1, which it is not."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected 0 or more and less than 1, got {text}")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Layer sizes: 256,100"""
    return tuple(positive(part) for part in text.split(","))


def augmentations(text: str) -> tuple[tuple[str, float], ...]:
    """Names, each with its own number if wanted: shift=3,rotate"""
    found = []
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in AUGMENTATIONS:
            known = ", ".join(AUGMENTATIONS)
            raise argparse.ArgumentTypeError(f"unknown {name!r}, expected names of {known}")
        try:
            found.append((name, float(number) if number else AUGMENTATIONS[name]))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected {name}={AUGMENTATIONS[name]:g}, a number behind the sign"
            ) from None
    return tuple(sorted(found, key=lambda item: item[0] == "mixup"))  # which must come last


def add_shared(group: argparse._ArgumentGroup) -> None:
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


def add_data_dir(group: argparse._ArgumentGroup) -> None:
    """Of the commands that read a data set."""
    group.add_argument("--data-dir", metavar="DIR", help="folder of the set's four IDX files")


def training_parser() -> argparse.ArgumentParser:
    """The command line of a training run."""
    parser = argparse.ArgumentParser(
        usage=USAGE,
        description="Train a network on MNIST, or ask one that was trained.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dlsys {dlsys.__version__}")
    add_run(parser.add_argument_group("the run"))
    add_training(parser.add_argument_group("training", MODERN))
    add_keeping(parser.add_argument_group("what is kept and shown"))
    return parser


def add_run(group: argparse._ArgumentGroup) -> None:
    """Which network, where, how long."""
    group.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        choices=[*MODELS, "all"],
        help="logreg, mlp, cnn (LeNet-5), resnet (a small residual network), or all, the default: "
        "logreg and mlp",
    )
    group.add_argument("-e", "--num-epochs", dest="epochs", type=positive, help="default: 10")
    group.add_argument(
        "-l",
        "--print-loss-val-each-epoch",
        dest="loss",
        action="store_true",
        help="print the loss of each epoch",
    )
    add_shared(group)
    group.add_argument(
        "--dataset", metavar="NAME", choices=DATASETS, help="mnist, the default, or fashion"
    )
    add_data_dir(group)
    group.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="default: 1000; 100 for cnn and resnet, and with an option of training",
    )
    group.add_argument(
        "--lr",
        type=not_negative,
        metavar="RATE",
        help="of the mean loss, the peak of the schedule; default: batch size / 1000; with an "
        "option of training the optimizer's usual one",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of weights, order, dropout and augmentation; default: 123",
    )


def add_training(group: argparse._ArgumentGroup) -> None:
    """How it learns."""
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
        "--warmup", type=not_negative, metavar="EPOCHS", help="raise the rate in them; default: 0"
    )
    group.add_argument("--momentum", type=share, metavar="SHARE", help="default: 0.9")
    group.add_argument(
        "--weight-decay",
        type=not_negative,
        metavar="SHARE",
        help="L2, decoupled for adamw and lion; default: 0, 0.01 for adamw",
    )
    group.add_argument("--hidden", type=sizes, metavar="SIZES", help="of mlp; default: 256,100")
    group.add_argument("--dropout", type=share, metavar="SHARE", help="default: 0")
    usual = ", ".join(f"{name}={number:g}" for name, number in AUGMENTATIONS.items())
    group.add_argument(
        "--augment",
        type=augmentations,
        metavar="NAMES",
        help=f"what changes the images, such as shift,rotate or shift=3; known are {usual}",
    )


def add_keeping(group: argparse._ArgumentGroup) -> None:
    """What a run leaves behind."""
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="keep last.safetensors and best.safetensors there, after each epoch and Ctrl-C",
    )
    group.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="DIR",
        help="go on from a checkpoint, with the options that it has; default: the --checkpoint one",
    )
    group.add_argument(
        "--early-stop",
        type=positive,
        metavar="N",
        help="stop when the validation loss has not fallen for N epochs, and take the best weights",
    )
    group.add_argument(
        "--log", type=Path, metavar="DIR", help="log.jsonl, and TensorBoard with tensorboardX"
    )
    group.add_argument(
        "--report", type=Path, metavar="FILE", help="one HTML page about the run; needs matplotlib"
    )
    group.add_argument("--profile", action="store_true", help="print the time of each operator")


def asking_parser(command: str) -> argparse.ArgumentParser:
    """The command line of predict and evaluate."""
    what = {
        "predict": "Say what a trained network takes images for.",
        "evaluate": "Measure a trained network, on its validation and test set unless files are "
        "given.",
    }
    parser = argparse.ArgumentParser(
        prog=f"mnist_dlsys.py {command}", description=what[command], epilog=FOOT
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", metavar="CHECKPOINT")
    if command == "predict":
        files = "images, or IDX files of images (n, 28, 28)"
        parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help=files)
        parser.add_argument(
            "-k",
            "--top",
            type=positive,
            metavar="N",
            default=3,
            help="classes an image; default: 3",
        )
    else:
        files = "two IDX files: images and their labels"
        parser.add_argument("files", type=Path, nargs="*", metavar="IDX", help=files)
    where = parser.add_argument_group("where")
    add_shared(where)
    if command == "evaluate":
        add_data_dir(where)
    return parser


# ---- what is done ----
def choose_device(name: str) -> ndarray.Context | None:
    """The device asked for, or the best one that is there, with the reasons against better ones."""
    if name != "auto":
        return {"numpy": None, "cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}[name]
    ctx, reasons = device.best_context()
    for reason in reasons:
        print(f"not used: {reason}")
    return ctx


def train(options: argparse.Namespace) -> None:
    """A run of each model asked for."""
    keeping = ("checkpoint", "log", "report")
    given = vars(options)
    kept = next((f"--{name}" for name in keeping if given[name] is not None), None)
    if options.resume is not None:
        setups = [resumed(options)]
    elif options.model in (None, "all"):
        if kept:
            raise UsageError(f"{kept} is for one run: choose a model, such as -m mlp")
        if options.hidden:
            raise UsageError("--hidden has the sizes of mlp: add -m mlp")
        setups = [choose(name, given) for name in ALL]
    else:
        setups = [choose(options.model, given)]
    ctx = choose_device(options.device)
    for setup in setups:
        if setup.assignment and not (kept or options.early_stop or options.resume):
            load = {"mnist": load_mnist, "fashion": load_fashion_mnist}[setup.dataset]
            assignment.run(setup, load(options.data_dir), ctx, options.loss, options.profile)
        else:
            train_by_fit(setup, ctx, options)


def resumed(options: argparse.Namespace) -> Setup:
    """The setup of the run to go on with, whose folder is that of its checkpoints from now on."""
    from dlsys.apps import mnist

    if options.resume == Path():
        if options.checkpoint is None:
            raise UsageError("--resume goes on from a checkpoint: say which, --resume DIR")
        options.resume = options.checkpoint
    if options.model == "all":
        raise UsageError("--resume goes on with one run: leave -m out, the checkpoint says it")
    setup = mnist.setup_of(options.resume)
    setup.check_same(str(options.resume), vars(options))
    if options.checkpoint is None:
        folder = options.resume.is_dir()
        options.checkpoint = options.resume if folder else options.resume.parent
    return setup.lasting(options.epochs or setup.epochs)


def train_by_fit(setup: Setup, ctx: ndarray.Context | None, options: argparse.Namespace) -> None:
    """A run with everything around it."""
    from dlsys.apps import mnist

    wishes = mnist.Wishes(
        print_loss=options.loss,
        profiled=options.profile,
        checkpoint=options.checkpoint,
        resume=options.resume,
        early_stop=options.early_stop or 0,
        log=options.log,
        report=options.report,
    )
    mnist.run(setup, options.data_dir, ctx, wishes)


def ask(command: str, options: argparse.Namespace) -> None:
    """predict or evaluate."""
    if options.checkpoint is None:
        raise UsageError(f"{command} needs a checkpoint; -m cnn --checkpoint DIR makes one")
    if command == "predict" and not options.files:
        raise UsageError("predict needs images: predict CHECKPOINT digit.png, or an IDX file")
    if command == "evaluate" and len(options.files) not in (0, 2):
        raise UsageError("evaluate takes two IDX files, IMAGES LABELS, or none for the test set")
    from dlsys.apps import mnist

    ctx = choose_device(options.device)
    if command == "predict":
        mnist.predict(options.checkpoint, options.files, options.top, ctx)
    else:
        mnist.evaluate(options.checkpoint, options.files, options.data_dir, ctx)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, 1 for an error that was explained, 2 for options, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    command = given[0] if given and given[0] in COMMANDS else None
    parser = asking_parser(command) if command else training_parser()
    options = parser.parse_args(given[1:] if command else given)
    try:
        if command:
            ask(command, options)
        else:
            train(options)
    except UsageError as error:
        parser.error(str(error))
    except KeyboardInterrupt as interrupt:
        nothing = "nothing" if command else "nothing trained yet"
        print(f"interrupted; done: {interrupt or nothing}", file=sys.stderr)
        return 130
    except (DlsysError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
