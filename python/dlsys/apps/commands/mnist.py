"""Train a network on MNIST or Fashion-MNIST, or ask one that was trained."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import NotApplicableError
from ...runtime.device import Context
from ...settings import settings
from .. import hints
from ..devices import choose_device
from ..options import add_training
from ..setup import Setup, as_option, choose, counted
from ..usage import Parser, UsageError

ALIASES = ("predict", "evaluate")
ALL = ("logreg", "mlp")  # the assignment's, in seconds on any device
KEEPING = ("checkpoint", "log", "report")


def add_arguments(parser: Parser) -> None:
    add_training(parser)


def run(options: argparse.Namespace, parser: Parser) -> None:
    """A run of each model asked for."""
    try:
        setups = chosen(options) if options.resume is None else [resumed(options)]
        if options.conv_algo and all(setup.model in ALL for setup in setups):
            raise UsageError(
                f"--conv-algo is for what convolves, cnn and resnet; {setups[0].model} does not: "
                "leave it out"
            )
        ctx = choose_device(options.device)
        with _convolving_by(options.conv_algo):
            train(setups, ctx, options, parser.line)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or "nothing trained yet") from interrupt
    wanted = sys.stdout.isatty() if options.hints is None else options.hints
    if wanted:
        print(hints.after(setups[-1], options.checkpoint, parser.typed))


@contextlib.contextmanager
def _convolving_by(rung: str | None) -> Iterator[None]:
    """While it lasts, convolutions run by a rung of their ladder, or as before without one. What
    they say of the setting is said of the option.
    """
    before = settings.conv
    settings.conv = rung or before
    try:
        yield
    except NotApplicableError as error:
        raise NotApplicableError(
            str(error).replace(f"DLSYS_CONV={rung}", f"--conv-algo {rung}")
        ) from error
    finally:
        settings.conv = before


def train(
    setups: list[Setup], ctx: Context | None, options: argparse.Namespace, command: str
) -> None:
    """Each setup: the assignment's as they always were, unless something around them is wanted."""
    first = setups[0]
    plain = options.init_from is None and not first.early_stop and not kept(options)
    if first.assignment and plain:
        from .. import assignment

        assignment.run(setups, options.data_dir, ctx, options.loss, options.profile)
        return
    from .. import mnist

    wishes = mnist.Wishes(
        print_loss=options.loss,
        profiled=options.profile,
        checkpoint=options.checkpoint,
        resume=options.resume,
        init_from=options.init_from,
        log=options.log,
        report=options.report,
        command=command,
    )
    for setup in setups:
        mnist.run(setup, options.data_dir, ctx, wishes)


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
    if options.init_from is not None:
        return [begun_with(options.init_from, options.model, given)]
    if options.model not in (None, "all"):
        return [choose(options.model, given)]
    if kept(options):
        raise UsageError(f"{kept(options)} is for one run: choose a model, such as -m mlp")
    if options.hidden:
        raise UsageError("--hidden has the sizes of mlp: add -m mlp")
    return [choose(name, given) for name in ALL]


def resumed(options: argparse.Namespace) -> Setup:
    """The setup of the run to go on with, whose folder is that of its checkpoints from now on."""
    from .. import trained

    if options.init_from is not None:
        raise UsageError(
            "--resume goes on with a run and --init-from begins another: leave one out"
        )
    if options.resume is True:
        if options.checkpoint is None:
            raise UsageError("--resume goes on from a checkpoint: say which, --resume DIR")
        options.resume = options.checkpoint
    if options.model == "all":
        raise UsageError("--resume goes on with one run: leave -m out, the checkpoint says it")
    what = str(options.resume)
    setup, done = trained.run_of(options.resume)
    setup.check_same(what, vars(options))
    if options.checkpoint is None:
        folder = options.resume.is_dir()
        options.checkpoint = options.resume if folder else options.resume.parent
    wanted = setup.lasting(options.epochs or setup.epochs)
    if done >= wanted.epochs:
        print(f"finished: {what} has all of its {counted(done)}; {setup.way_on(what)}")
    return wanted


def begun_with(folder: Path, model: str | None, given: Mapping[str, Any]) -> Setup:
    """The setup of a run that begins with the weights of another, whose network it has."""
    from .. import trained

    before = trained.load_model(folder)[0]
    for option, own, wanted in (
        ("-m", before.model, model),
        ("--hidden", before.hidden, given["hidden"]),
    ):
        if wanted not in (None, own):
            raise UsageError(
                f"--init-from {folder} has the weights of {option} {as_option(own)}, not "
                f"{as_option(wanted)}: leave {option} out, or begin without --init-from"
            )
    asked = {name: value for name, value in given.items() if value is not None}
    return choose(before.model, before.lasting_options() | asked)
