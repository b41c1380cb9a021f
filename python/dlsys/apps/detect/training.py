"""Trains a detector: its scenes, its run, and what a run prints."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import optim, train
from ...data.numbered import NumberedBatches
from ...errors import DataError
from ...runtime.device import Context
from .. import run_file
from ..progress import Progress, kept
from ..usage import UsageError
from . import made, scenes
from .fresh import FreshScenes
from .network import STRIDES, Detector, loss
from .scenes import SceneLoader, Scenes

_VALIDATED = 8  # batches of what is held out, the same each time
_WARM = 0.15  # of the steps, in which the rate rises
HELD = 200  # made scenes that a run is measured on


@dataclass(frozen=True)
class Settings(run_file.Counted):
    """A run's settings, which `run.json` has. `steps` are updates, `every` those between
    validations; `images` are made where no `data` are named, 0 for new ones in each batch, `held`
    those to measure it on; `size` is that of the square that photos are scaled into; `names` are
    those of the classes; flip 1 shows half of the photos as in a mirror.
    """

    steps: int = 1000
    every: int = 250
    batch_size: int = 16
    images: int = 2000
    size: int = 128
    width: int = 48
    flip: int = 0
    lr: float = 4e-3
    precision: str = "fp32"
    seed: int = 0
    data: str = ""
    held: str = ""
    names: tuple[str, ...] = ()

    def build_model(self) -> Detector:
        """The network with its first weights."""
        return Detector(len(self.names), self.width, self.seed)

    def trained_on(self) -> Scenes:
        """The scenes to train on."""
        return scenes.read(Path(self.data)) if self.data else made.made(self.images, self.seed)

    def batches(self, given: Scenes) -> NumberedBatches:
        """Batches of scenes, of new ones where none are given."""
        if not given.scenes:
            return FreshScenes(self.batch_size, self.every, self.seed)
        flip = bool(self.flip)
        return SceneLoader(given, self.size, self.batch_size, self.every, self.seed, flip=flip)

    def held_out(self) -> Scenes:
        """The scenes to measure it on."""
        if not self.held:
            return made.made(HELD, self.seed, held=True)
        found = scenes.read(Path(self.held))
        unknown = sorted(set(found.names) - set(self.names))
        if unknown:
            raise DataError(f"{self.held} has {unknown[0]!r}, which the run does not know")
        number = np.array([self.names.index(name) for name in found.names], np.int64)
        relabeled = [one._replace(labels=number[one.labels]) for one in found.scenes]
        return Scenes(relabeled, self.names)


def run(options: argparse.Namespace, ctx: Context | None) -> None:
    """Trains a new network, or goes on with a run. KeyboardInterrupt, after Ctrl-C, says what was
    done.
    """
    folder = options.folder
    if options.paths:
        raise UsageError(f"train has one folder, of the run: what is {options.paths[0]}?")
    given = vars(options) | {"names": None}
    for name in ("data", "held"):
        given[name] = None if given[name] is None else str(given[name].absolute())
    if (given["data"] is None) != (given["held"] is None):
        raise UsageError("--data and --held belong together: to train on, and to measure it on")
    if options.resume:
        settings = _read(folder, "go on with")
        run_file.check_same(folder, settings, given)
        trained_on = settings.trained_on()
    else:
        run_file.begin(folder, "train")
        settings = _chosen(given)
        trained_on = settings.trained_on()
        settings = replace(settings, names=trained_on.names)
    if settings.data and not (trained_on.scenes and trained_on.names):
        raise DataError(f"{settings.data} has no object to train on")
    held = settings.held_out()
    count = len(trained_on.scenes) or "new"
    print(f"{count} photos to train on, {len(held.scenes)} held out,", end=" ")
    print(f"{len(settings.names)} classes", flush=True)
    data = settings.batches(trained_on)
    validation = SceneLoader(held, settings.size, settings.batch_size, _VALIDATED, augment=False)
    model = settings.build_model()
    if not options.resume:
        run_file.write(folder, settings)
    total = settings.epochs * settings.every
    train.fit(
        model,
        data,
        optim.AdamW(optim.OneCycle(settings.lr, total, warm=max(_WARM, 2 / (total + 1)))),
        loss,
        settings.epochs,
        validation=validation,
        ctx=ctx,
        metrics=(),
        callbacks=kept(folder, Lines("photos", total)),
        log_every=max(settings.every // 5, 1),
        resume=folder if options.resume else None,
        precision=settings.precision,
    )


def load(folder: Path) -> tuple[Settings, Detector]:
    """The settings and the network of a run, as its last step left it. DataError where the folder
    has no such run.
    """
    settings = _read(folder, "use")
    model = settings.build_model()
    train.load_model(folder, model)
    return settings, model


def _chosen(given: dict[str, Any]) -> Settings:
    """The settings of a new run. UsageError for sizes that the network does not have."""
    settings = run_file.chosen(Settings, given)
    if settings.size % STRIDES[-1]:
        raise UsageError(f"--size {settings.size} is no multiple of {STRIDES[-1]} pixels")
    if settings.width % 8:
        raise UsageError(f"--width {settings.width} is no multiple of 8 channels")
    if not settings.data and not settings.images and (settings.size != made.SIDE or settings.flip):
        raise UsageError(
            f"--images 0 makes scenes of {made.SIDE} pixels that are not mirrored: leave --size "
            "and --flip out, or make some images"
        )
    if settings.steps < 2:
        raise UsageError("--steps 1 leaves no time for the rate to rise and fall: use 2 or more")
    return settings


def _read(folder: Path, purpose: str) -> Settings:
    settings = run_file.read(folder, Settings, purpose)
    if not settings.names or not settings.size or settings.size % STRIDES[-1]:
        raise DataError(
            f"{folder}/run.json is damaged: {len(settings.names)} classes in photos of "
            f"{settings.size} pixels, expected some in a multiple of {STRIDES[-1]}"
        )
    return settings


class Lines(Progress):
    """A line for each validation: the loss on what is trained on and on what is held out."""

    def figures(self, record: dict[str, Any]) -> tuple[str, ...]:
        return (
            f"loss {record['loss']:.3f}",
            f"held out {record['val_loss']:.3f}",
        )
