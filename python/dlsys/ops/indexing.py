"""Slices (`node[1:3, ::2]`) by numpy's rules and some stricter ones, gather and its opposite
scatter_add, one_hot.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from ..arguments.kinds import DType, Int, Ints, Kind, Misfit, Number, Shape
from ..arguments.signature import Signature, declared
from ..dtypes import STORAGE, host, stored
from ..errors import GraphError, OutOfRangeError
from ..graph.lines import where
from ..graph.node import Node, Op
from ..graph.spec import FLOAT32, Spec, describe
from .elementwise import add, cast_op, is_number
from .movement import reshape_like_op, reshape_op

__all__ = [
    "embedding_lookup_op", "embedding_op", "gather_op", "one_hot_op", "scatter_add_op",
    "slice_op",
]  # fmt: skip

_MAX_NDIM = 8  # steps that the kernels take


class Span(NamedTuple):
    """`size` positions from `begin` on (-1: all that follow), all of which must exist."""

    begin: int
    size: int
    extent: int | None = None  # the extent that the axis must have


class Share(NamedTuple):
    """Part `number`, counted from 0, of an axis cut into `parts` equal ones."""

    number: int
    parts: int


Entry = int | slice | Span | Share | EllipsisType | None


class Region(NamedTuple):
    """The elements that a key chooses: of each axis `sizes[k]` positions from `starts[k]` on in
    steps. `shape` is what they are shown in.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as numpy takes it, without dropped or added axes."""
        ends = [a + n * step for a, step, n in zip(self.starts, self.steps, self.sizes)]
        return tuple(
            slice(start, end if end >= 0 else None, step)
            for start, end, step in zip(self.starts, ends, self.steps)
        )

    def contiguous(self, shape: tuple[int, ...]) -> bool:
        """True where the elements are contiguous in an array of shape `shape`, in one order."""
        inside = False  # behind the first axis of which more than one position is chosen
        for step, size, extent in zip(self.steps, self.sizes, shape):
            if step != 1 or (inside and size != extent):
                return False
            inside = inside or size > 1
        return 0 not in self.sizes

    def scalars(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The flat index of the first element in an array of shape `shape`, and eight steps."""
        offset = 0
        for start, extent in zip(self.starts, shape):
            offset = offset * extent + start
        return (offset, *self.steps, *[1] * (_MAX_NDIM - len(self.steps)))


def region_of(node: Node, name: str, shape: tuple[int, ...]) -> Region:
    """The region that `node.attrs["key"]` chooses in an array of this shape, called `name` in
    errors.
    """
    key = node.attrs["key"]
    used = sum(entry is not None and entry is not Ellipsis for entry in key)
    if used > len(shape):
        raise node.error(f"{used} indices are too many for {name} {shape}")
    rest = (slice(None),) * (len(shape) - used)
    dots = next((k for k, entry in enumerate(key) if entry is Ellipsis), len(key))
    chosen: list[tuple[int, int, int]] = []
    kept = []
    for entry in (*key[:dots], *rest, *key[dots + 1 :]):
        if entry is None:
            kept.append(1)
            continue
        start, step, size = _positions(node, name, entry, len(chosen), shape)
        chosen.append((start, step if size > 1 else 1, size))
        if type(entry) is not int:
            kept.append(size)
    starts, steps, sizes = zip(*chosen) if chosen else ((), (), ())
    region = Region(starts, steps, sizes, tuple(kept))
    return region if 0 not in sizes else nowhere(sizes)._replace(shape=tuple(kept))


def nowhere(sizes: tuple[int, ...]) -> Region:
    """A region of no element."""
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    return Region(zeros, ones, sizes, sizes)


