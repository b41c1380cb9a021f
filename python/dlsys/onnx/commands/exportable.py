"""Print the ONNX form of each operator as Markdown, which docs/onnx.md shows."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes nothing."""


def run(options: argparse.Namespace) -> None:
    """Prints the table."""
    from ..exporter.table import markdown

    print(markdown(), end="")
