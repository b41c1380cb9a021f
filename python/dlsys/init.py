"""Initial values of weights: float32 arrays drawn once on the host, so the same on every device.

Every initializer is a function of (shape, rng). A weight's shape is (outputs, inputs) of a matrix
or (outputs, inputs, *window) of a filter; one unit then sees `fan in` = inputs · window values and
is seen by `fan out` = outputs · window. `rng` is a numpy Generator, a seed, or None for the one
that `seed` starts, which begins at 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from .arguments.kinds import Int, Kind, Number, OneOf, Shape
from .arguments.signature import declared
from .errors import GraphError, ShapeError
from .graph.lines import where
from .ops.random.philox import normal_quantile

Rng = np.random.Generator | int | None
Initializer = Callable[..., np.ndarray]  # (shape, rng) -> float32 array

_GAINS = {
    "linear": 1.0,
    "sigmoid": 1.0,
    "tanh": 5 / 3,
    "relu": math.sqrt(2),
    "selu": 3 / 4,
}


class RngKind(Kind):
    """A numpy Generator, a seed, or None."""

    expected = "a numpy Generator or a seed, an integer that is not negative"

    def take(self, value: Any) -> Any:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        np.random.default_rng(value)
        return value


RNG = RngKind(None)
SHAPE = Shape()
FINITE = Number(finite=True)
FAN = OneOf("in", "out", "average")


_left: ContextVar[list[int] | None] = ContextVar("left", default=None)  # elements, see `at_most`


@declared("init.", elements=Int(low=0))
@contextlib.contextmanager
def at_most(elements: int) -> Iterator[None]:
    """Inside `with at_most(n):` the initializers here make no more than n elements in all: an array
    beyond that raises ShapeError before it is made.

    elements: their number, not negative.

    >>> with init.at_most(12):
    ...     init.zeros((3, 4)).shape
    (3, 4)
    """
    token = _left.set([elements])
    try:
        yield
    finally:
        _left.reset(token)


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an array that is made now. ShapeError where `at_most` does not allow it."""
    left = _left.get()
    if left is not None:
        left[0] -= math.prod(shape)
        if left[0] < 0:
            raise ShapeError(f"init: a weight {tuple(shape)} is larger than the weights to come")
    return tuple(shape)


class _Default:
    """The generator of values that are drawn without an rng."""

    generator = np.random.default_rng(0)


@declared("init.", value=Int(low=0))
def seed(value: int) -> None:
    """Starts the generator behind everything that is drawn without an rng of its own anew.

    value: an integer that is not negative.

    >>> init.seed(0)
    """
    _Default.generator = np.random.default_rng(value)


def generator(rng: Rng = None) -> np.random.Generator:
    """A Generator itself, a new one from a seed, or for None the common one.

    >>> init.generator(0).integers(10, size=3)
    array([8, 6, 5])
    """
    return _Default.generator if rng is None else np.random.default_rng(rng)


@declared("init.", shape=SHAPE)
def fans(shape: Sequence[int]) -> tuple[int, int]:
    """Fan in and fan out of a weight. ShapeError for fewer than two dimensions.

    shape: of the weight.

    >>> init.fans((8, 3, 5, 5))
    (75, 200)
    """
    if len(shape) < 2:
        raise ShapeError(
            f"init: a weight of shape {tuple(shape)} has no fans, expected (outputs, inputs) or "
            "(outputs, inputs, height, width); use zeros, constant or normal"
        )
    window = math.prod(shape[2:])
    return shape[1] * window, shape[0] * window


@declared("init.", activation=OneOf(*_GAINS, "leaky_relu"), slope=Number(finite=True))
def gain(activation: str, slope: float = 0.01) -> float:
    """The factor that keeps the deviation of values through a linear layer and its activation:
    "linear", "sigmoid", "tanh", "relu", "selu", or "leaky_relu" with its slope, as PyTorch has
    them. GraphError for another name.

    >>> init.gain("relu")
    1.4142135623730951
    """
    if activation == "leaky_relu":
        return math.sqrt(2 / (1 + slope**2))
    return _GAINS[activation]