def _positions(
    node: Node, name: str, entry: Any, axis: int, shape: tuple[int, ...]
) -> tuple[int, int, int]:
    """The first position, the step and the number of positions that an entry chooses."""
    extent = shape[axis]
    if type(entry) is int:
        if not -extent <= entry < extent:
            raise node.error(f"index {entry} is out of range for axis {axis} of {name} {shape}")
        return entry % extent, 1, 1
    if entry == slice(None):
        return 0, 1, extent
    if type(entry) is slice:
        start, stop, step = entry.indices(extent)
        return start, step, len(range(start, stop, step))
    if type(entry) is Share:
        if extent % entry.parts:
            raise node.error(
                f"axis {axis} of {name} {shape} does not divide into {entry.parts} parts"
            )
        size = extent // entry.parts
        return entry.number * size, 1, size
    begin = entry.begin + extent if entry.begin < 0 else entry.begin
    size = extent - begin if entry.size == -1 else entry.size
    if entry.extent not in (None, extent):
        raise node.error(f"sizes add up to {entry.extent}, not to axis {axis} of {name} {shape}")
    if not 0 <= begin <= begin + size <= extent:
        raise node.error(
            f"{entry.size} positions from {entry.begin} on do not lie in axis {axis} of "
            f"{name} {shape}"
        )
    return begin, 1, size


class Key(Kind):
    """A key as a tuple of its entries."""

    def take(self, value: Any) -> tuple[Entry, ...]:
        entries = tuple(map(_entry, value if type(value) is tuple else (value,)))
        if entries.count(Ellipsis) > 1:
            raise Misfit("a key has at most one ...")
        return entries


def _entry(entry: Any) -> Entry:
    if entry is None or entry is Ellipsis or isinstance(entry, (Span, Share)):
        return entry
    try:
        if isinstance(entry, slice):
            parts = (entry.start, entry.stop, entry.step)
            if entry.step == 0:
                raise Misfit("a step must not be 0")
            return slice(*(None if part is None else operator.index(part) for part in parts))
        if not isinstance(entry, (bool, np.bool_)):
            return operator.index(entry)
    except TypeError:
        pass
    raise Misfit(
        f"cannot index a node with {type(entry).__name__}; expected integers, slices, None "
        "and ...; for indices in a node or an array use gather_op"
    )


_ALIGNMENT = 16  # bytes that kernels may read at once
_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


