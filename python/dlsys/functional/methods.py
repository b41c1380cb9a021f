"""The methods of nodes: functions of this package whose first argument is the node."""

from __future__ import annotations

from math import prod
from typing import Any

from ..methods import ArrayMethods
from . import activation, compare, index, math, reduce, shape

__all__ = ["METHODS", "PROPERTIES"]


def _reshape(x: Any, *extents: Any) -> Any:
    """x in another shape, as `functional.reshape`: x.reshape(2, 3) or x.reshape((2, 3))."""
    return shape.reshape(x, extents[0] if len(extents) == 1 else extents)


def _transpose(x: Any, *axes: Any) -> Any:
    """x with its axes in another order, as `functional.transpose`: x.transpose(), x.transpose(1, 0)
    or x.transpose((1, 0)).
    """
    if len(axes) == 1 and (axes[0] is None or not isinstance(axes[0], int)):
        return shape.transpose(x, axes[0])
    return shape.transpose(x, axes or None)


def _ndim(x: Any) -> int | None:
    return None if x.shape is None else len(x.shape)


def _size(x: Any) -> int | None:
    return None if x.shape is None or None in x.shape else prod(x.shape)


# Methods of a node, by name.
METHODS: dict[str, Any] = {
    **{function.__name__: function for function in (
        math.abs, math.astype, math.clip, math.copy, math.cos, math.exp, math.log, math.log1p,
        math.ceil, math.erf, math.floor, math.round, math.rsqrt, math.sign, math.sin, math.sqrt,
        compare.isfinite, compare.isinf, compare.isnan,
        index.masked_fill, index.take_along_axis, index.tril, index.triu,
        activation.log_softmax, activation.relu, activation.sigmoid, activation.softmax,
        activation.tanh,
        reduce.all, reduce.any, reduce.argmax, reduce.argmin, reduce.argsort,
        reduce.cumprod, reduce.cumsum, reduce.logsumexp, reduce.max, reduce.mean, reduce.min,
        reduce.prod, reduce.sort, reduce.std, reduce.sum, reduce.topk, reduce.var,
        shape.broadcast_to, shape.expand_dims, shape.flatten, shape.flip, shape.roll, shape.split,
        shape.squeeze, shape.swapaxes, shape.tile,
    )},
    "detach": math.stop_gradient,
    "reshape": _reshape,
    "transpose": _transpose,
    "unsqueeze": shape.expand_dims,
}  # fmt: skip

# Properties of a node, by name.
PROPERTIES: dict[str, property] = {
    "T": property(lambda x: shape.transpose(x), doc="x with its axes in reverse order."),
    "ndim": property(_ndim, doc="The number of axes, None where it is not known."),
    "size": property(_size, doc="The number of elements, None where it is not known."),
}

for _name, _member in (METHODS | PROPERTIES).items():
    setattr(ArrayMethods, _name, _member)
