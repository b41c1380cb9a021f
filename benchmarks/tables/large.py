"""The tables and the picture of large training steps (steps/large.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlsys.viz.svg import BLUE, GRAY, TEAL, axis_steps, drawing, element, label
from steps.large import OURS, TUNED
from tables.gpu import Results, rows, source

NAMES = {
    "gpt2": "GPT-2 124M, 16 × 1,024 tokens, AdamW",
    "resnet50": "ResNet-50, 128 images, SGD with momentum",
}
SHOWN = 0.01  # of a step's time; operators below are left out
GB_PER_S = 4281  # of a copy within an H200's memory
TFLOPS = {"bf16": 989.4, "tf32": 494.7, "fp32": 61.0}  # an H200's limits
_LEFT, _WIDTH, _TOP, _ROW = 300.0, 520.0, 30.0, 16.0


def steps(results: Results) -> str:
    """Milliseconds, memory and the first steps of each side."""
    record = results.read("large")
    body = []
    for step in _in_order(record):
        work = f"{NAMES[step['work']]}, {step['precision']}"
        cells = [f"{step['ms']:.1f}", f"{step['peak_mib'] / 1024:.1f}", f"{step['first_s']:.1f}"]
        body.append([f"{work}: {step['side']}", *cells])
    head = ["training step", "ms", "GiB at most", "s, the first two steps"]
    return f"{rows(head, body)}\n\n{source(record)}"


def kernels(results: Results) -> str:
    """The time of our steps by operator, beside its floor."""
    parts = ["![operators of a step and their floors](large.svg)"]
    parts += [f"{_title(step)}:\n\n{_kernels(step)}" for step in _traced(results.read("large"))]
    return "\n\n".join(parts)


def draw(results: Results, path: Path) -> str:
    """Draws the operators of our steps into an SVG file, or says why not."""
    try:
        record = results.read("large")
    except FileNotFoundError as missing:
        return f"{path.name}: left as it is, for want of {missing}"
    path.write_text(picture(_traced(record)) + "\n")
    return str(path)


def picture(steps: list[dict[str, Any]]) -> str:
    """A bar for each operator of each step, of which what its floor takes is dark."""
    words = "milliseconds of a step by operator; dark: what memory or tensor cores would take"
    parts = [label(10, 18, words, font_weight="bold")]
    y = _TOP
    for step in steps:
        shown = _shown(step)
        scale = _WIDTH / max(row["ms"] for row in shown)
        parts.append(label(10, y + 16, _title(step), font_weight="bold", font_size=11))
        y += 24
        for row in shown:
            parts += _bar(y, row, _floor(row, step["precision"]), scale)
            y += _ROW
        for ms in axis_steps(_WIDTH / scale):
            place = {"x": _LEFT + ms * scale, "y": y + 12, "text_anchor": "middle"}
            parts.append(element("text", f"{ms:g}", **place, font_size=10, fill=GRAY))
        y += 24
    return drawing(_LEFT + _WIDTH + 70, y, "operators of a step and their floors", parts)


def _bar(y: float, row: dict[str, Any], floor: float, scale: float) -> list[str]:
    name = f"{row['operator']} ({row['calls']})"
    middle = y + _ROW / 2 + 3.5
    look = {"x": _LEFT, "y": y + 2, "height": _ROW - 4}
    return [
        label(_LEFT - 6, middle, name, text_anchor="end", font_size=10),
        element("rect", **look, width=row["ms"] * scale, fill=BLUE, opacity=0.45),
        element("rect", **look, width=floor * scale, fill=TEAL),
        label(_LEFT + row["ms"] * scale + 5, middle, f"{row['ms']:.2f}", font_size=10),
    ]


def sentence(results: Results) -> str:
    """The README's line: each work in bf16, ours and PyTorch's."""
    record = results.read("large")
    told = []
    for work, name in NAMES.items():
        found = _in_order(record)
        ms = {x["side"]: x["ms"] for x in found if (x["work"], x["precision"]) == (work, "bf16")}
        theirs = next(value for side, value in ms.items() if side.startswith("PyTorch"))
        told.append(
            f"{name}: {ms['dlsys']:.1f} ms a step, PyTorch compiled and captured {theirs:.1f}"
        )
    gpu = record["machine"]["gpu"].partition(" (")[0]
    return f"In bf16 on an {gpu}: {'; '.join(told)} (`python benchmarks large`)."


def _in_order(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps by precision and work, ours before PyTorch's, as they take part."""
    works, sides = list(NAMES), list({**OURS, **TUNED})

    def key(step: dict[str, Any]) -> tuple[Any, ...]:
        side = step["side"]
        place = sides.index(side) if side in sides else len(sides)
        return step["precision"], works.index(step["work"]), place

    return sorted(record["steps"], key=key)


def _traced(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in _in_order(record) if "kernels" in step]


def _title(step: dict[str, Any]) -> str:
    """The step, and the commit of its operators' times where that is an earlier one."""
    earlier = f", of commit {step['kernels_commit']}" if "kernels_commit" in step else ""
    return f"{NAMES[step['work']]}, {step['precision']}{earlier}"


def _shown(step: dict[str, Any]) -> list[dict[str, Any]]:
    total = sum(row["ms"] for row in step["kernels"])
    return [row for row in step["kernels"] if row["ms"] >= SHOWN * total]


def _floor(row: dict[str, Any], precision: str) -> float:
    """Milliseconds that its bytes take at a copy's rate, or its operations at the chip's limit."""
    return float(row["ms"] * max(row["gb_per_s"] / GB_PER_S, row["tflops"] / TFLOPS[precision]))


def _kernels(step: dict[str, Any]) -> str:
    body = [
        [
            *(f"`{row['operator']}`", row["calls"], f"{row['ms']:.2f}"),
            *(f"{_floor(row, step['precision']):.2f}", row["gb_per_s"], row["tflops"]),
        ]
        for row in _shown(step)
    ]
    return rows(["operator", "calls", "ms", "floor, ms", "GB/s at least", "TFLOP/s"], body)