class SliceOp(Op):
    """The elements that a key of integers, slices, None and ... chooses, by numpy's rules."""

    name = kernel = "slice"
    autocast = "follow"
    gathers = 1
    movement = any_dtype = True
    signature = Signature("x", key=Key())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]._replace(shape=region_of(node, node.inputs[0].name, specs[0].shape).shape)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        region = region_of(node, node.inputs[0].name, x.shape)
        np.copyto(y.reshape(region.sizes), x[region.slices])

    def scalars(self, node: Node) -> tuple[int, ...]:
        x = node.inputs[0]
        return region_of(node, x.name, x.spec.shape).scalars(x.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [slice_gradient_op(output_grad, node.inputs[0], key=node.attrs["key"])]

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        region = region_of(node, x.name, x.spec.shape)
        if region.sizes == x.spec.shape and all(step == 1 for step in region.steps):
            return reshape_op(x, region.shape)
        if region.sizes != region.shape:
            return reshape_op(getitem_op(x, region.slices), region.shape)
        offset = region.scalars(x.spec.shape)[0]
        if region.contiguous(x.spec.shape) and offset * x.spec.dtype.itemsize % _ALIGNMENT == 0:
            return window_op(x, offset, region.shape)
        return None


class WindowOp(Op):
    """Contiguous elements of x from index `offset` on, in a shape: a view, which costs nothing.

    Slices become it where they can.
    """

    name = "window"
    view = movement = True
    autocast = "follow"
    signature = Signature("x", offset=Int(low=0), shape=Shape())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        offset, spec = node.attrs["offset"], specs[0]._replace(shape=node.attrs["shape"])
        if not 0 <= offset <= offset + spec.size <= specs[0].size:
            raise node.error(
                f"{spec.shape} from element {offset} on is not within {node.inputs[0].name} "
                f"{specs[0].shape}"
            )
        return spec

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, offset, shape = node.inputs[0], node.attrs["offset"], node.attrs["shape"]
        dy, flat = reshape_op(output_grad, (-1,)), reshape_op(x, (-1,))
        key = slice(offset, offset + math.prod(shape))
        return [reshape_like_op(slice_gradient_op(dy, flat, key), x)]


class SliceGradientOp(Op):
    """Zeros in the shape of a node, with dy where `key` chooses elements of it."""

    name = "slice_gradient"
    signature = Signature("dy", "x", key=Key())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        region = region_of(node, node.inputs[1].name, specs[1].shape)
        if region.shape != specs[0].shape:
            raise node.error(f"the key chooses {region.shape} in {describe(node, specs)}")
        return specs[0]._replace(shape=specs[1].shape)

    def simplify(self, node: Node) -> Node:
        dy, x = node.inputs
        region = region_of(node, x.name, x.spec.shape)
        placed = reshape_op(dy, region.sizes)
        return place_op(placed, x.spec.shape, region.starts, region.steps)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [getitem_op(output_grad, node.attrs["key"]), None]


class PlaceOp(Op):
    """x inside an array of `shape` whose other elements are `value`: from `starts` on in steps.

    Any dtype, whose bits are moved as they are; it must hold `value`. The shape of x must be known
    when the node is made; `pad_op` needs no shapes.
    """

    name = kernel = "place"
    autocast = "follow"
    any_dtype = True
    signature = Signature(
        "x", shape=Shape(), starts=Ints(), steps=Ints(None), value=Number(0, nan=True)
    )

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        if attrs["steps"] is None:
            attrs["steps"] = (1,) * len(attrs["starts"])
        node = Node(self, inputs, attrs, name)
        if node.spec is None:
            raise GraphError(
                f"place: the shape of {inputs[0].name} is not known yet; use pad_op [{node.where}]"
            )
        return node

    def infer(self, node: Node, *specs: Spec) -> Spec:
        self._region(node, specs[0].shape)
        check_fill(node, specs[0].dtype)
        return specs[0]._replace(shape=node.attrs["shape"])

    def _region(self, node: Node, sizes: tuple[int, ...]) -> Region:
        shape, starts, steps = (node.attrs[name] for name in ("shape", "starts", "steps"))
        fits = len(shape) == len(starts) == len(steps) == len(sizes)
        for extent, start, step, size in zip(shape, starts, steps, sizes):
            last = start + (size - 1) * step
            fits = fits and (not size or 0 <= min(start, last) <= max(start, last) < extent)
        if not fits:
            raise node.error(
                f"{node.inputs[0].name} {sizes} from {starts} on in steps of {steps} does not lie "
                f"in {shape}"
            )
        return Region(starts, steps, sizes, sizes) if 0 not in sizes else nowhere(sizes)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        if x.size < y.size:
            y.fill(node.attrs["value"])
        np.copyto(y[self._region(node, x.shape).slices], x)

    def scalars(self, node: Node) -> tuple[int, ...]:
        spec = node.inputs[0].spec
        region = self._region(node, spec.shape)
        return (bits_of(node.attrs["value"], spec.dtype), *region.scalars(node.attrs["shape"]))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        spec = node.inputs[0].spec
        return [getitem_op(output_grad, self._region(node, spec.shape).slices)]

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        complete = x.spec.shape == node.attrs["shape"] and min(node.attrs["steps"], default=1) > 0
        return x if complete else None


class GatherOp(Op):
    """x at the positions `indices` of one axis; the indices' axes take its place (numpy's take)."""

    name = kernel = "gather"
    gathers = 1
    fallible = any_dtype = True
    signature = Signature("x", "indices", axis=Int(0))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[1], node.inputs[1].name)
        shape = specs[0].shape
        axis = _axis(node, len(shape), specs[0].shape)
        return specs[0]._replace(shape=shape[:axis] + specs[1].shape + shape[axis + 1 :])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, indices, y = arrays
        axis = node.attrs["axis"]
        check_range(node, "index", indices, x.shape[axis])
        if y.size:
            np.take(x, indices, axis=axis, out=y, mode="clip")  # "raise" would copy the output

    def scalars(self, node: Node) -> tuple[int]:
        spec = node.inputs[0].spec
        return (_axis(node, len(spec.shape), spec.shape),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, indices = node.inputs
        return [gather_gradient_op(output_grad, indices, x, axis=node.attrs["axis"]), None]


class GatherGradientOp(Op):
    """The sum of dy over the positions of `x` that it was gathered from; only x's shape counts."""

    name = "gather_gradient"
    signature = Signature("dy", "indices", "x", axis=Int(0))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[1], node.inputs[1].name)
        axis = _axis(node, len(specs[2].shape), specs[2].shape)
        shape = specs[2].shape
        if specs[0].shape != shape[:axis] + specs[1].shape + shape[axis + 1 :]:
            raise node.error(f"shapes do not fit along axis {axis}: {describe(node, specs)}")
        return specs[0]._replace(shape=shape)

    def simplify(self, node: Node) -> Node:
        axis = _axis(node, len(node.spec.shape), node.spec.shape)
        dy, indices = node.inputs[:2]
        return scatter_op(dy, indices, size=node.spec.shape[axis], axis=axis)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [gather_op(output_grad, node.inputs[1], node.attrs["axis"]), None, None]


