"""Writing SVG by hand: elements, and a drawing that is light or dark like what is around it.

Lines and letters have the color of the text around the drawing (`currentColor`), areas are colors
that are legible on white and on black.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from html import escape
from typing import Any

MONO = "ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
SANS = "system-ui,'DejaVu Sans',sans-serif"
MONO_WIDTH = 0.61  # of a letter, in font sizes
BLUE, GREEN, ORANGE, PURPLE, RED, TEAL, GRAY = (
    "#4c8ee0", "#46a868", "#e2913b", "#9a72d6", "#d9605a", "#3aa5a5", "#8b949e",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, "#b8860b", "#5f74c4", "#c2649a", "#7a9a3a")

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def text_of(value: Any) -> str:
    """Any text, as XML may hold it."""
    return escape(printable(value))


def element(tag: str, *children: str, **attributes: Any) -> str:
    """`<tag …>children</tag>`; `_` in an attribute's name becomes `-`, None leaves it out."""
    start = f"<{tag}" + "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"{start}>{''.join(children)}</{tag}>" if children else f"{start}/>"


def label(x: float, y: float, words: Any, **attributes: Any) -> str:
    """One line of text."""
    return element("text", text_of(words), x=x, y=y, **attributes)


def drawing(width: float, height: float, title: str, children: Iterable[str]) -> str:
    """A complete drawing, for a page or a file of its own."""
    return element(
        "svg",
        element("title", text_of(title)),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width,
        height=height,
        role="img",
        font_family=SANS,
        font_size=12,
        fill="currentColor",
    )


def axis_steps(largest: float, count: int = 5, least: float = 0.0) -> list[float]:
    """About `count` ticks, round numbers from 0 on that do not exceed the largest, with steps of
    at least `least`.
    """
    if largest <= 0:
        return [0.0]
    step = max(largest / count, least)
    magnitude = 10.0 ** math.floor(math.log10(step))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= step)
    return [k * step for k in range(int(largest / step + 1e-9) + 1)]


def byte_text(nbytes: float) -> str:
    """Bytes in the unit that suits their size."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes:,.0f} bytes"


def time_text(ms: float) -> str:
    """Milliseconds in the unit that suits their size."""
    return f"{ms:,.2f} ms" if ms >= 1 else f"{ms * 1e3:.1f} µs"


def printable(value: Any) -> str:
    """A value as text, without the characters that XML may not hold."""
    return _UNPRINTABLE.sub("�", str(value))


def cut(words: str, letters: int) -> str:
    """The words, with their end left out where they are longer than so many letters."""
    return words if len(words) <= letters else words[: max(letters - 1, 1)] + "…"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text_of(value)
