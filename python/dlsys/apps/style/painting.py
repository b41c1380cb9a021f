"""Paints one photograph by optimizing its pixels (Gatys, Ecker and Bethge, 2016)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import optim
from ...autodiff import Executor, Node, Parameter, constant
from ...runtime.device import Context
from ..usage import UsageError
from . import features
from .losses import Losses, Weights, in_planes
from .pictures import check_free, read, write

Array = np.ndarray[Any, Any]

METHODS = ("lbfgs", "adam")
SIZE, STEPS = 384, 150
_ADAM_RATE = 0.02  # of pixels in [0, 1]
_LINES = 5  # that a run prints


class Record(NamedTuple):
    """Losses after so many steps: the weighted sum and its parts."""

    step: int
    loss: float
    content: float
    style: float
    variation: float


def paint(
    photo: Array,
    losses: Losses,
    method: str = "lbfgs",
    steps: int = STEPS,
    ctx: Context | None = None,
    tell: Callable[[Record], None] = lambda record: None,
) -> tuple[Array, list[Record]]:
    """The picture (h, w, 3) float32 that `steps` steps make of a photo (h, w, 3) in [0, 1], and the
    losses, those of the photo itself first.

    losses: with the style's picture. method: "lbfgs", whose step is a direction that is searched,
    or "adam". tell: is called with each record. A step evaluates the gradient once, nearly: the
    losses are the same at each evaluation, and L-BFGS's first step along a direction does mostly.
    """
    given = in_planes(photo)
    (wanted,) = Executor([losses.content_of(constant(given))], ctx=ctx).run({}, True)
    picture = Parameter(given.copy(), "picture")
    picture.to(ctx)
    parts = losses.of(picture, constant(wanted))
    loss = losses.total(picture, constant(wanted))
    measured = Executor([loss, *parts], ctx=ctx)
    advance = _advancing(method, picture, loss, ctx)
    records: list[Record] = []
    for step in _stops(steps):
        if records:
            advance(step - records[-1].step)
        records.append(Record(step, *(float(value) for value in measured.run({}, True))))
        tell(records[-1])
    return np.clip(picture.asnumpy()[0].transpose(1, 2, 0), 0, 1), records


def _stops(steps: int) -> list[int]:
    """The steps after which losses are measured, 0 and the last one among them."""
    every = -(-steps // _LINES)
    return [*range(0, steps, every), steps]


def _advancing(
    method: str, picture: Parameter, loss: Node, ctx: Context | None
) -> Callable[[int], None]:
    """A function that makes so many steps."""
    if method == "lbfgs":
        solver = optim.LBFGS(picture, iterations=1)

        def search(count: int) -> None:
            solver.iterations = count
            solver.solve(loss, ctx=ctx)

        return search
    update = Executor([optim.Adam(_ADAM_RATE).minimize(loss, [picture])], ctx=ctx)

    def repeat(count: int) -> None:
        for _ in range(count):
            update.run({})

    return repeat


# ---- command ----
def run(options: argparse.Namespace, ctx: Context | None) -> None:
    """Paints a photo in the style of a picture."""
    if len(options.paths) != 2:
        raise UsageError("paint needs a photo and a picture: style paint photo.jpg picture.jpg")
    file, picture = options.paths
    target = options.out or Path(f"{file.stem}_{picture.stem}.png")
    check_free(target)
    size = options.size or SIZE
    photo, painting = read(file, size), read(picture, options.style_size or size)
    losses = Losses(features.load(options.features), painting, chosen_weights(options), ctx)
    height, width = photo.shape[:2]
    print(f"{file}  {width} x {height}, {options.method} on {ctx or 'numpy'}", flush=True)
    start = time.perf_counter()
    made, _ = paint(photo, losses, options.method, options.steps or STEPS, ctx, _print_record)
    write(target, made)
    print(f"{target}  {time.perf_counter() - start:.1f} s")


def chosen_weights(options: argparse.Namespace) -> Weights:
    """The weights that were given, and defaults."""
    usual = Weights()
    given = options.style_weight, options.variation_weight
    return Weights(*(b if a is None else a for a, b in zip(given, (usual.style, usual.variation))))


def _print_record(record: Record) -> None:
    print(
        f"step {record.step}  loss {record.loss:.3f}  content {record.content:.3f}  "
        f"style {record.style:.4f}  variation {record.variation:.5f}",
        flush=True,
    )