# ---- numbers of one distribution ----


@declared("init.", shape=SHAPE, rng=RNG, value=Number(nan=True))
def constant(shape: Sequence[int], rng: Rng = None, *, value: float) -> np.ndarray:
    """One number everywhere.

    value: the number.

    >>> init.constant((2,), value=0.5)
    array([0.5, 0.5], dtype=float32)
    """
    return np.full(_extents(shape), value, np.float32)


@declared("init.", shape=SHAPE, rng=RNG)
def zeros(shape: Sequence[int], rng: Rng = None) -> np.ndarray:
    """Zeros.

    >>> init.zeros((2,))
    array([0., 0.], dtype=float32)
    """
    return constant(shape, value=0)


@declared("init.", shape=SHAPE, rng=RNG)
def ones(shape: Sequence[int], rng: Rng = None) -> np.ndarray:
    """Ones.

    >>> init.ones((2,))
    array([1., 1.], dtype=float32)
    """
    return constant(shape, value=1)


@declared("init.", shape=SHAPE, rng=RNG, low=FINITE, high=FINITE)
def uniform(
    shape: Sequence[int], rng: Rng = None, *, low: float = -1.0, high: float = 1.0
) -> np.ndarray:
    """Uniform between low and high. GraphError unless low <= high.

    >>> round(float(init.uniform((100, 50), rng=0).std()), 3)
    0.58
    """
    if not low <= high:
        raise GraphError(f"init.uniform: expected low <= high, got {low} and {high} [{where()}]")
    return generator(rng).uniform(low, high, _extents(shape)).astype(np.float32)


@declared(
    "init.", shape=SHAPE, rng=RNG, mean=Number(finite=True), deviation=Number(low=0, finite=True)
)
def normal(
    shape: Sequence[int], rng: Rng = None, *, mean: float = 0.0, deviation: float = 1.0
) -> np.ndarray:
    """Normal. GraphError unless deviation >= 0.

    mean, deviation: of the distribution.

    >>> round(float(init.normal((100, 50), rng=0).std()), 3)
    0.995
    """
    return generator(rng).normal(mean, deviation, _extents(shape)).astype(np.float32)


@declared(
    "init.",
    shape=SHAPE,
    rng=RNG,
    mean=Number(finite=True),
    deviation=Number(low=0, finite=True),
    low=Number(),
    high=Number(),
)
def truncated_normal(
    shape: Sequence[int],
    rng: Rng = None,
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
) -> np.ndarray:
    """Normal, within mean + low · deviation and mean + high · deviation. The cut narrows it: at
    ±2 its own deviation is 0.8796 of the given one.

    GraphError unless deviation >= 0 and low < high.

    >>> round(float(init.truncated_normal((100, 50), rng=0).std()), 3)
    0.884
    """
    if not low < high:
        raise GraphError(
            f"init.truncated_normal: expected low < high, got {low} and {high} [{where()}]"
        )
    side = -1 if low > 0 else 1  # far above 0, probabilities would all be 1
    low, high = sorted((side * low, side * high))
    below, above = (0.5 * math.erfc(-bound / math.sqrt(2)) for bound in (low, high))
    probability = below + generator(rng).uniform(0, 1, _extents(shape)) * (above - below)
    z = side * np.clip(normal_quantile(probability), low, high)
    return (mean + deviation * z).astype(np.float32)


# ---- scaled by the fans ----


@declared("init.", shape=SHAPE, rng=RNG, gain=FINITE)
def xavier_uniform(shape: Sequence[int], rng: Rng = None, *, gain: float = 1.0) -> np.ndarray:
    """Uniform with variance gain² · 2 / (fan in + fan out). Glorot and Bengio (2010).

    gain: a factor of the deviation, such as `gain("tanh")`.

    >>> round(float(init.xavier_uniform((100, 50), rng=0).std()), 3)
    0.116
    """
    return _uniform_scaled(shape, rng, _scale(shape, "average", gain))


