"""Convolution as functions of nodes: in two dimensions, transposed, in one dimension, and under the
names of older scripts.
"""

from __future__ import annotations

from typing import Any

from ...errors import GraphError
from ...graph.lines import where
from ...graph.node import Node
from ...graph.signature import Int, IntPair, declared, is_integer
from ..movement import expand_dims_op, reshape_op, squeeze_op
from .convolution import (
    SHARED,
    convolution_bias_op,
    convolution_op,
    data_gradient_like_op,
    data_gradient_op,
    filter_gradient_like_op,
    filter_gradient_op,
)
from .geometry import Padding, Pair


class Sides(Padding):
    """(before, after) of one axis, one number for both, or a word."""

    expected = "'same', 'valid' or one or two integers that are not negative"

    def take(self, value: Any) -> Any:
        if not (isinstance(value, str) or is_integer(value) or all(map(is_integer, value))):
            raise TypeError
        return super().take(value)


@declared(**SHARED)
def conv2d(
    x: Node,
    f: Node,
    bias: Node | None = None,
    stride: int | Pair = 1,
    padding: Any = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    name: str | None = None,
) -> Node:
    """The convolution of x (N, C, H, W) with f (O, C/groups, kH, kW), plus bias (O,) if given.

    Gives (N, O, oH, oW), oH = (H + padding before and after - dilation·(kH - 1) - 1) // stride + 1.
    padding: a number or a pair for both sides of each axis, ((top, bottom), (left, right)),
    "valid" (none) or "same" (oH = ceil(H / stride), an odd rest behind). groups: channels and
    filters in that many parts that do not mix; groups=C is a depthwise convolution. Floats of one
    dtype. Raises ShapeError for attributes or shapes that do not fit.
    """
    attrs: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    if bias is None:
        return convolution_op.make((x, f), attrs, name)
    return convolution_bias_op.make((x, f, bias), attrs, name)


@declared(**SHARED, output_padding=IntPair())
def conv_transpose2d(
    x: Node,
    f: Node,
    bias: Node | None = None,
    stride: int | Pair = 1,
    padding: Any = 0,
    output_padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    name: str | None = None,
) -> Node:
    """The transposed convolution of x (N, C, H, W) with f (C, O/groups, kH, kW), plus bias (O,).

    It is the gradient of the convolution by f for its data. Gives (N, O, oH, oW) with
    oH = (H - 1)·stride - padding before and after + dilation·(kH - 1) + 1 + output_padding.
    padding: as of `conv2d`, less "same". output_padding: below the stride. Raises ShapeError for
    attributes or shapes that do not fit.
    """
    y = data_gradient_op(
        f, x, stride=stride, padding=padding, dilation=dilation, groups=groups,
        output_padding=output_padding, name=name,
    )  # fmt: skip
    return y if bias is None else y + reshape_op(bias, (-1, 1, 1))


@declared(stride=Int(low=1), padding=Sides(), dilation=Int(low=1), groups=Int(low=1))
def conv1d(
    x: Node,
    f: Node,
    bias: Node | None = None,
    stride: int = 1,
    padding: Any = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Node:
    """The convolution of x (N, C, L) with f (O, C/groups, k), plus bias (O,): (N, O, oL).

    It is `conv2d` over planes of one row. padding: a number, (before, after), "same" or "valid".
    """
    if not isinstance(padding, str):
        padding = ((0, 0), padding)
    plane, filters = expand_dims_op(x, axis=2), expand_dims_op(f, axis=2)
    y = conv2d(plane, filters, bias, (1, stride), padding, (1, dilation), groups)
    return squeeze_op(y, axis=2)


@declared(padding=Padding(), stride=IntPair(low=1))
def conv2d_op(A: Node, B: Node, padding: Any = 0, stride: int | Pair = 1) -> Node:
    """`conv2d` of A (N, C, H, W) with the filter B (O, C, kH, kW)."""
    return conv2d(A, B, stride=stride, padding=padding)


@declared(padding=Padding(), stride=IntPair(low=1))
def conv2d_add_bias_op(
    A: Node, B: Node, bias: Node, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """`conv2d_op` plus bias (O,)."""
    return conv2d(A, B, bias, stride=stride, padding=padding)


def conv2d_gradient_of_data_op(
    A: Node, B: Node, *more: Any, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """The gradient of `conv2d_op` for its data, from the filter A (O, C, kH, kW) and dy B.

    Scripts call it in two ways, and both work: (filter, dy, padding, stride) gives the smallest
    planes that the convolution takes to dy, (filter, dy, x, padding, stride) gives those of x.
    """
    like, padding, stride = _sorted("conv2d_gradient_of_data", more, padding, stride)
    if like is None:
        return data_gradient_op(A, B, stride=stride, padding=padding)
    return data_gradient_like_op(A, B, like, stride=stride, padding=padding)


def conv2d_gradient_of_filter_op(
    A: Node, B: Node, *more: Any, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """The gradient of `conv2d_op` for its filter, from the data A (N, C, H, W) and dy B.

    (x, dy, padding, stride) gives the largest filter that takes x to dy's size, which at stride 1
    is the only one; (x, dy, filter, padding, stride) gives one like `filter`.
    """
    like, padding, stride = _sorted("conv2d_gradient_of_filter", more, padding, stride)
    if like is None:
        return filter_gradient_op(A, B, stride=stride, padding=padding)
    return filter_gradient_like_op(A, B, like, stride=stride, padding=padding)


def _sorted(
    called: str, more: tuple[Any, ...], padding: Any, stride: Any
) -> tuple[Node | None, Any, Any]:
    """The optional node, padding and stride among positional arguments."""
    like = more[0] if more and isinstance(more[0], Node) else None
    numbers = more if like is None else more[1:]
    if len(numbers) > 2:
        raise GraphError(
            f"{called}: expected at most three nodes, padding and stride, got "
            f"{2 + len(more)} arguments [{where()}]"
        )
    return like, *(*numbers, *(padding, stride)[len(numbers) :])[:2]
