"""Operators that join, cut and repeat arrays: concat, stack, split, tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import Axes, Int, Kind, Misfit, Shape
from ..arguments.signature import Signature, declared
from ..errors import GraphError
from ..graph.lines import where
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe, promote
from .elementwise import cast_op
from .indexing import Share, Span, getitem_op
from .leaf import zeroslike_op
from .movement import broadcast_to_op, expand_dims_op, reshape_op
from .reduce import sum_op

__all__ = ["concat", "concat_op", "split", "stack", "tile"]

_MOST = 8  # arrays that one kernel joins; more go through a tree
_MAX_NDIM = 8  # dimensions that native devices have


class Sections(Axes):
    """A number of equal parts, or the sizes of all parts."""

    expected = "an integer or a tuple of sizes"

    def take(self, value: Any) -> int | tuple[int, ...]:
        parts = super().take(value)
        if isinstance(parts, int):
            if parts < 1:
                raise Misfit(f"expected at least one part, got {parts}")
        elif min(parts, default=0) < 0:
            raise Misfit(f"sizes must not be negative, got {parts}")
        return parts


class Nodes(Kind):
    """A sequence of nodes."""

    expected = "a sequence of nodes"

    def take(self, value: Any) -> list[Node]:
        nodes = list(value)
        if isinstance(value, Node) or not all(isinstance(node, Node) for node in nodes):
            raise TypeError
        return nodes


class ConcatOp(Op):
    """Arrays one after the other along `axis`; `concat` takes any number of them."""

    name = "concat"
    any_dtype = True
    autocast = "follow"

    def __init__(self, count: int) -> None:
        self.kernel = f"concat_{count}"
        self.signature = Signature(*[f"x{k}" for k in range(count)], "*", axis=Int(0))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape = list(specs[0].shape)
        axis = node.attrs["axis"]
        if not -len(shape) <= axis < len(shape):
            raise node.error(f"axis {axis} does not fit {node.inputs[0].name} {specs[0].shape}")
        beside = [_without(spec.shape, axis % len(shape)) for spec in specs]
        if any(len(s.shape) != len(shape) or b != beside[0] for s, b in zip(specs, beside)):
            raise node.error(f"shapes differ beside axis {axis}: {describe(node, specs)}")
        shape[axis] = sum(spec.shape[axis] for spec in specs)
        return Spec(tuple(shape), promote(node, *specs), any(spec.declared for spec in specs))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        np.concatenate(arrays[:-1], axis=node.attrs["axis"], out=arrays[-1])

    def scalars(self, node: Node) -> tuple[int]:
        return (node.attrs["axis"] % len(node.spec.shape),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        axis = node.attrs["axis"]
        return [
            concat_gradient_op(output_grad, *node.inputs, index=k, axis=axis)
            for k in range(len(node.inputs))
        ]

    def simplify(self, node: Node) -> Node | None:
        if all(x.spec.dtype == node.spec.dtype for x in node.inputs):
            return node.inputs[0] if len(node.inputs) == 1 else None
        return node.derive([cast_op(x, node.spec.dtype) for x in node.inputs], node.spec)


class ConcatGradientOp(Op):
    """The part of dy that belongs to input number `index`; of the inputs only shapes count."""

    name = "concat_gradient"
    signature = Signature("dy", "*inputs", index=Int(low=0), axis=Int(0))

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        if attrs["index"] >= len(inputs) - 1:
            raise GraphError(
                f"concat_gradient: index {attrs['index']} is out of range: there are "
                f"{len(inputs) - 1}, counted from 0 [{where()}]"
            )
        return Node(self, inputs, attrs, name)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]._replace(shape=specs[1 + node.attrs["index"]].shape)

    def simplify(self, node: Node) -> Node:
        dy, *inputs = node.inputs
        index, axis = node.attrs["index"], node.attrs["axis"]
        extents = [x.spec.shape[axis] for x in inputs]
        begin = sum(extents[:index])
        return getitem_op(dy, _along(axis, Span(begin, extents[index], sum(extents))))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        inputs = node.inputs[1:]
        parts = [
            output_grad if k == node.attrs["index"] else zeroslike_op(x)
            for k, x in enumerate(inputs)
        ]
        return [concat(parts, node.attrs["axis"]), *[None] * len(inputs)]


class TileOp(Op):
    """x repeated `reps[k]` times along each axis k; fewer reps than axes count from the right."""

    name = "tile"
    signature = Signature("x", reps=Shape())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, reps = _aligned(specs[0].shape, node.attrs["reps"])
        return specs[0]._replace(shape=tuple(n * rep for n, rep in zip(x, reps)))

    def simplify(self, node: Node) -> Node:
        x = node.inputs[0]
        turns = _turns(*_aligned(x.spec.shape, node.attrs["reps"]))
        if len(turns) > 1:
            for reps in turns:
                x = tile_op(x, reps=reps)
            return x
        one, many, _ = _interleaved(*_aligned(x.spec.shape, node.attrs["reps"]))
        return reshape_op(broadcast_to_op(reshape_op(x, one), many), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [tile_gradient_op(output_grad, node.inputs[0], reps=node.attrs["reps"])]


class TileGradientOp(Op):
    """The sum of dy over the repetitions of `x`, of which only the shape counts."""

    name = "tile_gradient"
    signature = Signature("dy", "x", reps=Shape())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape, reps = _aligned(specs[1].shape, node.attrs["reps"])
        if specs[0].shape != tuple(n * rep for n, rep in zip(shape, reps)):
            raise node.error(f"{describe(node, specs)} do not fit the repetitions {reps}")
        return specs[0]._replace(shape=specs[1].shape)

    def simplify(self, node: Node) -> Node:
        dy, x = node.inputs
        shape, reps = _aligned(x.spec.shape, node.attrs["reps"])
        turns = _turns(shape, reps)
        if len(turns) > 1:
            stages = [x]
            for turn in turns[:-1]:
                stages.append(tile_op(stages[-1], reps=turn))
            for like, turn in zip(reversed(stages), reversed(turns)):
                dy = tile_gradient_op(dy, like, reps=turn)
            return dy
        _, many, axes = _interleaved(shape, reps)
        return reshape_op(sum_op(reshape_op(dy, many), axis=axes), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [tile_op(output_grad, reps=node.attrs["reps"]), None]


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _along(axis: int, entry: Any) -> tuple:
    """The key that has `entry` at an axis, counted from either end."""
    if axis >= 0:
        return (*[slice(None)] * axis, entry)
    return (Ellipsis, entry, *[slice(None)] * (-axis - 1))


def _aligned(shape: tuple[int, ...], reps: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shape and repetitions with 1 in front of the shorter one."""
    ndim = max(len(shape), len(reps))
    return [1] * (ndim - len(shape)) + [*shape], [1] * (ndim - len(reps)) + [*reps]


