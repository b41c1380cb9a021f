"""Gather and scatter in their forms, and results whose shapes depend on values."""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import functional as F
from ..call import Call
from ..registry import Unfit, graph, host
from ..walk import guard


def _inside(call: Call, indices: np.ndarray, n: int) -> np.ndarray:
    """Indices from 0; those from the end are negative. DataError for one out of range."""
    made = np.asarray(indices).astype(np.int64)
    if made.size and (made.min() < -n or made.max() >= n):
        raise call.error(f"an index out of range of {n}")
    return np.where(made < 0, made + n, made)


@graph("Gather", "fiub", known=(1,))
def _gather(call: Call, x: Any, indices: np.ndarray) -> Any:
    axis = call.get("axis", 0)
    return F.take(x, _inside(call, indices, x.shape[axis]), axis)


@host("Gather")
def _gather_array(call: Call, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    axis = call.get("axis", 0)
    return np.take(x, _inside(call, indices, x.shape[axis]), axis)


@host("GatherElements")
def _gather_elements(call: Call, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    axis = call.get("axis", 0)
    at: list[Any] = list(np.indices(indices.shape, sparse=True))
    at[axis] = _inside(call, indices, x.shape[axis])
    return x[tuple(at)]


def _coordinates(call: Call, x: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, ...]:
    last = indices.shape[-1]
    return tuple(_inside(call, indices[..., k], x.shape[k]) for k in range(last))


@host("GatherND")
def _gather_nd(call: Call, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    b = call.get("batch_dims", 0)
    lead = x.shape[:b]
    flat = x.reshape((-1, *x.shape[b:]))
    at = indices.reshape((flat.shape[0], *indices.shape[b:]))
    made = np.stack([row[_coordinates(call, row, where)] for row, where in zip(flat, at)])
    return made.reshape((*lead, *made.shape[1:]))


_REDUCE: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _put(call: Call, y: np.ndarray, at: tuple[Any, ...], updates: np.ndarray) -> np.ndarray:
    how = call.get("reduction", "none")
    if how == "none":
        y[at] = updates
    else:
        _REDUCE[how].at(y, at, updates)
    return y


@host("Scatter ScatterElements")
def _scatter(call: Call, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    axis = call.get("axis", 0)
    at: list[Any] = list(np.indices(indices.shape, sparse=True))
    at[axis] = _inside(call, indices, x.shape[axis])
    return _put(call, x.copy(), tuple(at), updates)


@host("ScatterND")
def _scatter_nd(call: Call, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    return _put(call, x.copy(), _coordinates(call, x, indices), updates)


@host("TensorScatter")
def _tensor_scatter(call: Call, past: np.ndarray, update: np.ndarray,
                    starts: Any = None) -> np.ndarray:  # fmt: skip
    axis, made = call.get("axis", -2) % past.ndim, past.copy()
    n, capacity = update.shape[axis], past.shape[axis]
    for b in range(past.shape[0]):
        first = 0 if starts is None else int(starts[b])
        at = np.arange(first, first + n)
        at = at % capacity if call.get("mode", "linear") == "circular" else at
        _inside(call, at, capacity)
        np.moveaxis(made[b], axis - 1, 0)[at] = np.moveaxis(update[b], axis - 1, 0)
    return made


@host("OneHot", dynamic=True)
def _one_hot(call: Call, indices: np.ndarray, depth: Any, values: np.ndarray) -> np.ndarray:
    n, axis = int(np.asarray(depth).ravel()[0]), call.get("axis", -1)
    guard((*indices.shape, n))
    at = np.asarray(indices).astype(np.int64)
    at = np.expand_dims(np.where(at < 0, at + n, at), axis)
    axis %= at.ndim
    row = np.arange(n).reshape([-1 if a == axis else 1 for a in range(at.ndim)])
    return np.where(at == row, values[1], values[0]).astype(values.dtype)


host("NonZero", dynamic=True)(lambda call, x: np.stack(np.nonzero(x)).astype(np.int64))


@host("Compress", dynamic=True)
def _compress(call: Call, x: np.ndarray, condition: np.ndarray) -> np.ndarray:
    return np.compress(condition, x, call.get("axis"))


@host("ArrayFeatureExtractor", domain="ai.onnx.ml")
def _array_feature_extractor(call: Call, x: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.take(np.atleast_2d(x), _inside(call, np.ravel(at), x.shape[-1]), -1)


@host("Binarizer", domain="ai.onnx.ml")
def _binarizer(call: Call, x: np.ndarray) -> np.ndarray:
    return (x > call.get("threshold", 0.0)).astype(x.dtype)


@host("Unique", dynamic=True)
def _unique(call: Call, x: np.ndarray) -> tuple[np.ndarray, ...]:
    axis = call.get("axis")
    made, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = np.ravel(inverse)
    if not call.get("sorted", 1):
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        made = np.take(made, order, 0 if axis is None else axis)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    return made, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


@graph("GatherElements", "fi", known=(1,))
def _gather_elements_nodes(call: Call, x: Any, indices: np.ndarray) -> Any:
    axis = call.get("axis", 0) % len(x.shape)
    same = all(n == m for a, (n, m) in enumerate(zip(x.shape, indices.shape)) if a != axis)
    if not same:
        raise Unfit
    return F.take_along_axis(x, _inside(call, indices, x.shape[axis]), axis)
