"""The words of the table in samples.py: what a row says of an operator, and what it is fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Domain = Callable[[np.random.Generator, Shape], np.ndarray]


# ---- domains: values of inputs, all of them exact in float32 ----


def uniform(low: float, high: float) -> Domain:
    return lambda rng, shape: rng.uniform(low, high, shape).astype(np.float32).astype(np.float64)


def nonzero(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Of both signs and away from 0, where relu has a kink and division a pole."""
    return positive(rng, shape) * rng.choice([-1.0, 1.0], shape)


def weights(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Rows of labels that do not sum to 1."""
    return positive(rng, shape) * (rng.uniform(size=shape) < 0.7)


def one_hot(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    classes = rng.integers(0, max(shape[-1], 1), shape[:-1])
    return (np.arange(shape[-1]) == classes[..., None]).astype(np.float64)


def classes(count: int, dtype: Any) -> Domain:
    return lambda rng, shape: rng.integers(0, count, shape).astype(dtype)


WIDE = (2, 1, 3, 1, 2, 1, 2, 3)  # as many dimensions as native devices have
signed = uniform(-2, 2)
positive = uniform(0.25, 2)
extreme = uniform(-1e4, 1e4)


# ---- rows ----


@dataclass(frozen=True)
class Case:
    """One use of an operator: its inputs' shapes and the node's attributes."""

    shapes: tuple[Shape, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    domain: Domain | tuple[Domain, ...] | None = None  # instead of the row's

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes)


@dataclass(frozen=True)
class Refusal:
    """Inputs that make no node, and what the error says (a regular expression)."""

    message: str
    shapes: tuple[Shape, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32",) * 4
    states: int = 0  # inputs, the first ones, that are Parameters


@dataclass(frozen=True)
class Sample:
    """A row of the table."""

    name: str
    op: Any  # the operator, or a function that builds nodes
    reference: Callable[..., Any]  # of float64 arrays; updates give a tuple of the new states
    cases: tuple[Case, ...]
    domain: Domain | tuple[Domain, ...] = signed
    scale: Callable[..., Any] | None = None  # what errors are measured against; None: the result
    ulps: float = 0.5
    gradient_ulps: float = 8  # of the gradient's largest element
    storages: tuple[str, ...] = ("bfloat16", "float16")  # in which its floats may lie too
    roundings: float = 1  # to those, on the way to the result
    wide: tuple[int, ...] = ()  # inputs that stay float32 then, such as slots
    differentiable: tuple[int, ...] | None = None  # None: all inputs
    gradient_factor: Callable[..., float] = lambda *shapes: 1.0  # declared, over the true gradient
    integers: str = ""  # what becomes of them: "float", "same", "moved" or refused
    specials: bool = True  # NaN and infinities flow through as in the formula
    states: int = 0  # inputs, the first ones, that are Parameters and get updated
    refusals: tuple[Refusal, ...] = ()
    build: Callable[..., Any] | None = None  # None: op(*inputs, **attrs)
    fused: bool = False  # fusions alone make it: devices without its kernel never meet it

    def node(self, *inputs: Any, **attrs: Any) -> Any:
        return (self.build or self.op)(*inputs, **attrs)

    def storage_of(self, k: int, storage: Any) -> Any:
        """The dtype of input k, a float, where floats lie in a storage type."""
        return np.dtype(np.float32) if k in self.wide else storage

    def domains(self, case: Case) -> tuple[Domain, ...]:
        given = case.domain or self.domain
        return given if isinstance(given, tuple) else (given,) * len(case.shapes)


def case(*shapes: Shape, domain: Any = None, **attrs: Any) -> Case:
    return Case(shapes, attrs, domain)


def refuse(
    message: str, *shapes: Shape, dtypes: Any = ("float32",) * 4, states: int = 0, **attrs: Any
) -> Refusal:
    return Refusal(message, shapes, attrs, dtypes, states)


def product(shapes: tuple[Case, ...], *settings: Mapping[str, Any]) -> tuple[Case, ...]:
    return tuple(Case(one.shapes, one.attrs | attrs) for one in shapes for attrs in settings)


def mixed(name: str, shape: Shape = (3,)) -> tuple[Refusal, ...]:
    message = rf"{name}: \S+ is float32 and \S+ is float64; feed or declare both with one dtype"
    return (refuse(message, shape, shape, dtypes=("float32", "float64")),)
