"""Specs, which are shapes with dtypes, and the rules for them that operators share: promotion,
broadcasting, axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..dtypes import FLOAT32 as FLOAT32
from ..dtypes import FLOAT64 as FLOAT64
from ..dtypes import bfloat16


class Spec(NamedTuple):
    """`shape` and `dtype` of a value, None while unknown; `declared` tells that the user chose the
    dtype.
    """

    shape: tuple[int, ...]
    dtype: Any  # a np.dtype, or None while unknown
    declared: bool = True

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def nbytes(self) -> int:
        """The bytes it takes in memory."""
        return self.size * self.dtype.itemsize


class Site(Protocol):
    """A node as the rules here see it: errors name its inputs and its source line."""

    inputs: Any

    def error(self, message: str) -> Exception:
        """An error of this node, ready to raise."""


def promote(node: Site, *specs: Spec) -> np.dtype | None:
    """The dtype of a computation over these inputs: integers give way to floats, bool to integers.

    float32 with float64 is an error when one of them was declared; two undeclared feeds promote as
    in numpy. bfloat16 with another float is always an error.
    """
    if len(specs) == 1 or (len(specs) == 2 and specs[0].dtype == specs[1].dtype):
        return specs[0].dtype
    dtypes = {spec.dtype for spec in specs}
    if None in dtypes:
        return None
    if len(dtypes) == 1:
        return dtypes.pop()
    floats = {dtype for dtype in dtypes if dtype.kind == "f"}
    if len(floats) == 1:
        return floats.pop()
    if floats:
        _refuse_mixed_floats(node, specs, always=bfloat16 in floats)
    return np.result_type(*(dtype for dtype in (floats or dtypes) if dtype is not None))


def _refuse_mixed_floats(node: Site, specs: tuple[Spec, ...], always: bool) -> None:
    floats = [
        (x, s) for x, s in zip(node.inputs, specs) if s.dtype is not None and s.dtype.kind == "f"
    ]
    if always or any(spec.declared for _, spec in floats):
        first = floats[0]
        other = next(pair for pair in floats if pair[1].dtype != first[1].dtype)
        raise node.error(
            f"{first[0].name} is {first[1].dtype} and {other[0].name} is {other[1].dtype}; "
            "feed or declare both with one dtype"
        )


def floating(dtype: np.dtype | None) -> np.dtype | None:
    """`dtype` itself when it is floating, else the default that integers promote to."""
    return dtype if dtype is None or dtype.kind == "f" else FLOAT64


def broadcast(node: Site, *specs: Spec) -> tuple[int, ...]:
    """The common shape by numpy's rule: aligned at the right, extents equal or 1."""
    shape = specs[0].shape
    for spec in specs[1:]:
        if len(spec.shape) == len(shape) and spec.shape == shape:
            continue
        merged = merge_shapes(shape, spec.shape)
        if merged is None:
            raise node.error(f"shapes do not broadcast: {describe(node, specs)}")
        shape = merged
    return shape


def merge_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Two shapes broadcast against each other, None where they cannot be. Extents are compared
    only with those that they meet: one may stand in for an unknown one, see extents.py.
    """
    if len(a) == len(b) and a == b:
        return a
    ndim = max(len(a), len(b))
    left = (1,) * (ndim - len(a)) + a
    right = (1,) * (ndim - len(b)) + b
    if any(m != n and m != 1 and n != 1 for m, n in zip(left, right)):
        return None
    return tuple(n if m == 1 else m for m, n in zip(left, right))


def broadcast_axes(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of `target` along which an array of `shape` is repeated."""
    lead = len(target) - len(shape)
    return tuple(
        axis
        for axis, extent in enumerate(target)
        if axis < lead or (shape[axis - lead] == 1 != extent)
    )


def normalize_axes(node: Site, axes: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes as a sorted tuple of non-negative numbers; None is all of them."""
    if axes is None:
        return tuple(range(ndim))
    given = (axes,) if isinstance(axes, (int, np.integer)) else tuple(axes)
    found = sorted(int(axis) + ndim if axis < 0 else int(axis) for axis in given)
    if any(not 0 <= axis < ndim for axis in found) or len(set(found)) != len(found):
        raise node.error(f"axes {given} do not fit an array of {ndim} dimensions")
    return tuple(found)


def describe(node: Site, specs: Iterable[Spec]) -> str:
    """The inputs with their shapes, such as `x (64, 784) and w (10, 784)`."""
    return " and ".join(f"{x.name} {spec.shape}" for x, spec in zip(node.inputs, specs))
