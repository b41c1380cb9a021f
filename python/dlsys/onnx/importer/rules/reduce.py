"""Reductions, softmax, cumulative sums, and what is sorted or counted along axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import functional as F
from ..call import Call
from ..registry import Unfit, graph, host
from .elementwise import wide


def _axes(call: Call, x: Any, given: Any) -> tuple[int, ...] | None:
    """The axes that are reduced, all for none unless the node makes none a copy."""
    found = call.axes(given)
    if found is None:
        return () if call.get("noop_with_empty_axes", 0) else None
    return tuple(a % len(x.shape) for a in found)


def _logsumexp(x: np.ndarray, axis: Any, keepdims: bool) -> np.ndarray:
    top = np.max(x, axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    made = np.log(np.sum(np.exp(x - top), axis, keepdims=True)) + top
    return made if keepdims else made.reshape(np.sum(x, axis).shape)


def _extreme(x: np.ndarray, axis: Any, keepdims: bool, largest: bool) -> np.ndarray:
    """The largest or smallest elements; those of none are the ends of the dtype's range."""
    if x.dtype.kind == "b":
        return (np.any if largest else np.all)(x, axis=axis, keepdims=keepdims)
    if x.dtype.kind == "f":
        ends: Any = (-np.inf, np.inf)
    else:
        ends = (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
    f = np.max if largest else np.min
    return f(x, axis=axis, keepdims=keepdims, initial=ends[0 if largest else 1])


_HOST: dict[str, Any] = {
    "ReduceSum": lambda x, a, k: np.sum(x, axis=a, keepdims=k),
    "ReduceMean": lambda x, a, k: np.mean(x, axis=a, keepdims=k),
    "ReduceProd": lambda x, a, k: np.prod(x, axis=a, keepdims=k),
    "ReduceMax": lambda x, a, k: _extreme(x, a, k, True),
    "ReduceMin": lambda x, a, k: _extreme(x, a, k, False),
    "ReduceL1": lambda x, a, k: np.sum(np.abs(x), axis=a, keepdims=k),
    "ReduceL2": lambda x, a, k: np.sqrt(np.sum(np.square(x), axis=a, keepdims=k)),
    "ReduceSumSquare": lambda x, a, k: np.sum(np.square(x), axis=a, keepdims=k),
    "ReduceLogSum": lambda x, a, k: np.log(np.sum(x, axis=a, keepdims=k)),
    "ReduceLogSumExp": _logsumexp,
}
_GRAPH: dict[str, Any] = {
    "ReduceSum": F.sum, "ReduceMean": F.mean, "ReduceProd": F.prod, "ReduceMax": F.max,
    "ReduceMin": F.min, "ReduceLogSumExp": F.logsumexp,
    "ReduceL1": lambda x, axis, keepdims: F.sum(F.abs(x), axis, keepdims),
    "ReduceL2": lambda x, axis, keepdims: F.sqrt(F.sum(F.mul(x, x), axis, keepdims)),
    "ReduceSumSquare": lambda x, axis, keepdims: F.sum(F.mul(x, x), axis, keepdims),
    "ReduceLogSum": lambda x, axis, keepdims: F.log(F.sum(x, axis, keepdims)),
}  # fmt: skip


def _register(name: str) -> None:
    @graph(name, known=(1,))
    def nodes(call: Call, x: Any, axes: Any = None) -> Any:
        found = _axes(call, x, axes)
        reduced = x.shape if found is None else [x.shape[axis] for axis in found]
        if found == () or 0 in x.shape or None in reduced:
            raise Unfit
        return _GRAPH[name](x, axis=found, keepdims=bool(call.get("keepdims", 1)))

    @host(name)
    def arrays(call: Call, x: np.ndarray, axes: Any = None) -> np.ndarray:
        found = _axes(call, x, axes)
        made = _HOST[name](wide(x), found, bool(call.get("keepdims", 1)))
        return np.asarray(made).astype(x.dtype)


for _name in _HOST:
    _register(_name)


# ---- softmax ----
def _matrix_axis(call: Call, x: Any) -> int | None:
    """The axis of softmax; below version 13 all from it on are one, which None stands for."""
    axis = call.get("axis", -1 if call.version >= 13 else 1) % max(len(x.shape), 1)
    return axis if call.version >= 13 or axis == len(x.shape) - 1 else None


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _hardmax(x: np.ndarray, axis: int) -> np.ndarray:
    top = np.expand_dims(np.argmax(x, axis), axis)
    return np.arange(x.shape[axis]).reshape([-1 if a == axis % x.ndim else 1
                                             for a in range(x.ndim)]) == top  # fmt: skip


def _register_softmax(name: str, nodes: Any, arrays: Any) -> None:
    if nodes is not None:

        @graph(name)
        def of_nodes(call: Call, x: Any) -> Any:
            axis = _matrix_axis(call, x)
            if axis is not None:
                return nodes(x, axis)
            rows = int(np.prod(x.shape[: call.get("axis", 1)]))
            return F.reshape(nodes(F.reshape(x, (rows, -1)), 1), x.shape)

    @host(name)
    def of_arrays(call: Call, x: np.ndarray) -> np.ndarray:
        axis = _matrix_axis(call, x)
        if axis is not None:
            return np.asarray(arrays(wide(x), axis)).astype(x.dtype)
        rows = int(np.prod(x.shape[: call.get("axis", 1)]))
        return np.asarray(arrays(wide(x).reshape(rows, -1), 1)).astype(x.dtype).reshape(x.shape)


_register_softmax("Softmax", F.softmax, _softmax)
_register_softmax("LogSoftmax", F.log_softmax, lambda x, axis: x - _logsumexp(x, axis, True))
_register_softmax("Hardmax", None, _hardmax)


# ---- positions ----
def _register_arg(name: str, nodes: Any, arrays: Any) -> None:
    @graph(name)
    def of_nodes(call: Call, x: Any) -> Any:
        if call.get("select_last_index", 0):
            raise Unfit
        return nodes(x, call.get("axis", 0), bool(call.get("keepdims", 1)))

    @host(name)
    def of_arrays(call: Call, x: np.ndarray) -> np.ndarray:
        axis, keepdims = call.get("axis", 0), bool(call.get("keepdims", 1))
        if not call.get("select_last_index", 0):
            return arrays(wide(x), axis=axis, keepdims=keepdims)
        return x.shape[axis] - 1 - arrays(np.flip(wide(x), axis), axis=axis, keepdims=keepdims)


_register_arg("ArgMax", F.argmax, np.argmax)
_register_arg("ArgMin", F.argmin, np.argmin)


def _top_k(call: Call, k: Any) -> int:
    return int(call.get("k") if k is None else np.asarray(k).ravel()[0])


@graph("TopK", known=(1,))
def _topk(call: Call, x: Any, k: Any = None) -> Any:
    return F.topk(x, _top_k(call, k), call.get("axis", -1), bool(call.get("largest", 1)))


@host("TopK")
def _topk_arrays(call: Call, x: np.ndarray, k: Any = None) -> tuple[np.ndarray, ...]:
    axis, n = call.get("axis", -1) % x.ndim, _top_k(call, k)
    if call.get("largest", 1):
        order = np.argsort(np.flip(x, axis), axis, kind="stable")
        order = x.shape[axis] - 1 - np.flip(order, axis)
    else:
        order = np.argsort(x, axis, kind="stable")
    order = np.take(order, np.arange(min(n, x.shape[axis])), axis)
    return np.take_along_axis(x, order, axis), order


@host("CumSum CumProd")
def _cumulative(call: Call, x: np.ndarray, axis: np.ndarray) -> np.ndarray:
    product = call.node.op_type == "CumProd"
    at = int(np.asarray(axis).ravel()[0]) % x.ndim
    y = np.flip(x, at) if call.get("reverse", 0) else x
    made = (np.cumprod if product else np.cumsum)(wide(y), at)
    if call.get("exclusive", 0):
        first = np.full_like(np.take(made, [0], at), 1 if product else 0)
        made = np.concatenate([first, np.take(made, range(made.shape[at] - 1), at)], at)
    return (np.flip(made, at) if call.get("reverse", 0) else made).astype(x.dtype)


@graph("CumSum", known=(1,))
def _cumsum(call: Call, x: Any, axis: Any) -> Any:
    if call.get("exclusive", 0):
        raise Unfit
    return F.cumsum(x, int(np.asarray(axis).ravel()[0]), bool(call.get("reverse", 0)))
