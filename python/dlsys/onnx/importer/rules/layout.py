"""Shapes and positions: reshape, slices, concatenation, and arrays made from shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import functional as F
from ..call import Call, key
from ..reader import array_of
from ..registry import Unfit, graph, host, values
from ..walk import guard
from .elementwise import dtype_of

ALL = "fiub"


@values("Constant")
def _constant(call: Call) -> Any:
    attrs = call.attrs
    if "value" in attrs:
        return array_of(attrs["value"], call.walker.folder)
    for name, dtype in (("value_int", np.int64), ("value_ints", np.int64),
                        ("value_float", np.float32), ("value_floats", np.float32)):  # fmt: skip
        if name in attrs:
            return np.asarray(attrs[name], dtype)
    if "value_string" in attrs:
        return np.asarray(call.get("value_string"), object)
    if "value_strings" in attrs:
        return np.asarray(call.words("value_strings"), object)
    raise call.error("sparse values are not supported")


@values("Shape")
def _shape(call: Call, x: Any) -> np.ndarray:
    if None in x.shape:
        raise call.error("an extent that only a feed decides; declare the Variable's shape")
    end = call.get("end")
    return np.asarray(x.shape[call.get("start", 0) : end], np.int64)


@values("Size")
def _size(call: Call, x: Any) -> np.ndarray:
    return np.asarray(int(np.prod(x.shape)), np.int64)


@values("Identity")
def _identity(call: Call, x: Any) -> Any:
    return x


@values("Dropout")
def _dropout(call: Call, x: Any, ratio: Any = None, training: Any = None) -> Any:
    look = call.walker.look
    rate = call.get("ratio", 0.5) if ratio is None else float(look(ratio))
    if training is None or not bool(np.asarray(look(training)).any()) or rate == 0:
        mask = np.ones(x.shape, bool)
        return (x, mask if call.version >= 10 else mask.astype(np.float32))
    np.random.seed(call.get("seed")) if call.get("seed") is not None else None
    kept = np.random.uniform(0, 1, x.shape) >= rate
    y = look(x)
    return (y * kept / (1 - rate)).astype(y.dtype), kept


def _target(call: Call, x: Any, shape: Any) -> tuple[int, ...]:
    wanted = [int(n) for n in (call.get("shape") if shape is None else shape)]
    if not call.get("allowzero", 0):
        wanted = [x.shape[k] if n == 0 else n for k, n in enumerate(wanted)]
    return tuple(wanted)


@graph("Reshape", ALL, known=(1,))
def _reshape(call: Call, x: Any, shape: Any = None) -> Any:
    wanted = _target(call, x, shape)
    if -1 in wanted and 0 in x.shape:
        raise Unfit
    return F.reshape(x, wanted)


@host("Reshape")
def _reshape_array(call: Call, x: np.ndarray, shape: Any = None) -> np.ndarray:
    return np.reshape(x, _target(call, x, shape))


def _flat(call: Call, x: Any) -> tuple[int, int]:
    axis = call.get("axis", 1)
    axis += len(x.shape) if axis < 0 else 0
    return int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:]))


graph("Flatten", ALL)(lambda call, x: F.reshape(x, _flat(call, x)))
host("Flatten")(lambda call, x: np.reshape(x, _flat(call, x)))


@graph("Squeeze", ALL, known=(1,))
def _squeeze(call: Call, x: Any, axes: Any = None) -> Any:
    found = call.axes(axes)
    return F.squeeze(x, found) if found is not None else F.squeeze(x)


host("Squeeze")(lambda call, x, axes=None: np.squeeze(x, call.axes(axes)))


def _unsqueezed(call: Call, x: Any, axes: Any) -> tuple[int, ...]:
    found = call.axes(axes) or ()
    rank = len(x.shape) + len(found)
    at = {a % rank for a in found}
    rest = iter(x.shape)
    return tuple(1 if k in at else next(rest) for k in range(rank))


@graph("Unsqueeze", ALL, known=(1,))
def _unsqueeze(call: Call, x: Any, axes: Any = None) -> Any:
    return F.reshape(x, _unsqueezed(call, x, axes))


host("Unsqueeze")(lambda call, x, axes=None: np.reshape(x, _unsqueezed(call, x, axes)))


@graph("Transpose", ALL)
def _transpose(call: Call, x: Any) -> Any:
    perm = call.get("perm")
    return F.transpose(x, tuple(range(len(x.shape)))[::-1] if perm is None else tuple(perm))


host("Transpose")(lambda call, x: np.transpose(x, call.get("perm")))


@graph("Concat", ALL)
def _concat(call: Call, *xs: Any) -> Any:
    return F.concatenate(list(xs), call.get("axis", 1))


host("Concat")(lambda call, *xs: np.concatenate(xs, call.get("axis", 1)))


def _parts(call: Call, x: Any, split: Any) -> list[int]:
    """The extents of the parts of a split."""
    axis, given = call.get("axis", 0), call.get("split") if split is None else split
    if given is not None:
        return [int(n) for n in given]
    count = call.get("num_outputs", call.count)
    size = -(-x.shape[axis] // count)
    return [max(min(size, x.shape[axis] - k * size), 0) for k in range(count)]


def _split(x: Any, parts: list[int], axis: int) -> tuple[Any, ...]:
    before = (slice(None),) * (axis % len(x.shape))
    ends = np.cumsum(parts).tolist()
    if ends and ends[-1] != x.shape[axis]:
        raise ValueError(f"parts {parts} of an axis of {x.shape[axis]}")
    return tuple(x[key(*before, slice(end - n, end))] for n, end in zip(parts, ends))


@graph("Split", ALL, known=(1,))
def _split_nodes(call: Call, x: Any, split: Any = None) -> Any:
    return _split(x, _parts(call, x, split), call.get("axis", 0))


host("Split")(lambda call, x, split=None: _split(x, _parts(call, x, split), call.get("axis", 0)))


def _slices(call: Call, x: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> tuple[Any, ...]:
    starts = call.get("starts") if starts is None else starts
    ends = call.get("ends") if ends is None else ends
    axes = call.get("axes") if axes is None else axes
    key: list[Any] = [slice(None)] * len(x.shape)
    for k, (begin, end) in enumerate(zip(starts, ends)):
        axis = k if axes is None else int(axes[k])
        n, step = x.shape[axis], 1 if steps is None else int(steps[k])
        begin, end = int(begin), int(end)
        begin, end = begin + n * (begin < 0), end + n * (end < 0)
        if step < 0:
            begin, end = min(max(begin, -1), n - 1), min(max(end, -1), n)
            key[axis] = slice(begin, None if end < 0 else end, step) if begin >= 0 else slice(0, 0)
        else:
            key[axis] = slice(min(max(begin, 0), n), min(max(end, 0), n), step)
    return tuple(key)


@graph("Slice", ALL, known=(1, 2, 3, 4))
def _slice(call: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None,
           steps: Any = None) -> Any:  # fmt: skip
    return F.getitem(x, _slices(call, x, starts, ends, axes, steps))


@host("Slice")
def _slice_array(call: Call, x: np.ndarray, starts: Any = None, ends: Any = None,
                 axes: Any = None, steps: Any = None) -> np.ndarray:  # fmt: skip
    return x[_slices(call, x, starts, ends, axes, steps)]


def _expanded(x: Any, shape: Any) -> tuple[int, ...]:
    return guard(np.broadcast_shapes(tuple(x.shape), tuple(int(n) for n in shape)))


@graph("Expand", ALL, known=(1,))
def _expand(call: Call, x: Any, shape: Any) -> Any:
    return F.broadcast_to(x, _expanded(x, shape))


host("Expand")(lambda call, x, shape: np.broadcast_to(x, _expanded(x, shape)).copy())


@graph("Tile", ALL, known=(1, 2))
def _tile(call: Call, x: Any, repeats: Any, axis: Any = None) -> Any:
    if axis is not None:
        raise Unfit
    guard(n * int(r) for n, r in zip(x.shape, repeats))
    return F.tile(x, tuple(int(r) for r in repeats))


@host("Tile")
def _tile_array(call: Call, x: np.ndarray, repeats: Any, axis: Any = None) -> np.ndarray:
    if axis is not None:  # version 1
        repeats = [int(repeats) if k == int(axis) else 1 for k in range(x.ndim)]
    guard(n * int(r) for n, r in zip(x.shape, repeats))
    return np.tile(x, [int(r) for r in repeats])


@values("ConstantOfShape")
def _constant_of_shape(call: Call, shape: Any) -> np.ndarray:
    given = call.get("value")
    value = np.zeros(1, np.float32) if given is None else array_of(given, None)
    return np.full(guard(call.walker.look(shape)), value.ravel()[0], value.dtype)


@host("Range", dynamic=True)
def _range(call: Call, start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> np.ndarray:
    a, b, step = (np.asarray(v).ravel()[0] for v in (start, limit, delta))
    count = max(int(np.ceil((float(b) - float(a)) / float(step))), 0)
    guard((count,))
    made = np.arange(count) * float(step) + float(a) if start.dtype.kind not in "iu" else (
        np.arange(count) * int(step) + int(a)
    )  # fmt: skip
    return made.astype(start.dtype)


@host("EyeLike")
def _eye_like(call: Call, x: np.ndarray) -> np.ndarray:
    dtype = x.dtype if call.get("dtype") is None else dtype_of(call.get("dtype"))
    return np.eye(x.shape[0], x.shape[1], call.get("k", 0)).astype(dtype)


@graph("Trilu", "fiub", known=(1,))
def _trilu(call: Call, x: Any, k: Any = None) -> Any:
    if 0 in x.shape:
        raise Unfit
    at = 0 if k is None else int(np.asarray(k).ravel()[0])
    return (F.triu if call.get("upper", 1) else F.tril)(x, at)


@host("Trilu")
def _trilu_array(call: Call, x: np.ndarray, k: Any = None) -> np.ndarray:
    at = 0 if k is None else int(np.asarray(k).ravel()[0])
    return (np.triu if call.get("upper", 1) else np.tril)(x, at)


def _paddings(call: Call, x: Any, pads: Any, axes: Any) -> list[tuple[int, int]]:
    pads = call.get("pads", call.get("paddings")) if pads is None else pads
    at = range(len(x.shape)) if axes is None else [int(a) % len(x.shape) for a in axes]
    found = [(0, 0)] * len(x.shape)
    n = len(pads) // 2
    for k, axis in enumerate(at):
        found[axis] = (int(pads[k]), int(pads[n + k]))
    return found


@graph("Pad", known=(1, 2, 3))
def _pad(call: Call, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    found, mode = _paddings(call, x, pads, axes), call.get("mode", "constant")
    if any(n < 0 for pair in found for n in pair) or mode == "wrap" or 0 in x.shape:
        raise Unfit
    guard(n + a + b for n, (a, b) in zip(x.shape, found))
    fill = call.get("value", 0.0) if value is None else float(np.asarray(value).ravel()[0])
    return F.pad(x, tuple(found), mode, fill)


@host("Pad")
def _pad_array(call: Call, x: np.ndarray, pads: Any = None, value: Any = None,
               axes: Any = None) -> np.ndarray:  # fmt: skip
    found, mode = _paddings(call, x, pads, axes), call.get("mode", "constant")
    guard(max(n + a + b, 0) for n, (a, b) in zip(x.shape, found))
    cut = tuple(slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(x.shape, found))
    more = [(max(a, 0), max(b, 0)) for a, b in found]
    if mode != "constant":
        return np.pad(x[cut], more, mode=mode)
    fill: Any = call.get("value", 0.0) if value is None else np.asarray(value).ravel()[0]
    return np.pad(x[cut], more, constant_values=fill)


@host("CenterCropPad")
def _center_crop_pad(call: Call, x: np.ndarray, shape: Any) -> np.ndarray:
    axes = [a % x.ndim for a in call.axes(None) or range(x.ndim)]
    guard(shape)
    for axis, wanted in zip(axes, (int(n) for n in shape)):
        n, before = x.shape[axis], (slice(None),) * axis
        if n >= wanted:
            x = x[key(*before, slice((n - wanted) // 2, (n - wanted) // 2 + wanted))]
        else:
            low = (wanted - n) // 2
            x = np.pad(x, [(low, wanted - n - low) if a == axis else (0, 0) for a in range(x.ndim)])
    return x


@host("ReverseSequence")
def _reverse_sequence(call: Call, x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    batch, time = call.get("batch_axis", 1), call.get("time_axis", 0)
    made = np.moveaxis(x.copy(), (batch, time), (0, 1))
    for row, n in zip(made, lengths):
        row[: int(n)] = row[: int(n)][::-1].copy()
    return np.moveaxis(made, (0, 1), (batch, time))
