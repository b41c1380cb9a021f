"""The memory plan of an executor: when each buffer lives, and where in the arena."""

from __future__ import annotations

from collections.abc import Sequence

from ..executor.plan.memory import Buffer, Plan
from .svg import (
    COLORS,
    MONO,
    MONO_WIDTH,
    axis_steps,
    byte_text,
    cut,
    drawing,
    element,
    label,
    text_of,
)

_WIDTH, _HEIGHT = 860.0, 380.0  # of the rectangles' area
_LEFT, _TOP = 80.0, 46.0
_LIVE_HEIGHT = 70.0
_LETTERS = 10  # pixels high
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def memory_plan(plan: Plan, limit: int = 2000) -> str:
    """A plan's buffers as rectangles, lifetime in steps by offset in the arena, as SVG.

    Below them the bytes that live at each step, with the arena's size as the upper line. A pointer
    over a rectangle shows what it holds. At most `limit` buffers are drawn, the largest.
    """
    inside = [buffer for buffer in plan.buffers if buffer.kind == "arena" and buffer.nbytes]
    drawn = sorted(inside, key=lambda buffer: -buffer.nbytes)[:limit]
    names = _names(plan)
    columns = max([len(plan.steps), *(buffer.last + 1 for buffer in inside)])
    frame = _Frame(columns, max(plan.arena_nbytes, 1))
    note = _summary(plan)
    if len(drawn) < len(inside):
        note += f"; the {len(drawn):,} largest of {len(inside):,} buffers are drawn"
    parts = [
        label(_LEFT, 18, note, font_weight="bold"),
        label(_LEFT, 34, _outside(plan), opacity=0.75),
        *frame.axes(),
        *(frame.rectangle(buffer, names.get(buffer, [])) for buffer in drawn),
        *frame.live(inside, plan.live_nbytes),
    ]
    height = _TOP + _HEIGHT + 30 + _LIVE_HEIGHT + 40
    return drawing(_LEFT + _WIDTH + 20, height, "memory plan", parts)


