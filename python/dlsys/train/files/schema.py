"""Schemas of JSON values: what comes out of a file is held against one before any of it is used.

A schema is a function of a value that returns None where the value matches, else what is wrong,
beginning with the path to the fault in the value: `.history.epochs[3].step is 'x', expected an
integer`. `check` makes that an error. Mappings may have more entries than their schema says, so
that newer files can be read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import DataError, quoted

Schema = Callable[[Any], "str | None"]

_LARGEST = 2**53  # of counts, some of which pass through float64
_DEEPEST = 8  # lists within lists of a figure


def check(what: str, value: Any, schema: Schema, verdict: str = "is damaged or forged") -> None:
    """DataError, naming `what` and the path in it, unless the value matches the schema."""
    fault = schema(value)
    if fault is not None:
        fault = f"its {fault[1:]}" if fault.startswith(".") else f"it{fault}"
        raise DataError(f"{what} {verdict}: {fault}")


# ---- single values ----
def integer(low: int = 0, high: int = _LARGEST) -> Schema:
    """An integer from low to high."""

    def schema(value: Any) -> str | None:
        right = type(value) is int and low <= value <= high
        return None if right else _wrong(value, f"an integer from {low} to {high}")

    return schema


def number(low: float = -math.inf, high: float = math.inf, finite: bool = True) -> Schema:
    """A number from low to high; NaN never."""

    def schema(value: Any) -> str | None:
        right = type(value) in (int, float) and low <= value <= high
        right = right and (not finite or abs(value) <= sys.float_info.max)
        if right:
            return None
        kind = "a finite number" if finite else "a number"
        bounds = "" if math.isinf(low) and math.isinf(high) else f" from {low} to {high}"
        return _wrong(value, kind + bounds)

    return schema


def text(value: Any) -> str | None:
    """A text."""
    return None if isinstance(value, str) else _wrong(value, "a text")


def latin(value: Any) -> str | None:
    """A text whose characters are bytes."""
    right = isinstance(value, str) and all(ord(c) < 256 for c in value)
    return None if right else _wrong(value, "a text of bytes")


def flag(value: Any) -> str | None:
    """True or false."""
    return None if isinstance(value, bool) else _wrong(value, "true or false")


def anything(value: Any) -> str | None:
    """Any value that is not nested absurdly."""
    depth, level = 0, [value]
    while level:
        level = [x for v in level if isinstance(v, (list, dict)) for x in _parts(v)]
        depth += 1
        if depth > _DEEPEST:
            return f" is nested more than {_DEEPEST} deep"
    return None


def _parts(value: list[Any] | dict[str, Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def one_of(*values: Any) -> Schema:
    """One of these."""

    def schema(value: Any) -> str | None:
        right = any(type(value) is type(known) and value == known for known in values)
        return None if right else _wrong(value, f"one of {', '.join(map(str, values))}")

    return schema


def either(*schemas: Schema) -> Schema:
    """A value that matches one of the schemas."""

    def schema(value: Any) -> str | None:
        right = any(one(value) is None for one in schemas)
        return None if right else f" is {quoted(value)}, which is none of the known ones"

    return schema


def maybe(schema: Schema) -> Schema:
    """Null, or a value that matches."""
    return lambda value: None if value is None else schema(value)


# ---- containers ----
def items(schema: Schema, count: int | None = None) -> Schema:
    """A list, of so many values if a count is given, each of which matches."""

    def matches(value: Any) -> str | None:
        if not isinstance(value, (list, tuple)):
            return _wrong(value, "a list")
        if count is not None and len(value) != count:
            return f" has {len(value)} entries, expected {count}"
        faults = ((k, schema(item)) for k, item in enumerate(value))
        return next((f"[{k}]{fault}" for k, fault in faults if fault is not None), None)

    return matches


def row(*schemas: Schema) -> Schema:
    """A list with a value for each schema."""

    def matches(value: Any) -> str | None:
        fault = items(anything, len(schemas))(value)
        if fault is not None:
            return fault
        faults = ((k, schema(item)) for k, (schema, item) in enumerate(zip(schemas, value)))
        return next((f"[{k}]{fault}" for k, fault in faults if fault is not None), None)

    return matches


def named(schema: Schema) -> Schema:
    """A mapping from any names to values that match."""

    def mapping(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return _wrong(value, "a mapping")
        faults = ((name, schema(item)) for name, item in value.items())
        return next((f".{_name(n)}{fault}" for n, fault in faults if fault is not None), None)

    return mapping


def fields(**schemas: Schema) -> Schema:
    """A mapping that has at least these names, each with a value that matches its schema."""

    def mapping(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return _wrong(value, "a mapping")
        for name, schema in schemas.items():
            if name not in value:
                return f" lacks {name}"
            fault = schema(value[name])
            if fault is not None:
                return f".{name}{fault}"
        return None

    return mapping


def where_there(**schemas: Schema) -> Schema:
    """A mapping in which those of these names that it has have values that match their schemas."""

    def mapping(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return _wrong(value, "a mapping")
        return fields(**{name: schema for name, schema in schemas.items() if name in value})(value)

    return mapping


def every(*schemas: Schema) -> Schema:
    """A value that matches all of the schemas."""
    return lambda value: next((fault for schema in schemas if (fault := schema(value))), None)


def _wrong(value: Any, expected: str) -> str:
    return f" is {quoted(value)}, expected {expected}"


def _name(name: str) -> str:
    return name if name.isidentifier() else quoted(name)


# ---- what checkpoints and histories hold ----
# A run's header has RUN; CALLBACKS are the states of its callbacks, in their order.
_FIGURE = maybe(number(finite=False))
RECORD = every(
    fields(epoch=integer(), step=integer()),
    where_there(loss=_FIGURE, lr=_FIGURE, seconds=_FIGURE, samples_per_second=_FIGURE),
    named(anything),
)
HISTORY = fields(epochs=items(RECORD), curve=items(RECORD), kept=integer(1), logged=integer())
CALLBACKS = items(fields(name=text, state=named(anything)))
# Which algorithms kernels had; checkpoints of before have them under the other name.
KERNELS = every(fields(device=text), where_there(algorithms=named(text), choices=named(text)))
RUN = fields(
    epoch=integer(),
    batch=integer(),
    step=integer(),
    data=named(anything),
    metrics=items(text),
    sums=items(number()),
    seconds=number(0),
    random=items(row(integer(-(2**128), 2**128), integer(0, 2**32 - 1))),
    kernels=KERNELS,
    history=HISTORY,
    callbacks=CALLBACKS,
)
