"""Random numbers: dropout and distributions, equal on every device for one seed.

`generator` is a source with a seed and a step of its own, see `dlsys.autodiff.Generator`; without
one the seed is that of `dlsys.autodiff.seed`. Each run draws anew.
"""

from __future__ import annotations

from ..ops.elementwise import as_node
from ..ops.random import sampling
from ..ops.random.sampling import Generator
from .record import Array, recorded

__all__ = [
    "dropout", "random_bernoulli", "random_normal", "random_truncated_normal", "random_uniform",
]  # fmt: skip


@recorded
def dropout(
    x: Array, p: float = 0.5, training: bool = True, generator: Generator | None = None
) -> Array:
    """x with each element 0 with probability p, else divided by 1 - p; x itself unless `training`.

    x: any shape, floats. generator: a source of numbers with a seed of its own, `ad.Generator`;
    that of `ad.seed` where it is None. SignatureError unless 0 <= p < 1. After Srivastava et al.
    (2014).

    >>> dl.manual_seed(0)
    >>> y = F.dropout(dl.ones(1000), p=0.2)
    >>> sorted(set(y.tolist()))
    [0.0, 1.25]
    """
    return sampling.dropout(as_node(x), p, generator, training)


@recorded
def random_uniform(
    shape: tuple[int, ...], low: float = 0.0, high: float = 1.0, generator: Generator | None = None
) -> Array:
    """float32 numbers uniform in [low, high), 2^24 of them; rounding may give `high` itself.

    shape: that of the result. generator: a source of numbers with a seed of its own,
    `ad.Generator`; that of `ad.seed` where it is None. GraphError unless low <= high.

    >>> ad.Executor([F.random_uniform((2, 3), -1, 1)]).run()[0].shape
    (2, 3)
    """
    return sampling.random_uniform(shape, low, high, generator)


@recorded
def random_bernoulli(
    shape: tuple[int, ...], probability: float, generator: Generator | None = None
) -> Array:
    """float32 ones with the given probability, else zeros.

    shape: that of the result. generator: a source of numbers with a seed of its own,
    `ad.Generator`; that of `ad.seed` where it is None. SignatureError unless it is in [0, 1].

    >>> kept = F.random_bernoulli((100,), 0.25)
    >>> sorted({*ad.Executor([kept]).run()[0].tolist()})
    [0.0, 1.0]
    """
    return sampling.random_bernoulli(shape, probability, generator)


@recorded
def random_normal(
    shape: tuple[int, ...],
    mean: float = 0.0,
    deviation: float = 1.0,
    generator: Generator | None = None,
) -> Array:
    """float32 numbers of the normal distribution with this mean and standard deviation.

    shape: that of the result. generator: a source of numbers with a seed of its own,
    `ad.Generator`; that of `ad.seed` where it is None. SignatureError for a negative deviation.

    >>> ad.Executor([F.random_normal((2, 3), deviation=0.1)]).run()[0].shape
    (2, 3)
    """
    return sampling.random_normal(shape, mean, deviation, generator)


@recorded
def random_truncated_normal(
    shape: tuple[int, ...],
    mean: float = 0.0,
    deviation: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    generator: Generator | None = None,
) -> Array:
    """float32 numbers of a normal distribution within mean + low · deviation and mean + high ·
    deviation.

    shape: that of the result. generator: a source of numbers with a seed of its own,
    `ad.Generator`; that of `ad.seed` where it is None. SignatureError for a negative deviation,
    GraphError unless low < high.

    >>> x = F.random_truncated_normal((100,))
    >>> bool((abs(ad.Executor([x]).run()[0]) <= 2).all())
    True
    """
    return sampling.random_truncated_normal(shape, mean, deviation, low, high, generator)
