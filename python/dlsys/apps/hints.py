"""Hints: a training that ends well says what to try next."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..errors import how_to_install
from .setup import Setup


def after(setup: Setup, checkpoint: Path | None, program: str) -> str:
    """A few lines to type, each with what it does. program: what starts `mnist`, as typed."""
    bigger = {"logreg": "mlp", "mlp": "cnn"}.get(setup.model, "resnet")
    rows = []
    if checkpoint is not None:
        photo = f"what it takes a photo of your own for{_needing('PIL')}"
        rows.append((f"predict {checkpoint} digit.jpg", photo))
        rows.append((f"--init-from {checkpoint} -e 3 --lr 0.01", "train on from its weights"))
    if setup.model != bigger:
        run = f"runs/{bigger}"
        rows.append(
            (f"-m {bigger} -e 3 --checkpoint {run}", f"{_DESCRIBED[bigger]}, and keep its weights")
        )
        if checkpoint is None:
            photo = f"then ask it about a photo of a digit{_needing('PIL')}"
            rows.append((f"predict {run} digit.jpg", photo))
    if not setup.augment:
        rows.append((f"-m {setup.model} --augment shift,rotate", "the same on images that vary"))
    page = f"one page about a run{_needing('matplotlib')}"
    rows.append((f"-m {setup.model} --report run.html", page))
    rows.append(("--help", "everything else"))
    width = max(len(arguments) for arguments, _ in rows)
    lines = [f"  {program} {arguments:<{width}}  # {what}" for arguments, what in rows]
    return "\n".join(["", "to try next:", *lines])


_DESCRIBED = {
    "mlp": "hidden layers",
    "cnn": "convolutions (LeNet-5)",
    "resnet": "a residual network",
}


def _needing(module: str) -> str:
    """Names what to install first, where an optional library is missing."""
    missing = importlib.util.find_spec(module) is None
    return f", after {how_to_install(module)}" if missing else ""
