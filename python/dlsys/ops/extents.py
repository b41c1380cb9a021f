"""Shapes that are known but for some extents, such as (None, 784) for batches of any size.

No operator has a second rule for them. Its one rule (`Op.infer`) is run with several numbers in the
place of what is unknown: extents on which the results agree are known, the others are None. A
number for which the rule fails says nothing, since another might do, unless the rule never asked
how large the unknown extent is: then it fails for every one, and the error is raised at once.

A rule of an operator that declares a signature depends on attributes and specs alone, so what it
gave is remembered by these: networks repeat the same few layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..errors import ShapeError
from ..graph.spec import Spec

_noted = threading.local()


class Extent(int):
    """A stand-in for an unknown extent: what is computed from it is one too, and a comparison is
    noted, but not one with itself, nor with 1 where it is `free` to be that: the stand-ins cover
    what comes of it. It is shown as None.
    """

    free = False

    def __repr__(self) -> str:
        return "None"

    __str__ = __repr__
    __hash__ = int.__hash__

    def __format__(self, form: str) -> str:
        return "None"

    def __bool__(self) -> bool:
        _noted.asked = True
        return int.__bool__(self)


def _computed(name: str) -> Callable[..., Any]:
    compute = getattr(int, name)

    def method(*operands: Any) -> Any:
        made = compute(*operands)
        return Extent(made) if type(made) is int else made

    return method


def _compared(name: str) -> Callable[..., Any]:
    compare = getattr(int, name)

    def method(self: Extent, other: Any) -> Any:
        if self is not other and not (self.free and type(other) is int and other == 1):
            _noted.asked = True
        return compare(self, other)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(Extent, f"__{_side}{_name}__", _computed(f"__{_side}{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Extent, f"__{_name}__", _compared(f"__{_name}__"))
Extent.__neg__ = _computed("__neg__")  # type: ignore[method-assign]

# What stands in: the smallest batch, and two that all numbers up to 16 divide, so that equal parts
# and windows come out even.
STAND_INS = (Extent(1), Extent(720_720), Extent(1_441_440))
for _extent in STAND_INS:
    _extent.free = True


class Partial:
    """The known part of a spec: a shape with None for unknown extents, or None, and a dtype.

    guesses: the spec (a tuple of them where there are several values) for each stand-in, None where
    the rule failed. Two are equal only where they are one.
    """

    __slots__ = ("shape", "dtype", "guesses")

    def __init__(self, shape: Any, dtype: Any, guesses: tuple[Any, ...]) -> None:
        self.shape, self.dtype, self.guesses = shape, dtype, guesses


_MOST_REMEMBERED = 4096  # results; then they begin anew
_remembered: dict[Any, Partial | None] = {}


@lru_cache(maxsize=_MOST_REMEMBERED)
def partial_of(spec: Spec) -> Partial:
    """The known part of a spec in whose shape None stands for an unknown extent."""
    return _agreed(
        tuple(
            spec._replace(shape=tuple([extent if n is None else n for n in spec.shape]))
            for extent in STAND_INS
        )
    )


def partial(node: Any) -> Partial | None:
    """Infers what is known of a node from its inputs. ShapeError where no extents fit."""
    known = [x.partial if x.spec is None else x.spec for x in node.inputs]
    if None in known:
        return None
    op = node.op
    # Else its rule may look at more than attributes and specs.
    if op.writes or (op.signature is None and not op.projection):
        return _by_stand_ins(node)
    attrs = node.attrs
    try:
        key = (op, *known, *attrs.items(), *map(type, attrs.values()))  # for 2 == 2.0
        if key in _remembered:
            return _remembered[key]
    except TypeError:  # an attribute without a hash
        return _by_stand_ins(node)
    made = _by_stand_ins(node)
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.clear()
    _remembered[key] = made
    return made


def _by_stand_ins(node: Any) -> Partial | None:
    """`partial` by the operator's rule."""
    made: list[Any] = []
    errors: list[ShapeError | None] = []
    for k in range(len(STAND_INS)):
        specs = [x.partial.guesses[k] if x.spec is None else x.spec for x in node.inputs]
        made.append(None)
        if None not in specs:
            made[k], error = _inferred(node, specs)
            errors.append(error)
    if errors and None not in errors:
        raise errors[0]  # type: ignore[misc]
    return _shared(_agreed(tuple(made))) if made.count(None) < len(made) else None


def _shared(made: Partial) -> Partial:
    """The Partial of a Variable of this shape, where that is what is known: so that a layer whose
    input is another's output is remembered as one behind a Variable.
    """
    if made.shape is None or type(made.guesses[0]) is not Spec:
        return made
    declared = made.guesses[0].declared
    for guess, extent in zip(made.guesses, STAND_INS):
        if guess is None or (guess.dtype, guess.declared) != (made.dtype, declared):
            return made
        if any(known is None and n is not extent for n, known in zip(guess.shape, made.shape)):
            return made
    return partial_of(Spec(made.shape, made.dtype, declared))


def _inferred(node: Any, specs: list[Any]) -> tuple[Any, ShapeError | None]:
    """The node's spec, or None with the error where the rule asked for no unknown extent."""
    _noted.asked = False
    try:
        return node.op.infer(node, *specs), None
    except ShapeError as error:
        return None, None if _noted.asked else error
    except Exception:  # a rule of a user's that numbers like these bring down; a run tells
        return None, None


def _agreed(guesses: tuple[Any, ...]) -> Partial:
    """The extents that the guesses agree on, if more than one passed: one alone may have for the
    number that it is. Where they differ, their extents stand in for an unknown one again.
    """
    specs = [guess for guess in guesses if type(guess) is Spec]
    dtypes, ndims = {spec.dtype for spec in specs}, {len(spec.shape) for spec in specs}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if len(specs) < 2 or len(ndims) > 1:
        return Partial(None, dtype, guesses)
    shape = tuple(map(_known, zip(*[spec.shape for spec in specs])))
    return Partial(shape, dtype, tuple([_marked(guess, shape) for guess in guesses]))


def _known(guessed: tuple[int, ...]) -> int | None:
    first = guessed[0]
    same = not isinstance(first, Extent) and guessed.count(first) == len(guessed)
    return first if same else None


def _marked(guess: Spec | None, shape: tuple[int | None, ...]) -> Spec | None:
    """A guess with Extents where the shape is unknown: an operator may have lost them."""
    if guess is None:
        return None
    extents = [
        Extent(n) if known is None and type(n) is int else n for n, known in zip(guess.shape, shape)
    ]
    return guess._replace(shape=tuple(extents))
