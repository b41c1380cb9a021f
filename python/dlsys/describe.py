"""Objects show themselves as one line of text, and in notebooks as what `dlsys.viz` draws.

A class of any floor says so in one line: `__repr__ = described`, `_repr_html_ = drawn_by(…)`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from .errors import quoted

_NOTHING: Any = object()
_FEW = 8


def described(x: Any) -> str:
    """`Class(option=value, …)` with the arguments of the constructor that the object keeps under
    their names, or these with a `_` before; what is None, False or empty is left out. Arrays are
    told by dtype and shape. It is the `__repr__` of a class that says so.
    """
    import inspect  # takes milliseconds, and nothing else here needs it

    words = []
    for name in inspect.signature(type(x)).parameters:
        value = getattr(x, name, getattr(x, f"_{name}", _NOTHING))
        own = getattr(value, "__self__", None) is x  # a method, whose repr has that of x
        if not own and not _empty(value):
            words.append(f"{name}={brief(value)}")
    return f"{type(x).__name__}({', '.join(words)})"


def brief(value: Any) -> str:
    """A value on a part of a line: an array by dtype and shape, others by the start of their
    repr.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {tuple(value.shape)}"
    told = os.fspath(value) if isinstance(value, os.PathLike) else value
    return " ".join(quoted(told).split())


def few(words: Sequence[str]) -> list[str]:
    """The words; of many the first few, and how many there are."""
    more = [f"… {len(words):,} in all"] if len(words) > _FEW else []
    return [*words[:_FEW], *more]


def counted(n: int, noun: str) -> str:
    """So many of something, such as `1 run` or `2,000 runs`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def source_line(file: str, line: int) -> str:
    """A line of a program as errors name it: `model.py:31`, in a notebook `In[4]:2`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)  # IPython 8
    cell = name_of(file) if name_of is not None else None
    return f"{cell[1] if cell else os.path.basename(file)}:{line}"


def told_by(module: str, function: str) -> Callable[[Any], str]:
    """A method: the text that a function makes of the object. What tells of a class may stand on a
    floor above it, so that its module is imported when the text is asked for.
    """

    def tell(x: Any) -> str:
        return getattr(import_module(module), function)(x)

    return tell


def drawn_by(function: str) -> Callable[[Any], str]:
    """A `_repr_html_`: the HTML that a function of `dlsys.viz.notebook` makes of the object."""
    return told_by("dlsys.viz.notebook", function)


def _empty(value: Any) -> bool:
    if value is _NOTHING or value is None or value is False:
        return True
    return isinstance(value, (str, tuple, list, dict)) and not value
