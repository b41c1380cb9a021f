"""A page of HTML that is complete in itself: its style, headings, tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .svg import text_of

_SMALLEST, _NARROW = 0.7, 640.0  # the share of a picture's width, and pixels, that it keeps
_STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --paper: #ffffff; --pale: #f3f5f8;
  --line: #d5dae1; --accent: #2b6cc4; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4ea; --paper: #15181d; --pale: #1e2229;
  --line: #363c46; --accent: #79aef2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 76rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; }
a { color: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0; }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.numbers div { background: var(--pale); border-radius: 6px; padding: .5rem 1rem; }
.numbers b { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
.columns { display: grid; gap: 0 3rem;
  grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
.columns table { width: 100%; }
.columns th { width: 10rem; font-weight: normal; opacity: .75; }
.scroll { overflow: auto; max-height: 85vh; }
.picture { padding: .5rem 0; }
.picture svg { display: block; max-width: 100%; min-width: var(--least); height: auto; }
.picture div { overflow: auto; max-height: 95vh; }
.picture label { font-size: .85rem; }
.picture label:has(:checked) + div svg { max-width: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
tfoot td { font-weight: bold; }
thead th { position: sticky; top: 0; background: var(--paper); }
pre { font: 12px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; background: var(--pale);
  padding: .75rem; border-radius: 6px; overflow: auto; max-height: 60vh; }
summary { cursor: pointer; color: var(--accent); margin: .5rem 0; }
"""


class Section(NamedTuple):
    """A heading, its anchor, finished HTML below it, and what a newcomer wants to know of it."""

    anchor: str
    heading: str
    body: str
    lead: str = ""


def document(title: str, lead: str, sections: Iterable[Section]) -> str:
    """A complete HTML page."""
    filled = [section for section in sections if section.body]
    links = "".join(f'<a href="#{s.anchor}">{text_of(s.heading)}</a>' for s in filled)
    parts = "".join(
        f'<section id="{s.anchor}"><h2>{text_of(s.heading)}</h2>\n'
        f"{f'<p>{text_of(s.lead)}</p>' if s.lead else ''}{s.body}\n</section>\n"
        for s in filled
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n'
        f"<title>{text_of(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{text_of(title)}</h1>\n{lead}\n<nav>{links}</nav>\n{parts}</body>\n</html>\n"
    )


def numbers(values: Mapping[str, str]) -> str:
    """A few figures in large type with their names."""
    tiles = "".join(f"<div><b>{text_of(v)}</b>{text_of(k)}</div>" for k, v in values.items())
    return f'<div class="numbers">{tiles}</div>' if tiles else ""


def pairs(heading: str, values: Mapping[str, Any] | None) -> str:
    """A table of names and values with a small heading."""
    if not values:
        return ""
    rows = "".join(
        f"<tr><th>{text_of(key)}</th><td>{text_of(value)}</td></tr>"
        for key, value in values.items()
    )
    return f"<div><h3>{text_of(heading)}</h3><table>{rows}</table></div>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    total: Sequence[Any] | None = None,
    words: int = 1,
) -> str:
    """A table; every column but the first `words` is numeric."""
    foot = f"<tfoot>{_row(total, 'td', words)}</tfoot>" if total else ""
    return (
        f'<div class="scroll"><table><thead>{_row(head, "th", words)}</thead>'
        f"<tbody>{''.join(_row(row, 'td', words) for row in rows)}</tbody>{foot}</table></div>"
    )


def picture(svg: str, zoom: bool = False) -> str:
    """A drawing, scaled down to the page's width, but not beyond what can be read on a phone, where
    it is scrolled instead; with `zoom` a box to tick shows its own size.
    """
    width, unit = re.findall(r' width="([\d.]+)(pt)?"', svg[: svg.index(">")])[0]
    pixels = float(width) * (4 / 3 if unit else 1)
    least = f"{min(_SMALLEST * pixels, _NARROW):.0f}px"
    box = '<label><input type="checkbox"> full size</label>' if zoom else ""
    return f'<div class="picture" style="--least: {least}">{box}<div>{svg}</div></div>'


def folded(summary: str, words: str) -> str:
    """Plain text that a click unfolds."""
    return f"<details><summary>{text_of(summary)}</summary><pre>{text_of(words)}</pre></details>"


def _row(cells: Sequence[Any], tag: str, words: int) -> str:
    row = (
        f"<{tag}{' class=number' if k >= words else ''}>{text_of(cell)}</{tag}>"
        for k, cell in enumerate(cells)
    )
    return f"<tr>{''.join(row)}</tr>"
