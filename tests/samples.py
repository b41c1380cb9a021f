"""The table of operators: a row an operator, with inputs, an independent formula and a tolerance.

test_operators.py runs every row on every device. A row's `reference` is written in float64 and never
calls the operator's own numpy form. Its tolerance is |error| <= ulps * eps * scale, where `scale` says
what the error is measured against: by default the result itself, for sums the sum of the terms' sizes,
since what cancels keeps the error of its terms. "worst" is the largest error that was measured, in the
same unit, in float32: numpy 2.4 and the CPU device with AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlsys.ops import elementwise, layout, loss, matmul, reduce, softmax, source, update

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
    differentiable: tuple[int, ...] | None = None  # None: all inputs
    second: bool = True  # gradients of gradients are tested too
    gradient_factor: Callable[..., float] = lambda *shapes: 1.0  # declared, over the true gradient
    integers: str = ""  # what becomes of them: "float", "same" (numpy only), "moved" or refused
    states: int = 0  # inputs, the first ones, that are Parameters and get updated
    refusals: tuple[Refusal, ...] = ()
    build: Callable[..., Any] | None = None  # None: op(*inputs, **attrs)

    def node(self, *inputs: Any, **attrs: Any) -> Any:
        return (self.build or self.op)(*inputs, **attrs)

    def domains(self, case: Case) -> tuple[Domain, ...]:
        given = case.domain or self.domain
        return given if isinstance(given, tuple) else (given,) * len(case.shapes)


def case(*shapes: Shape, domain: Any = None, **attrs: Any) -> Case:
    return Case(shapes, attrs, domain)


def refuse(message: str, *shapes: Shape, dtypes: Any = ("float32",) * 4, **attrs: Any) -> Refusal:
    return Refusal(message, shapes, attrs, dtypes)


def product(shapes: tuple[Case, ...], *settings: Mapping[str, Any]) -> tuple[Case, ...]:
    return tuple(Case(one.shapes, one.attrs | attrs) for one in shapes for attrs in settings)


WIDE = (2, 1, 3, 1, 2, 1, 2, 3)  # as many dimensions as native devices have
ONE = tuple(case(s) for s in [(), (1,), (7,), (0,), (3, 5), (0, 4), WIDE, (31, 33), (70_001,)])
FEW = tuple(case(s) for s in [(), (7,), (0, 4), (37, 41)])
TWO = tuple(
    case(a, b)
    for a, b in [
        ((), ()), ((7,), ()), ((), (7,)), ((3, 5), (3, 5)), ((3, 5), (5,)), ((5,), (3, 5)),
        ((3, 1), (1, 5)), ((4, 1, 3), (2, 1)), ((2, 1), (4, 1, 3)), ((0, 3), (3,)), ((1,), (0,)),
        (WIDE, (1, 3, 1, 2, 1, 2, 1, 1)), ((131, 67), (67,)), ((67, 1), (67, 129)), ((1,), (1, 1, 1)),
        ((300, 257), (257,)), ((300, 257), (300, 257)),
    ]
)  # fmt: skip
BAD_PAIR = (
    refuse(r"shapes do not broadcast: \S+ \(3, 4\) and \S+ \(3,\)", (3, 4), (3,)),
    refuse(r"shapes do not broadcast: \S+ \(2, 3\) and \S+ \(4, 3\)", (2, 3), (4, 3)),
)


def mixed(name: str) -> tuple[Refusal, ...]:
    message = rf"{name}: \S+ is float32 and \S+ is float64; feed or declare both with one dtype"
    return (refuse(message, (3,), (3,), dtypes=("float32", "float64")),)


def unary(name: str, reference: Callable, **more: Any) -> Sample:
    return Sample(name, getattr(elementwise, f"{name}_op"), reference, ONE, **more)


def binary(name: str, reference: Callable, **more: Any) -> Sample:
    refusals = tuple(Refusal(f"{name}: {r.message}", r.shapes) for r in BAD_PAIR) + mixed(name)
    op = getattr(elementwise, f"{name}_op")
    return Sample(name, op, reference, TWO, refusals=refusals, **more)


def with_const(op: Any, reference: Callable, *constants: float, **more: Any) -> Sample:
    cases = product(FEW, *({"const": c} for c in constants))
    return Sample(op.name, op, reference, cases, **more)


def function(name: str, reference: Callable, **more: Any) -> Sample:
    """A function of a node with a number or an array on either side."""
    values = (2, 2.5, np.float32(1.5), np.array(3.0, np.float32), np.array([0.5, 2, 3, 4], np.float32))
    cases = product(
        (case((3, 4)),), *({"value": v, "left": left} for v in values for left in (True, False))
    )
    op = getattr(elementwise, name)
    build = lambda x, value, left: op(value, x) if left else op(x, value)  # noqa: E731
    formula = lambda x, value, left: reference(value, x) if left else reference(x, value)  # noqa: E731
    return Sample(f"{name}_function", op, formula, cases, positive, build=build, **more)


# exp and pow of float32 in SIMD code are good to a few ulp (numpy documents up to 4), while + - * /
# and sqrt are rounded exactly, half an ulp. Errors of a sum's operands add up: add and sub too are
# exact, for the operands are float32 themselves.
ELEMENTWISE = (
    unary("neg", lambda x: 0 - x, ulps=0, integers="same"),
    unary("exp", lambda x: np.e**x, ulps=3, integers="float"),
    unary("log", lambda x: np.log2(x) * np.log(2.0), domain=positive, ulps=4, integers="float"),
    unary("sqrt", lambda x: x**0.5, domain=positive, integers="float"),
    unary("tanh", lambda x: 1 - 2 / (np.exp(2 * x) + 1), ulps=4, integers="float"),
    unary("sigmoid", lambda x: 0.5 * (1 + np.tanh(x / 2)), ulps=4, integers="float"),
    unary("relu", lambda x: np.where(x <= 0, 0, x), domain=nonzero, ulps=0, integers="same"),
    binary("add", lambda a, b: a + b, integers="same"),
    binary("sub", lambda a, b: a - b, integers="same"),
    binary("mul", lambda a, b: a * b, integers="same"),
    binary("div", lambda a, b: a * (1 / b), domain=nonzero, integers="float"),
    binary("pow", lambda a, b: a**b, domain=positive, ulps=3, integers="float"),
    binary(
        "relu_gradient", lambda x, g: np.where(x > 0, g, 0 * x), domain=nonzero, ulps=0,
        differentiable=(1,), integers="same",
    ),
    with_const(elementwise.add_byconst_op, lambda x, const: x + const, 0, 2, -1.5, integers="same"),
    with_const(elementwise.mul_byconst_op, lambda x, const: x * const, 1, 3, -0.3, integers="same"),
    with_const(elementwise.div_byconst_op, lambda x, const: x / const, 1, 2, -0.3, integers="float"),
    with_const(elementwise.const_sub_op, lambda x, const: const - x, 0, 2, 1.5, integers="same"),
    with_const(
        elementwise.const_div_op, lambda x, const: const / x, 0, 1, -2.5, domain=nonzero,
        integers="float",
    ),
    with_const(
        elementwise.pow_byconst_op, lambda x, const: x**const, 0, 1, 2, 3, -1, 0.5, -1.5,
        domain=positive, ulps=3, integers="float",
    ),
    with_const(
        elementwise.const_pow_op, lambda x, const: const**x, 1, 2, 0.3, ulps=3, integers="float"
    ),
    Sample(
        "cast", elementwise.cast_op, lambda x, dtype: x.copy(), product(ONE, {"dtype": "float64"}),
        ulps=0, integers="moved",
    ),
    Sample(
        "cast_to_integers", elementwise.cast_op, lambda x, dtype: x.astype(dtype),
        product(FEW, *({"dtype": name} for name in ("int32", "int64", "uint8", "bool", "float32"))),
        domain=uniform(0, 200), ulps=0, differentiable=(), integers="moved",
    ),
    function("add", lambda a, b: a + b),
    function("sub", lambda a, b: a - b),
    function("mul", lambda a, b: a * b),
    function("div", lambda a, b: a / b),
    function("power", lambda a, b: a**b, ulps=3),
)  # fmt: skip
