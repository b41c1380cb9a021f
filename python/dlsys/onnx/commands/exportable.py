"""Print the ONNX form of each operator as Markdown, or write it to docs/onnx.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import DataError
from ...files import replacing

BEGIN, END = "exportable -->\n\n", "\n<!-- end -->"  # of the table in a page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The page, if any."""
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in this page")


def run(options: argparse.Namespace) -> None:
    """Prints the table, or writes it. DataError for a page that has none."""
    from ..exporter.table import markdown

    if options.write is None:
        print(markdown(), end="")
        return
    before, begin, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"{options.write} has no table of exportable operators to replace")
    with replacing(options.write) as file:
        file.write("".join([before, begin, markdown(), end, after]).encode())