def _interleaved(shape: list[int], reps: list[int]) -> tuple[list[int], list[int], tuple[int, ...]]:
    """A shape with an axis of 1 before every repeated one, the same repeated, and those axes.

    Neighbors that are not repeated are one axis.
    """
    one: list[int] = []
    axes = []
    for repeated, group in itertools.groupby(zip(shape, reps), key=lambda pair: pair[1] != 1):
        pairs = list(group)
        if not repeated:
            one.append(math.prod(n for n, _ in pairs))
            continue
        for n, _ in pairs:
            axes.append(len(one))
            one += [1, n]
    many = list(one)
    for axis, rep in zip(axes, (rep for rep in reps if rep != 1)):
        many[axis] = rep
    return one, many, tuple(axes)


def _turns(shape: list[int], reps: list[int]) -> list[tuple[int, ...]]:
    """The repetitions, two axes at a time where all at once need more dimensions than devices
    have.
    """
    if len(_interleaved(shape, reps)[0]) <= _MAX_NDIM:
        return [tuple(reps)]
    repeated = [k for k, rep in enumerate(reps) if rep != 1]
    return [
        tuple(rep if k in repeated[at : at + 2] else 1 for k, rep in enumerate(reps))
        for at in range(0, len(repeated), 2)
    ]


concat_ops = {count: ConcatOp(count) for count in range(1, _MOST + 1)}
concat_gradient_op = ConcatGradientOp()
tile_op = TileOp()
tile_gradient_op = TileGradientOp()


@declared(nodes=Nodes(), axis=Int())
def concat(nodes: Sequence[Node], axis: int = 0, name: str | None = None) -> Node:
    """Arrays one after the other along an axis; their shapes agree in all others.

    nodes: at least one.
    """
    level = list(nodes)
    if not level:
        raise GraphError(f"concat: expected at least one node [{where()}]")
    while len(level) > _MOST:
        groups = [level[k : k + _MOST] for k in range(0, len(level), _MOST)]
        level = [concat_ops[len(group)](*group, axis=axis) for group in groups]
    return concat_ops[len(level)](*level, axis=axis, name=name)


@declared(axis=Int())
def concat_op(A: Node, B: Node, axis: int = 0, name: str | None = None) -> Node:
    """Two arrays one after the other along an axis; `concat` takes any number.

    A, B: the two.
    """
    return concat([A, B], axis, name)


@declared(nodes=Nodes(), axis=Int())
def stack(nodes: Sequence[Node], axis: int = 0, name: str | None = None) -> Node:
    """Arrays of one shape side by side along a new axis.

    nodes: at least one.
    """
    return concat([expand_dims_op(node, axis) for node in nodes], axis, name)


@declared(sections=Sections(), axis=Int())
def split(x: Node, sections: int | Sequence[int], axis: int = 0) -> list[Node]:
    """x cut along an axis into `sections` equal parts, or into parts of the given sizes.

    ShapeError when the parts are not equal, or when the sizes do not add up to the axis.
    """
    if isinstance(sections, int):
        return [getitem_op(x, _along(axis, Share(k, sections))) for k in range(sections)]
    begins = [0, *itertools.accumulate(sections)]
    return [
        getitem_op(x, _along(axis, Span(begin, size, begins[-1])))
        for begin, size in zip(begins, sections)
    ]


@declared(reps=Axes())
def tile(x: Node, reps: int | Sequence[int], name: str | None = None) -> Node:
    """x repeated `reps[k]` times along axis k; numpy's rule where their numbers differ."""
    counts = (reps,) if isinstance(reps, int) else tuple(reps)
    if any(count < 0 for count in counts):
        raise GraphError(f"tile: repetitions must not be negative, got {counts} [{where()}]")
    return tile_op(x, reps=counts, name=name)
