"""Print the operators that are read from ONNX files as Markdown: docs/onnx-operators.md."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes nothing."""


def run(options: argparse.Namespace) -> None:
    """Prints the page."""
    from ..importer.table import markdown

    print(markdown(), end="")
