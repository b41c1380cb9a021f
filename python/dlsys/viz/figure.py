"""Figures of matplotlib without pyplot: no window, no state that outlives a figure."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, DlsysError, ShapeError, how_to_install
from ..files import replacing
from .svg import cut, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#22272e"  # of all lines and letters; it becomes currentColor on a page
_STYLE: Any = {
    "svg.fonttype": "none",  # letters stay letters: small, sharp, searchable
    "svg.hashsalt": "dlsys",  # equal figures are equal text
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches. DlsysError says what to install without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise DlsysError(
            f"pictures of data need matplotlib: {how_to_install('matplotlib')} (graphs, plans and "
            "operator times are drawn without it)"
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def words(value: Any, letters: int = 1000) -> str:
    """Text as it is, cut to so many letters: matplotlib would read text between dollar signs as
    mathematics.
    """
    return cut(printable(value), letters).replace("$", r"\$")


def class_names(classes: Sequence[str] | None, count: int, letters: int = 24) -> list[str]:
    """The names of classes for a picture, their indices where none are given. Raises ShapeError for
    fewer names than classes.
    """
    if classes is None:
        return [str(k) for k in range(count)]
    if len(classes) < count:
        raise ShapeError(f"there are {count} classes, but names for {len(classes)}")
    return [words(name, letters) for name in classes]


def plot(figure: Figure, *position: Any, title: str = "", grid: bool = False) -> Any:
    """Axes in the colors of ours; `position` is that of `Figure.add_subplot`."""
    axes = figure.add_subplot(*(position or (1, 1, 1)))
    axes.set_title(words(title), color=INK)
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, labelsize=8)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for spine in axes.spines.values():
        spine.set_color(INK)
        spine.set_alpha(0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(color=INK, alpha=0.12, linewidth=0.8)
    return axes


def legend(axes: Any, **options: Any) -> None:
    """A legend without a frame."""
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, **options)


def bare(axes: Any) -> None:
    """Takes ticks and frame away, for images."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def save(figure: Figure | str, path: str | os.PathLike, dpi: int = 150) -> None:
    """Writes a figure (`.png`, `.svg`, `.pdf` by the name) or a picture in SVG or DOT text; an
    earlier file is replaced only by a complete one.

    dpi: dots an inch of a PNG. Raises DataError for SVG text under a name of another kind of
    picture.
    """
    target = Path(path)
    kind = target.suffix.lstrip(".").lower()
    if isinstance(figure, str):
        if kind in ("png", "pdf", "jpg", "jpeg"):
            raise DataError(f"{target}: this picture is text (SVG or DOT); name it .svg or .dot")
        content = figure.encode()
    else:
        content = _rendered(figure, kind or "png", dpi)
    with replacing(target) as file:
        file.write(content)


def svg_of(figure: Figure, prefix: str) -> str:
    """A figure as SVG inside a page: no declarations, lines and letters of the page's color, and
    all ids begin with `prefix`, so that several figures keep to themselves.
    """
    text = _rendered(figure, "svg", 150, transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    return text.replace(INK, "currentColor")


def _rendered(figure: Figure, kind: str, dpi: int, transparent: bool = False) -> bytes:
    import matplotlib

    sink = io.BytesIO()
    nothing = {"svg": dict.fromkeys(("Creator", "Date", "Format", "Type"))}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(
            sink, format=kind, dpi=dpi, transparent=transparent, metadata=nothing.get(kind)
        )
    return sink.getvalue()
