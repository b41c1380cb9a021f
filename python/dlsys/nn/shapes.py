"""Layers check the shape of an input when their graph is built."""

from __future__ import annotations

from typing import Any

from ..autodiff import Node
from ..errors import GraphError, ShapeError
from ..graph.lines import where


def shape_of(layer: str, x: Node, axes: str) -> tuple[Any, ...]:
    """The extents of x, whose axes are named as in "steps batch features"; None for an extent that
    only a feed decides.

    ShapeError for another number of axes, GraphError where that number is not known.
    """
    names = axes.split()
    if x.shape is None:
        raise GraphError(
            f"{layer}: the shape of its input is not known when the graph is built; declare the "
            f"Variable's shape ({', '.join(names)}), with None for a batch of any size [{where()}]"
        )
    if len(x.shape) != len(names):
        raise ShapeError(
            f"{layer}: expected an input ({', '.join(names)}), got one of shape {x.shape} "
            f"[{where()}]"
        )
    return tuple(x.shape)


def known(layer: str, extent: int | None, what: str) -> int:
    """An extent that must be known when the graph is built. GraphError where it is None."""
    if extent is None:
        raise GraphError(
            f"{layer}: the number of {what} is not known when the graph is built; declare it in "
            f"the Variable's shape [{where()}]"
        )
    return extent
