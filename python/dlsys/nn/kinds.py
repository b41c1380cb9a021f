"""Kinds of what layers take besides numbers, see arguments/kinds.py."""

from __future__ import annotations

from typing import Any

from ..arguments.kinds import Kind
from ..ops.conv.geometry import IntPair, Padding


class AsGiven(Kind):
    """A value that fits another kind, in the form in which it is given."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.expected = kind.expected

    def take(self, value: Any) -> Any:
        self.kind.take(value)
        return value


class Function(Kind):
    """Anything that can be called."""

    expected = "a function"

    def take(self, value: Any) -> Any:
        if not callable(value):
            raise TypeError
        return value


class Padding1d(Kind):
    """Elements around a sequence: an integer for both sides, a pair for before and after, or a word
    that says how many.
    """

    expected = "'same', 'valid', or an integer or a pair of them that is not negative"

    def take(self, value: Any) -> Any:
        return Padding().take(value) if isinstance(value, str) else IntPair().take(value)
