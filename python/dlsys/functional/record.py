"""All functions of this package take the same kinds of arguments and are recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

from ..errors import SignatureError
from ..graph.lines import where
from ..graph.node import Node
from ..ops.elementwise import as_node, is_number

Function = TypeVar("Function", bound=Callable[..., Any])

# What functions take and give: a node. A numpy array, a list or a number that is given where a node
# is expected becomes a constant: an array of its own dtype, floats of Python float32.
Array: TypeAlias = Any


class Recorder:
    """The class whose values functions record a call on, once `dlsys.eager` is there: Tensor."""

    tensor: Any = None


def recorded(function: Function) -> Function:
    """Makes a function of nodes and plain arguments one of the vocabulary: of Tensors too, for
    which the call is recorded.

    Such a function builds its result from operators alone and is pure: the same nodes and the same
    arguments give the same graph. Its plain arguments can be hashed, with tuples for lists.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and ("dim" in kwargs or "keepdim" in kwargs):
            raise SignatureError(
                f"{function.__name__}: axes go by numpy's names here, axis and keepdims instead of "
                f"dim and keepdim [{where()}]"
            )
        tensor = Recorder.tensor
        for x in args:
            if type(x) is tensor:
                return x.engine.record(function, args, kwargs)
        if tensor is not None and (kwargs or _has_sequence(args)):
            found = _tensor_in((args, kwargs), tensor)
            if found is not None:
                return found.engine.record(function, args, kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


def _has_sequence(args: tuple[Any, ...]) -> bool:
    return any(type(x) is list or type(x) is tuple for x in args)


def _tensor_in(value: Any, tensor: type) -> Any:
    """The first Tensor among arguments, None where there is none."""
    if type(value) is tensor:
        return value
    items = value.values() if type(value) is dict else value
    if type(value) not in (dict, list, tuple):
        return None
    return next((x for x in (_tensor_in(item, tensor) for item in items) if x is not None), None)


def pair(a: Array, b: Array) -> tuple[Any, Any]:
    """Two operands: nodes and numbers as they are, arrays as constants, one of two numbers too."""
    a = as_node(a) if is_number(b) or not is_number(a) else a
    return a, b if is_number(b) else as_node(b)


def optional(x: Array | None) -> Node | None:
    """A node, or None where there is none."""
    return None if x is None else as_node(x)
