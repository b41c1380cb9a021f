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
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import SignatureError
from ..graph.lines import where
from ..graph.node import Node
from .kinds import REQUIRED, WRONG, Input, Kind, Misfit, Name

Declared = TypeVar("Declared", bound=Callable[..., Any])


class Signature:
    """The inputs and attributes of an operator, in order.

    Inputs are names: "x", or "*nodes" for any number. A bare "*" behind them makes the attributes
    keyword-only, as in Python; "*nodes" does too. Attributes, and inputs that are optional or may
    be arrays, are kinds by name. The name of the node comes last.
    """

    def __init__(self, *inputs: str, **kinds: Kind) -> None:
        plain = [name for name in inputs if name[0] != "*"]
        known: dict[str, Kind] = {**{name: Input() for name in plain}, **kinds}
        nodes = [key for key, kind in known.items() if isinstance(kind, Input)]
        keyword_only = len(plain) < len(inputs) or len(nodes) == len(known)
        known.setdefault("name", Name())
        variadic = next((name[1:] for name in inputs if name[0] == "*" and name != "*"), "")
        positional = plain if variadic else nodes
        self._declare(known, positional if keyword_only else list(known), variadic)

    @classmethod
    def of(cls, function: Callable, kinds: dict[str, Kind]) -> Signature:
        """The signature of a function: a parameter that is annotated Node is an input, `name` the
        name of the node, and the others are of the given kinds with the function's defaults.
        """
        known: dict[str, Kind] = {}
        parameters = inspect.signature(function).parameters
        for key, parameter in parameters.items():
            if key != "self":
                node = str(parameter.annotation).removesuffix(" | None") in ("Node", "Parameter")
                kind = kinds.get(key) or (Name() if key == "name" else Input() if node else None)
                assert kind is not None, f"{function.__qualname__}: of what kind is {key}?"
                known[key] = copy.copy(kind)
                known[key].default = parameter.default
        made = cls.__new__(cls)
        only = inspect.Parameter.KEYWORD_ONLY
        made._declare(known, [key for key in known if parameters[key].kind is not only], "")
        return made

    def _declare(self, kinds: dict[str, Kind], positional: list[str], variadic: str) -> None:
        self._kinds, self._positional, self.variadic = kinds, positional, variadic
        self.inputs = [key for key, kind in kinds.items() if isinstance(kind, Input)]
        others = [key for key in kinds if key not in self.inputs and key != "name"]
        self.attributes = {key: kinds[key] for key in others}
        self._also = {kind.also: key for key, kind in kinds.items() if kind.also}
        self._take = {key: kind.take for key, kind in kinds.items()}
        self._nullable = {key for key, kind in kinds.items() if kind.default is None}
        self._initial = {key: kind.initial for key, kind in kinds.items() if not kind.omitted}
        self._needed = [key for key, kind in kinds.items() if kind.default is REQUIRED]
        self._defaults = {key: x for key, x in self._initial.items() if key not in self.inputs}
        self._asked = [key for key in self._needed if key in others]
        plain = [key for key in self._needed if type(kinds[key]) is Input]
        # The inputs of a call whose attributes are keywords; -1 where it takes a closer look.
        self._plain = len(plain) if plain == self.inputs and not variadic else -1

    def bind(
        self, called: str, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any], str | None]:
        """Inputs, attributes and the node's name of a call. SignatureError where it does not
        fit.
        """
        if len(args) == self._plain:  # as in most calls; nodes themselves ask for nodes
            bound = self._defaults.copy()
            if given:
                self._take_keywords(bound, called, args, given)
            if self._asked:
                self._require(self._asked, bound, called, args, given)
            return args, bound, bound.pop("name")
        rest: tuple[Any, ...] = ()
        if self.variadic:
            count = len(self._positional)
            args, rest = args[:count], args[count:]
        bound = self.arguments(called, args, given)
        inputs = [x for x in map(bound.pop, self.inputs) if x is not None]
        name = bound.pop("name")
        return [*inputs, *rest], bound, name

    def arguments(self, called: str, args: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        """All that a call gives and the defaults of the rest, by name. SignatureError where it does
        not fit.
        """
        if len(args) > len(self._positional):
            raise self._count_error(called, args, given)
        made, take, nullable = self._initial.copy(), self._take, self._nullable
        for key, value in zip(self._positional, args):
            if value is not None or key not in nullable:
                try:
                    made[key] = take[key](value)
                except WRONG as error:
                    raise self._value_error(called, args, key, value, error) from None
        if given:
            self._take_keywords(made, called, args, given)
        self._require(self._needed, made, called, args, given)
        return made

    def _take_keywords(
        self, made: dict[str, Any], called: str, args: Sequence[Any], given: dict[str, Any]
    ) -> None:
        take, taken = self._take, self._positional[: len(args)]
        for key, value in given.items():
            if key not in take or key in taken:
                key = self._meant(called, key, taken, given)
            if value is not None or key not in self._nullable:
                try:
                    made[key] = take[key](value)
                except WRONG as error:
                    raise self._value_error(called, args, key, value, error) from None

    # ---- what is refused ----

    def _error(self, called: str, wrong: str, usage: bool = True) -> SignatureError:
        hint = f"; {self.usage(called)}" if usage else ""
        return SignatureError(f"{called}: {wrong}{hint} [{where()}]")

    def _count_error(
        self, called: str, args: Sequence[Any], given: dict[str, Any]
    ) -> SignatureError:
        """More positional arguments than there is room for, or fewer inputs than are needed."""
        most = [key for key in self.inputs if key in self._positional]
        least = [key for key in most if self._kinds[key].default is REQUIRED]
        alone = len(most) == len(self._positional)
        got = sum(key in given for key in most) + sum(
            alone or isinstance(value, Node) for value in args
        )
        if len(least) <= got <= len(most):
            return self._error(called, f"takes {len(self._positional)} arguments, got {len(args)}")
        count = f"{len(least)}" if least == most else f"{len(least)} to {len(most)}"
        plural = "" if count == "1" else "s"
        names = f" ({', '.join(most)})" if most else ""
        return self._error(called, f"takes {count} input{plural}{names}, got {got}", usage=False)

    def _meant(self, called: str, key: str, taken: Sequence[str], given: dict[str, Any]) -> str:
        """The attribute that a keyword is a second word for. SignatureError where there is none, or
        it is given besides.
        """
        own = self._also.get(key, key)
        if own in taken or (own != key and own in given):
            raise self._error(called, f"{own} is given twice")
        if own in self._kinds:
            return own
        from difflib import get_close_matches  # half a millisecond, for errors alone

        close = get_close_matches(key, self._kinds, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise self._error(called, f"unexpected attribute {key!r}{hint}")

    def _require(
        self, keys: Sequence[str], made: dict, called: str, args: Sequence[Any], given: dict
    ) -> None:
        for key in keys:
            if made[key] is REQUIRED:
                if key in self.inputs:
                    raise self._count_error(called, args, given)
                raise self._error(called, f"attribute {key!r} is missing")

    def _value_error(
        self, called: str, args: Sequence[Any], key: str, value: Any, error: Exception
    ) -> SignatureError:
        if isinstance(value, Node) and self.inputs and key in self._positional[: len(args)]:
            return self._count_error(called, args, {})  # one input too many
        wrong = str(error) if isinstance(error, Misfit) else self._kinds[key].refusal(key, value)
        return self._error(called, wrong, usage=False)

    # ---- as Python and people read it ----

    def python(self) -> inspect.Signature:
        """The signature as `inspect` has them."""
        parameter = inspect.Parameter
        hows = {key: parameter.POSITIONAL_OR_KEYWORD for key in self._positional}
        made = [
            parameter(key, hows.get(key, parameter.KEYWORD_ONLY), default=kind.default)
            for key, kind in self._kinds.items()
        ]
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


def declared(prefix: str = "", /, **kinds: Kind) -> Callable[[Declared], Declared]:
    """Makes a function, or the `__init__` of a class, bind its arguments as an operator does: see
    `Signature.of`. In errors it is called by its name, less `_op`, or by that of the class, behind
    a prefix.
    """

    def decorate(function: Declared) -> Declared:
        signature = Signature.of(function, kinds)
        *owner, own = function.__qualname__.split(".")
        skipped = int(own == "__init__")  # arguments: self
        called = prefix + (owner[-1] if skipped else own.removesuffix("_op"))

        @functools.wraps(function)
        def bound(*args: Any, **given: Any) -> Any:
            name = prefix + type(args[0]).__name__ if skipped else called
            values = signature.arguments(name, args[skipped:], given)
            return function(*args[:skipped], **values)

        return bound  # type: ignore[return-value]

    return decorate
