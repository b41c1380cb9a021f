"""Kinds of values: what an attribute or an input may be, and the form to which it is brought.

A numpy integer becomes an int, a list a tuple, so that what follows need not ask.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..dtypes import as_dtype

REQUIRED = inspect.Parameter.empty  # the default of what must be given
WRONG = (TypeError, ValueError, OverflowError)  # what `take` raises for a value of another kind


class Misfit(ValueError):
    """Says in words of its own why a value does not fit."""


class Kind:
    """The kind of an attribute: the values that it may have. `take` brings a value to its form or
    raises TypeError or ValueError; `expected` says what fits, for errors; None fits where it is the
    default.

    An attribute that is `omitted` when it is not given is then no attribute of the node at all, and
    its default is what the operator takes it for. `also` is a second keyword for it.
    """

    expected = "something else"

    def __init__(self, default: Any = REQUIRED, *, omitted: bool = False, also: str = "") -> None:
        self.default = default
        self.omitted = omitted
        self.also = also

    def take(self, value: Any) -> Any:
        """The value in its form. TypeError or ValueError where it does not fit."""
        return value

    def refusal(self, key: str, value: Any) -> str:
        """The reason why a value does not fit, as a part of a sentence."""
        return f"{key} must be {self.expected}, got {shown(value)}"

    def checked_default(self, key: str) -> Any:
        """The default in its form, so that calls need not look at it."""
        if self.default is None or self.default is REQUIRED:
            return self.default
        try:
            return self.take(self.default)
        except WRONG as error:
            raise AssertionError(f"{key}: the default {self.default!r} does not fit") from error


class Input(Kind):
    """A node."""

    expected = "a node"

    def take(self, value: Any) -> Any:
        if not hasattr(value, "op"):
            raise TypeError
        return value

    def refusal(self, key: str, value: Any) -> str:
        advice = "wrap arrays in ad.constant"
        if isinstance(value, bool):
            advice = "compare nodes by == or <, which makes one"
        return f"{key} is {type(value).__name__}, expected a node; {advice}"


class Operand(Input):
    """A node, or a number or an array of numbers that becomes one."""

    expected = "a node, a number or an array of numbers"

    def take(self, value: Any) -> Any:
        if is_node(value):
            return value
        if isinstance(value, bool) or np.asarray(value).dtype.kind not in "biuf":
            raise TypeError
        return value

    def refusal(self, key: str, value: Any) -> str:
        if isinstance(value, bool):
            return f"{key} is the Python bool {value}; compare nodes by == or <, which makes a node"
        return Kind.refusal(self, key, value)


class Nodes(Kind):
    """A sequence of nodes."""

    expected = "a sequence of nodes"

    def take(self, value: Any) -> Any:
        nodes = list(value)
        if is_node(value) or not all(map(is_node, nodes)):
            raise TypeError
        return nodes


class Name(Kind):
    """The name of the node, a string or None."""

    expected = "a string or None"

    def __init__(self) -> None:
        super().__init__(None)

    def take(self, value: Any) -> Any:
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

    def __init__(
        self, default: Any = REQUIRED, low: int | None = None, high: int | None = None, **more: Any
    ) -> None:
        super().__init__(default, **more)
        self.low = -math.inf if low is None else low
        self.high = math.inf if high is None else high

    @property
    def expected(self) -> str:  # type: ignore[override]
        return {0: "an integer that is not negative", 1: "a positive integer"}.get(
            self.low if self.high == math.inf else None,  # type: ignore[arg-type]
            f"an integer{_range(self.low, self.high)}",
        )

    def take(self, value: Any) -> int:
        if type(value) is not int:
            value = integer(value)
        if not self.low <= value <= self.high:
            raise ValueError
        return value


class Number(Kind):
    """A real number between bounds, which are included, or above one that is not; NaN only where
    `nan` says so. Integers stay integers.
    """

    def __init__(
        self,
        default: Any = REQUIRED,
        low: float = -math.inf,
        high: float = math.inf,
        *,
        above: float | None = None,
        finite: bool = False,
        nan: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(default, **more)
        most = sys.float_info.max if finite else math.inf
        self.low, self.high, self.above = max(low, -most), min(high, most), above
        self.finite, self.nan = finite, nan

    @property
    def expected(self) -> str:  # type: ignore[override]
        kind = "a finite number" if self.finite else "a number"
        low, high = (math.nan if abs(x) == sys.float_info.max else x for x in (self.low, self.high))
        if self.above is not None:
            return f"{kind} above {self.above:g}" + (
                f" and up to {high:g}" if high < math.inf else ""
            )
        if low == 0 and not high < math.inf:
            return f"{kind} that is not negative"
        return kind + _range(low, high)

    def take(self, value: Any) -> float:
        if type(value) is not float and type(value) is not int:
            value = number(value)
        if self.low <= value <= self.high and (self.above is None or value > self.above):
            return value
        if self.nan and value != value:
            return value
        raise ValueError


class Axes(Kind):
    """One axis, several, or with the default None all of them."""

    expected = "an integer or a tuple of them"

    def take(self, value: Any) -> int | tuple[int, ...]:
        if is_integer(value):
            return operator.index(value)
        return integers(value)


class Shape(Kind):
    """A tuple of extents, each at least `low`; with `free` an extent may be None."""

    def __init__(
        self, default: Any = REQUIRED, low: int = 0, free: bool = False, **more: Any
    ) -> None:
        super().__init__(default, **more)
        self.low, self.free = low, free

    @property
    def expected(self) -> str:  # type: ignore[override]
        return "a tuple of extents such as (3, 4)" + ", None where any will do" * self.free

    def take(self, value: Any) -> tuple[Any, ...]:
        if self.free:
            extents = tuple([None if n is None else integer(n) for n in _items(value)])
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


class Numbers(Kind):
    """A tuple of numbers."""

    expected = "a sequence of numbers"

    def take(self, value: Any) -> tuple[float, ...]:
        return tuple([number(item) for item in _items(value)])


class IntPair(Kind):
    """Two integers, for height and width; one stands for both."""

    def __init__(self, default: Any = REQUIRED, low: int = 0, **more: Any) -> None:
        super().__init__(default, **more)
        self.low = low

    @property
    def expected(self) -> str:  # type: ignore[override]
        how = "positive integers" if self.low else "integers that are not negative"
        return f"one or two {how}"

    def take(self, value: Any) -> tuple[int, int]:
        if type(value) is int:
            height = width = value
        elif is_integer(value):
            height = width = operator.index(value)
        else:
            height, width = integers(value)
        if height < self.low or width < self.low:
            raise ValueError
        return height, width


class DType(Kind):
    """A dtype of numbers or truth values, or what numpy makes one of."""

    expected = "a dtype of numbers such as 'float32'"

    def take(self, value: Any) -> Any:
        dtype = as_dtype(value)
        if value is None or dtype.kind not in "fiub":
            raise TypeError
        return dtype


class Choice(Kind):
    """One of some words."""

    def __init__(self, *words: str, default: Any = REQUIRED, **more: Any) -> None:
        super().__init__(default, **more)
        self.words = words

    @property
    def expected(self) -> str:  # type: ignore[override]
        *most, last = self.words
        return f"{', '.join(most)} or {last}" if most else last

    def take(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value


class Instance(Kind):
    """A value of a class, or of one of several."""

    def __init__(self, *classes: type, default: Any = REQUIRED, **more: Any) -> None:
        super().__init__(default, **more)
        self.classes = classes
        self.expected = " or ".join(
            f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"
            for kind in classes
        )

    def take(self, value: Any) -> Any:
        if not isinstance(value, self.classes):
            raise TypeError
        return value


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


# ---- values ----


def is_node(value: Any) -> bool:
    """True for a node: this file does not know the class."""
    return hasattr(value, "op")


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
    return tuple([x if type(x) is int else integer(x) for x in _items(value)])


def number(value: Any) -> float:
    """A real number, or an array of one without dimensions, as Python's int or float. TypeError for
    everything else.
    """
    kind = type(value)
    if kind is float or kind is int:
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        if value.ndim or value.dtype.kind not in "iuf":
            raise TypeError
        return value.item()
    if kind is bool or not isinstance(value, (int, float)):
        raise TypeError
    return value


def shown(value: Any) -> str:
    """A value as errors show it, cut where it is long."""
    if is_node(value):
        return f"the node {value.name}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _items(value: Any) -> Iterable[Any]:
    """The items of a sequence; a string is none."""
    if isinstance(value, (str, bytes)) or is_node(value):
        raise TypeError
    return value


def _range(low: float, high: float) -> str:
    if low > -math.inf and high < math.inf:
        return f" from {low:g} to {high:g}"
    if low > -math.inf:
        return f" from {low:g} on"
    return f" up to {high:g}" if high < math.inf else ""
