"""Commands share this: a parser whose errors are one sentence, and values that options take."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .. import __version__
from ..errors import DlsysError, printable
from . import streams

Number = TypeVar("Number", int, float)

CHECKPOINT = "A checkpoint is a file, or the folder of a run, which means its best one."
_MOST = 10**9  # of whatever is counted
_MOST_LETTERS = 40  # letters of an argument that is refused


class UsageError(DlsysError):
    """Options that cannot be had together; the text says which can."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, with status 2.

    typed: the words that start the program, for hints of what to type next. line: the program with
    the arguments that it was given, as one would type them.
    """

    def __init__(self, *, typed: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.typed = typed or self.prog
        self.line = self.typed

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options. Files may stand before, between and behind options."""
        self.line = " ".join([self.typed, shlex.join(args or ())]).strip()
        options, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            meant = nearest(unknown[0].partition("=")[0], known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return options

    def error(self, message: str) -> NoReturn:
        streams.say(printable(message))
        self.exit(2)

    def add_version(self) -> None:
        """Adds --version."""
        self.add_argument("--version", action="version", version=f"dlsys {__version__}")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` where a word is nearly one that is known, else nothing."""
    found = difflib.get_close_matches(word[:_MOST_LETTERS], list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


# ---- the values of options ----
def read(
    kind: Callable[[str], Number], text: str, fits: Callable[[Number], bool], what: str
) -> Number:
    """The number in a text. ArgumentTypeError, with what is expected, for one that does not fit."""
    with contextlib.suppress(ValueError, OverflowError):
        value = kind(text)
        if fits(value):
            return value
    raise argparse.ArgumentTypeError(f"expected {what}, got {shortened(text) or 'nothing'}")


def shortened(text: str) -> str:
    """The text as an error quotes it."""
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"


def positive(text: str) -> int:
    """An argument that counts something."""
    value = read(int, text, lambda value: value >= 1, "a positive number")
    return read(int, text, lambda _: value <= _MOST, f"at most {_MOST}")


def whole(text: str) -> int:
    """A count of what may be left out."""
    return read(int, text, lambda value: value >= 0, "an integer from 0 on")


def path(text: str) -> Path:
    """The name of a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got nothing")
    return Path(text)


def page_path(text: str) -> Path:
    """The name of an HTML page, which may also have no ending."""
    found = path(text)
    if found.suffix.lower() not in ("", ".html", ".htm"):
        page = found.with_suffix(".html")
        raise argparse.ArgumentTypeError(
            f"a report is an HTML page and cannot be {shortened(found.name)}: write {page}, which "
            "a browser shows and prints"
        )
    return found


def seed(text: str) -> int:
    """A seed, as every generator here takes it."""
    return read(int, text, lambda value: 0 <= value < 2**32, "an integer from 0 to 4294967295")


def not_negative(text: str) -> float:
    """A rate, a decay or a duration."""
    return read(float, text, lambda value: 0 <= value < float("inf"), "a number from 0 on")


def share(text: str) -> float:
    """A part of something, but not all of it."""
    return read(float, text, lambda value: 0 <= value < 1, "0 or more and less than 1")
