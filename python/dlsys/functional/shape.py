"""Functions that make, arrange, join and cut arrays and compute nothing. They take any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments.kinds import is_integer
from ..dtypes import FLOAT32
from ..errors import GraphError
from ..graph.lines import where
from ..graph.node import Node
from ..ops import concat as joining
from ..ops import movement
from ..ops.elementwise import as_node
from ..ops.indexing import getitem_op
from ..ops.leaf import full_op, oneslike_op, zeroslike_op
from ..ops.pad import pad_op
from .record import Array, recorded

__all__ = [
    "broadcast_to", "concatenate", "expand_dims", "flatten", "flip", "full", "ones_like", "pad",
    "reshape", "roll", "split", "squeeze", "stack", "swapaxes", "tile", "transpose", "zeros_like",
]  # fmt: skip

Axes = int | tuple[int, ...]


@recorded
def reshape(x: Array, shape: Axes) -> Array:
    """The elements of x in row-major order in another shape, of which one extent may be -1.

    It costs nothing. ShapeError where the number of elements differs.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> F.reshape(x, (3, -1))
    Tensor([[0, 1],
            [2, 3],
            [4, 5]],
           device=numpy)
    """
    return movement.reshape_op(as_node(x), (shape,) if is_integer(shape) else shape)


@recorded
def flatten(x: Array, axis: int = 0) -> Array:
    """x with all axes from `axis` on as one; the axes before it stay.

    It costs nothing. ShapeError for an axis that x does not have.

    >>> F.flatten(dl.zeros(2, 3, 4), 1).shape
    (2, 12)
    """
    return movement.flatten_op(as_node(x), axis)


@recorded
def squeeze(x: Array, axis: Axes | None = None) -> Array:
    """x without the axes `axis`, which have extent 1; by default without all such axes.

    It costs nothing. ShapeError for an axis of another extent.

    >>> F.squeeze(dl.zeros(1, 3, 1)).shape
    (3,)
    >>> F.squeeze(dl.zeros(1, 3, 1), 0).shape
    (3, 1)
    """
    return movement.squeeze_op(as_node(x), axis)


@recorded
def expand_dims(x: Array, axis: Axes) -> Array:
    """x with new axes of extent 1, which are the axes `axis` of the result.

    It costs nothing. ShapeError for an axis that the result does not have.

    >>> F.expand_dims(dl.zeros(2, 3), -1).shape
    (2, 3, 1)
    """
    return movement.expand_dims_op(as_node(x), axis)


@recorded
def transpose(x: Array, axes: tuple[int, ...] | None = None) -> Array:
    """x with its axes in another order, reversed by default: axis k of the result is axis axes[k]
    of x.

    ShapeError for axes that do not name each axis once.

    >>> F.transpose(dl.zeros(2, 3, 4), (0, 2, 1)).shape
    (2, 4, 3)
    """
    return movement.transpose_op(as_node(x), axes)


@recorded
def swapaxes(x: Array, a: int, b: int) -> Array:
    """x with two axes exchanged.

    a, b: the two axes, from the end where they are negative. GraphError for an axis that x does not
    have, and where its number of dimensions is not known.

    >>> F.swapaxes(dl.zeros(2, 3, 4), 0, -1).shape
    (4, 3, 2)
    """
    x = as_node(x)
    order = list(range(_ndim("swapaxes", x, a, b)))
    order[a], order[b] = order[b], order[a]
    return movement.transpose_op(x, tuple(order))


@recorded
def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    """x repeated to `shape` by numpy's rule; its gradient is summed over the repetitions.

    ShapeError where x does not broadcast to it.

    >>> F.broadcast_to(dl.tensor([1, 2]), (2, 2))
    Tensor([[1, 2],
            [1, 2]],
           device=numpy)
    """
    return movement.broadcast_to_op(as_node(x), shape)


@recorded
def tile(x: Array, reps: Axes) -> Array:
    """x repeated reps[k] times along axis k, by numpy's rule where their numbers differ.

    GraphError for negative repetitions.

    >>> F.tile(dl.tensor([1, 2]), (2, 2))
    Tensor([[1, 2, 1, 2],
            [1, 2, 1, 2]],
           device=numpy)
    """
    return joining.tile(as_node(x), reps)


@recorded
def concatenate(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Arrays one after the other along an axis; their shapes agree in all others.

    ShapeError where they do not, GraphError for no arrays.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> F.concatenate((x, x), axis=1)
    Tensor([[0, 1, 2, 0, 1, 2],
            [3, 4, 5, 3, 4, 5]],
           device=numpy)
    """
    return joining.concat([as_node(x) for x in arrays], axis)


