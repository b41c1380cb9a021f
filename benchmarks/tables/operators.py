"""The table and the picture of every operator beside PyTorch (operators.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlsys.viz.svg import BLUE, GRAY, ORANGE, drawing, element, label
from operators.operators import ratio

from .gpu import Results, rows, source

WAYS = ("forward", "with gradients")
BEYOND = 2.0
_ROW, _LEFT, _WIDTH, _TOP = 12.0, 190.0, 280.0, 52.0
_LEAST, _MOST = 1 / 16, 16.0  # of the picture's axis; what lies beyond is drawn at its end


def table(results: Results) -> str:
    """A line an operator: PyTorch's time, and what part of it the others take."""
    record = results.read("operators")
    body = []
    for name, found in record["works"].items():
        cells = []
        for way in WAYS:
            each = found.get(way)
            shares = [f"{ratio(each, who):.2f}" for who in ("cpu", "numpy")] if each else ["", ""]
            cells += [f"{each['torch']['min']:.3f}" if each else "", *shares]
        body.append([name, *cells])
    head = ["operator", "PyTorch, ms", "CPU", "numpy"]
    head += ["with gradients: PyTorch, ms", "CPU", "numpy"]
    note = f"Times over PyTorch's, {_threads(record)}; minima. {source(record)}"
    return f"![operators](operators.svg)\n\n{summary(record)}\n\n{rows(head, body)}\n\n{note}"


def summary(record: dict[str, Any]) -> str:
    """The count of operators beyond twice PyTorch's time, and the median ratio."""
    told = []
    for who, title in (("cpu", "the CPU device"), ("numpy", "numpy")):
        shares = sorted(
            ratio(found[way], who)
            for found in record["works"].values()
            for way in WAYS
            if way in found
        )
        beyond = sum(share > BEYOND for share in shares)
        told.append(
            f"{beyond} of {len(shares)} times of {title} are beyond {BEYOND:g} times PyTorch's, "
            f"the median is {shares[len(shares) // 2]:.2f}"
        )
    return f"{'; '.join(told)}."


def _threads(record: dict[str, Any]) -> str:
    return "on one thread" if record["threads"] == 1 else f"on {record['threads']} threads"


def draw(results: Results, path: Path) -> str:
    """Draws the ratios into an SVG file, or says why not."""
    try:
        record = results.read("operators")
    except FileNotFoundError as missing:
        return f"{path.name}: left as it is, for want of {missing}"
    path.write_text(picture(record) + "\n")
    return str(path)


def picture(record: dict[str, Any]) -> str:
    """Two columns of operators, each with its ratios as dots on an axis of powers of two."""
    names = list(record["works"])
    half = math.ceil(len(names) / 2)
    title = f"time over PyTorch's, float32, {_threads(record)}"
    parts = [label(10, 18, title, font_weight="bold"), *_legend(10, 36)]
    for column, start in enumerate((0, half)):
        left = _LEFT + column * (_LEFT + _WIDTH + 30)
        shown = [(name, record["works"][name]) for name in names[start : start + half]]
        parts += _column(left, shown, half)
    height = _TOP + half * _ROW + 24
    return drawing(2 * (_LEFT + _WIDTH + 30), height, "operators beside PyTorch", parts)


def _legend(x: float, y: float) -> list[str]:
    parts = []
    for who, color in (("CPU device", BLUE), ("numpy", ORANGE)):
        for way, fill in (("forward", color), ("with gradients", "none")):
            parts.append(_dot(x + 4, y - 4, color, fill))
            parts.append(label(x + 12, y, f"{who}, {way}", font_size=11))
            x += 165
    return parts


def _column(left: float, shown: Sequence[tuple[str, dict[str, Any]]], count: int) -> list[str]:
    bottom = _TOP + count * _ROW
    parts = []
    for power in range(-4, 5):
        x = left + _place(2.0**power)
        number = f"{2**power}" if power >= 0 else f"1/{2**-power}"
        strong = power in (0, 1)
        line = {"x1": x, "x2": x, "y1": _TOP, "y2": bottom, "stroke": "currentColor"}
        parts.append(element("line", **line, opacity=0.6 if strong else 0.15))
        parts.append(label(x, bottom + 14, f"{number} ×", text_anchor="middle", font_size=10))
    for k, (name, found) in enumerate(shown):
        y = _TOP + (k + 0.5) * _ROW
        parts.append(label(left - 8, y + 3.5, name, text_anchor="end", font_size=9))
        line = {"x1": left, "x2": left + _WIDTH, "y1": y, "y2": y, "stroke": GRAY}
        parts.append(element("line", **line, opacity=0.12))
        for who, color in (("numpy", ORANGE), ("cpu", BLUE)):
            for way in WAYS:
                if way in found:
                    x = left + _place(ratio(found[way], who))
                    parts.append(_dot(x, y, color, color if way == "forward" else "none"))
    return parts


def _place(share: float) -> float:
    held = min(max(share, _LEAST), _MOST)
    return _WIDTH * math.log(held / _LEAST) / math.log(_MOST / _LEAST)


def _dot(x: float, y: float, color: str, fill: str) -> str:
    return element("circle", cx=x, cy=y, r=3.2, stroke=color, fill=fill, stroke_width=1.3)
