"""Trains a network that enlarges photographs: its photos, its run, and what a run prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import functional as F
from ... import nn, optim, train
from ...autodiff import Node
from ...errors import DataError
from ...runtime.device import Context
from .. import run_file
from ..progress import Progress, kept
from ..usage import UsageError
from .patches import Pair, PatchLoader
from .photos import listed, split
from .planes import Array, enlarged, read_photo, reduced
from .quality import psnr_of

NETWORKS = ("espcn", "srcnn")
SCALES = (2, 3, 4)
Network = nn.ESPCN | nn.SRCNN
_VALIDATED = 8  # batches of the photos held out, the same each time
_END = 1 / 50  # of the highest rate, where its cosine ends


@dataclass(frozen=True)
class Settings(run_file.Counted):
    """A run's settings, which `run.json` has. `steps` are updates, `every` those between
    validations; `patch` is in pixels of large photos; `lr` falls along a cosine; `photos` are what
    the user named, none for those of packages.
    """

    network: str = "espcn"
    scale: int = 2
    steps: int = 1500
    every: int = 250
    batch_size: int = 16
    patch: int = 72
    lr: float = 1e-3
    precision: str = "fp32"
    seed: int = 0
    photos: tuple[str, ...] = ()

    @property
    def factor(self) -> int:
        """How much larger the network's output is than what it takes: SRCNN's input was enlarged
        before.
        """
        return self.scale if self.network == "espcn" else 1

    def build_model(self) -> Network:
        """The network with its first weights."""
        if self.network == "espcn":
            return nn.ESPCN(self.scale, seed=self.seed)
        return nn.SRCNN(seed=self.seed)

    def given(self, small: Array) -> Array:
        """What the network takes of the luminance (h, w) of a small photo."""
        return small if self.network == "espcn" else enlarged(small, self.scale)

    def split(self) -> tuple[list[Path], list[Path]]:
        """The photos to train on and those held out."""
        return split(listed([Path(name) for name in self.photos]))


def run(options: argparse.Namespace, ctx: Context | None) -> None:
    """Trains a new network, or goes on with a run. KeyboardInterrupt, after Ctrl-C, says what was
    done.
    """
    folder = options.folder
    if options.paths:
        raise UsageError(
            f"train has one folder, of the run: name photos as --photos {options.paths[0]}"
        )
    given = vars(options) | {"photos": _absolute(options.photos)}
    if options.resume:
        settings = _read(folder, "go on with")
        run_file.check_same(folder, settings, given)
    else:
        run_file.begin(folder, "train")
        settings = _chosen(given)
    trained_on, held = settings.split()
    print(f"{len(trained_on)} photos to train on, {len(held)} held out: {_names(held)}", flush=True)
    model = settings.build_model()
    data = _loader(settings, trained_on, model.margin, settings.every)
    validation = _loader(settings, held, model.margin, _VALIDATED)
    if not options.resume:
        run_file.write(folder, settings)
    total = settings.epochs * settings.every
    train.fit(
        model,
        data,
        optim.Adam(optim.Cosine(settings.lr, total, settings.lr * _END)),
        loss_of(model.margin * settings.factor),
        settings.epochs,
        validation=validation,
        ctx=ctx,
        metrics=(),
        callbacks=kept(folder, Lines("patches", total)),
        log_every=max(settings.every // 5, 1),
        resume=folder if options.resume else None,
        precision=settings.precision,
    )


def load(folder: Path) -> tuple[Settings, Network]:
    """The settings and the network of a run, as its last step left it: which step that is, no photo
    that is held out decides. DataError where the folder has no such run.
    """
    settings = _read(folder, "use")
    model = settings.build_model()
    train.load_model(folder, model)
    return settings, model


def loss_of(margin: int) -> Any:
    """The mean squared error of what a network makes, (n, 1, H, W), less a margin, against what is
    wanted of it.
    """

    def loss(output: Node, wanted: Node) -> Node:
        return F.mse_loss(output[:, :, margin:-margin, margin:-margin], wanted)

    return loss


def pair_of(settings: Settings, path: Path) -> Pair:
    """What the network takes of the photo in a file, reduced, and what it should make of it."""
    large, small = reduced(read_photo(path).luminance, settings.scale)
    return Pair(settings.given(small), large)


# ---- its parts ----
def _chosen(given: dict[str, Any]) -> Settings:
    """The settings of a new run. UsageError for a patch that the scale does not divide."""
    settings = run_file.chosen(Settings, given)
    if settings.patch % settings.scale:
        raise UsageError(
            f"--patch {settings.patch} has pixels of large photos, and {settings.scale} must "
            "divide it: 72 and 96 do for each scale"
        )
    return settings


def _read(folder: Path, purpose: str) -> Settings:
    """The settings of a run. DataError for a network or a scale that there is not."""
    settings = run_file.read(folder, Settings, purpose)
    if settings.network not in NETWORKS or settings.scale not in SCALES:
        raise DataError(
            f"{folder}/run.json is damaged: {settings.network!r:.40} at {settings.scale} times is "
            f"none of {', '.join(NETWORKS)} at {', '.join(map(str, SCALES))}"
        )
    return settings


def _absolute(paths: Sequence[Path] | None) -> tuple[str, ...] | None:
    return None if paths is None else tuple(str(path.absolute()) for path in paths)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.stem for path in paths)


def _loader(settings: Settings, paths: Sequence[Path], margin: int, steps: int) -> PatchLoader:
    pairs = [pair_of(settings, path) for path in paths]
    side = settings.patch // settings.factor
    return PatchLoader(pairs, side, margin, settings.batch_size, steps, settings.seed)


class Lines(Progress):
    """A line for each validation: PSNR on the patches trained on and on those held out."""

    def on_epoch_end(self, run: train.Run, record: dict[str, Any]) -> None:
        super().on_epoch_end(run, record)
        record["psnr"], record["val_psnr"] = psnr_of(record["loss"]), psnr_of(record["val_loss"])

    def figures(self, record: dict[str, Any]) -> tuple[str, ...]:
        return (
            f"PSNR {record['psnr']:.2f} dB",
            f"held out {record['val_psnr']:.2f} dB",
        )
