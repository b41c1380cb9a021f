"""Trains networks on MNIST: python mnist_dlsys.py -m mlp -c auto -e 10 -l"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

# What is installed has the library; a checkout where nothing is installed runs what is in it. The
# look at a file tells this package from another one of its name.
if __package__ in (None, ""):
    installed = importlib.util.find_spec("dlsys")
    folders = installed.submodule_search_locations if installed else None
    if not any((Path(folder) / "apps" / "mnist.py").is_file() for folder in folders or ()):
        sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

from dlsys.errors import DlsysError

try:
    from dlsys import ndarray
    from dlsys.apps import options as command_line
    from dlsys.apps import streams
    from dlsys.apps.setup import Setup, UsageError, choose
    from dlsys.runtime import device
except DlsysError as error:  # a DLSYS_* variable whose value cannot be
    sys.exit(f"error: {error}")

ALL = ("logreg", "mlp")  # the assignment's, in seconds on any device
KEEPING = ("checkpoint", "log", "report")


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
    setups = chosen(options) if options.resume is None else [resumed(options)]
    ctx = choose_device(options.device)
    first = setups[0]
    if first.assignment and not first.early_stop and not kept(options):
        from dlsys.apps import assignment

        assignment.run(setups, options.data_dir, ctx, options.loss, options.profile)
    else:
        for setup in setups:
            train_by_fit(setup, ctx, options)


def kept(options: argparse.Namespace) -> str | None:
    """The first option that keeps something of a run."""
    given = vars(options)
    return next((f"--{name}" for name in KEEPING if given[name] is not None), None)


def chosen(options: argparse.Namespace) -> list[Setup]:
    """The setups of new runs."""
    folder, given = options.checkpoint, vars(options)
    if folder is not None and (folder / "last.safetensors").exists():
        raise UsageError(
            f"{folder} has the checkpoints of a run: go on with it, --resume {folder}, or choose "
            "another folder"
        )
    if options.model not in (None, "all"):
        return [choose(options.model, given)]
    if kept(options):
        raise UsageError(f"{kept(options)} is for one run: choose a model, such as -m mlp")
    if options.hidden:
        raise UsageError("--hidden has the sizes of mlp: add -m mlp")
    return [choose(name, given) for name in ALL]


def resumed(options: argparse.Namespace) -> Setup:
    """The setup of the run to go on with, whose folder is that of its checkpoints from now on."""
    from dlsys.apps import mnist

    if options.resume is True:
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
    if command == "evaluate" and options.files and options.data_dir:
        raise UsageError("evaluate takes IMAGES LABELS or the set in --data-dir: leave one out")
    from dlsys.apps import mnist

    ctx = choose_device(options.device)
    if command == "predict":
        mnist.predict(options.checkpoint, options.files, options.top, ctx)
    else:
        mnist.evaluate(options.checkpoint, options.files, options.data_dir, ctx)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, 1 for an error that was explained, 2 for options, 130 after Ctrl-C."""
    return streams.guarded(lambda: run(arguments))


def run(arguments: list[str] | None) -> int:
    """The exit status, of what is not the fault of standard output."""
    command, parser, options = command_line.read(sys.argv[1:] if arguments is None else arguments)
    try:
        if command:
            ask(command, options)
        else:
            train(options)
    except UsageError as error:
        parser.error(str(error))
    except KeyboardInterrupt as interrupt:
        nothing = "nothing" if command else "nothing trained yet"
        print(f"interrupted; done: {str(interrupt) or nothing}", file=sys.stderr)
        return 130
    except DlsysError as error:
        streams.say(str(error))
        return 1
    except MemoryError as error:
        streams.say(f"there is not enough memory: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
