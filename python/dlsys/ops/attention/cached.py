"""Attention of generation: new keys and values go into a cache of fixed size, and new queries
attend to what is there up to their own position.
"""

from __future__ import annotations

import numpy as np

from ...arguments.kinds import Number
from ...arguments.signature import Signature
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe
from ..optim.assign import check_count, check_parameter


class AppendToCacheOp(Op):
    """Stores k and v (N, heads, L, d) at the positions from `start`, an int64 scalar, on in `keys`
    and `values`, Parameters (N, heads, capacity, d); its values are the two Parameters behind that.

    What would lie outside of the capacity is left out.
    """

    name = kernel = "append_to_cache"
    vocabulary = False
    outputs = 2
    writes = (0, 1)
    any_dtype = (4,)
    signature = Signature("keys", "values", "k", "v", "start")

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        keys, values, k, v, start = specs
        for x in node.inputs[:2]:
            check_parameter(node, x)
        _check(node, k, keys, start)
        if keys.shape != values.shape or k.shape != v.shape:
            raise node.error(f"keys and values differ: {describe(node, specs[:4])}")
        return keys, values

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        keys, values, k, v, start = arrays
        positions = int(start.item()) + np.arange(k.shape[2])
        inside = (positions >= 0) & (positions < keys.shape[2])
        keys[:, :, positions[inside]] = k[:, :, inside]
        values[:, :, positions[inside]] = v[:, :, inside]


class CachedAttentionOp(Op):
    """softmax(scale · q keysᵀ) values as (N, L, heads · d), of queries q (N, heads, L, d) over keys
    and values (N, heads, capacity, d).

    start: an int64 scalar, the position of the first query; query l sees the positions up to start
    + l. No gradient. On a GPU d is a multiple of 4, at most 512.
    """

    name = kernel = "cached_attention"
    vocabulary = False
    any_dtype = (3,)
    tolerance = 1e-5
    signature = Signature("q", "keys", "values", "start", "*", scale=Number(finite=True))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        q, keys, values, start = specs
        _check(node, q, keys, start)
        if keys.shape != values.shape:
            raise node.error(f"keys and values differ: {describe(node, specs[:3])}")
        batch, heads, length, d = q.shape
        return q._replace(shape=(batch, length, heads * d))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        q, keys, values, start, y = arrays
        batch, heads, length, d = q.shape
        scores = (q * node.attrs["scale"]).astype(q.dtype) @ keys.transpose(0, 1, 3, 2)
        rows = int(start.item()) + np.arange(length)
        scores[..., np.arange(keys.shape[2]) > rows[:, None]] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        y.reshape(batch, length, heads, d)[...] = (scores @ values).transpose(0, 2, 1, 3)

    def scalars(self, node: Node) -> tuple[float]:
        return (float(node.attrs["scale"]),)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 4 * output.size * inputs[1].shape[2]


def _check(node: Node, new: Spec, cache: Spec, start: Spec) -> None:
    """Refuses new rows (N, heads, L, d) that do not go with a cache (N, heads, capacity, d)."""
    check_count(node, "start", start)
    a, b = new.shape, cache.shape
    fits = len(a) == len(b) == 4 and a[:2] == b[:2] and a[3] == b[3]
    if not fits or a[2] > b[2]:
        raise node.error(
            f"expected (N, heads, L, d) and a cache (N, heads, capacity, d), got {a} and {b}"
        )


append_to_cache_op = AppendToCacheOp()
cached_attention_op = CachedAttentionOp()
