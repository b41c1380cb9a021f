"""Signatures of operators and public functions: the inputs by name, and the attributes with their
type, range and default, said once.

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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import SignatureError
from .kinds import REQUIRED, WRONG, Input, Kind, Misfit, Name, is_node
from .lines import where

Declared = TypeVar("Declared", bound=Callable[..., Any])


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
        self._initial = {
            key: kind.checked_default(key) for key, kind in kinds.items() if not kind.omitted
        }
        self._defaults = {key: self._initial[key] for key in others if key in self._initial}
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
        except WRONG:
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
        made = self._initial.copy()
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
        except WRONG as error:
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
            how: Any = parameter.KEYWORD_ONLY
            if key in self._positional:
                how = parameter.POSITIONAL_OR_KEYWORD
            made.append(parameter(key, how, default=kind.default))
        if self.variadic:
            made.append(parameter(self.variadic, parameter.VAR_POSITIONAL))
        return inspect.Signature(sorted(made, key=lambda one: one.kind))

    def described(self) -> str:
        """The attributes, a line each, below an empty one."""
        lines = [f"\n{key}: {kind.expected}." for key, kind in self.attributes.items()]
        return "".join(["\n", *lines]) if lines else ""

    def usage(self, called: str) -> str:
        """A call of it in short, without the node's name: `softmax(x, *, axis=-1)`."""
        full = self.python()
        short = [one for key, one in full.parameters.items() if key != "name"]
        return called + str(full.replace(parameters=short))


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
