"""Models and what training measured, in notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from ...errors import DlsysError
from ..curves import curves
from ..figure import svg_of
from ..page import table
from ..svg import cut, text_of
from .frame import framed, sentence

_EPOCHS = 12  # rows of a history; of a longer one the first and the last ones
_LAYERS = 60  # rows of a model
_numbers = count(1)  # of pictures with ids, which are one page's in a notebook


def history_html(history: Any) -> str:
    """A `train.History`: curves over the epochs and a table of them."""
    told = repr(history).partition("(")[2].removesuffix(")")
    if not history.epochs and not history.curve:
        return framed("History", told, sentence("Nothing is measured before the first epoch."))
    return framed("History", told, _curves(history), _epochs(history.epochs))


def _curves(history: Any) -> str:
    try:
        figure = curves(history.epochs, history.curve)
    except DlsysError as missing:  # no matplotlib; the text says how to install it
        return sentence(f"No curves: {missing}")
    drawn = svg_of(figure, f"dlsys{next(_numbers)}")
    words = text_of(f"curves of {history!r}")
    return f'<div class="picture" role="img" aria-label="{words}">{drawn}</div>'


def _epochs(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return ""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    shown: list[Any] = list(records)
    if len(shown) > _EPOCHS:
        shown[_EPOCHS // 2 : -_EPOCHS // 2] = [dict.fromkeys(names, "…")]
    return table(list(names), [[figure(record.get(name)) for name in names] for record in shown])


def figure(value: Any) -> str:
    """A measure in a table, to five digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.5g}"
    return cut(str("" if value is None else value), 24)


def summary_html(summary: Any) -> str:
    """A `Module.summary`: a row a layer."""
    rows = [
        (_indented(row.name), row.kind, row.shape, f"{row.parameters:,}", f"{row.operations:,}")
        for row in summary.rows
    ]
    facts = (
        f"{summary.parameters:,} parameters and {summary.buffers:,} elements in buffers, "
        f"{summary.nbytes:,} bytes; {summary.operations:,} operations"
    )
    head = ("layer", "kind", "output", "parameters", "operations")
    return framed("Summary", facts, _layers(head, rows, words=3))


def module_html(model: Any) -> str:
    """A layer or model (`nn.Module`): its layers with their options and state."""
    rows = []
    for name, module in model.named_modules():
        own = [state for path, state in module.named_state() if "." not in path]
        shapes = ", ".join(str(state.shape) for state in own)
        count_ = sum(state.spec.size for state in module.parameters())
        kind = f"{type(module).__name__}({module.options()})"
        rows.append((_indented(name), cut(kind, 60), shapes, f"{count_:,}"))
    total = sum(state.spec.size for state in model.parameters())
    facts = f"{total:,} parameters, in {'training' if model.training else 'inference'} mode"
    head = ("layer", "kind", "state", "parameters")
    note = sentence("model.summary(input_shape) also tells the shapes of outputs.")
    return framed(type(model).__name__, facts, _layers(head, rows, words=3), note)


def _layers(head: Sequence[str], rows: Sequence[Sequence[Any]], words: int) -> str:
    more = len(rows) - _LAYERS
    note = sentence(f"and {more} more layers; print it to see all") if more > 0 else ""
    return table(head, rows[:_LAYERS], words=words) + note


def _indented(name: str) -> str:
    """The last part of a path, two spaces in for each part."""
    return "  " * len(name.split(".")) + name.split(".")[-1] if name else "model"
