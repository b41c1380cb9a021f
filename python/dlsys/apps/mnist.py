"""Networks on MNIST and Fashion-MNIST, trained with all that fit offers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

from .. import optim, profile, train
from ..data import Dataset, DeviceLoader, Loader
from ..data.dataset import Sets
from ..errors import DataError, DivergedError, DlsysError, how_to_install
from ..files import check_replaceable, make_folder
from ..runtime.device import Context
from .report import Sampled, write_report
from .setup import Setup
from .trained import HELD_BACK, Chosen, in_order, load_model, load_sets, measured, probabilities
from .usage import UsageError

_WORKERS = 2  # threads that change images; more of them wait for each other, as numpy's calls do


class Wishes(NamedTuple):
    """The outputs of a run besides its training."""

    print_loss: bool = False
    profiled: bool = False
    checkpoint: Path | None = None  # a folder
    resume: Path | None = None  # a file, or a folder with last.safetensors
    init_from: Path | None = None  # the same with best.safetensors: the weights to begin with
    log: Path | None = None  # a folder
    report: Path | None = None
    command: str = ""  # that was typed, for the report


class Lines(train.Progress):
    """A bar an epoch on a terminal, and a line an epoch: the loss where it is asked for."""

    def __init__(self, title: str, print_loss: bool) -> None:
        super().__init__()
        self._title, self._print_loss = title, print_loss
        self.run: train.Run | None = None

    def on_start(self, run: train.Run) -> None:
        self.run = run
        print(f"training {self._title} on {run.ctx or 'numpy'}", flush=True)
        if run.step:
            print(f"going on after {self.done()}", flush=True)

    def on_record(self, run: train.Run, record: Any) -> None:
        names = ("loss", "val_loss", "val_accuracy") if self._print_loss else ("val_accuracy",)
        figures = [f"{name} {record[name]:.6f}" for name in names if name in record]
        parts = [f"epoch {record['epoch']}/{run.epochs}", *figures]
        print(*parts, f"{record['samples_per_second']:,.0f} images/s", sep="  ", flush=True)

    def done(self) -> str:
        """The progress of the run, as text."""
        run = self.run
        if run is None:
            return "nothing trained yet"
        return f"{run.epoch} epochs and {run.batch} of {len(run.data)} batches"


def run(setup: Setup, data_dir: str | None, ctx: Context | None, wishes: Wishes) -> None:
    """Trains one model and prints its accuracies. KeyboardInterrupt, after Ctrl-C, says what was
    done.
    """
    _check_report(wishes.report)
    sets = load_sets(setup, data_dir)
    lines = Lines(setup.model, wishes.print_loss)
    try:
        _run(setup, sets, ctx, wishes, lines)
    except KeyboardInterrupt as interrupt:
        notes = lines.run.notes if lines.run is not None else []
        raise KeyboardInterrupt("; ".join([lines.done(), *notes])) from interrupt
    except DivergedError as error:
        if "--lr" in str(error):
            raise
        raise DivergedError(f"{error}; use a smaller --lr than {setup.lr:g}") from error


def _run(setup: Setup, sets: Sets, ctx: Context | None, wishes: Wishes, lines: Lines) -> None:
    watched = _fit(setup, sets, ctx, wishes, lines)
    assert lines.run is not None
    model = lines.run.model
    found = {name: measured(model, getattr(sets, name), ctx) for name in HELD_BACK}
    if wishes.profiled:
        print(watched.profile)
        if ctx is not None:
            print(profile.counters(ctx))
    accuracies = {name: figures["accuracy"] for name, figures in found.items()}
    for name, accuracy in accuracies.items():
        print(f"{name} set accuracy={accuracy:f}", flush=True)
    if wishes.report is not None:  # last: a disk that is full takes nothing from the rest
        chances = probabilities(model, sets.test.images, ctx)
        try:
            what = (wishes.command, setup, sets, lines.run, accuracies, chances, watched.profile)
            write_report(wishes.report, *what)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"--report {wishes.report}: it cannot be written: {reason}") from error
    setup.check_loss(found["validation"]["loss"])


def _check_report(path: Path | None) -> None:
    """Before the training rather than after it."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise DlsysError(f"--report needs matplotlib: {how_to_install('matplotlib')}")
    if path.is_dir():
        raise DlsysError(f"--report {path}: this is a folder; name a file, such as {path}/run.html")
    check_replaceable(path)
    if path.is_file() or not path.exists():  # a device's folder takes no files, and needs none
        make_folder(Path(os.path.realpath(path)).parent)


def _fit(setup: Setup, sets: Sets, ctx: Context | None, wishes: Wishes, lines: Lines) -> Sampled:
    data = _loader(setup, sets.train)
    model = setup.build_model()
    if wishes.init_from is not None:
        model.load_state_dict(load_model(wishes.init_from)[1].state_dict())
    schedule = setup.build_schedule(setup.epochs * len(data))
    watched = Sampled(wishes.profiled, wishes.report is not None)
    train.fit(
        model,
        data,
        setup.build_optimizer(schedule),
        epochs=setup.epochs,
        validation=in_order(sets.validation) if _validated(setup, wishes) else None,
        ctx=ctx,
        callbacks=[*_callbacks(setup, schedule, wishes), watched, lines],
        resume=wishes.resume,
        quiet=True,  # its own lines say it
        precision=setup.precision,
    )
    return watched


def _validated(setup: Setup, wishes: Wishes) -> bool:
    """True if the validation set is evaluated after each epoch."""
    shown = wishes.print_loss or wishes.checkpoint or wishes.log or wishes.report
    return bool(shown or setup.early_stop or setup.schedule == "plateau")


def _loader(setup: Setup, samples: Dataset) -> Any:
    """On the device unless the host has to change each image, or the last batch is a small one.
    UsageError where there is no full batch, but for the assignment's networks.
    """
    if setup.batch_size > len(samples) and not setup.assignment:
        raise UsageError(
            f"--batch-size {setup.batch_size} is more than the {len(samples)} images of the "
            "training set: use a smaller one"
        )
    if setup.augment or (setup.assignment and len(samples) % setup.batch_size):
        return Loader(
            samples,
            setup.batch_size,
            shuffle=not setup.assignment,
            seed=setup.seed,
            augment=setup.build_augmentation(),
            workers=_WORKERS,
        )
    shuffle = not setup.assignment
    return DeviceLoader(samples, setup.batch_size, shuffle=shuffle, seed=setup.seed)


def _callbacks(setup: Setup, schedule: Any, wishes: Wishes) -> list[train.Callback]:
    made: list[train.Callback] = [Chosen(setup)]
    plateau = getattr(schedule, "after", schedule)
    if isinstance(plateau, optim.ReduceOnPlateau):
        made.append(train.PlateauSchedule(plateau))
    if setup.early_stop:
        made.append(train.EarlyStopping(setup.early_stop))
    if wishes.log is not None:
        made.append(train.JsonLog(wishes.log / "log.jsonl"))
        if importlib.util.find_spec("tensorboardX") is not None:
            made.append(train.TensorBoard(wishes.log))
    if wishes.checkpoint is not None:
        made.append(train.Checkpoint(wishes.checkpoint))
    return made
