"""Padding: x with more positions at its borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import Kind, Misfit, Number, OneOf, integer, integers, is_integer
from ..arguments.signature import Signature, declared
from ..graph.node import Node, Op
from ..graph.spec import Spec
from .indexing import check_fill, getitem_op, place_op

__all__ = ["pad_op"]


class Paddings(Kind):
    """(before, after) for each axis, or one number for both."""

    expected = "a pair (before, after) or a number for each axis"

    def take(self, value: Any) -> tuple[tuple[int, int], ...]:
        if isinstance(value, str) or is_integer(value):
            raise TypeError
        pairs = []
        for one in value:
            both = (integer(one),) * 2 if is_integer(one) else integers(one)
            if len(both) != 2:
                raise ValueError
            pairs.append((both[0], both[1]))
        if any(n < 0 for pair in pairs for n in pair):
            raise Misfit(f"paddings must not be negative, got {tuple(pairs)}; a slice takes away")
        return tuple(pairs)


class Mode(OneOf):
    """A word in small letters or capitals."""

    def take(self, value: Any) -> str:
        return super().take(value.lower() if isinstance(value, str) else value)


class ConstantPadOp(Op):
    """x with `value` around it, as many positions as `paddings` says for each axis."""

    name = "pad"
    signature = Signature("x", "*", paddings=Paddings(), value=Number(0, nan=True))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_fill(node, specs[0].dtype)
        return specs[0]._replace(shape=_padded(node, specs[0].shape))

    def simplify(self, node: Node) -> Node:
        starts = [before for before, _ in node.attrs["paddings"]]
        return place_op(node.inputs[0], node.spec.shape, starts, value=node.attrs["value"])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        key = [slice(before, -after or None) for before, after in node.attrs["paddings"]]
        return [getitem_op(output_grad, tuple(key))]


class PadOp(Op):
    """x continued at its borders: by the border itself ("edge") or as in a mirror that stands on
    it ("reflect").
    """

    any_dtype = movement = True
    autocast = "follow"
    signature = Signature("x", "*", paddings=Paddings())

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = self.kernel = f"pad_{mode}"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, shape = specs[0].shape, _padded(node, specs[0].shape)
        for axis, extent in enumerate(x):
            most = max(node.attrs["paddings"][axis])
            if most and (extent == 0 or self.mode == "reflect" and most >= extent):
                raise node.error(
                    f"axis {axis} of {node.inputs[0].name} {x} is too short to be padded by "
                    f"{node.attrs['paddings'][axis]}"
                )
        return specs[0]._replace(shape=shape)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        middle = (
            slice(before, before + n) for (before, _), n in zip(node.attrs["paddings"], x.shape)
        )
        np.copyto(y[tuple(middle)], x)
        for axis, (before, after) in enumerate(node.attrs["paddings"]):
            part = y.swapaxes(0, axis)
            for border, source in _copies(self.mode, before, after, x.shape[axis]):
                np.copyto(part[border], part[source][::-1])

    def scalars(self, node: Node) -> tuple[int, int]:
        return _one_axis(node)[:2]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [pad_gradient_ops[self.mode](output_grad, paddings=node.attrs["paddings"])]

    def simplify(self, node: Node) -> Node | None:
        return _axis_by_axis(self, node)


class PadGradientOp(Op):
    """The sum of dy over all copies that padding made of an element."""

    autocast = "follow"
    signature = Signature("dy", "*", paddings=Paddings())

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = self.kernel = f"pad_{mode}_gradient"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        paddings = node.attrs["paddings"]
        shape = tuple(n - sum(padding) for n, padding in zip(specs[0].shape, paddings))
        if len(paddings) != len(specs[0].shape) or min(shape, default=0) < 0:
            raise node.error(f"dy {specs[0].shape} is not padded by {paddings}")
        return specs[0]._replace(shape=shape)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        axis, before, after = _one_axis(node)
        dy, dx = (array.swapaxes(0, axis) for array in arrays)
        np.copyto(dx, dy[before : before + len(dx)])
        for border, source in _copies(self.mode, before, after, len(dx)):
            into = dx[source.start - before : source.stop - before]
            mirrored = [dy[border][::-1]] if self.mode == "reflect" else dy[border]
            for copies in mirrored:
                np.add(into, copies, out=into)

    scalars = PadOp.scalars
    simplify = PadOp.simplify

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [pad_ops[self.mode](output_grad, paddings=node.attrs["paddings"])]


def _padded(node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    paddings = node.attrs["paddings"]
    if len(paddings) != len(shape):
        raise node.error(
            f"{node.inputs[0].name} {shape} has {len(shape)} axes and paddings are given for "
            f"{len(paddings)}"
        )
    return tuple(before + n + after for (before, after), n in zip(paddings, shape))


def _one_axis(node: Node) -> tuple[int, int, int]:
    """The one axis that is padded, with how much before and after."""
    padded = [(k, *both) for k, both in enumerate(node.attrs["paddings"]) if any(both)]
    assert len(padded) == 1, "simplify pads axis by axis"
    return padded[0]


def _axis_by_axis(op: Op, node: Node) -> Node | None:
    """The node as one node an axis, None when it is that already."""
    paddings = node.attrs["paddings"]
    padded = [k for k, both in enumerate(paddings) if any(both)]
    if len(padded) == 1:
        return None
    x = node.inputs[0]
    for axis in padded:
        x = op(x, paddings=tuple(p if k == axis else (0, 0) for k, p in enumerate(paddings)))
    return x


def _copies(mode: str, before: int, after: int, n: int) -> list[tuple[slice, slice]]:
    """The two borders of a padded axis, each with the positions whose mirror image it is."""
    if mode == "reflect":
        front, back = (
            slice(before + 1, 2 * before + 1),
            slice(before + n - 1 - after, before + n - 1),
        )
    else:
        front, back = slice(before, before + 1), slice(before + n - 1, before + n)
    both = [(slice(0, before), front), (slice(before + n, before + n + after), back)]
    return [(border, source) for border, source in both if border.stop > border.start]


constant_pad_op = ConstantPadOp()
pad_ops = {mode: PadOp(mode) for mode in ("edge", "reflect")}
pad_gradient_ops = {mode: PadGradientOp(mode) for mode in pad_ops}


@declared(
    paddings=Paddings(), mode=Mode("constant", "edge", "reflect"), constant_values=Number(nan=True)
)
def pad_op(
    x: Node,
    paddings: Sequence[Any],
    mode: str = "constant",
    constant_values: float = 0,
    name: str | None = None,
) -> Node:
    """x with positions added at its borders.

    paddings: (before, after), or one number for both, for each axis. mode: "constant" adds
    `constant_values`, which x's dtype must hold, "edge" repeats the border, "reflect" mirrors
    without repeating it and adds at most the axis less 1. Capitals are taken too. Elements are
    copied bit by bit, integers of any size among them; a Variable without a dtype is float32 on
    native devices.
    """
    if mode == "constant":
        return constant_pad_op(x, paddings=paddings, value=constant_values, name=name)
    return pad_ops[mode](x, paddings=paddings, name=name)
