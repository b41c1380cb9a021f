"""Trains the network by a recipe for few epochs, and measures it.

The parts are those of Page, "How to train your ResNet" (2018), and Jordan, "94% on CIFAR-10 in 3.29
seconds" (2024): one cycle of the rate with Nesterov's momentum, cut and mirrored images, smoothed
labels, a fixed whitening of patches in front, no weight decay for biases and normalization, and an
answer that is the mean of an image's and its mirror image's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import functional as F
from ... import nn, optim, train
from ...autodiff import Node
from ...data import Loader, cifar10_sets
from ...data.dataset import Dataset, Sets
from ...data.transforms.normalize import normalized
from ...errors import DataError
from ...runtime.device import Context
from .. import run_file
from ..progress import Progress, kept
from ..usage import UsageError
from .batches import MovedLoader, made_sets

Array = np.ndarray[Any, Any]

# The mean and the deviation of CIFAR-10's training images, by channel.
NORMALIZE = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_EVALUATED = 1000  # images at a time
_WARM = 0.25  # of the steps, in which the rate rises
_SMOOTHING = 0.1


@dataclass(frozen=True)
class Settings:
    """A run's settings, which `run.json` has. `lr` is the highest; `made` is the number of made
    images to train on, 0 for CIFAR-10, which `data_dir` has.
    """

    epochs: int = 15
    batch_size: int = 512
    width: int = 64
    lr: float = 0.4
    decay: float = 5e-4
    precision: str = "bf16"
    seed: int = 0
    made: int = 0
    data_dir: str = ""

    def sets(self) -> Sets:
        """The images to train on, to validate and to test."""
        if self.made:
            held = max(self.made // 9, 10)
            return made_sets(self.made, held, 2 * held, self.seed)
        return cifar10_sets(self.data_dir or None)

    def build_model(self) -> nn.ResNetCIFAR:
        """The network with its first weights."""
        return nn.ResNetCIFAR(width=self.width, seed=self.seed)


def run(options: argparse.Namespace, ctx: Context | None) -> None:
    """Trains a new network, or goes on with a run, and prints its accuracies. KeyboardInterrupt,
    after Ctrl-C, says what was done.
    """
    folder = options.folder
    given = vars(options)
    if options.data_dir is not None:
        given = given | {"data_dir": str(options.data_dir.absolute())}
    if options.resume:
        settings = read_settings(folder, "go on with")
        run_file.check_same(folder, settings, given)
    else:
        settings = _chosen(given)
        run_file.begin(folder, "train")
    sets = settings.sets()
    model = fitted(settings, sets, folder, ctx, resume=options.resume)
    _print_accuracies(model, sets, ctx)


def fitted(
    settings: Settings, sets: Sets, folder: Path, ctx: Context | None, resume: bool = False
) -> nn.ResNetCIFAR:
    """The network trained on sets; its checkpoints are in a folder."""
    model = settings.build_model()
    data = MovedLoader(sets.train, settings.batch_size, seed=settings.seed, normalize=NORMALIZE)
    held = Loader(sets.validation, min(_EVALUATED, len(sets.validation)), normalize=NORMALIZE)
    if resume:
        resume_from: Path | None = folder
    else:
        scale, shift = data.normalization.affine(np.dtype(np.uint8))
        model.whiten(normalized(np.asarray(sets.train.images[:5000]), scale, shift))
        run_file.write(folder, settings)
        resume_from = None
    total = settings.epochs * len(data)
    train.fit(
        model,
        data,
        optim.SGD(optim.OneCycle(settings.lr, total, warm=max(_WARM, 2 / (total + 1))), 0.9,
                  nesterov=True),
        smoothed,
        settings.epochs,
        validation=held,
        ctx=ctx,
        callbacks=kept(folder, Lines("images", total)),
        log_every=max(len(data) // 4, 1),
        parameters=groups(model, settings.decay),
        resume=resume_from,
        precision=settings.precision,
    )  # fmt: skip
    return model


def smoothed(logits: Node, labels: Node) -> Node:
    """The cross entropy with a tenth of the weight on all classes alike."""
    return F.cross_entropy(logits, labels, label_smoothing=_SMOOTHING)


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """The optimizer's groups: filters and matrices decay, biases and what normalizes does not."""
    large = [p for p in model.parameters() if len(p.shape) > 1]
    small = [p for p in model.parameters() if len(p.shape) <= 1]
    return [{"params": large, "weight_decay": decay}, {"params": small, "weight_decay": 0.0}]


def accuracy(
    model: nn.Module, samples: Dataset, ctx: Context | None, mirrored: bool = True
) -> float:
    """The share of right answers; `mirrored` adds the logits of each image's mirror image."""
    images = np.asarray(samples.images)
    logits = train.predict(model, images, ctx)
    if mirrored:
        logits = logits + train.predict(model, np.ascontiguousarray(images[..., ::-1]), ctx)
    return float((logits.argmax(axis=1) == np.asarray(samples.labels)).mean())


def evaluate(options: argparse.Namespace, ctx: Context | None) -> None:
    """Prints the accuracies of a run."""
    settings = read_settings(options.folder, "use")
    model = settings.build_model()
    train.load_model(options.folder, model)
    _print_accuracies(model, settings.sets(), ctx)


def read_settings(folder: Path, purpose: str) -> Settings:
    """The settings of the run in a folder. DataError for sizes that no network has."""
    settings = run_file.read(folder, Settings, purpose)
    if not 1 <= settings.width <= 1024 or min(settings.epochs, settings.batch_size) < 1:
        raise DataError(f"{folder}/run.json is damaged: a network of width {settings.width}")
    return settings


# ---- its parts ----
def _chosen(given: dict[str, Any]) -> Settings:
    """The settings of a new run. UsageError for made images that fill no batch."""
    names = Settings.__dataclass_fields__
    settings = Settings(**{n: given[n] for n in names if given.get(n) is not None})
    if settings.made and settings.made < 2 * settings.batch_size:
        raise UsageError(
            f"--made {settings.made} images are no two batches of {settings.batch_size}: use more, "
            "or a smaller --batch-size"
        )
    if settings.made and settings.data_dir:
        raise UsageError("--made takes the place of --data-dir: leave one of them out")
    return settings


def _print_accuracies(model: nn.Module, sets: Sets, ctx: Context | None) -> None:
    for name in ("validation", "test"):
        samples = getattr(sets, name)
        plain, both = (accuracy(model, samples, ctx, mirrored) for mirrored in (False, True))
        print(f"{name} accuracy={plain:.4f}  with mirror images {both:.4f}", flush=True)


class Lines(Progress):
    """A line for each epoch: losses, the accuracy on what is held out, seconds."""

    def figures(self, record: dict[str, Any]) -> tuple[str, ...]:
        return (
            f"loss {record['loss']:.3f}",
            f"held out {record['val_loss']:.3f}  accuracy {record['val_accuracy']:.4f}",
            f"{record['seconds']:.2f} s",
        )
