"""The user's source line: what nodes and errors say they come from."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ..describe import source_line

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_building = threading.local()


class attributed_to:  # noqa: N801 (used as a function; a class costs half of a generator)
    """Nodes made inside `with attributed_to(node):` are said to come from the same source line
    as `node`, and to be backward if it is or if that is said.
    """

    __slots__ = ("_line", "_before")

    def __init__(self, node: Any, backward: bool = False) -> None:
        self._line = (*node._line[:2], True) if backward else node._line

    def __enter__(self) -> None:
        self._before = getattr(_building, "line", None)
        _building.line = self._line

    def __exit__(self, *error: object) -> None:
        _building.line = self._before


def current_line() -> tuple[str, int, bool]:
    """File and line of the user's code that is building a graph, and whether it is a gradient's."""
    line = getattr(_building, "line", None)
    if line is not None:
        return line
    inner = frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        inner, frame = frame, frame.f_back
    if frame.f_code.co_filename.startswith("<frozen"):  # `python -m dlsys`, whose lines are ours
        frame = inner
    return frame.f_code.co_filename, frame.f_lineno, False


def where() -> str:
    """The user's line as errors show it, such as `model.py:31`."""
    return source_line(*current_line()[:2])
