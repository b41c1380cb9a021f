"""Extents that only a run decides, such as the size of a batch.

As in ops/extents.py there is no second rule for them: a graph is traced for several assignments of
numbers to the names of its free axes. Where the traces agree, nothing depends on these. Extents
that differ are products of named ones with a factor, or one of them with a factor and a term; they
are computed from the inputs' shapes at run time. Anything else that differs is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from ...errors import GraphError
from ...graph.node import Node
from .trace import Call, Trace

# Each name gets other numbers in each trace: multiples of 48, so that equal parts and windows come
# out even, and numbers of all remainders besides, by which what is rounded shows.
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
_UNIT = 48
_REMAINDERS = (0, 0, 0, 1, 2, 3, 5)
_EVEN = 3  # traces of multiples
MOST = len(_PRIMES) // _EVEN  # names


class Expression(NamedTuple):
    """factor · (product of names) + term."""

    factor: Fraction
    names: tuple[str, ...]
    term: int

    def __str__(self) -> str:
        product = "*".join(self.names)
        if self.factor.numerator != 1:
            product = f"{self.factor.numerator}*{product}"
        if self.factor.denominator != 1:
            product = f"{product}/{self.factor.denominator}"
        return f"{product}{self.term:+}" if self.term else product


def assignments(names: Sequence[str]) -> list[dict[str, int]]:
    """Numbers for the names, one dictionary a trace; those behind the third are not all even, and
    a graph that needs even ones refuses them.
    """
    if len(names) > MOST:
        raise GraphError(f"export: expected at most {MOST} names of free extents, got {len(names)}")
    return [
        {
            name: _UNIT * _PRIMES[k * _EVEN + trace % _EVEN] + rest * (k + 1)
            for k, name in enumerate(names)
        }
        for trace, rest in enumerate(_REMAINDERS if names else (0,))
    ]


def is_even(numbers: Mapping[str, int]) -> bool:
    """True for an assignment of multiples, which has to fit every graph."""
    return all(number % _UNIT == 0 for number in numbers.values())


def expression(values: Sequence[int], given: Sequence[Mapping[str, int]]) -> Expression | None:
    """The expression that has these values for these numbers, None where there is none."""
    names = tuple(given[0])
    for count in (1, 2, 3):
        for chosen in combinations_with_replacement(names, count):
            products = [math.prod(numbers[name] for name in chosen) for numbers in given]
            factors = {Fraction(v, p) for v, p in zip(values, products)}
            if len(factors) == 1:
                return Expression(factors.pop(), chosen, 0)
    for name in names:
        points = list(zip([numbers[name] for numbers in given], values))
        (a, u), (b, v) = points[:2]
        factor = Fraction(v - u, b - a)
        term = u - factor * a
        exact = factor and factor.denominator == term.denominator == 1
        if exact and all(factor * x + term == y for x, y in points):
            return Expression(factor, (name,), int(term))
    return None


class Merger:
    """Makes one trace of several, with calls that compute the extents that differ.

    axes: an input and one of its axes for each name.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        given: Sequence[Mapping[str, int]],
        axes: Mapping[str, tuple[str, int]],
    ) -> None:
        self._traces, self._given, self._axes = traces, given, axes
        self._computed: dict[Expression, str] = {}
        self._calls: list[Call] = []
        self.trace = traces[0]

    def merged(self) -> Trace:
        """The trace. GraphError names the operator whose form depends on extents otherwise."""
        if len(self._traces) > 1:
            self._compare_calls()
            self._compare_arrays()
            for name in list(self.trace.extents):
                self._settle(name)
            self.trace.calls[:0] = self._calls
        for name, values in self.trace.extents.items():
            self.trace.arrays[name] = np.array(values, np.int64)
        return self.trace

    def shape(self, k: int) -> list[int | str]:
        """The shape of output k, with names or expressions for extents that are free."""
        shapes = [trace.outputs[k][1].shape for trace in self._traces]
        found: list[int | str] = []
        for values in zip(*shapes):
            made = None if len(set(values)) == 1 else expression(values, self._given)
            found.append(values[0] if len(set(values)) == 1 else str(made or "unknown"))
        return found

    def _users(self, name: str) -> Iterator[Call]:
        return (call for call in self.trace.calls if name in call.inputs)

    def _refusal(self, node: Node) -> GraphError:
        names = ", ".join(self._given[0])
        return GraphError(
            f"{node.op.name}: its ONNX form depends on the free extents ({names}) in a way that no "
            f"shape tells; give them numbers in `inputs` [{node.where}]"
        )

    def _compare_calls(self) -> None:
        for calls in zip(*[trace.calls for trace in self._traces]):
            first = calls[0]
            for call in calls[1:]:
                same = call[:3] == first[:3] and _equal(call.attributes, first.attributes)
                if not same:
                    raise self._refusal(first.node)
        if len({len(trace.calls) for trace in self._traces}) > 1:
            raise self._refusal(self.trace.calls[-1].node)

    def _compare_arrays(self) -> None:
        for name, array in self.trace.arrays.items():
            others = [trace.arrays[name] for trace in self._traces[1:]]
            user = next(self._users(name), None)
            if user is not None and not all(_same_array(array, other) for other in others):
                raise self._refusal(user.node)

    def _settle(self, name: str) -> None:
        """Makes a vector of extents a constant, or computes it."""
        vectors = [trace.extents[name] for trace in self._traces]
        users = list(self._users(name))
        if not users or len(set(vectors)) == 1:
            return
        columns = list(zip(*vectors))
        free = [k for k, values in enumerate(columns) if len(set(values)) > 1]
        fixed = [values[0] for k, values in enumerate(columns) if k not in free]
        if len(free) == 1 and 0 not in fixed and all(u.op_type == "Reshape" for u in users):
            vector = list(vectors[0])
            vector[free[0]] = -1  # what is left
            self.trace.extents[name] = tuple(vector)
            return
        node = users[0].node
        parts = [
            self._compute(values, node) if k in free else self._constant(values[0])
            for k, values in enumerate(columns)
        ]
        del self.trace.extents[name]
        joined = Call("Concat", tuple(parts), (name,), {"axis": 0}, node)
        self._calls.append(joined)

    def _constant(self, value: int) -> str:
        name = f"extent_{value}" if value >= 0 else f"extent_minus_{-value}"
        self.trace.arrays[name] = np.array([value], np.int64)
        return name

    def _compute(self, values: Sequence[int], node: Node) -> str:
        """The name of a vector of one element that has these values."""
        made = expression(values, self._given)
        if made is None:
            raise self._refusal(node)
        if made not in self._computed:
            self._computed[made] = self._written(made, node)
        return self._computed[made]

    def _written(self, made: Expression, node: Node) -> str:
        name = self._extent(made.names[0], node)
        for other in made.names[1:]:
            name = self._call("Mul", name, self._extent(other, node), node)
        if made.factor.numerator != 1:
            name = self._call("Mul", name, self._constant(made.factor.numerator), node)
        if made.factor.denominator != 1:
            name = self._call("Div", name, self._constant(made.factor.denominator), node)
        return self._call("Add", name, self._constant(made.term), node) if made.term else name

    def _extent(self, symbol: str, node: Node) -> str:
        key = Expression(Fraction(1), (symbol,), 0)
        if key not in self._computed:
            source, axis = self._axes[symbol]
            name = self._computed[key] = f"extent_of_{symbol}"
            attributes = {"start": axis, "end": axis + 1}
            self._calls.append(Call("Shape", (source,), (name,), attributes, node))
        return self._computed[key]

    def _call(self, op_type: str, a: str, b: str, node: Node) -> str:
        name = f"extent_{op_type}_{len(self._calls)}"
        self._calls.append(Call(op_type, (a, b), (name,), {}, node))
        return name


def _equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        _same_array(np.asarray(a[key]), np.asarray(b[key])) for key in a
    )


def _same_array(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
