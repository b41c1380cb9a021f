"""Curves of training: loss, accuracy and other measures over the epochs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .figure import INK, legend, new_figure, plot
from .svg import BLUE, ORANGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_MEASURE = re.compile(r"epoch|steps?|samples|seconds|best|.*(/|per|_)s(econds?)?")
_LOG_RANGE = 50.0  # a loss that falls by more gets a logarithmic axis


def curves(history: Sequence[Mapping[str, Any]], fine: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """Training and validation curves from one record an epoch, a panel for each measure.

    A record maps names to numbers: `loss`, `accuracy`, …, the same with `val_` of the validation
    set, and `lr`; `epoch` (from 1) is its x. Other names and values that are no number are skipped.
    `fine` has records within epochs, with `step` and `loss`; the history's last `step` says where
    they belong.
    """
    panels = _panels(history)
    columns = min(max(len(panels), 1), 3)
    rows = max(-(-len(panels) // columns), 1)
    figure = new_figure(3.6 * columns, 2.7 * rows)
    for k, name in enumerate(panels):
        axes = plot(figure, rows, columns, k + 1, title=name, grid=True)
        if name == "loss" and fine and history:
            _draw_fine(axes, fine, history[-1])
        _draw(axes, name, history)
    return figure


def _panels(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Loss, then the measures in the order in which they appear, then the rate where it changes."""
    names: dict[str, None] = {"loss": None}
    for record in history:
        for key, value in record.items():
            base = key.removeprefix("val_")
            if _is_number(value) and not _NO_MEASURE.fullmatch(base):
                names[base] = None
    rates = {record["lr"] for record in history if _is_number(record.get("lr"))}
    found = [name for name in names if name != "lr"]
    return [*found, *(["lr"] if len(rates) > 1 else [])]


def _draw_fine(axes: Any, fine: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> None:
    known = [record for record in fine if _is_number(record.get("loss"))]
    a_step = last.get("epoch", 1) / last["step"] if last.get("step") else 1.0
    x = [record["step"] * a_step for record in known]
    y = [record["loss"] for record in known]
    if len(known) > 1:
        axes.plot(x, y, color=BLUE, alpha=0.45, linewidth=0.9, label="within epochs")


def _draw(axes: Any, name: str, history: Sequence[Mapping[str, Any]]) -> None:
    drawn: list[float] = []
    lost: list[str] = []
    for key, what, color in ((name, "training", BLUE), (f"val_{name}", "validation", ORANGE)):
        points = [
            (record.get("epoch", k), record[key])
            for k, record in enumerate(history, 1)
            if _is_number(record.get(key))
        ]
        if not points:
            continue
        x, y = np.asarray(points, np.float64).T
        marker = "o" if len(points) <= 40 else None
        axes.plot(x, y, color=color, marker=marker, markersize=3, label=what)
        finite = np.isfinite(y)
        drawn += y[finite].tolist()
        if not finite.all():
            lost.append(f"{what}: no finite number in epoch {x[~finite][0]:.0f}")
    _finish_axes(axes, name, history, drawn)
    axes.set_xlabel("\n".join(["epoch", *lost]))
    if len(axes.lines) > 1:
        legend(axes)
    axes.tick_params(which="both", colors=INK)


def _finish_axes(
    axes: Any, name: str, history: Sequence[Mapping[str, Any]], drawn: Sequence[float]
) -> None:
    """The scales of both axes: integer epochs, and a logarithm for a loss that falls far."""
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    epochs = [record.get("epoch", k) for k, record in enumerate(history, 1)]
    if epochs:
        left, right = axes.get_xlim() if drawn else (np.inf, -np.inf)
        alone = len(epochs) == 1  # a point of its own in the middle
        axes.set_xlim(min(left, epochs[0] - alone), max(right, epochs[-1] + alone * 0.5))
    if name == "loss" and drawn and 0 < min(drawn) < max(drawn) / _LOG_RANGE:
        axes.set_yscale("log")
    elif "accuracy" in name and drawn and 0 <= min(drawn) and max(drawn) <= 1:
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
