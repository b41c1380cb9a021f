"""Trains a network that paints in one style (Johnson, Alahi and Fei-Fei, 2016)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import nn, optim, train
from ...autodiff import Node
from ...data.numbered import NumberedBatches
from ...errors import DataError
from ...runtime.device import Context
from .. import run_file
from ..progress import Progress, kept
from ..superres.photos import listed, split
from ..usage import UsageError
from . import features
from .losses import Losses, Weights
from .pictures import read

Array = np.ndarray[Any, Any]

_VALIDATED = 4  # batches of the photos held out, the same each time
_END = 1 / 50  # of the highest rate, where its cosine ends
_LONGEST = 640  # pixels of the longer side of a photo that patches are cut from
_SMALLER = 2**-0.5  # of that, again and again: patches of whole photos and of their details


@dataclass(frozen=True)
class Settings(run_file.Counted):
    """A run's settings, which `run.json` has. `style` is the picture, read at `style_size` pixels;
    `steps` are updates, `every` those between validations; `patch` is the extent of the square
    patches of photos; width and blocks are the network's; `lr` falls along a cosine; `photos` are
    what the user named, none for those of packages; `features` is a name or a file.
    """

    style: str = ""
    steps: int = 2000
    every: int = 250
    batch_size: int = 4
    patch: int = 256
    style_size: int = 384
    width: int = 32
    blocks: int = 5
    lr: float = 1e-3
    style_weight: float = 10.0
    variation_weight: float = Weights.variation
    features: str = features.EFFICIENTNET
    precision: str = "fp32"
    seed: int = 0
    photos: tuple[str, ...] = ()

    def build_model(self) -> nn.StyleNet:
        """The network with its first weights."""
        return nn.StyleNet(self.width, self.blocks, seed=self.seed)

    def split(self) -> tuple[list[Path], list[Path]]:
        """The photos to train on and those held out."""
        return split(listed([Path(name) for name in self.photos]))

    def losses(self, ctx: Context | None) -> Losses:
        """The losses against the style's picture."""
        painting = read(Path(self.style), self.style_size)
        weights = Weights(self.style_weight, self.variation_weight)
        return Losses(features.load(self.features), painting, weights, ctx)


class Patches(NumberedBatches):
    """Batches for `train.fit`: patches (batch_size, 3, side, side) float32 in [0, 1] of photos,
    twice: what the network takes, and what its content is compared with.

    Each patch is drawn from all photos alike, at a random position, and mirrored or not. What a
    batch has is a function of (seed, its number) alone. steps: batches in an epoch. DataError for a
    photo that is smaller than a patch.
    """

    def __init__(
        self, photos: Sequence[Array], side: int, batch_size: int, steps: int, seed: int = 0
    ) -> None:
        smallest = min(min(photo.shape[:2]) for photo in photos)
        if smallest < side:
            raise DataError(
                f"patches of {side} pixels are no part of a photo that is {smallest} pixels small: "
                "use a smaller --patch, or larger photos"
            )
        self._photos, self._side, self._seed = photos, side, seed
        shape = (3, side, side)
        super().__init__(
            batch_size, steps, {"photo": (shape, np.float32), "wanted": (shape, np.float32)}
        )

    def batch(self, number: int) -> tuple[Array, Array]:
        """The patches of a batch, by its number since the first epoch's beginning."""
        rng = np.random.default_rng((self._seed, number))
        made = np.stack([self._patch(rng) for _ in range(self.batch_size)])
        return made, made

    def _patch(self, rng: np.random.Generator) -> Array:
        photo = self._photos[int(rng.integers(len(self._photos)))]
        row, column = (int(rng.integers(n - self._side + 1)) for n in photo.shape[:2])
        part = photo[row : row + self._side, column : column + self._side]
        return (part[:, ::-1] if rng.integers(2) else part).transpose(2, 0, 1)


def run(options: argparse.Namespace, ctx: Context | None) -> None:
    """Trains a new network, or goes on with a run. KeyboardInterrupt, after Ctrl-C, says what was
    done.
    """
    folder = options.paths[0]
    if len(options.paths) > 1:
        raise UsageError(f"train has one folder, of the run: what is {options.paths[1]}?")
    given = vars(options) | {
        "photos": None if options.photos is None else tuple(map(_absolute, options.photos)),
        "style": None if options.style is None else _absolute(options.style),
    }
    if options.resume:
        settings = read_settings(folder, "go on with")
        run_file.check_same(folder, settings, given)
    else:
        run_file.begin(folder, "train")
        settings = _chosen(given)
    trained_on, held = settings.split()
    print(f"{len(trained_on)} photos to train on, {len(held)} held out", flush=True)
    data = _patches(settings, trained_on, settings.every)
    validation = _patches(settings, held, _VALIDATED)
    losses = settings.losses(ctx)

    def loss(painted: Node, photo: Node) -> Node:
        return losses.total(painted, losses.content_of(photo))

    if not options.resume:
        run_file.write(folder, settings)
    total = settings.epochs * settings.every
    train.fit(
        settings.build_model(),
        data,
        optim.Adam(optim.Cosine(settings.lr, total, settings.lr * _END)),
        loss,
        settings.epochs,
        validation=validation,
        ctx=ctx,
        metrics=(),
        callbacks=kept(folder, Lines("patches", total)),
        log_every=max(settings.every // 5, 1),
        resume=folder if options.resume else None,
        precision=settings.precision,
    )


def load(folder: Path) -> tuple[Settings, nn.StyleNet]:
    """The settings and the network of a run, as its last step left it. DataError where the folder
    has no such run.
    """
    settings = read_settings(folder, "use")
    model = settings.build_model()
    train.load_model(folder, model)
    return settings, model


def read_settings(folder: Path, purpose: str) -> Settings:
    """The settings of the run in a folder. DataError for sizes that no network has."""
    settings = run_file.read(folder, Settings, purpose)
    if min(settings.width, settings.patch, settings.batch_size) < 1 or settings.width > 1024:
        raise DataError(f"{folder}/run.json is damaged: a network of width {settings.width}")
    return settings


# ---- its parts ----
def _chosen(given: dict[str, Any]) -> Settings:
    """The settings of a new run. UsageError without a style, and for a patch of another size."""
    settings = run_file.chosen(Settings, given)
    if not settings.style:
        raise UsageError("train needs a picture: style train DIR --style picture.jpg")
    if settings.patch % nn.StyleNet.multiple or settings.patch < 32:
        raise UsageError(f"--patch {settings.patch} is no multiple of 4 pixels from 32 on")
    if settings.features != features.EFFICIENTNET:
        return run_file.chosen(Settings, given | {"features": _absolute(Path(settings.features))})
    return settings


def _patches(settings: Settings, paths: Sequence[Path], steps: int) -> Patches:
    photos = [photo for path in paths for photo in sizes(path, settings.patch)]
    return Patches(photos, settings.patch, settings.batch_size, steps, settings.seed)


def sizes(path: Path, smallest: int) -> list[Array]:
    """A photo in several sizes, as far as a patch is a part of them."""
    found = [read(path, _LONGEST)]
    while min(found[-1].shape[:2]) * _SMALLER >= smallest:
        found.append(read(path, round(max(found[-1].shape[:2]) * _SMALLER)))
    return found


def _absolute(path: Path) -> str:
    return str(path.absolute())


class Lines(Progress):
    """A line for each validation: the loss on what is trained on and on what is held out."""

    def figures(self, record: dict[str, Any]) -> tuple[str, ...]:
        return f"loss {record['loss']:.3f}", f"held out {record['val_loss']:.3f}"
