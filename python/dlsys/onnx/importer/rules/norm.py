"""Normalization."""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import functional as F
from ..call import Call
from ..registry import Unfit, graph, host
from .elementwise import wide


def _columns(v: np.ndarray, rank: int) -> np.ndarray:
    """A value for each channel, to broadcast against (N, C, …)."""
    return wide(v).reshape((-1, *[1] * (rank - 2)))


@graph("BatchNormalization")
def _batch_norm(call: Call, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    """Inference alone: Parameters as statistics are looked at by no formula but this one."""
    if call.get("training_mode", 0) or call.count > 1 or len(x.shape) < 2:
        raise Unfit
    columns = (-1, *[1] * (len(x.shape) - 2))
    factor = F.div(scale, F.sqrt(F.add(var, call.get("epsilon", 1e-5))))
    shift = F.sub(bias, F.mul(mean, factor))
    return F.add(F.mul(x, F.reshape(factor, columns)), F.reshape(shift, columns))


@host("BatchNormalization")
def _batch_norm_arrays(call: Call, x: np.ndarray, scale: np.ndarray, bias: np.ndarray,
                       mean: np.ndarray, var: np.ndarray) -> Any:  # fmt: skip
    eps, momentum = call.get("epsilon", 1e-5), call.get("momentum", 0.9)
    training = call.get("training_mode", 0)
    m, v = mean, var
    if training:
        axes = tuple(a for a in range(x.ndim) if a != 1)
        m, v = wide(x).mean(axes), wide(x).var(axes)
    c = [_columns(value, x.ndim) for value in (m, v, scale, bias)]
    y = ((wide(x) - c[0]) / np.sqrt(c[1] + eps) * c[2] + c[3]).astype(x.dtype)
    if not training:
        return (y, mean, var, mean, var)[: max(call.count, 1)]
    running = [(old * momentum + new * (1 - momentum)).astype(old.dtype)
               for old, new in ((mean, m), (var, v))]  # fmt: skip
    return (y, *running)


@graph("InstanceNormalization")
def _instance_norm(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    return F.instance_norm(x, scale, bias, call.get("epsilon", 1e-5))


def _standard(x: np.ndarray, axes: tuple[int, ...], eps: float) -> np.ndarray:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + eps)


@host("InstanceNormalization")
def _instance_norm_arrays(call: Call, x: np.ndarray, scale: Any, bias: Any) -> np.ndarray:
    y = _standard(wide(x), tuple(range(2, x.ndim)), call.get("epsilon", 1e-5))
    return (y * _columns(scale, x.ndim) + _columns(bias, x.ndim)).astype(x.dtype)


@graph("LayerNormalization")
def _layer_norm(call: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    axis = call.get("axis", -1) % len(x.shape)
    if call.count > 1 or tuple(scale.shape) != tuple(x.shape[axis:]):
        raise Unfit
    return F.layer_norm(x, tuple(x.shape[axis:]), scale, bias, call.get("epsilon", 1e-5))


@host("LayerNormalization")
def _layer_norm_arrays(call: Call, x: np.ndarray, scale: Any, bias: Any = None) -> Any:
    axes = tuple(range(call.get("axis", -1) % x.ndim, x.ndim))
    w = wide(x)
    mean = w.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(((w - mean) ** 2).mean(axes, keepdims=True) + call.get("epsilon", 1e-5))
    y = (w - mean) * inverse * wide(scale) + (0 if bias is None else wide(bias))
    return y.astype(x.dtype), mean, inverse


@graph("RMSNormalization")
def _rms_norm(call: Call, x: Any, scale: Any) -> Any:
    axis = call.get("axis", -1) % len(x.shape)
    if tuple(scale.shape) != tuple(x.shape[axis:]):
        raise Unfit
    return F.rms_norm(x, tuple(x.shape[axis:]), scale, call.get("epsilon", 1e-5))


@host("RMSNormalization")
def _rms_norm_arrays(call: Call, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    axes = tuple(range(call.get("axis", -1) % x.ndim, x.ndim))
    w = wide(x)
    made = w / np.sqrt((w * w).mean(axes, keepdims=True) + call.get("epsilon", 1e-5))
    return (made * wide(scale)).astype(x.dtype)


@host("GroupNormalization")
def _group_norm(call: Call, x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    groups, w = call.get("num_groups"), wide(x)
    y = _standard(w.reshape((x.shape[0], groups, -1)), (2,), call.get("epsilon", 1e-5))
    if len(scale) != x.shape[1]:  # below version 21: one for each group
        scale, bias = (np.repeat(v, x.shape[1] // groups) for v in (scale, bias))
    return (y.reshape(x.shape) * _columns(scale, x.ndim) + _columns(bias, x.ndim)).astype(x.dtype)


@graph("GroupNormalization")
def _group_norm_nodes(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    if scale.shape[0] != x.shape[1]:
        raise Unfit
    return F.group_norm(x, call.get("num_groups"), scale, bias, call.get("epsilon", 1e-5))


@host("MeanVarianceNormalization")
def _mvn(call: Call, x: np.ndarray) -> np.ndarray:
    axes = tuple(call.get("axes", (0, 2, 3)))
    w = wide(x)
    mean = w.mean(axes, keepdims=True)
    spread = np.sqrt((w * w).mean(axes, keepdims=True) - mean * mean)
    return ((w - mean) / (spread + 1e-9)).astype(x.dtype)


@host("LpNormalization")
def _lp_norm(call: Call, x: np.ndarray) -> np.ndarray:
    axis, p, w = call.get("axis", -1), call.get("p", 2), wide(x)
    size = np.sum(np.abs(w), axis, keepdims=True) if p == 1 else np.sqrt(
        np.sum(w * w, axis, keepdims=True))  # fmt: skip
    return np.where(size == 0, 0, w / np.where(size == 0, 1, size)).astype(x.dtype)


@host("LRN")
def _lrn(call: Call, x: np.ndarray) -> np.ndarray:
    n, w = call.get("size"), wide(x)
    low, high = (n - 1) // 2, n - 1 - (n - 1) // 2
    padded = np.pad(w * w, [(0, 0), (low, high), *[(0, 0)] * (x.ndim - 2)])
    total = sum(padded[:, k : k + x.shape[1]] for k in range(n))
    scale = call.get("bias", 1.0) + call.get("alpha", 1e-4) / n * total
    return (w / scale ** call.get("beta", 0.75)).astype(x.dtype)


@graph("LRN")
def _lrn_nodes(call: Call, x: Any) -> Any:
    n, channels = call.get("size"), x.shape[1]
    low = (n - 1) // 2
    rest = [(0, 0)] * (len(x.shape) - 2)
    padded = F.pad(F.mul(x, x), ((0, 0), (low, n - 1 - low), *rest))
    total = padded[:, :channels]
    for k in range(1, n):
        total = F.add(total, padded[:, k : k + channels])
    scale = F.add(F.mul(total, call.get("alpha", 1e-4) / n), call.get("bias", 1.0))
    return F.div(x, F.pow(scale, call.get("beta", 0.75)))
