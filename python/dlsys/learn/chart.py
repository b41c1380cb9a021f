"""Bars, as text for a terminal and as a drawing: one for each rung."""

from __future__ import annotations

from collections.abc import Sequence

from ..viz.svg import BLUE, axis_steps, drawing, element, label

Bars = Sequence[tuple[str, float]]  # a name and a number each

_ROW, _LEFT, _WIDTH, _TOP = 22, 150, 420, 40
_LETTERS = 48  # of the longest bar as text


def bars(values: Bars, unit: str) -> str:
    """A line a bar, as long as its number."""
    most = max((value for _, value in values), default=0.0) or 1.0
    width = max((len(name) for name, _ in values), default=0)
    return "\n".join(
        f"{name:<{width}} {'█' * max(1, round(_LETTERS * value / most))} {value:.4g} {unit}"
        for name, value in values
    )


def picture(title: str, values: Bars, unit: str = "TFLOP/s", limit: float | None = None) -> str:
    """The bars as SVG, over an axis in `unit` with a line at a limit."""
    most = max([value for _, value in values] + [limit or 0.0]) or 1.0
    bottom = _TOP + _ROW * len(values)
    parts = [label(10, 18, title, font_weight="bold")]
    for tick in axis_steps(most):
        x = _LEFT + _WIDTH * tick / most
        line = {"x1": x, "x2": x, "y1": _TOP - 6, "y2": bottom, "stroke": "currentColor"}
        parts.append(element("line", **line, opacity=0.15))
        parts.append(label(x, bottom + 14, f"{tick:g}", text_anchor="middle", font_size=10))
    for k, (name, value) in enumerate(values):
        y, length = _TOP + _ROW * k, _WIDTH * value / most
        parts.append(label(_LEFT - 8, y + 13, name, text_anchor="end", font_size=11))
        parts.append(element("rect", x=_LEFT, y=y + 2, width=length, height=_ROW - 6, fill=BLUE))
        parts.append(label(_LEFT + length + 5, y + 13, f"{value:.4g}", font_size=10))
    if limit:
        x = _LEFT + _WIDTH * limit / most
        line = {"x1": x, "x2": x, "y1": _TOP - 6, "y2": bottom, "stroke": "currentColor"}
        parts.append(element("line", **line, stroke_dasharray="4 3"))
        parts.append(label(x, _TOP - 10, "limit", text_anchor="middle", font_size=10))
    parts.append(label(_LEFT, bottom + 30, unit, font_size=10))
    return drawing(_LEFT + _WIDTH + 60, bottom + 40, title, parts) + "\n"
