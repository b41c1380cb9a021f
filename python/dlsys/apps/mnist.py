"""Networks on MNIST and Fashion-MNIST: trained with all that fit offers, evaluated, asked."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import autodiff as ad
from .. import optim, profile, train
from ..data import (
    DataDescription,
    Dataset,
    DeviceLoader,
    Loader,
    fashion_mnist_sets,
    mnist_sets,
    read_idx,
)
from ..data.dataset import Sets
from ..data.normalize import PLAIN
from ..errors import DataError, DlsysError, how_to_install, printable
from ..files import check_replaceable, make_folder
from ..nn import Module
from ..runtime.device import Context
from ..train.schema import CALLBACKS, check, fields
from .pictures import read_pictures
from .report import Sampled, write_report
from .setup import Setup, UsageError

_EVALUATED = 1000  # images at a time
_WORKERS = 2  # threads that change images; more of them wait for each other, as numpy's calls do
_HELD_BACK = ("validation", "test")


class Wishes(NamedTuple):
    """The outputs of a run besides its training."""

    print_loss: bool = False
    profiled: bool = False
    checkpoint: Path | None = None  # a folder
    resume: Path | None = None  # a file, or a folder with last.safetensors
    log: Path | None = None  # a folder
    report: Path | None = None


class Chosen(train.Callback):
    """Keeps the setup in checkpoints."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def state_dict(self) -> dict[str, Any]:
        return self._setup.as_dict()


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


def setup_of(path: Path) -> Setup:
    """The setup that a checkpoint, or the last one of a folder, was trained with."""
    return _setup_in(str(path), train.load(path))


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


def _run(setup: Setup, sets: Sets, ctx: Context | None, wishes: Wishes, lines: Lines) -> None:
    watched = _fit(setup, sets, ctx, wishes, lines)
    assert lines.run is not None
    model = lines.run.model
    found = {name: _measured(model, getattr(sets, name), ctx) for name in _HELD_BACK}
    if wishes.profiled:
        print(watched.profile)
        if ctx is not None:
            print(profile.counters(ctx))
    figures = {name: measured["accuracy"] for name, measured in found.items()}
    for name, accuracy in figures.items():
        print(f"{name} set accuracy={accuracy:f}", flush=True)
    if wishes.report is not None:  # last: a disk that is full takes nothing from the rest
        chances = probabilities(model, sets.test.images, ctx)
        try:
            write_report(wishes.report, setup, sets, lines.run, figures, chances, watched.profile)
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
    schedule = setup.build_schedule(setup.epochs * len(data))
    watched = Sampled(wishes.profiled, wishes.report is not None)
    train.fit(
        model,
        data,
        setup.build_optimizer(schedule),
        epochs=setup.epochs,
        validation=_in_order(sets.validation) if _validated(setup, wishes) else None,
        ctx=ctx,
        callbacks=[*_callbacks(setup, schedule, wishes), watched, lines],
        resume=wishes.resume,
    )
    return watched


def _validated(setup: Setup, wishes: Wishes) -> bool:
    """True if the validation set is evaluated after each epoch."""
    kept = wishes.checkpoint or wishes.log or wishes.report
    return bool(kept or setup.early_stop or setup.schedule == "plateau")


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


def _in_order(samples: Dataset) -> Loader:
    return Loader(samples, _EVALUATED)


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


def load_sets(setup: Setup, data_dir: str | None) -> Sets:
    """The data set of a setup."""
    return {"mnist": mnist_sets, "fashion": fashion_mnist_sets}[setup.dataset](data_dir)


def _measured(model: Module, samples: Dataset, ctx: Context | None) -> dict[str, float]:
    """The loss and the accuracy."""
    return train.evaluate(model, _in_order(samples), ctx=ctx)


# ---- checkpoints that are asked ----
def load_model(path: Path) -> tuple[Setup, Module]:
    """The setup and the trained model of a checkpoint; of a folder, of its best one."""
    if path.is_dir() and (path / "best.safetensors").exists():
        path = path / "best.safetensors"
    saved = train.load(path)
    setup = _setup_in(str(path), saved)
    model = setup.build_model()
    model.load_state_dict(saved.part("model"))
    if model.trained_on is None:  # before checkpoints said so, all of them were
        model.trained_on = DataDescription((1, 28, 28), "uint8", *PLAIN, setup.classes)
    return setup, model


def _setup_in(what: str, saved: train.Saved) -> Setup:
    states = saved.header.get("callbacks", [])
    check(what, {"callbacks": states}, fields(callbacks=CALLBACKS))
    own = [state["state"] for state in states if state["name"] == Chosen.__name__]
    setup = Setup.from_dict(what, own[0] if own else {})
    setup.check_weights(what, saved.part("model").values())
    return setup


def evaluate(
    checkpoint: Path, files: Sequence[Path], data_dir: str | None, ctx: Context | None
) -> None:
    """Prints the accuracies of a checkpoint on the validation and the test set, or on the images
    and labels of two IDX files.
    """
    setup, model = load_model(checkpoint)
    print(f"evaluating {setup.model} of {setup.dataset} on {ctx or 'numpy'}", flush=True)
    if not files:
        sets = load_sets(setup, data_dir)
        for name in _HELD_BACK:
            accuracy = _measured(model, getattr(sets, name), ctx)["accuracy"]
            print(f"{name} set accuracy={accuracy:f}", flush=True)
        return
    images, labels = files
    samples = Dataset(read_pictures(images, digits=False), read_idx(labels))
    if samples.labels.ndim != 1 or samples.labels.min() < 0 or samples.labels.max() > 9:
        raise DataError(f"{labels}: expected labels from 0 to 9, one an image")
    found = train.evaluate(model, _in_order(samples), ctx=ctx)
    print(f"{len(samples):,} images  loss {found['loss']:.6f}  accuracy={found['accuracy']:f}")


def predict(checkpoint: Path, files: Sequence[Path], top: int, ctx: Context | None) -> None:
    """Prints, for each image of the files, the likeliest classes with their probabilities."""
    setup, model = load_model(checkpoint)
    pictures = [read_pictures(path, digits=setup.dataset == "mnist") for path in files]
    names = [
        printable(str(path) if len(read) == 1 else f"{path}[{k}]")
        for path, read in zip(files, pictures)
        for k in range(len(read))
    ]
    chances = probabilities(model, np.concatenate(pictures), ctx)
    width = max(map(len, names))
    for name, row in zip(names, chances):
        best = np.argsort(-row, kind="stable")[:top]
        ranking = "  ".join(f"{setup.classes[k]} {row[k]:.4f}" for k in best)
        print(f"{name:<{width}}  {ranking}")


def probabilities(model: Module, images: Any, ctx: Context | None) -> np.ndarray:
    """Of each class (n, 10), for images (n, 1, 28, 28) uint8."""
    return np.asarray(ad.softmax_func(train.predict(model, images, ctx)))
