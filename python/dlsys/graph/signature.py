"""What an operator or a public function takes, said once: its inputs by name, and its attributes
with their type, range and default.

    class ResizeOp(Op):
        signature = Signature("x", size=IntPair(low=1), align_corners=Bool(False))

A call is bound to its signature before the node is made. A value is brought to one form on the way
(a numpy integer becomes an int, a list a tuple), so that what follows need not ask. Whatever does
not fit is refused by SignatureError with the operator, what it got, what it takes and the user's
line.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..errors import SignatureError
from .lines import where

REQUIRED = inspect.Parameter.empty  # the default of what must be given
Declared = TypeVar("Declared", bound=Callable[..., Any])
_WRONG = (TypeError, ValueError, OverflowError)  # what `take` raises for a value of another kind


# ---- kinds of values ----


class Misfit(ValueError):
    """Says in words of its own why a value does not fit."""


class Kind:
    """What one attribute may be. `take` brings a value to its form or raises TypeError or
    ValueError; `expected` says what fits, for errors; None fits where it is the default.

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
        """What is wrong with a value that does not fit, as a part of a sentence."""
        return f"{key} must be {self.expected}, got {shown(value)}"

    def settled(self, key: str) -> Any:
        """The default in its form, so that calls need not look at it."""
        if self.default is None or self.default is REQUIRED:
            return self.default
        try:
            return self.take(self.default)
        except _WRONG as error:
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

    def take(self, value: Any) -> np.dtype:
        dtype = value if isinstance(value, np.dtype) else np.dtype(value)
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
    """What fits another kind, in the form in which it is given."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.expected = kind.expected

    def take(self, value: Any) -> Any:
        self.kind.take(value)
        return value


class Function(Kind):
    """What can be called."""

    expected = "a function"

    def take(self, value: Any) -> Any:
        if not callable(value):
            raise TypeError
        return value


# ---- values ----


def is_node(value: Any) -> bool:
    """Whether a value is a node: this floor of the graph does not know the class."""
    return hasattr(value, "op")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, Python's or numpy's, and no truth value."""
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


# ---- signatures ----


