"""The frame of all that is shown in notebooks: a heading and parts, in the notebook's colors."""

from __future__ import annotations

from typing import Any

from ..svg import text_of

# Lines and letters have the color of the notebook's text. A class named twice is more specific than
# a notebook's own rules for tables.
_STYLE = """
.dlsys { line-height: 1.45; }
.dlsys > div { margin: .3em 0; }
.dlsys .scroll { overflow: auto; max-height: 32em; }
.dlsys .picture div { overflow: auto; max-height: 64em; }
.dlsys .picture svg { display: block; max-width: 100%; min-width: var(--least); height: auto; }
.dlsys .picture label:has(:checked) + div svg { max-width: none; }
.dlsys.dlsys table { border-collapse: collapse; margin: .3em 0; font-variant-numeric: tabular-nums;
  background: none; color: inherit; }
.dlsys.dlsys tr, .dlsys.dlsys tbody tr:nth-child(n), .dlsys.dlsys tbody tr:hover {
  background: none; color: inherit; }
.dlsys.dlsys th, .dlsys.dlsys td { text-align: left; padding: .15em 1em .15em 0;
  vertical-align: top; border: 0; border-bottom: 1px solid rgba(128, 128, 128, .4);
  white-space: pre; }
.dlsys.dlsys td.number, .dlsys.dlsys th.number { text-align: right; }
.dlsys.dlsys tfoot td { font-weight: bold; }
.dlsys pre { margin: .3em 0; overflow: auto; max-height: 32em; background: none; color: inherit;
  font: .92em/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.dlsys summary { cursor: pointer; }
.dlsys img { display: block; image-rendering: pixelated; max-width: 100%; height: auto; }
.dlsys iframe { width: 100%; height: 36em; border: 1px solid rgba(128, 128, 128, .4); }
"""


def framed(heading: str, facts: Any, *parts: str) -> str:
    """A fragment: a heading in bold, facts beside it, and finished HTML below."""
    line = f"<div><b>{text_of(heading)}</b> {text_of(facts)}</div>"
    body = "".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div class="dlsys"><style>{_STYLE}</style>{line}{body}</div>'


def sentence(words: str) -> str:
    """A line of text in a weaker tone."""
    return f'<span style="opacity:.75">{text_of(words)}</span>' if words else ""


def plain(words: str) -> str:
    """Text with its line breaks, in letters of one width."""
    return f"<pre>{text_of(words)}</pre>"