class ScatterOp(Op):
    """Zeros with `size` positions along one axis, to which updates are added at `indices`, always
    in the same order.
    """

    name = kernel = "scatter_add"
    fallible = True
    any_dtype = (1,)
    signature = Signature("updates", "indices", size=Int(low=0), axis=Int(0))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[1], node.inputs[1].name)
        updates, indices = specs[0].shape, specs[1].shape
        axis = _axis(node, len(updates) - len(indices) + 1, updates)
        behind = axis + len(indices)
        if updates[axis:behind] != indices:
            raise node.error(
                f"updates need the indices' shape from axis {axis} on, got {describe(node, specs)}"
            )
        return specs[0]._replace(shape=(*updates[:axis], node.attrs["size"], *updates[behind:]))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        axis = node.attrs["axis"] % len(outputs[0].shape)
        shape = inputs[0].shape
        return [
            inputs[0]._replace(shape=(*shape[:axis], inputs[1].size, *outputs[0].shape[axis + 1 :]))
        ]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        updates, indices, by_row, y = arrays
        axis = node.attrs["axis"] % y.ndim
        check_range(node, "index", indices, y.shape[axis])
        y.fill(0)
        if not by_row.size:
            return
        rows = indices.reshape(-1)
        order = np.argsort(rows, kind="stable")
        np.take(updates.reshape(by_row.shape), order, axis=axis, out=by_row, mode="clip")
        sorted_rows = rows[order]
        starts = np.flatnonzero(np.diff(sorted_rows, prepend=-1))
        chosen = (slice(None),) * axis + (sorted_rows[starts],)
        y[chosen] = np.add.reduceat(by_row, starts, axis=axis)

    def scalars(self, node: Node) -> tuple[int]:
        return (node.attrs["axis"] % len(node.spec.shape),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [gather_op(output_grad, node.inputs[1], node.attrs["axis"]), None]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size


class OneHotOp(Op):
    """A row of `depth` elements for each index: 1 at the index, 0 elsewhere. No gradient."""

    name = kernel = "one_hot"
    fallible = True
    any_dtype = (0,)
    signature = Signature("indices", depth=Int(low=0), dtype=DType(FLOAT32))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[0], node.inputs[0].name)
        return Spec((*specs[0].shape, node.attrs["depth"]), node.attrs["dtype"], declared=False)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        indices, y = arrays
        depth = node.attrs["depth"]
        check_range(node, "index", indices, depth)
        y.fill(0)
        rows = y.reshape(indices.size, depth)
        rows[np.arange(indices.size), indices.reshape(-1)] = 1

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]

    def simplify(self, node: Node) -> Node | None:
        if node.spec.dtype in STORAGE:
            return None
        return cast_op(one_hot_op(node.inputs[0], node.attrs["depth"]), node.spec.dtype)