class Signature:
    """The inputs and attributes of an operator, in order.

    Inputs are names: "x", or "*nodes" for any number. A bare "*" behind them makes the attributes
    keyword-only, as in Python; "*nodes" does too. Attributes, and inputs that are optional or may
    be arrays, are kinds by name. The name of the node comes last.
    """

    def __init__(self, *inputs: str, **kinds: Kind) -> None:
        plain = [name for name in inputs if not name.startswith("*")]
        known: dict[str, Kind] = {**{name: Input() for name in plain}, **kinds}
        taken = [name for name, kind in known.items() if isinstance(kind, Input)]
        keyword_only = len(plain) < len(inputs) or len(taken) == len(known)
        known.setdefault("name", Name())
        variadic = next((name[1:] for name in inputs if name[:1] == "*" < name), "")
        positional = plain if variadic else taken
        self._prepare(known, positional if keyword_only else list(known), variadic)

    @classmethod
    def of(cls, function: Callable, kinds: dict[str, Kind]) -> Signature:
        """The signature of a function: a parameter that is annotated Node is an input, `name` the
        name of the node, and the others are of the given kinds with the function's defaults.
        """
        known: dict[str, Kind] = {}
        positional = []
        for key, parameter in inspect.signature(function).parameters.items():
            if key == "self":
                continue
            node = str(parameter.annotation).removesuffix(" | None") in ("Node", "Parameter")
            kind = Input() if node and key not in kinds else Name() if key == "name" else kinds[key]
            known[key] = kind = copy.copy(kind)
            kind.default = parameter.default
            if parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(key)
        made = cls.__new__(cls)
        made._prepare(known, positional, "")
        return made

    def _prepare(self, kinds: dict[str, Kind], positional: list[str], variadic: str) -> None:
        self._kinds, self._positional, self.variadic = kinds, positional, variadic
        self.inputs = [key for key, kind in kinds.items() if isinstance(kind, Input)]
        others = [key for key in kinds if key not in self.inputs and key != "name"]
        self.attributes = {key: kinds[key] for key in others}
        self._words = {kind.also: key for key, kind in kinds.items() if kind.also}
        self._settled = {key: kind.settled(key) for key, kind in kinds.items() if not kind.omitted}
        self._defaults = {key: self._settled[key] for key in others if key in self._settled}
        self._needed = [key for key, kind in kinds.items() if kind.default is REQUIRED]
        self._nullable = frozenset(key for key, kind in kinds.items() if kind.default is None)
        self._optional = not self._nullable.isdisjoint(self.inputs)
        plain = all(type(kinds[key]) is Input for key in self.inputs)
        # How many inputs a call has of which only the attributes need a look, and whether not
        # even these do when none is given.
        self._plain = len(self.inputs) if plain and not (variadic or self._optional) else -1
        self._given = [key for key in self._needed if key in self.attributes]
        self._quick = not self._given

    def bind(
        self, called: str, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any], str | None]:
        """Inputs, attributes and the node's name of a call. SignatureError where it does not
        fit.
        """
        if len(args) == self._plain:
            if not given:
                if self._quick:
                    return args, self._defaults.copy(), None
            else:
                name = given.get("name")
                attrs = self._attributes(given)
                if attrs is not None and (name is None or type(name) is str):
                    return args, attrs, name
        rest: tuple[Any, ...] = ()
        if self.variadic:
            count = len(self._positional)
            args, rest = args[:count], args[count:]
        bound = self.arguments(called, args, given)
        inputs = [bound.pop(key) for key in self.inputs]
        if self._optional:
            inputs = [x for x in inputs if x is not None]
        name = bound.pop("name")
        return [*inputs, *rest] if rest else inputs, bound, name

    def _attributes(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """The attributes of a usual call, in which they are keywords and fit, else None. Whether
        inputs are nodes, the node itself asks.
        """
        made = self._defaults.copy()
        kinds, nullable = self.attributes, self._nullable
        try:
            for key, value in given.items():
                if key in kinds:
                    if value is not None or key not in nullable:
                        made[key] = kinds[key].take(value)
                elif key != "name":
                    return None
        except _WRONG:
            return None
        for key in self._given:
            if made[key] is REQUIRED:
                return None
        return made

    def arguments(self, called: str, args: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        """All that a call gives and the defaults of the rest, by name. SignatureError where it does
        not fit.
        """
        if len(args) > len(self._positional):
            raise self._count_error(called, args, given)
        made = self._settled.copy()
        kinds, nullable = self._kinds, self._nullable
        taken = self._positional[: len(args)]
        key, value = "", None
        try:
            for key, value in zip(taken, args):
                if value is not None or key not in nullable:
                    made[key] = kinds[key].take(value)
            for key, value in given.items():
                if key not in kinds or key in taken:
                    key = self._key(called, key, args, given)
                if value is not None or key not in nullable:
                    made[key] = kinds[key].take(value)
        except _WRONG as error:
            if isinstance(error, SignatureError):
                raise
            raise self._value_error(called, args, key, value, error) from None
        for key in self._needed:
            if made[key] is REQUIRED:
                raise self._missing_error(called, args, given, key)
        return made

    def _key(self, called: str, key: str, args: Sequence[Any], given: dict[str, Any]) -> str:
        """The attribute that another word stands for."""
        taken = self._positional[: len(args)]
        own = self._words.get(key, key)
        if own in taken or own != key and own in given:
            raise _error(called, f"{own} is given twice", self)
        if own in self._kinds:
            return own
        close = difflib.get_close_matches(key, self._kinds, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise _error(called, f"unexpected attribute {key!r}{hint}", self)

    # ---- what is refused ----

    def _count_error(
        self, called: str, args: Sequence[Any], given: dict[str, Any]
    ) -> SignatureError:
        """More positional arguments than there is room for, or fewer inputs than are needed."""
        most = [key for key in self.inputs if key in self._positional]
        least = [key for key in most if self._kinds[key].default is REQUIRED]
        alone = len(most) == len(self._positional)
        got = sum(key in given for key in most) + sum(alone or is_node(value) for value in args)
        if len(least) <= got <= len(most):
            most_args = len(self._positional)
            return _error(called, f"takes {most_args} arguments, got {len(args)}", self)
        count = f"{len(least)}" if least == most else f"{len(least)} to {len(most)}"
        plural = "" if count == "1" else "s"
        names = f" ({', '.join(most)})" if most else ""
        return _error(called, f"takes {count} input{plural}{names}, got {got}")

    def _missing_error(
        self, called: str, args: Sequence[Any], given: dict[str, Any], key: str
    ) -> SignatureError:
        if key in self.inputs:
            return self._count_error(called, args, given)
        return _error(called, f"attribute {key!r} is missing", self)

    def _value_error(
        self, called: str, args: Sequence[Any], key: str, value: Any, error: Exception
    ) -> SignatureError:
        if is_node(value) and self.inputs and key in self._positional[: len(args)]:
            return self._count_error(called, args, {})  # one input too many
        wrong = str(error) if isinstance(error, Misfit) else self._kinds[key].refusal(key, value)
        return _error(called, wrong)

    # ---- as Python and people read it ----

    def python(self) -> inspect.Signature:
        """The signature as `inspect` has them."""
        parameter = inspect.Parameter
        made = []
        for key, kind in self._kinds.items():
            place: Any = parameter.KEYWORD_ONLY
            if key in self._positional:
                place = parameter.POSITIONAL_OR_KEYWORD
            made.append(parameter(key, place, default=kind.default))
        if self.variadic:
            made.append(parameter(self.variadic, parameter.VAR_POSITIONAL))
        return inspect.Signature(sorted(made, key=lambda one: one.kind))

    def described(self) -> str:
        """The attributes, a line each, below an empty one."""
        lines = [f"\n{key}: {kind.expected}." for key, kind in self.attributes.items()]
        return "".join(["\n", *lines]) if lines else ""

    def usage(self, called: str) -> str:
        """A call of it in short, without the node's name: `softmax(x, *, axis=-1)`."""
        whole = self.python()
        short = [one for key, one in whole.parameters.items() if key != "name"]
        return called + str(whole.replace(parameters=short))


def _error(called: str, wrong: str, usage: Signature | None = None) -> SignatureError:
    hint = f"; {usage.usage(called)}" if usage is not None else ""
    return SignatureError(f"{called}: {wrong}{hint} [{where()}]")


def declared(prefix: str = "", /, **kinds: Kind) -> Callable[[Declared], Declared]:
    """Makes a function, or the `__init__` of a class, bind its arguments as an operator does: see
    `Signature.of`. In errors it is called by its name, less `_op`, or by that of the class, behind
    a prefix.
    """

    def decorate(function: Declared) -> Declared:
        signature = Signature.of(function, kinds)
        *owner, own = function.__qualname__.split(".")
        called = prefix + (owner[-1] if own == "__init__" else own.removesuffix("_op"))

        @functools.wraps(function)
        def bound(*args: Any, **given: Any) -> Any:
            return function(**signature.arguments(called, args, given))

        @functools.wraps(function)
        def bound_method(self: Any, *args: Any, **given: Any) -> Any:
            return function(self, **signature.arguments(called, args, given))

        return bound_method if own == "__init__" else bound  # type: ignore[return-value]

    return decorate
