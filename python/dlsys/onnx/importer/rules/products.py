"""Matrix products, einsum and attention-free linear algebra."""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import functional as F
from ..call import Call
from ..registry import Unfit, graph, host
from .elementwise import is_integer, wide


@graph("MatMul")
def _matmul(call: Call, a: Any, b: Any) -> Any:
    if 0 in (*a.shape, *b.shape):
        raise Unfit
    return F.matmul(a, b)


@host("MatMul")
def _matmul_arrays(call: Call, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.matmul(wide(a), wide(b))).astype(a.dtype)


@graph("Gemm")
def _gemm(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    made = F.matmul(a, b, bool(call.get("transA", 0)), bool(call.get("transB", 0)))
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    made = made if alpha == 1.0 else F.mul(made, alpha)
    if c is None or beta == 0:
        return made
    return F.add(made, c if beta == 1.0 else F.mul(c, beta))


@host("Gemm")
def _gemm_arrays(call: Call, a: np.ndarray, b: np.ndarray, c: Any = None) -> np.ndarray:
    left = a.T if call.get("transA", 0) else a
    right = b.T if call.get("transB", 0) else b
    made = call.get("alpha", 1.0) * (wide(left) @ wide(right))
    made = made if c is None else made + call.get("beta", 1.0) * wide(c)
    return np.asarray(made).astype(a.dtype)


@host("Einsum")
def _einsum(call: Call, *xs: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum(call.get("equation"), *map(wide, xs))).astype(xs[0].dtype)


@graph("Einsum")
def _einsum_nodes(call: Call, *xs: Any) -> Any:
    text = call.get("equation").replace(" ", "")
    left, _, right = text.partition("->")
    if "..." in text or any(len(set(part)) < len(part) for part in left.split(",")) or (
        len(set(right)) < len(right)
    ):  # fmt: skip
        raise Unfit
    return F.einsum(text, *xs)


@host("Det")
def _det(call: Call, x: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.det(wide(x))).astype(x.dtype)


def product_of_integers(a: np.ndarray, b: np.ndarray, a_zero: Any, b_zero: Any) -> np.ndarray:
    """(a - its zero points) @ (b - its zero points) in int32."""
    left, right = a.astype(np.int32), b.astype(np.int32)
    if a_zero is not None:
        left = left - (a_zero[:, None] if np.ndim(a_zero) == 1 and np.size(a_zero) > 1 else a_zero
                       ).astype(np.int32)  # fmt: skip
    if b_zero is not None:
        right = right - np.asarray(b_zero).astype(np.int32)
    return np.matmul(left, right)


@host("MatMulInteger")
def _matmul_integer(call: Call, a: np.ndarray, b: np.ndarray, a_zero: Any = None,
                    b_zero: Any = None) -> np.ndarray:  # fmt: skip
    assert is_integer(a)
    return product_of_integers(a, b, a_zero, b_zero)
