"""Formulas of operators, in float64 and independent of the package, and scales of their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def tanh(x: np.ndarray) -> np.ndarray:
    t = np.expm1(-2 * np.abs(x))
    return np.sign(x) * -t / (t + 2)


def root_of_terms(x: np.ndarray, terms: np.ndarray) -> Any:
    """Rounding errors have either sign, so those of K additions grow like the root of K."""
    return np.sqrt(max(x.size / max(np.size(terms), 1), 1)) * terms


def sum_scale(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> Any:
    return root_of_terms(x, np.abs(x).sum(axis=axis, keepdims=keepdims))


def mean(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    total = x.sum(axis=axis, keepdims=keepdims)
    with np.errstate(all="ignore"):
        return total / np.float64(x.size // max(total.size, 1))


def mean_scale(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> Any:
    return root_of_terms(x, mean(np.abs(x), axis, keepdims))


def sum_to(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    lead = x.ndim - like.ndim
    x = x.sum(axis=tuple(range(lead)))
    return x.sum(axis=tuple(k for k, n in enumerate(like.shape) if n == 1), keepdims=True)


def expand(x: np.ndarray, like: np.ndarray, axis: Any, keepdims: bool, mean: bool) -> np.ndarray:
    if not keepdims:
        x = np.expand_dims(x, axis if axis is not None else tuple(range(like.ndim)))
    return (x + np.zeros(like.shape)) * (x.size / like.size if mean else 1)


def einsum_axes(x: np.ndarray, axes: Any) -> tuple[list[int], list[int]]:
    order = range(x.ndim)[::-1] if axes is None else [axis % x.ndim for axis in axes]
    return list(range(x.ndim)), list(order)


def transposed(a: np.ndarray, b: np.ndarray, trans_A: bool, trans_B: bool) -> tuple:
    return (a.T if trans_A else a), (b.T if trans_B else b)


def matmul_reference(a: np.ndarray, b: np.ndarray, trans_A=False, trans_B=False) -> np.ndarray:
    a, b = transposed(a, b, trans_A, trans_B)
    return np.einsum("ik,kj->ij", a, b, optimize=a.size > 10_000)


def matmul_scale(a: np.ndarray, b: np.ndarray, trans_A=False, trans_B=False) -> np.ndarray:
    a, b = transposed(np.abs(a), np.abs(b), trans_A, trans_B)
    return np.sqrt(max(a.shape[1], 1)) * (a @ b)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """(x_i - max) - log(1 + Σ exp(x_j - max) over all j but the largest): both terms have the same
    sign, so that no digit cancels. Infinity spoils its row.
    """
    if not x.size:
        return np.zeros(x.shape)
    with np.errstate(all="ignore"):
        largest = x.max(axis=-1, keepdims=True)
        others = np.exp(x - largest)
        np.put_along_axis(others, x.argmax(axis=-1, keepdims=True), 0, axis=-1)
        y = (x - largest) - np.log1p(others.sum(axis=-1, keepdims=True))
    y = np.where(np.isneginf(largest), np.inf, y)
    spoilt = (np.isposinf(x) | np.isnan(x)).any(axis=-1, keepdims=True)
    return np.where(spoilt, np.nan, y)


def softmax_scale(x: np.ndarray) -> np.ndarray:
    """x - max(x) is rounded before exp sees it."""
    return np.exp(log_softmax(x)) * (1 + np.abs(x - x.max(axis=-1, keepdims=True, initial=-1e30)))


def pick(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, labels[..., None].astype(np.int64), -1)[..., 0]


def rows_of(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return (np.arange(logits.shape[-1]) == labels[..., None]).astype(np.float64)


REDUCE: dict[str, Callable] = {"none": lambda x: x, "mean": mean, "sum": np.sum}


def dense_loss(x: np.ndarray, labels: np.ndarray, reduction: str = "none") -> np.ndarray:
    return REDUCE[reduction](-np.einsum("...c,...c->...", labels, log_softmax(x)))


def dense_scale(x: np.ndarray, labels: np.ndarray, reduction: str = "none") -> np.ndarray:
    return REDUCE[reduction]((np.abs(labels) * (1 + np.abs(log_softmax(x)))).sum(axis=-1))


def sparse_loss(x: np.ndarray, labels: np.ndarray, reduction: str = "none") -> np.ndarray:
    return REDUCE[reduction](-pick(log_softmax(x), labels))


def sparse_scale(x: np.ndarray, labels: np.ndarray, reduction: str = "none") -> np.ndarray:
    return REDUCE[reduction](1 + np.abs(pick(log_softmax(x), labels)))


def dense_gradient(x: np.ndarray, labels: np.ndarray, dy: np.ndarray) -> np.ndarray:
    total = labels.sum(axis=-1, keepdims=True)
    return (np.exp(log_softmax(x)) * total - labels) * dy.reshape(total.shape)


def dense_gradient_scale(x: np.ndarray, labels: np.ndarray, dy: np.ndarray) -> np.ndarray:
    total = labels.sum(axis=-1, keepdims=True)
    return (softmax_scale(x) * total + labels) * np.abs(dy.reshape(total.shape))


def sparse_gradient(x: np.ndarray, labels: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return dense_gradient(x, rows_of(labels, x), dy)


def sparse_gradient_scale(x: np.ndarray, labels: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return dense_gradient_scale(x, rows_of(labels, x), dy)