def _axis(node: Node, ndim: int, shape: tuple[int, ...]) -> int:
    axis = node.attrs["axis"]
    if not -ndim <= axis < ndim:
        raise node.error(f"axis {axis} does not fit {shape}")
    return axis % ndim


def check_indices(node: Node, spec: Spec, name: str) -> None:
    if spec.dtype is not None and spec.dtype not in _INDEX_DTYPES:
        raise node.error(
            f"indices must be int32 or int64, got {name} of {spec.dtype}; declare or cast them"
        )


def check_range(node: Node, what: str, values: np.ndarray, extent: int) -> None:
    """Raises OutOfRangeError for one of the values, each an index or a label as `what` says, that
    is not from 0 to extent - 1.
    """
    if values.size and (values.min() < 0 or values.max() >= extent):
        at = int(np.flatnonzero((values < 0) | (values >= extent))[0])
        raise OutOfRangeError(
            f"{node.op.name}: {what} {values.flat[at]} at position {at} is out of range: there are "
            f"{extent}, counted from 0 [{node.where}]"
        )


def check_fill(node: Node, dtype: np.dtype | None) -> None:
    """Refuses an attribute `value` that elements of this dtype cannot be."""
    value = node.attrs["value"]
    if not is_number(value):
        raise node.error(f"expected one number to fill with, got {type(value).__name__}")
    if dtype is None:
        return
    if dtype.kind == "f":
        held = not math.isfinite(value) or abs(value) <= float(np.finfo(host(dtype)).max)
    else:
        lowest, largest = (
            (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        )
        held = math.isfinite(value) and value == int(value) and lowest <= value <= largest
    if not held:
        raise node.error(
            f"{dtype} cannot hold the fill {value}; cast {node.inputs[0].name} before, or fill "
            "with what it can hold"
        )


def bits_of(value: float, dtype: np.dtype) -> int:
    """The bits of a number in a dtype, as the kernels that fill take them."""
    return stored(np.array(value), dtype).view(f"i{dtype.itemsize}").item()


getitem_op = SliceOp()
window_op = WindowOp()
slice_gradient_op = SliceGradientOp()
place_op = PlaceOp()
gather_op = GatherOp()
gather_gradient_op = GatherGradientOp()
scatter_op = ScatterOp()
one_hot_op = OneHotOp()


@declared(begin=Ints(), size=Ints())
def slice_op(x: Node, begin: Sequence[int], size: Sequence[int], name: str | None = None) -> Node:
    """`size[k]` positions from `begin[k]` on along each axis k of x; -1 is all that follow.

    Other than with `x[...]`, all of them must exist: ShapeError names the axis where they do not.
    """
    if len(begin) != len(size):
        raise GraphError(
            f"slice: begin {tuple(begin)} and size {tuple(size)} differ in length [{where()}]"
        )
    return getitem_op(x, tuple(map(Span, begin, size)), name)


@declared(axis=Int())
def scatter_add_op(x: Node, indices: Node, updates: Node, axis: int = 0) -> Node:
    """x with `updates` added at the positions `indices` of one axis, repeated ones each time.

    updates: x's shape with the indices' axes in the place of `axis`. indices: int32 or int64; one
    out of range raises OutOfRangeError. The order of the sums is the same in every run.
    """
    return add(x, gather_gradient_op(updates, indices, x, axis=axis))


@declared()
def embedding_op(table: Node, indices: Node, name: str | None = None) -> Node:
    """Rows of a table (n, …) at indices of any shape, int32 or int64: (*indices, …).

    An index out of range raises OutOfRangeError. The table's gradient is dense.
    """
    return gather_op(table, indices, 0, name)


embedding_lookup_op = embedding_op
