"""Checks pages that `make docs` made: they load nothing from elsewhere, and no link is broken.

python docs/site/check.py build/docs
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from urllib.parse import unquote

ADDRESS = r"(?:https?:)?//[^\s\"'>)]+"
LOADED = re.compile(
    rf"<(?!a\b)\w[^>]*\b(?:src|href|data)=[\"']?({ADDRESS})|(?:url\(|@import)\s*[\"']?({ADDRESS})"
)


def loaded_from_elsewhere(text: str) -> list[str]:
    """Addresses of other hosts that a page or a style sheet loads; links to them are no matter."""
    return [first or second for first, second in LOADED.findall(text)]


def broken(pages: dict[str, str], files: set[str]) -> list[str]:
    """Links and pictures of pages, by path, whose file or anchor is not among them."""
    anchors = {page: set(re.findall(r"\bid=\"([^\"]*)\"", text)) for page, text in pages.items()}
    found = []
    for page, text in pages.items():
        for link in re.findall(r"<(?:a|img|link|script)\b[^>]*\b(?:href|src)=\"([^\"]*)\"", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            path = path.partition("?")[0]
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
            target = page if not path else target
            missing = anchor and target in pages and anchor not in anchors[target]
            if target not in files or missing:
                found.append(f"{page}: {link}")
    return found


def main(folder: Path) -> int:
    files = {str(p.relative_to(folder).as_posix()): p for p in folder.rglob("*") if p.is_file()}
    pages = {n: p.read_text(encoding="utf-8") for n, p in files.items() if n.endswith(".html")}
    wrong = broken(pages, set(files))
    for name, path in files.items():
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            wrong += [f"{name}: loads {address}" for address in loaded_from_elsewhere(text)]
    if "Search.setIndex" not in (folder / "searchindex.js").read_text(encoding="utf-8")[:100]:
        wrong.append("searchindex.js: no index for the search")
    print(*wrong, f"{len(pages)} pages, {len(wrong)} faults", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
