"""Losses over classes, and random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..call import Call
from ..registry import host
from ..walk import guard
from .elementwise import dtype_of, wide
from .reduce import _logsumexp


def _nll(call: Call, log_p: np.ndarray, labels: np.ndarray, weight: Any) -> np.ndarray:
    """-log_p at the labels, weighted and reduced as the node says."""
    ignore, how = call.get("ignore_index"), call.get("reduction", "mean")
    valid = np.ones(labels.shape, bool) if ignore is None else labels != ignore
    at = np.where(valid, labels, 0).astype(np.int64)
    if at.size and (at.min() < 0 or at.max() >= log_p.shape[1]):
        raise call.error(f"a label out of range of {log_p.shape[1]}")
    picked = -np.take_along_axis(log_p, np.expand_dims(at, 1), 1).squeeze(1)
    w = (np.ones(log_p.shape[1]) if weight is None else weight)[at] * valid
    picked = picked * w
    if how == "none":
        return picked
    return picked.sum() if how == "sum" else picked.sum() / w.sum()


@host("NegativeLogLikelihoodLoss")
def _nll_loss(call: Call, log_p: np.ndarray, labels: np.ndarray, weight: Any = None) -> np.ndarray:
    return np.asarray(_nll(call, log_p, labels, weight)).astype(log_p.dtype)


@host("SoftmaxCrossEntropyLoss")
def _cross_entropy(call: Call, scores: np.ndarray, labels: np.ndarray, weight: Any = None) -> Any:
    log_p = wide(scores) - _logsumexp(wide(scores), 1, True)
    made = np.asarray(_nll(call, log_p, labels, weight)).astype(scores.dtype)
    return made, log_p.astype(scores.dtype)


def _generator(call: Call) -> np.random.Generator:
    seed = call.get("seed")
    return np.random.default_rng(None if seed is None else abs(int(seed)))


@host("RandomUniform RandomUniformLike RandomNormal RandomNormalLike Bernoulli")
def _random(call: Call, like: Any = None) -> np.ndarray:
    name, draw = call.node.op_type, _generator(call)
    code = call.get("dtype")
    dtype = dtype_of(code or 1) if like is None or code else like.dtype
    shape = guard(call.get("shape", ())) if like is None else like.shape
    if name == "Bernoulli":
        return (draw.random(shape) < like).astype(dtype)
    if "Normal" in name:
        return draw.normal(call.get("mean", 0.0), call.get("scale", 1.0), shape).astype(dtype)
    return draw.uniform(call.get("low", 0.0), call.get("high", 1.0), shape).astype(dtype)


@host("Multinomial")
def _multinomial(call: Call, x: np.ndarray) -> np.ndarray:
    n = call.get("sample_size", 1)
    p = np.exp(wide(x) - _logsumexp(wide(x), 1, True)).astype(np.float64)
    draw = _generator(call)
    made = [draw.choice(len(row), n, p=row / row.sum()) for row in p]
    return np.stack(made).astype(dtype_of(call.get("dtype", 6)))