class _Frame:
    """Steps and bytes as coordinates of the drawing."""

    def __init__(self, steps: int, nbytes: int) -> None:
        self._steps, self._nbytes = steps, nbytes
        self._unit, self._unit_name = next(u for u in _UNITS if nbytes >= u[0] or u[0] == 1)

    def x(self, step: float) -> float:
        return _LEFT + _WIDTH * step / max(self._steps, 1)

    def y(self, offset: float) -> float:
        return _TOP + _HEIGHT * (1 - offset / self._nbytes)

    def axes(self) -> list[str]:
        bottom = _TOP + _HEIGHT
        lines, words = [], [label(_LEFT + _WIDTH, bottom + 30, "step", text_anchor="end")]
        words.append(label(_LEFT - 8, _TOP - 12, "offset", text_anchor="end"))
        for tick in axis_steps(self._nbytes / self._unit):
            y = self.y(tick * self._unit)
            lines.append(element("path", d=f"M{_LEFT} {y:.1f}h{_WIDTH}", stroke_opacity=0.15))
            text = f"{tick:g} {self._unit_name}" if tick else "0"
            words.append(label(_LEFT - 8, y + 4, text, text_anchor="end"))
        for tick in axis_steps(self._steps - 1, 10, least=1):
            x = self.x(tick + 0.5)
            lines.append(element("path", d=f"M{x:.1f} {bottom}v4", stroke_opacity=0.6))
            words.append(label(x, bottom + 17, f"{tick:g}", text_anchor="middle"))
        return [element("g", *lines, stroke="currentColor"), *words]

    def rectangle(self, buffer: Buffer, held: Sequence[str]) -> str:
        x, width = self.x(buffer.first), self.x(buffer.last + 1) - self.x(buffer.first)
        y = self.y(buffer.offset + buffer.nbytes)
        height = self.y(buffer.offset) - y
        color = COLORS[buffer.node.number % len(COLORS)]
        tip = (
            f"{', '.join(held[:6])}{', …' if len(held) > 6 else ''}: {buffer.nbytes:,} bytes at "
            f"{buffer.offset:,}, steps {buffer.first} to {buffer.last}"
        )
        area = element(
            "rect", x=x, y=y, width=max(width - 0.5, 0.5), height=max(height - 0.5, 0.5),
            fill=color, fill_opacity=0.45, stroke=color, stroke_width=0.7,
        )  # fmt: skip
        words = self._inner(x, y, width, height, next(iter(held), buffer.node.name))
        return element("g", element("title", text_of(tip)), area, *words)

    def _inner(self, x: float, y: float, width: float, height: float, name: str) -> list[str]:
        """The name, where there is room for some of it."""
        letters = int((width - 6) / (MONO_WIDTH * _LETTERS))
        if height < _LETTERS + 3 or letters < 3:
            return []
        words = cut(name, letters)
        return [label(x + 3, y + height / 2 + 3.5, words, font_size=_LETTERS, font_family=MONO)]

    def live(self, inside: Sequence[Buffer], largest: int) -> list[str]:
        """The sum of live bytes as an area over the steps."""
        top = _TOP + _HEIGHT + 44
        sums = _live(inside, self._steps)
        words = [f"M{_LEFT} {top + _LIVE_HEIGHT:.1f}"]
        for k, nbytes in enumerate(sums):
            y = top + _LIVE_HEIGHT * (1 - nbytes / self._nbytes)
            words.append(f"L{self.x(k):.1f} {y:.1f}H{self.x(k + 1):.1f}")
        words.append(f"V{top + _LIVE_HEIGHT:.1f}Z")
        return [
            label(_LEFT, top - 6, f"live bytes at each step, at most {byte_text(largest)}"),
            element(
                "path", d="".join(words), fill=COLORS[0], fill_opacity=0.35, stroke=COLORS[0],
            ),
            element(
                "path", d=f"M{_LEFT} {top}h{_WIDTH}", stroke="currentColor",
                stroke_dasharray="4 3", stroke_opacity=0.7,
            ),
            label(_LEFT - 8, top + 4, "arena", text_anchor="end"),
        ]  # fmt: skip


def _live(inside: Sequence[Buffer], steps: int) -> list[int]:
    change = [0] * (steps + 1)
    for buffer in inside:
        change[buffer.first] += buffer.nbytes
        change[buffer.last + 1] -= buffer.nbytes
    sums, live = [], 0
    for delta in change[:steps]:
        live += delta
        sums.append(live)
    return sums


def _names(plan: Plan) -> dict[Buffer, list[str]]:
    """The contents of each buffer in the course of a run: values, and scratch of the steps."""
    held: dict[Buffer, list[str]] = {}
    for values in plan.values.values():
        for value in values:
            held.setdefault(value.buffer, []).append(value.node.name)
    for step in plan.steps:
        for value in step.workspace:
            held.setdefault(value.buffer, []).append(f"scratch of {step.node.name}")
    return held


def _summary(plan: Plan) -> str:
    return (
        f"arena {byte_text(plan.arena_nbytes)} for {len(plan.steps)} steps; largest sum of live "
        f"bytes {byte_text(plan.live_nbytes)}, without reuse {byte_text(plan.unshared_nbytes)}"
    )


def _outside(plan: Plan) -> str:
    sums = {"feed": 0, "state": 0, "constant": 0, "fetch": 0}
    for buffer in plan.buffers:
        if buffer.kind in sums:
            sums[buffer.kind] += buffer.nbytes
    names = {"feed": "feeds", "state": "Parameters", "constant": "constants", "fetch": "fetches"}
    return "outside it: " + ", ".join(
        f"{names[kind]} {byte_text(nbytes)}" for kind, nbytes in sums.items() if nbytes
    )