@declared("init.", shape=SHAPE, rng=RNG, gain=FINITE)
def xavier_normal(shape: Sequence[int], rng: Rng = None, *, gain: float = 1.0) -> np.ndarray:
    """Normal with variance gain² · 2 / (fan in + fan out). Glorot and Bengio (2010).

    gain: a factor of the deviation, such as `gain("tanh")`.

    >>> round(float(init.xavier_normal((100, 50), rng=0).std()), 3)
    0.115
    """
    return normal(shape, rng, deviation=_scale(shape, "average", gain))


@declared("init.", shape=SHAPE, rng=RNG, fan=FAN, gain=FINITE)
def he_uniform(
    shape: Sequence[int], rng: Rng = None, *, fan: str = "in", gain: float = math.sqrt(2)
) -> np.ndarray:
    """Uniform with variance gain² / fan; fan: "in", "out" or "average". The gain is relu's.
    He et al. (2015).

    >>> round(float(init.he_uniform((100, 50), rng=0).std()), 3)
    0.201
    """
    return _uniform_scaled(shape, rng, _scale(shape, fan, gain))


@declared("init.", shape=SHAPE, rng=RNG, fan=FAN, gain=FINITE)
def he_normal(
    shape: Sequence[int], rng: Rng = None, *, fan: str = "in", gain: float = math.sqrt(2)
) -> np.ndarray:
    """Normal with variance gain² / fan; fan: "in", "out" or "average". The gain is relu's.
    He et al. (2015).

    >>> round(float(init.he_normal((100, 50), rng=0).std()), 3)
    0.199
    """
    return normal(shape, rng, deviation=_scale(shape, fan, gain))


@declared("init.", shape=SHAPE, rng=RNG)
def lecun_uniform(shape: Sequence[int], rng: Rng = None) -> np.ndarray:
    """Uniform with variance 1 / fan in. LeCun et al., "Efficient BackProp" (1998).

    >>> round(float(init.lecun_uniform((100, 50), rng=0).std()), 3)
    0.142
    """
    return _uniform_scaled(shape, rng, _scale(shape, "in", 1.0))


@declared("init.", shape=SHAPE, rng=RNG)
def lecun_normal(shape: Sequence[int], rng: Rng = None) -> np.ndarray:
    """Normal with variance 1 / fan in, as self-normalizing networks want it.

    >>> round(float(init.lecun_normal((100, 50), rng=0).std()), 3)
    0.141
    """
    return normal(shape, rng, deviation=_scale(shape, "in", 1.0))


@declared("init.", shape=SHAPE, rng=RNG, gain=FINITE)
def orthogonal(shape: Sequence[int], rng: Rng = None, *, gain: float = 1.0) -> np.ndarray:
    """A random matrix (shape[0], the rest) whose rows, or columns where there are more rows, are
    orthogonal and of length `gain`. Saxe, McClelland and Ganguli (2014).

    >>> weight = init.orthogonal((2, 3), rng=0)
    >>> np.abs(weight @ weight.T).round(3)
    array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    fans(shape)
    rows, columns = shape[0], math.prod(_extents(shape)[1:])
    drawn = generator(rng).standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(drawn)
    q *= np.where(np.diag(r) < 0, -1, 1)  # else qr's choice of signs would favor some directions
    return (gain * (q if rows >= columns else q.T)).reshape(shape).astype(np.float32)


def _scale(shape: Sequence[int], fan: str, gain: float) -> float:
    """gain / sqrt(fan), the deviation of a weight."""
    fan_in, fan_out = fans(shape)
    choices = {"in": fan_in, "out": fan_out, "average": (fan_in + fan_out) / 2}
    return gain / math.sqrt(max(choices[fan], 1))


def _uniform_scaled(shape: Sequence[int], rng: Rng, deviation: float) -> np.ndarray:
    bound = math.sqrt(3) * deviation
    return uniform(shape, rng, low=-bound, high=bound)
