"""Control flow, sequences and optionals. Loops are unrolled; what decides them must be known, or
be a Tensor, which is looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import functional as F
from ..call import Call, key
from ..registry import values

MOST_ITERATIONS = 100_000


def _truth(call: Call, x: Any) -> bool:
    return bool(np.asarray(call.walker.look(x)).ravel()[0])


def _stack(call: Call, items: list[Any], axis: int = 0, dtype: Any = np.float32) -> Any:
    """Values of one shape along a new axis."""
    if not items:
        return np.zeros((0,), dtype)
    if all(isinstance(x, np.ndarray) for x in items):
        return np.stack(items, axis)
    return F.stack([call.walker.value(x) for x in items], axis)


@values("If")
def _if(call: Call, condition: Any) -> tuple[Any, ...]:
    name = "then_branch" if _truth(call, condition) else "else_branch"
    return tuple(call.walker.graph(call.attrs[name], [], call.scope))


@values("Loop")
def _loop(call: Call, trips: Any = None, condition: Any = None, *state: Any) -> tuple[Any, ...]:
    walker, body = call.walker, call.attrs["body"]
    most = None if trips is None else int(np.asarray(walker.look(trips)).ravel()[0])
    on = True if condition is None else _truth(call, condition)
    carried, n = list(state), len(state)
    rows: list[list[Any]] = [[] for _ in body.output[1 + n :]]
    k = 0
    while on and (most is None or k < most):
        if k >= MOST_ITERATIONS:
            raise call.error(f"more than {MOST_ITERATIONS} iterations")
        flag, *made = walker.graph(body, [np.int64(k) * np.ones((), np.int64),
                                          np.asarray(on), *carried], call.scope)  # fmt: skip
        on, carried = _truth(call, flag), made[:n]
        for row, value in zip(rows, made[n:]):
            row.append(value)
        k += 1
    return (*carried, *(_stack(call, row) for row in rows))


def _at(x: Any, k: int, axis: int) -> Any:
    return x[key(*[slice(None)] * (axis % len(x.shape)), k)]


@values("Scan")
def _scan(call: Call, *inputs: Any) -> tuple[Any, ...]:
    if call.version < 9:
        return _scan_of_batches(call, *inputs)
    body, m = call.attrs["body"], call.get("num_scan_inputs")
    return _scanned(call, list(inputs[:-m]), list(inputs[-m:]), body)


def _scan_of_batches(call: Call, lengths: Any, *inputs: Any) -> tuple[Any, ...]:
    """Version 8 scans each row of a batch on its own."""
    body, m = call.attrs["body"], call.get("num_scan_inputs")
    made = []
    for b in range(inputs[0].shape[0]):
        row = [x[b] for x in inputs]
        made.append(_scanned(call, row[:-m], row[-m:], body))
    return tuple(_stack(call, [row[k] for row in made]) for k in range(len(made[0])))


def _scanned(call: Call, state: list[Any], sequences: list[Any], body: Any) -> tuple[Any, ...]:
    n, m = len(state), len(sequences)
    outputs = len(body.output) - n
    axes = call.get("scan_input_axes") or [0] * m
    back = call.get("scan_input_directions") or call.get("directions") or [0] * m
    out_axes = call.get("scan_output_axes") or [0] * outputs
    out_back = call.get("scan_output_directions") or [0] * outputs
    steps = sequences[0].shape[axes[0]]
    if steps > MOST_ITERATIONS:
        raise call.error(f"more than {MOST_ITERATIONS} iterations")
    rows: list[list[Any]] = [[] for _ in range(outputs)]
    for t in range(steps):
        now = [_at(x, steps - 1 - t if r else t, a) for x, a, r in zip(sequences, axes, back)]
        made = call.walker.graph(body, [*state, *now], call.scope)
        state = made[:n]
        for row, value in zip(rows, made[n:]):
            row.append(value)
    stacked = [_stack(call, row[::-1] if r else row, a)
               for row, a, r in zip(rows, out_axes, out_back)]  # fmt: skip
    return (*state, *stacked)


# ---- sequences ----
values("SequenceConstruct")(lambda call, *xs: ([*xs],))
values("SequenceEmpty")(lambda call: ([],))
values("SequenceLength")(lambda call, xs: np.asarray(len(xs), np.int64))


def _position(call: Call, at: Any, n: int) -> int:
    k = int(np.asarray(call.walker.look(at)).ravel()[0])
    if not -n <= k < n:
        raise call.error(f"position {k} of {n}")
    return k % n if n else 0


@values("SequenceAt")
def _sequence_at(call: Call, xs: list[Any], at: Any) -> Any:
    return xs[_position(call, at, len(xs))]


@values("SequenceInsert")
def _sequence_insert(call: Call, xs: list[Any], x: Any, at: Any = None) -> tuple[list[Any]]:
    k = len(xs) if at is None else int(np.asarray(call.walker.look(at)).ravel()[0])
    k = k + len(xs) if k < 0 else k
    return ([*xs[:k], x, *xs[k:]],)


@values("SequenceErase")
def _sequence_erase(call: Call, xs: list[Any], at: Any = None) -> tuple[list[Any]]:
    k = _position(call, -1 if at is None else at, len(xs))
    return ([*xs[:k], *xs[k + 1 :]],)


@values("ConcatFromSequence")
def _concat_from_sequence(call: Call, xs: list[Any]) -> Any:
    axis = call.get("axis")
    if call.get("new_axis", 0):
        return _stack(call, xs, axis)
    if all(isinstance(x, np.ndarray) for x in xs):
        return np.concatenate(xs, axis)
    return F.concatenate([call.walker.value(x) for x in xs], axis)


@values("SplitToSequence")
def _split_to_sequence(call: Call, x: Any, split: Any = None) -> tuple[list[Any]]:
    axis = call.get("axis", 0) % len(x.shape)
    n = x.shape[axis]
    given = None if split is None else np.asarray(call.walker.look(split))
    if given is None:
        parts = [1] * n
    elif given.ndim == 0:
        size = max(int(given), 1)
        parts = [min(size, n - k) for k in range(0, n, size)]
    else:
        parts = [int(p) for p in given]
    ends, before = np.cumsum(parts).tolist(), (slice(None),) * axis
    made = [x[key(*before, slice(end - p, end))] for p, end in zip(parts, ends)]
    if given is None and not call.get("keepdims", 1):
        made = [_at(y, 0, axis) for y in made]
    return (made,)


@values("SequenceMap")
def _sequence_map(call: Call, xs: list[Any], *more: Any) -> tuple[list[Any], ...]:
    body = call.attrs["body"]
    rows: list[list[Any]] = [[] for _ in body.output]
    for k, x in enumerate(xs):
        others = [y[k] if isinstance(y, list) else y for y in more]
        for row, value in zip(rows, call.walker.graph(body, [x, *others], call.scope)):
            row.append(value)
    return tuple(rows)


# ---- optionals: the value itself, None where it is empty ----
values("Optional")(lambda call, x=None: (x,))
values("OptionalHasElement")(lambda call, x=None: np.asarray(x is not None))


@values("OptionalGetElement")
def _optional_get(call: Call, x: Any) -> tuple[Any]:
    if x is None:
        raise call.error("the optional is empty")
    return (x,)


@values("StringConcat")
def _string_concat(call: Call, a: Any, b: Any) -> np.ndarray:
    a, b = np.broadcast_arrays(np.asarray(a, object), np.asarray(b, object))
    made = np.empty(a.shape, object)
    made.ravel()[:] = [str(x) + str(y) for x, y in zip(a.ravel(), b.ravel())]
    return made
