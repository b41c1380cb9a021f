"""The page of a training run: what `--report` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import explain, profile, train, viz
from ..data.dataset import Sets
from .setup import Setup

_FIRST, _LAST = 10, 40  # the steps of a run whose operators are timed for the page


class Sampled(train.Callback):
    """Times the operators of training steps: of all of them, or of a few for a report."""

    def __init__(self, always: bool, some: bool) -> None:
        self.profile = profile.Profile()
        self._always, self._some = always, some
        self._from, self._first = 0, _FIRST

    def on_start(self, run: train.Run) -> None:
        self._from = run.step
        left = max(run.epochs * len(run.data) - run.step, 1)
        self._first = min(_FIRST, left // 2)
        if self._always or (self._some and not self._first):
            run.executor.recorder = self.profile

    def on_step(self, run: train.Run) -> None:
        if self._always or not self._some:
            return
        done = run.step - self._from
        if done in (self._first, _LAST):
            run.executor.recorder = self.profile if done == self._first else None


def write_report(
    path: Path,
    command: str,
    setup: Setup,
    sets: Sets,
    run: train.Run,
    figures: Mapping[str, float],
    chances: np.ndarray,
    timed: profile.Profile,
) -> None:
    """Writes the page. command: as it was typed. figures: accuracies by set. chances:
    probabilities (n, 10) of the test images. Raises DlsysError without matplotlib.
    """
    labels, images = sets.test.labels, sets.test.images[:, 0]
    taken = chances.argmax(axis=1)
    counts = np.bincount(labels * 10 + taken, minlength=100).reshape(10, 10)
    first = np.asarray(sets.test.images[0], np.float32) / np.float32(255)
    page = viz.report.Report(
        title=f"{setup.model} on {setup.dataset}",
        command=command,
        numbers={f"{name} accuracy": value for name, value in figures.items()},
        settings=setup.in_words(),
        environment=viz.report.environment() | {"device": str(run.ctx or "numpy")},
        history=run.history.epochs,
        fine=run.history.curve,
        model=run.model,
        image=first,
        confusion=counts,
        mistakes=viz.report.Mistakes(images, labels, taken, chances),
        evidence=evidence(run, setup, np.asarray(sets.test.images), labels, chances),
        classes=setup.classes,
        graph=run.executor.eval_node_list,
        plan=run.executor.plan(_shapes(run)),
        profile=timed,
        counters=None if run.ctx is None else profile.counters(run.ctx),
    )
    viz.report.write(path, page)


def evidence(
    run: train.Run, setup: Setup, images: np.ndarray, labels: np.ndarray, chances: np.ndarray
) -> viz.report.Evidence:
    """What the answers for the first test images of each class look at, and for as many mistakes,
    the surest first.
    """
    taken = chances.argmax(axis=1)
    firsts = [int(np.flatnonzero(labels == label)[0]) for label in np.unique(labels)]
    wrong = np.flatnonzero(taken != labels)
    surest = wrong[np.argsort(-chances[wrong, taken[wrong]], kind="stable")]
    shown = np.array([*firsts, *surest[: len(firsts)].tolist()])
    method = "grad_cam" if setup.model in ("cnn", "resnet") else "saliency"
    found = explain.Explainer(run.model, method, ctx=run.ctx)(images[shown])
    pictures = np.stack([explain.overlay(images[k], m, 4) for k, m in zip(shown, found.maps)])
    names = [f"{setup.classes[label]}\n{chances[k, label]:.0%}"
             for k, label in zip(shown, found.classes)]  # fmt: skip
    return viz.report.Evidence(pictures, names, method)


def _shapes(run: train.Run) -> dict[Any, tuple[int, ...]]:
    """Of what a step is fed with."""
    feed = next(iter(run.data.epoch(0)))
    return {node: value.shape for node, value in feed.items()}
