"""What all functions of this package have in common: what they take, and that they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from ..graph.node import Node
from ..ops.elementwise import as_node, is_number

Function = TypeVar("Function", bound=Callable[..., Any])

# What functions take and give: a node. A numpy array, a list or a number that is given where a node
# is expected becomes a constant: an array of its own dtype, floats of Python float32.
Array: TypeAlias = Any


def recorded(function: Function) -> Function:
    """Makes a function of nodes and plain arguments one of the vocabulary.

    Such a function builds its result from operators alone and is pure: the same nodes and the same
    arguments give the same graph. Its plain arguments can be hashed, with tuples for lists.
    """
    return function


def pair(a: Array, b: Array) -> tuple[Any, Any]:
    """Two operands: nodes and numbers as they are, arrays as constants, one of two numbers too."""
    a = as_node(a) if is_number(b) or not is_number(a) else a
    return a, b if is_number(b) else as_node(b)


def optional(x: Array | None) -> Node | None:
    """A node, or None where there is none."""
    return None if x is None else as_node(x)
