"""The table and the picture of training from host arrays (overlap.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlsys.viz.svg import BLUE, ORANGE, TEAL, axis_steps, drawing, element, label

from .gpu import NAMES, Results, rows, source

_LEFT, _WIDTH, _TOP, _ROW, _APART = 70.0, 860.0, 44.0, 30.0, 10.0


def table(results: Results) -> str:
    """Steps fed from the host beside those whose data lie on the device."""
    record = results.read("overlap")
    body = []
    for found in record["works"]:
        ms = [f"{found['ms'][way]['median']:.3f}" for way in ("device", "ahead", "fed")]
        share = f"{found['trace']['share']:.0%}" if "trace" in found else ""
        name = f"{NAMES[found['work']]}, {found['images']} images"
        body.append([name, f"{found['nbytes'] / 1e6:.2f}", *ms, share])
    head = [
        *("training step, ms", "MB a batch", "batches on the device", "copied ahead"),
        *("copied by the run", "copies beside kernels"),
    ]
    timelines = any("timeline" in found for found in record["works"])
    picture = "![copies beside kernels](overlap.svg)\n\n" if timelines else ""
    note = f"Medians of {found['ms']['device']['n']} rounds. {source(record)}"
    return f"{picture}{rows(head, body)}\n\n{note}"


def draw(results: Results, path: Path) -> str:
    """Draws the timeline into an SVG file, or says why not."""
    try:
        works = results.read("overlap")["works"]
    except FileNotFoundError as missing:
        return f"{path.name}: left as it is, for want of {missing}"
    for found in works:
        if "timeline" in found:
            path.write_text(picture(found, NAMES[found["work"]]) + "\n")
            return str(path)
    return f"{path.name}: not drawn, nothing was traced"


def picture(found: dict[str, Any], name: str) -> str:
    """A few steps: copies from the host above the kernels, which change color with each step."""
    shown = found["timeline"]
    begins = shown["begins"]
    scale = _WIDTH / begins[-1]
    copies = [(*span, ORANGE) for span in shown["copies"]]
    kernels = [
        (*span, (BLUE, TEAL)[sum(begin <= span[0] for begin in begins) % 2])
        for span in shown["kernels"]
    ]
    bottom = _TOP + 2 * _ROW + _APART
    words = f"{len(begins) - 1} training steps of {name}, {found['images']} images from the host"
    parts = [label(10, 20, words, font_weight="bold")]
    for begin in begins:
        x = _LEFT + begin * scale
        line = {"x1": x, "x2": x, "y1": _TOP - 8, "y2": bottom + 8}
        parts.append(element("line", **line, stroke="currentColor", opacity=0.35))
    parts += _row(_TOP, "copies", copies, scale)
    parts += _row(_TOP + _ROW + _APART, "kernels", kernels, scale)
    for us in axis_steps(begins[-1], 8):
        words = f"{us:g} µs"
        parts.append(label(_LEFT + us * scale, bottom + 22, words, text_anchor="middle"))
    return drawing(_LEFT + _WIDTH + 40, bottom + 32, "copies beside kernels", parts)


def _row(y: float, name: str, spans: Sequence[tuple[float, float, str]], scale: float) -> list[str]:
    parts = [label(_LEFT - 8, y + _ROW / 2 + 4, name, text_anchor="end")]
    for start, end, color in spans:  # some kernels run beside each other
        place = {"x": _LEFT + start * scale, "width": max((end - start) * scale - 0.5, 0.5)}
        look = {"fill": color, "opacity": 0.8}
        parts.append(element("rect", **place, y=y, height=_ROW, **look))
    return parts
