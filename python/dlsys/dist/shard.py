"""Shards: each rank holds one part of a state, such as an optimizer's slot.

A state of n elements is cut into as many flat parts as there are ranks, the last filled up with
zeros. To whoever reads or sets it, it is the complete state, in its own shape: so checkpoints are
the same for any number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dtypes import widened
from ..errors import ShapeError
from ..graph.node import Node
from ..ops.leaf import Parameter
from ..ops.movement import reshape_op
from ..ops.pad import pad_op
from .collectives import all_gather_op, reduce_scatter_op
from .group import Group


class Shard(Parameter):
    """One rank's part of a state that goes with a Parameter, float32 beside one of 16 bits.

    `asnumpy` gathers the complete state from all ranks, and `set` takes it: all ranks call them
    together. of: the Parameter. initial: what the state begins at; None for the Parameter's value,
    which the shard follows whenever somebody sets it. group: the ranks.
    """

    __slots__ = ("of", "group", "follows", "seen")
    of_rank = True

    def __init__(self, of: Parameter, name: str, group: Group, initial: float | None) -> None:
        size = math.ceil(math.prod(of.shape) / group.size)
        value = np.full(size, 0.0 if initial is None else initial, widened(of.dtype))
        super().__init__(value, name, trainable=False)
        self.of, self.group = of, group
        self.follows = initial is None
        self.seen = -1  # the version of the Parameter that it follows

    @property
    def saved_shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def derived(self) -> bool:  # type: ignore[override]
        return self.follows

    def asnumpy(self) -> np.ndarray:
        """The complete state, of all ranks."""
        parts = self.group.all_gather(super().asnumpy())
        return parts.reshape(-1)[: math.prod(self.of.shape)].reshape(self.of.shape)

    def set(self, value: Any) -> None:
        """Replaces the state; `value` is complete. ShapeError when its shape differs."""
        array = np.asarray(value)
        if array.shape != self.of.shape:
            raise ShapeError(
                f"Parameter {self.name}: set() got {array.dtype} {array.shape}, expected "
                f"{self.dtype} {self.of.shape}"
            )
        (count,), rank = self.shape, self.group.rank
        part = np.zeros(self.shape, array.dtype)
        own = array.reshape(-1)[rank * count : (rank + 1) * count]
        part[: own.size] = own
        super().set(part)

    def refresh(self) -> None:
        """Takes over the value of the Parameter that it follows, where somebody has set it."""
        if self.follows and self.seen != self.of.version:
            self.seen = self.of.version
            self.set(self.of.asnumpy())


class Slice(Parameter):
    """One rank's part of a weight, or of a slot beside it, cut along an axis. To whoever reads or
    sets it, it is the complete weight; `asnumpy` is a collective.
    """

    __slots__ = ("group", "axis")
    of_rank = True

    def __init__(
        self, value: np.ndarray, name: str, group: Group, axis: int, trainable: bool = True
    ) -> None:
        self.group, self.axis = group, axis
        super().__init__(self._part(value), name, trainable=trainable)

    def _part(self, value: np.ndarray) -> np.ndarray:
        return np.split(value, self.group.size, self.axis)[self.group.rank].copy()

    @property
    def saved_shape(self) -> tuple[int, ...]:
        shape = [*self.shape]
        shape[self.axis] *= self.group.size
        return tuple(shape)

    def asnumpy(self) -> np.ndarray:
        """The complete weight, of all ranks."""
        return np.concatenate([*self.group.all_gather(super().asnumpy())], self.axis)

    def set(self, value: Any) -> None:
        """Replaces the weight; `value` is complete. ShapeError when its shape differs."""
        array = np.asarray(value)
        if array.shape != self.saved_shape:
            raise ShapeError(
                f"Parameter {self.name}: set() got {array.dtype} {array.shape}, expected "
                f"{self.dtype} {self.saved_shape}"
            )
        super().set(self._part(array))


def scattered(gradient: Node, of: Parameter, group: Group) -> Node:
    """This rank's part of the mean of all ranks' gradients of a Parameter."""
    size = math.prod(of.shape)
    flat = reshape_op(gradient, (size,))
    rest = -size % group.size
    even = pad_op(flat, ((0, rest),)) if rest else flat
    return reduce_scatter_op(even, group=group, op="mean")


def gathered(part: Node, of: Parameter, group: Group) -> Node:
    """The Parameter's new value of all ranks' parts."""
    flat = all_gather_op(part, group=group)
    size = math.prod(of.shape)
    if size % group.size:
        flat = flat[:size]
    return reshape_op(flat, of.shape)
