"""Dtypes of normalizations over storage types of 16 bits: statistics and sums are float32, scale
and bias are of x's type or float32, and what has x's shape has its type.
"""

from __future__ import annotations

from typing import Any

from ...dtypes import is_narrow, widened
from ...graph.node import Node
from ...graph.spec import Spec, floating, promote


def dtype_of_values(
    node: Node, specs: tuple[Spec, ...], own: tuple[int, ...], affine: tuple[int, ...] = ()
) -> Any:
    """The dtype of what a node computes in x's shape: x's where it is of 16 bits, else promotion's.

    own: the inputs of x's shape, x first; affine: those that are scale and bias. ShapeError where
    an input of 16 bits meets x of another dtype, or is none of these.
    """
    x = specs[0].dtype
    if not any(is_narrow(spec.dtype) for spec in specs):
        return floating(promote(node, *specs))
    if x is None:
        return None
    for k, spec in enumerate(specs):
        if k in own:
            fits, wanted = spec.dtype == x, f"{x}"
        elif k in affine:
            fits, wanted = spec.dtype == x or not is_narrow(spec.dtype), f"{x} or float32"
        else:
            fits, wanted = not is_narrow(spec.dtype), "float32"
        if spec.dtype is not None and not fits:
            raise node.error(
                f"{node.inputs[k].name} is {spec.dtype}, expected {wanted} as "
                f"{node.inputs[0].name} is {x}; declare it so or cast it"
            )
    return x


def dtype_of_sums(dtype: Any) -> Any:
    """The dtype of statistics and sums over values of a dtype."""
    return floating(widened(dtype))