@recorded
def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Arrays of one shape side by side along a new axis.

    ShapeError where their shapes differ, GraphError for no arrays.

    >>> F.stack((dl.tensor([1, 2]), dl.tensor([3, 4])), axis=-1)
    Tensor([[1, 3],
            [2, 4]],
           device=numpy)
    """
    return joining.stack([as_node(x) for x in arrays], axis)


@recorded
def split(x: Array, sections: Axes, axis: int = 0) -> list[Array]:
    """x cut along an axis into `sections` equal parts, or into parts of the given sizes: a list.

    ShapeError where the parts are not equal, or the sizes do not add up to the axis.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> first, rest = F.split(x, (1, 2), axis=1)
    >>> rest
    Tensor([[1, 2],
            [4, 5]],
           device=numpy)
    """
    return joining.split(as_node(x), sections, axis)


@recorded
def pad(x: Array, paddings: Sequence[Any], mode: str = "constant", value: float = 0) -> Array:
    """x with more positions at its borders.

    paddings: (before, after), or one number for both, for each axis, as in numpy. mode: "constant"
    adds `value`, "edge" repeats the border, "reflect" mirrors without repeating it, at most the
    axis less 1. ShapeError where paddings do not fit the axes or the dtype cannot hold the value.

    >>> F.pad(dl.tensor([[1, 2]]), ((0, 1), (1, 0)), value=-1)
    Tensor([[-1,  1,  2],
            [-1, -1, -1]],
           device=numpy)
    """
    return pad_op(as_node(x), paddings, mode, value)


@recorded
def flip(x: Array, axis: Axes | None = None) -> Array:
    """x in reverse order along `axis`, by default along all axes.

    GraphError for an axis that x does not have, and where its number of dimensions is not known.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> F.flip(x, axis=1)
    Tensor([[2, 1, 0],
            [5, 4, 3]],
           device=numpy)
    """
    x = as_node(x)
    axes = (axis,) if isinstance(axis, int) else axis
    ndim = _ndim("flip", x, *(axes or ()))
    chosen = set(range(ndim)) if axes is None else {k % ndim for k in axes}
    return getitem_op(x, tuple(slice(None, None, -1 if k in chosen else 1) for k in range(ndim)))


@recorded
def roll(x: Array, shift: int, axis: int) -> Array:
    """x moved by `shift` positions along one axis; what leaves at one end comes back at the other.

    GraphError for an axis that x does not have, and where its extent is not known.

    >>> x = dl.arange(6).reshape(2, 3)
    >>> F.roll(x, 1, axis=1)
    Tensor([[2, 0, 1],
            [5, 3, 4]],
           device=numpy)
    """
    x = as_node(x)
    ndim = _ndim("roll", x, axis)
    extent = x.shape[axis]
    if extent is None:
        raise GraphError(
            f"roll: axis {axis} of {x.name} {x.shape} has no known extent; declare the Variable's "
            f"shape [{where()}]"
        )
    at = -shift % extent if extent else 0
    if not at:
        return x
    before = (slice(None),) * (axis % ndim)
    parts = (slice(at, None), slice(None, at))
    return joining.concat([getitem_op(x, (*before, part)) for part in parts], axis)


@recorded
def full(shape: tuple[int, ...], value: float, dtype: Any = FLOAT32) -> Array:
    """An array with one number everywhere.

    shape: a tuple of extents. value: the number. GraphError for a number that the dtype cannot
    hold.

    >>> F.full((2, 2), 0.5).shape
    (2, 2)
    """
    return full_op(shape, value, dtype)


@recorded
def zeros_like(x: Array) -> Array:
    """0 everywhere, in the shape and dtype of x, whose values do not matter.

    >>> F.zeros_like(dl.tensor([1.0, 2.0]))
    Tensor([0., 0.], device=numpy)
    """
    return zeroslike_op(as_node(x))


@recorded
def ones_like(x: Array) -> Array:
    """1 everywhere, in the shape and dtype of x, whose values do not matter.

    >>> F.ones_like(dl.tensor([1.0, 2.0]))
    Tensor([1., 1.], device=numpy)
    """
    return oneslike_op(as_node(x))


def _ndim(name: str, x: Node, *axes: int) -> int:
    """The number of dimensions of x. GraphError where it is not known or there is no such axis."""
    if x.ndim is None:
        raise GraphError(
            f"{name}: the number of dimensions of {x.name} is not known; declare the Variable's "
            f"shape, with None for an extent that may vary [{where()}]"
        )
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            raise GraphError(f"{name}: {x.name} {x.shape} has no axis {axis} [{where()}]")
    return x.ndim
