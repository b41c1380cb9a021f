"""What moves elements: shapes, slices, joins, padding, gathering and its opposite, sources."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....graph.node import Node
from ....graph.spec import normalize_axes
from ....ops.elementwise import add, cast_op
from ....ops.indexing import getitem_op, region_of
from ....ops.movement import expand_dims_op, reshape_op
from ....ops.pad import pad_op
from ....ops.reduce import sum_op
from ....ops.scan import cumprod_op, cumsum_op
from ..registry import rule
from ..trace import Emitter
from .elementwise import comparable

_LOWEST = -(2**63) + 1  # as an end: before the first element, for steps backward
_HIGHEST = 2**63 - 1  # behind the last
Shape = tuple[int, ...]


# ---- shapes ----


@rule("reshape reshape_like squeeze expand_dims flatten channels normalization_view", "Reshape")
def _reshape(g: Emitter, node: Node, x: str, *likes: str) -> str:
    return x if node.spec.shape == node.inputs[0].spec.shape else g.reshape(x, node.spec.shape)


@rule("transpose", "Transpose")
def _transpose(g: Emitter, node: Node, x: str) -> str:
    axes = node.attrs["axes"]
    ndim = len(node.spec.shape)
    order = range(ndim)[::-1] if axes is None else [axis % ndim for axis in axes]
    return g("Transpose", x, perm=list(order)) if ndim > 1 else x


@rule("broadcast_to broadcast_like", "Expand")
def _broadcast(g: Emitter, node: Node, x: str, *like: str) -> str:
    if node.spec.shape == node.inputs[0].spec.shape:
        return x
    return g("Expand", x, g.extents(node.spec.shape))


# ---- slices ----


def _slice(g: Emitter, x: str, shape: Shape, starts: Shape, steps: Shape, sizes: Shape) -> str:
    """`sizes` positions from `starts` on in steps; axes that stay as they are are left out."""
    axes = [
        axis
        for axis, (n, step, size) in enumerate(zip(shape, steps, sizes))
        if size != n or step != 1
    ]
    if not axes:
        return x
    ends = [starts[a] + sizes[a] * steps[a] for a in axes]
    ends = [_LOWEST if end < 0 else end for end in ends]
    begins = g.extents([starts[a] for a in axes])
    moved = [steps[a] for a in axes]
    by = g.axes(moved) if set(moved) != {1} else None
    return g("Slice", x, begins, g.extents(ends), g.axes(axes), by)


@rule("slice", "Slice, Reshape")
def _getitem(g: Emitter, node: Node, x: str) -> str:
    """Entries as they stand, since ONNX counts from the end and clips as numpy does where steps go
    forward: x[a:b:-s] is x reversed, [-a-1:-b-1:s].
    """
    given = node.inputs[0]
    region = region_of(node, given.name, given.spec.shape)
    if not all(type(e) in (int, slice) or e is None or e is Ellipsis for e in node.attrs["key"]):
        y = _slice(g, x, given.spec.shape, region.starts, region.steps, region.sizes)
        return y if region.shape == region.sizes else g.reshape(y, region.shape)
    entries = [e for e in _entries(node) if e is not None]
    parts = {a: _part(e) for a, e in enumerate(entries) if e != slice(None)}
    backward = [axis for axis, (_, _, step) in parts.items() if step < 0]
    if backward:
        ones = [-1] * len(backward)
        lowest = [_LOWEST] * len(backward)
        x = g("Slice", x, g.axes(ones), g.axes(lowest), g.axes(backward), g.axes(ones))
    if parts:
        starts, ends, steps = zip(*map(_forward, parts.values()))
        by = g.axes(steps) if set(steps) != {1} else None
        x = g("Slice", x, g.axes(starts), g.axes(ends), g.axes(list(parts)), by)
    return x if region.shape == region.sizes else g.reshape(x, region.shape)


def _entries(node: Node) -> list[Any]:
    """The entries of a key with as many of : as ... stands for, and behind the last."""
    key = list(node.attrs["key"])
    used = sum(entry is not None and entry is not Ellipsis for entry in key)
    rest = [slice(None)] * (len(node.inputs[0].spec.shape) - used)
    at = next((k for k, entry in enumerate(key) if entry is Ellipsis), len(key))
    return [*key[:at], *rest, *key[at + 1 :]]


def _part(entry: int | slice) -> tuple[int | None, int | None, int]:
    """Start, stop and step of an entry."""
    if isinstance(entry, slice):
        return entry.start, entry.stop, 1 if entry.step is None else entry.step
    return entry, None if entry == -1 else entry + 1, 1


def _forward(part: tuple[int | None, int | None, int]) -> tuple[int, int, int]:
    """The same of an axis that was reversed where the step is backward."""
    start, stop, step = part
    if step < 0:
        start, stop = (None if n is None else -n - 1 for n in (start, stop))
    return start or 0, _HIGHEST if stop is None else stop, abs(step)


@rule("window")
def _window(g: Emitter, node: Node, x: str) -> Node:
    flat, offset = reshape_op(node.inputs[0], (-1,)), node.attrs["offset"]
    part = getitem_op(flat, slice(offset, offset + node.spec.size))
    return reshape_op(part, node.spec.shape)


@rule("place", "Pad, Reshape, Slice")
def _place(g: Emitter, node: Node, x: str) -> str:
    """Pads; where steps leave gaps, each element is padded to a block of its own first."""
    shape, starts, steps = (list(node.attrs[key]) for key in ("shape", "starts", "steps"))
    sizes = list(node.inputs[0].spec.shape)
    if 0 in sizes:
        filled = g("Expand", np.array(node.attrs["value"], node.spec.dtype), g.extents(shape))
        return filled
    for axis, step in enumerate(steps):
        if step < 0:
            backward = [-1 if a == axis else 1 for a in range(len(sizes))]
            ends = [n - 1 if a == axis else 0 for a, n in enumerate(sizes)]
            x = _slice(g, x, tuple(sizes), tuple(ends), tuple(backward), tuple(sizes))
            starts[axis] += (sizes[axis] - 1) * step
        if abs(step) > 1 and sizes[axis] > 1:
            x = _spaced(g, node, x, sizes, axis, abs(step))
    after = [n - start - size for n, start, size in zip(shape, starts, sizes)]
    return _pad(g, node, x, starts, after)


def _spaced(g: Emitter, node: Node, x: str, sizes: list[int], axis: int, step: int) -> str:
    """x with its elements `step` apart along an axis; `sizes` follows."""
    split = [*sizes[: axis + 1], 1, *sizes[axis + 1 :]]
    behind = [0] * len(split)
    behind[axis + 1] = step - 1
    x = _pad(g, node, g.reshape(x, split), [0] * len(split), behind)
    wide, zeros, ones = list(sizes), (0,) * len(sizes), (1,) * len(sizes)
    wide[axis] *= step
    sizes[axis] = (sizes[axis] - 1) * step + 1
    return _slice(g, g.reshape(x, wide), tuple(wide), zeros, ones, tuple(sizes))


def _pad(g: Emitter, node: Node, x: str, before: list[int], after: list[int]) -> str:
    if not any(before) and not any(after):
        return x
    dtype = node.spec.dtype
    wide = comparable(dtype)
    value = np.array(node.attrs["value"], wide)
    return g.cast(
        g("Pad", g.cast(x, dtype, wide), g.extents([*before, *after]), value), wide, dtype
    )


@rule("pad", "Pad")
def _constant_pad(g: Emitter, node: Node, x: str) -> str:
    before, after = zip(*node.attrs["paddings"]) if node.attrs["paddings"] else ((), ())
    return _pad(g, node, x, list(before), list(after))


@rule("pad_edge pad_reflect", "Pad")
def _continued_pad(g: Emitter, node: Node, x: str) -> str:
    before, after = zip(*node.attrs["paddings"]) if node.attrs["paddings"] else ((), ())
    if not any(before) and not any(after):
        return x
    dtype = node.spec.dtype
    wide = comparable(dtype)
    mode = node.op.name.removeprefix("pad_")
    y = g("Pad", g.cast(x, dtype, wide), g.extents([*before, *after]), mode=mode)
    return g.cast(y, wide, dtype)


@rule("pad_edge_gradient pad_reflect_gradient")
def _pad_gradient(g: Emitter, node: Node, name: str) -> Node:
    """Axis by axis, the middle of dy plus what its borders have for positions of it."""
    dy, reflect = node.inputs[0], node.op.name == "pad_reflect_gradient"
    for axis, (before, after) in enumerate(node.attrs["paddings"]):
        if not before and not after:
            continue
        n = dy.spec.shape[axis] - before - after
        total = _at(dy, axis, slice(before, -after or None))
        # From the border, in the order of the positions that it copies, and the first of these.
        borders = [
            (before, slice(0, before), 1 if reflect else 0),
            (after, slice(-after, None), n - 1 - after if reflect else n - 1),
        ]
        for count, border, first in borders:
            if not count:
                continue
            part = _at(dy, axis, border)
            if reflect:
                part = _at(part, axis, slice(None, None, -1))
            else:
                part, count = sum_op(part, axis=axis, keepdims=True), 1
            paddings = [(0, 0)] * len(dy.spec.shape)
            paddings[axis] = (first, n - first - count)
            total = total + pad_op(part, paddings)
        dy = total
    return dy


# ---- joins ----


@rule("concat", "Concat")
def _concat(g: Emitter, node: Node, *inputs: str) -> str:
    same = [g.cast(x, i.spec.dtype, node.spec.dtype) for x, i in zip(inputs, node.inputs)]
    return g("Concat", *same, axis=node.attrs["axis"]) if len(same) > 1 else same[0]


@rule("tile", "Tile")
def _tile(g: Emitter, node: Node, x: str) -> str:
    shape, reps = node.inputs[0].spec.shape, node.attrs["reps"]
    ndim = max(len(shape), len(reps))
    if ndim > len(shape):
        x = g.reshape(x, (1,) * (ndim - len(shape)) + shape)
    return g("Tile", x, g.axes((1,) * (ndim - len(reps)) + reps))


@rule("tril triu", "Trilu")
def _triangle(g: Emitter, node: Node, x: str) -> str:
    dtype = node.spec.dtype
    wide = np.dtype(np.int64) if dtype.kind in "iub" else dtype
    upper = int(node.op.name == "triu")
    y = g("Trilu", g.cast(x, dtype, wide), np.array(node.attrs["k"], np.int64), upper=upper)
    return g.cast(y, wide, dtype)


# ---- gathering, and its opposite ----


@rule("gather", "Gather")
def _gather(g: Emitter, node: Node, x: str, indices: str) -> str:
    return g("Gather", x, indices, axis=node.attrs["axis"])


@rule("take_along_axis", "GatherElements")
def _take_along(g: Emitter, node: Node, x: str, indices: str) -> str:
    axis = node.attrs["axis"] % len(node.spec.shape)
    return g("GatherElements", x, indices, axis=axis)


@rule("put_along_axis put_along", "ScatterElements")
def _put_along(g: Emitter, node: Node, updates: str, indices: str, *x: str) -> str:
    zeros = zeros_of(g, node.spec.shape, node.spec.dtype)
    attrs = dict(axis=node.attrs["axis"] % len(node.spec.shape), reduction="add")
    updates = g.cast(updates, node.inputs[0].spec.dtype, node.spec.dtype)
    return g("ScatterElements", zeros, indices, updates, **attrs)


@rule("scatter_add", "ScatterND, Transpose")
def _scatter(g: Emitter, node: Node, updates: str, indices: str) -> str:
    """Updates are added at rows of zeros, the axis of the rows first."""
    shape, count = node.spec.shape, len(node.inputs[1].spec.shape)
    axis, before = node.attrs["axis"] % len(shape), node.inputs[0].spec.shape
    taken = list(range(axis, axis + count))
    rest = [a for a in range(len(before)) if a not in taken]
    updates = g("Transpose", updates, perm=[*taken, *rest]) if axis else updates
    rows = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    indices = g.cast(indices, node.inputs[1].spec.dtype, np.dtype(np.int64))
    at = g("Unsqueeze", indices, g.axes([-1]))
    y = g("ScatterND", zeros_of(g, rows, node.spec.dtype), at, updates, reduction="add")
    back = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
    return g("Transpose", y, perm=back) if axis else y


def zeros_of(g: Emitter, shape: Shape, dtype: np.dtype) -> str:
    """Zeros of a shape."""
    return g("ConstantOfShape", g.extents(shape), value=np.zeros(1, dtype))


@rule("one_hot", "OneHot")
def _one_hot(g: Emitter, node: Node, indices: str) -> str:
    indices = g.cast(indices, node.inputs[0].spec.dtype, np.dtype(np.int64))
    values = np.array([0, 1], np.float32)
    scalar = len(node.spec.shape) == 1  # ONNX wants at least a vector
    indices = g.reshape(indices, (1,)) if scalar else indices
    y = g("OneHot", indices, np.array(node.attrs["depth"], np.int64), values, axis=-1)
    y = g.cast(y, np.dtype(np.float32), node.spec.dtype)
    return g.reshape(y, node.spec.shape) if scalar else y


@rule("sort", "TopK")
def _sort(g: Emitter, node: Node, x: str) -> tuple[str, str]:
    spec, attrs = node.spec[0], node.attrs
    (axis,) = normalize_axes(node, attrs["axis"], len(spec.shape))
    wide = comparable(spec.dtype)
    x = g.cast(x, spec.dtype, wide)
    k = g.extents([spec.shape[axis]])
    largest = int(attrs["descending"])
    values, indices = g("TopK", x, k, outputs=2, axis=axis, largest=largest, sorted=1)
    return g.cast(values, wide, spec.dtype), indices


# ---- sources ----


@rule("full", "ConstantOfShape")
def _full(g: Emitter, node: Node) -> str:
    value = np.array([node.attrs["value"]]).astype(node.spec.dtype)
    if not node.spec.shape:
        return g.constant(value[0], node.spec.dtype)
    return g("ConstantOfShape", g.extents(node.spec.shape), value=value)


@rule("ones_like zeros_like", "ConstantOfShape")
def _filled_like(g: Emitter, node: Node, like: str) -> Node:
    return node.op.simplify(node)  # type: ignore[return-value]


# ---- recurrences ----


@rule("cumsum", "CumSum")
def _cumsum(g: Emitter, node: Node, x: str) -> str:
    dtype = node.spec.dtype
    axis = node.attrs.get("axis", 1)
    given = g.cast(x, node.inputs[0].spec.dtype, dtype)
    return g("CumSum", given, np.array(axis, np.int64), reverse=int(node.attrs["reverse"]))


@rule("cumprod")
def _cumprod(g: Emitter, node: Node, name: str) -> Node:
    """By doubling: after step k an element has the product of the 2^k elements up to it."""
    x = cast_op(node.inputs[0], node.spec.dtype)
    axis, reverse = node.attrs.get("axis", 1) % len(x.spec.shape), node.attrs["reverse"]
    extent, step = x.spec.shape[axis], 1
    while step < extent:
        x = x * _moved(x, axis, step, reverse, 1)
        step *= 2
    return x


@rule("recurrence")
def _recurrence(g: Emitter, node: Node, *names: str) -> Node:
    """y = a · y[before] + b by doubling: the maps (a, b) of ranges of elements are composed."""
    a, b = (cast_op(x, node.spec.dtype) for x in node.inputs)
    axis = node.attrs.get("axis", 1) % len(a.spec.shape)
    reverse, extent, step = node.attrs["reverse"], a.spec.shape[axis], 1
    while step < extent:
        b = add(a * _moved(b, axis, step, reverse, 0), b)
        a = a * _moved(a, axis, step, reverse, 1)
        step *= 2
    return a * node.attrs["initial"] + b


def _moved(x: Node, axis: int, by: int, reverse: bool, value: float) -> Node:
    """x moved on by some positions along an axis, with `value` where it leaves them free."""
    paddings = [(0, 0)] * len(x.spec.shape)
    paddings[axis] = (0, by) if reverse else (by, 0)
    part = _at(x, axis, slice(by, None) if reverse else slice(None, -by))
    return pad_op(part, paddings, constant_values=value)


def _at(x: Node, axis: int, part: slice) -> Node:
    """A part of x along one axis."""
    return getitem_op(x, ((slice(None),) * axis + (part,)))


@rule("prod_others")
def _others(g: Emitter, node: Node, name: str) -> Node | None:
    """Products of the elements before, times those of the elements behind."""
    x = node.inputs[0]
    if "axis" in node.attrs:
        return None
    before = _moved(cumprod_op(x, 1), 1, 1, False, 1)
    return before * _moved(cumprod_op(x, 1, reverse=True), 1, 1, True, 1)


@rule("first_match")
def _first_match(g: Emitter, node: Node, *names: str) -> Node | None:
    if "axis" in node.attrs:
        return None
    x, y = node.inputs
    y = expand_dims_op(y, 1)
    same = (x == y) | ((x != x) & (y != y))
    return same & (cumsum_op(cast_op(same, np.int64), 1) == 1)
