"""Kinds of values: what an attribute or an input may be, and the form to which it is brought.

A numpy integer becomes an int, a list a tuple, so that what follows need not ask.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..dtypes import as_dtype
from ..graph.node import Node, no_node
from ..rungs import Ladder

REQUIRED = inspect.Parameter.empty  # the default of what must be given
WRONG = (TypeError, ValueError, OverflowError)  # what `take` raises for a value of another kind


class Misfit(ValueError):
    """Says in words of its own why a value does not fit."""


class Kind:
    """The kind of an attribute: the values that it may have. `take` brings a value to its form or
    raises TypeError or ValueError; `expected` says what fits, for errors; None fits where it is the
    default.

    An attribute that is `omitted` when it is not given is then no attribute of the node at all, and
    its default is what the operator takes it for. `also` is a second keyword for it. `limits` are
    attributes of the class that this kind has otherwise, such as `low`.
    """

    expected = "something else"

    def __init__(
        self, default: Any = REQUIRED, *, omitted: bool = False, also: str = "", **limits: Any
    ) -> None:
        self.default, self.omitted, self.also = default, omitted, also
        for key, value in limits.items():
            assert hasattr(type(self), key), f"{type(self).__name__} has no {key}"
            setattr(self, key, value)

    def take(self, value: Any) -> Any:
        """The value in its form. TypeError or ValueError where it does not fit."""
        return value

    def refusal(self, key: str, value: Any) -> str:
        """The reason why a value does not fit, as a part of a sentence."""
        return f"{key} must be {self.expected}, got {shown(value)}"

    @property
    def initial(self) -> Any:
        """The default in its form, so that calls need not look at it."""
        plain = self.default is None or self.default is REQUIRED
        return self.default if plain else self.take(self.default)


class Input(Kind):
    """A node."""

    expected = "a node"

    def take(self, value: Any) -> Any:
        if not isinstance(value, Node):
            raise TypeError
        return value

    def refusal(self, key: str, value: Any) -> str:
        return no_node(key, value)


class Name(Kind):
    """The name of the node, a string or None."""

    expected = "a string or None"

    def __init__(self) -> None:
        super().__init__(None)

    def take(self, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return value


class Bool(Kind):
    """True or False; 1 and 0 stand for them."""

    expected = "True or False"

    def take(self, value: Any) -> bool:
        if value is True or value is False:
            return value
        if isinstance(value, np.bool_) or (is_integer(value) and value in (0, 1)):
            return bool(value)
        raise TypeError


class Int(Kind):
    """An integer between bounds, which are included."""

    low = -math.inf
    high = math.inf

    @property
    def expected(self) -> str:  # type: ignore[override]
        if (self.low, self.high) == (1, math.inf):
            return "a positive integer"
        return "an integer" + _between(self.low, self.high)

    def take(self, value: Any) -> int:
        value = integer(value)
        if not self.low <= value <= self.high:
            raise ValueError
        return value


class Number(Kind):
    """A real number between bounds, which are included, or above one that is not; NaN only where
    `nan` says so. Integers stay integers.
    """

    low = -math.inf
    high = math.inf
    above: float | None = None
    finite = False
    nan = False

    @property
    def expected(self) -> str:  # type: ignore[override]
        kind = "a finite number" if self.finite else "a number"
        if self.above is None:
            return kind + _between(self.low, self.high)
        most = f" and up to {self.high:g}" if self.high < math.inf else ""
        return f"{kind} above {self.above:g}{most}"

    def take(self, value: Any) -> float:
        value = number(value)
        fits = self.low <= value <= self.high and (self.above is None or value > self.above)
        if fits and not (self.finite and math.isinf(value)) or (self.nan and value != value):
            return value
        raise ValueError


class Axes(Kind):
    """One axis, several, or with the default None all of them."""

    expected = "an integer or a tuple of them"

    def take(self, value: Any) -> int | tuple[int, ...]:
        return operator.index(value) if is_integer(value) else integers(value)


class Shape(Kind):
    """A tuple of extents, each at least `low`; with `free` an extent may be None."""

    low = 0
    free = False

    @property
    def expected(self) -> str:  # type: ignore[override]
        return "a tuple of extents such as (3, 4)" + ", None where any will do" * self.free

    def take(self, value: Any) -> tuple[Any, ...]:
        extents: tuple[Any, ...]
        if self.free:
            extents = tuple([None if n is None else integer(n) for n in items(value)])
        else:
            extents = integers(value)
        for extent in extents:
            if extent is not None and extent < self.low:
                raise ValueError
        return extents


class Ints(Kind):
    """A tuple of integers."""

    expected = "a tuple of integers"

    def take(self, value: Any) -> tuple[int, ...]:
        return integers(value)


class DType(Kind):
    """A dtype of numbers or truth values, or what numpy makes one of."""

    expected = "a dtype of numbers such as 'float32'"

    def take(self, value: Any) -> Any:
        dtype = as_dtype(value)
        if value is None or dtype.kind not in "fiub":
            raise TypeError
        return dtype


class OneOf(Kind):
    """One of some words."""

    def __init__(self, *words: str, default: Any = REQUIRED, **more: Any) -> None:
        super().__init__(default, **more)
        self.words = words
        *most, last = words
        self.expected = f"{', '.join(most)} or {last}" if most else last

    def take(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value


class Rung(OneOf):
    """A rung of a ladder, or auto; without it the ladder's setting counts."""

    def __init__(self, ladder: Ladder) -> None:
        super().__init__(*ladder.words, default=None, omitted=True)


class Instance(Kind):
    """A value of a class, or of one of several."""

    def __init__(self, *classes: type, default: Any = REQUIRED, **more: Any) -> None:
        super().__init__(default, **more)
        self.classes = classes
        names = [kind.__name__ for kind in classes]
        self.expected = " or ".join(
            f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}" for name in names
        )

    def take(self, value: Any) -> Any:
        if not isinstance(value, self.classes):
            raise TypeError
        return value


# ---- values ----


def is_integer(value: Any) -> bool:
    """True for an integer, Python's or numpy's, and no truth value."""
    if type(value) is int:
        return True
    if isinstance(value, (tuple, bool, np.bool_)):
        return False
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iu"
    return hasattr(type(value), "__index__")


def integer(value: Any) -> int:
    """An integer as Python's. TypeError for everything else: truth values, floats, strings."""
    if not is_integer(value):
        raise TypeError
    return operator.index(value)


def integers(value: Any) -> tuple[int, ...]:
    """Integers as a tuple. TypeError for what is none."""
    return tuple([x if type(x) is int else integer(x) for x in items(value)])


def number(value: Any) -> float:
    """A real number, or an array of one without dimensions, as Python's int or float. TypeError for
    everything else.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        if value.ndim or value.dtype.kind not in "iuf":
            raise TypeError
        return value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return value


def items(value: Any) -> Iterable[Any]:
    """The items of a sequence; a string is none. TypeError for what has no items."""
    if isinstance(value, (str, bytes)) or isinstance(value, Node):
        raise TypeError
    return value


def shown(value: Any) -> str:
    """A value as errors show it, cut where it is long."""
    if isinstance(value, Node):
        return f"the node {value.name}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _between(low: float, high: float) -> str:
    if high < math.inf:
        return f" from {low:g} to {high:g}" if low > -math.inf else f" up to {high:g}"
    if low == 0:
        return " that is not negative"
    return f" from {low:g} on" if low > -math.inf else ""
