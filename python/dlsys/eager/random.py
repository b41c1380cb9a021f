"""Random Tensors: numbers of Philox by the seed of `manual_seed` and the count of draws since."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..errors import GraphError
from ..graph.lines import where
from ..ops.elementwise import cast_op
from ..ops.random.sampling import random_normal, random_uniform
from .create import extents
from .device import Device, engine_of
from .engine import Engine
from .tensor import Tensor


def manual_seed(seed: int) -> None:
    """Has random numbers of Tensors begin anew: the same program then draws the same ones, on every
    device.

    seed: an integer; GraphError for anything else.

    >>> dl.manual_seed(7)
    >>> a = dl.rand(3)
    >>> dl.manual_seed(7)
    >>> dl.rand(3).tolist() == a.tolist()
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise GraphError(f"manual_seed: expected an integer, got {seed!r} [{where()}]")
    # Sequences of different seeds are parts of one that are far from each other.
    Engine.seed = int(np.random.SeedSequence(abs(int(seed))).generate_state(1, np.uint64)[0]) >> 1
    Engine.drawn = itertools.count()


def rand(*shape: Any, device: Device = None, requires_grad: bool = False) -> Tensor:
    """float32 numbers uniform in [0, 1).

    shape: integers, or one tuple of them. device and requires_grad: as of `tensor`.

    >>> x = dl.rand(1000)
    >>> bool(x.min() >= 0), bool(x.max() < 1)
    (True, True)
    """
    return _drawn(random_uniform, (extents("rand", shape),), device, requires_grad)


def randn(*shape: Any, device: Device = None, requires_grad: bool = False) -> Tensor:
    """float32 numbers of the standard normal distribution.

    shape: integers, or one tuple of them. device and requires_grad: as of `tensor`.

    >>> dl.randn(2, 3).shape
    (2, 3)
    """
    return _drawn(random_normal, (extents("randn", shape),), device, requires_grad)


def randint(low: int, high: int, shape: Any = (), device: Device = None) -> Tensor:
    """int64 numbers, each of low, …, high - 1 alike. GraphError unless low < high, both within
    ±2^24.

    shape: an integer or a tuple. device: as of `tensor`.

    >>> x = dl.randint(0, 3, (1000,))
    >>> sorted(set(x.tolist()))
    [0, 1, 2]
    """
    if not -(2**24) <= low < high <= 2**24:
        raise GraphError(
            f"randint: expected low < high within 2**24 of 0, got {low} and {high} [{where()}]"
        )
    return _drawn(_integers, (extents("randint", (shape,)), low, high), device, False)


def _integers(shape: tuple[int, ...], low: int, high: int) -> Any:
    integral = cast_op(cast_op(random_uniform(shape) * float(high - low), np.int64), np.float32)
    return cast_op(integral + float(low), np.int64)


def _drawn(function: Any, args: tuple[Any, ...], device: Device, requires_grad: bool) -> Tensor:
    made = engine_of(device).record(function, args)
    if requires_grad:
        made.requires_grad = True
    return made
