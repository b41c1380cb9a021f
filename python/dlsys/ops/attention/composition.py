"""Attention as a composition of other operators: product, softmax, product. Its matrices of weights
are (N, heads, L, S), so it is for small ones, for gradients that no kernel computes, and to compare
kernels with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...graph.gradients import gradients
from ...graph.node import Node
from ..comparison import equal_op, less_op, where_op
from ..elementwise import cast_op
from ..leaf import constant_op, zeroslike_op
from ..loss.softmax import softmax_op
from ..matmul import batched_matmul_op
from ..movement import reshape_op, stop_gradient_op
from ..random.sampling import masked_op
from ..reduce import logsumexp_op, max_op, sum_op, sum_to_like
from .problem import Extra


class Call(NamedTuple):
    """Attention's nodes, whose specs are known, and attributes."""

    q: Node
    k: Node
    v: Node
    extra: Extra
    causal: bool
    scale: float
    attrs: dict[str, Any]

    @property
    def grouped(self) -> tuple[int, int, int]:
        """Samples, heads of keys, and heads of queries for each."""
        heads, kv_heads = self.q.spec.shape[1], self.k.spec.shape[1]
        return self.q.spec.shape[0], kv_heads, heads // max(kv_heads, 1)

    def of_queries(self, x: Node) -> Node:
        """(N, heads, …) as (N, kv heads, group, …)."""
        return reshape_op(x, (*self.grouped, *x.spec.shape[2:]))

    def of_keys(self, x: Node) -> Node:
        """(N, kv heads, …) as (N, kv heads, 1, …)."""
        return reshape_op(x, (*x.spec.shape[:2], 1, *x.spec.shape[2:]))

    def merged(self, x: Node) -> Node:
        """(N, kv heads, group, …) as (N, heads, …)."""
        batch, kv_heads, group = self.grouped
        return reshape_op(x, (batch, kv_heads * group, *x.spec.shape[3:]))

    def real(self) -> Call:
        """With zeros in the rows behind the lengths, whatever is there."""
        k, v = (_cleared(x, self.extra.lengths) for x in (self.k, self.v))
        return self._replace(q=_cleared(self.q, self.extra.query_lengths), k=k, v=v)

    def gradient(self, dy: Node, towards: Sequence[Node], order: int, of: int) -> Node:
        """A gradient for input `of` among q, k, v, dy and the mask: of order 1 that of <y, dy> for
        the mask, of order 2 that of <dq, g> + <dk, g> + <dv, g>, of order 3 that of <dmask, g>,
        each with its own of `towards` as g.
        """
        inputs = [*map(stop_gradient_op, (self.q, self.k, self.v, dy))]  # each a node of its own
        extra, mask = self.extra, self.extra.mask
        if mask is not None and mask.spec.dtype.kind == "f":
            inputs.append(stop_gradient_op(mask))
            extra = extra._replace(mask=inputs[-1])
        if of >= len(inputs):  # a mask of truth values
            return zeroslike_op(mask)
        own = self._replace(q=inputs[0], k=inputs[1], v=inputs[2], extra=extra)
        if order == 1:
            return _of_mask(own, inputs[3])
        made = backward(own, inputs[3]) if order == 2 else [_of_mask(own, inputs[3])]
        first, *rest = (gradients(y, [inputs[of]], seed)[0] for y, seed in zip(made, towards))
        return sum(rest, first)


def _cleared(x: Node, lengths: Node | None) -> Node:
    """x (N, heads, positions, size) with zeros behind the lengths (N,)."""
    if lengths is None:
        return x
    return where_op(_within(x.spec.shape[2], lengths, (-1, 1, 1, 1), (-1, 1)), x, 0.0)


def _within(extent: int, lengths: Node, of_sample: Any, of_position: Any) -> Node:
    """True where a position is below its sample's length."""
    positions = np.arange(extent).astype(lengths.spec.dtype).reshape(of_position)
    shape = (lengths.spec.shape[0], *of_sample[1:])
    return less_op(constant_op(positions), reshape_op(lengths, shape))


def _scores(call: Call) -> Node:
    """(N, heads, L, S), -inf where a key is hidden."""
    q = call.of_queries(call.q) * call.scale
    scores = call.merged(batched_matmul_op(q, call.of_keys(call.k), trans_B=True))
    rows, columns = scores.spec.shape[2:]
    mask, lengths = call.extra.mask, call.extra.lengths
    if mask is not None and mask.spec.dtype.kind == "b":
        scores = where_op(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + cast_op(mask, dtype=scores.spec.dtype)
    if lengths is not None:
        visible = _within(columns, lengths, (-1, 1, 1, 1), (-1,))
        scores = where_op(visible, scores, -math.inf)
    if call.causal:
        scores = where_op(constant_op(np.tri(rows, columns, dtype=bool)), scores, -math.inf)
    return scores


def _weights(call: Call, scores: Node) -> Node:
    """The softmax of the scores; 0 in rows that see no key."""
    if call.extra.mask is None and call.extra.lengths is None:
        return softmax_op(scores)
    if not scores.spec.size:
        return scores
    blind = equal_op(max_op(scores, axis=-1, keepdims=True), -math.inf)
    return where_op(blind, 0.0, softmax_op(where_op(blind, 0.0, scores)))


def _dropped(call: Call, weights: Node) -> Node:
    if call.extra.step is None:
        return weights
    attrs = {key: call.attrs[key] for key in ("seed", "node", "threshold")}
    return masked_op(weights, call.extra.step, **attrs, scale=call.attrs["keep"])


def forward(call: Call) -> list[Node]:
    """The output and the logarithms of the rows' sums."""
    call = call.real()
    scores = _scores(call)
    used = call.of_queries(_dropped(call, _weights(call, scores)))
    y = call.merged(batched_matmul_op(used, call.of_keys(call.v)))
    return [_cleared(y, call.extra.query_lengths), logsumexp_op(scores, axis=-1)]


def backward(call: Call, dy: Node) -> list[Node]:
    """The gradients of q, k and v; with weights p, dp of them and ds of the scores."""
    before, call = call, call.real()
    dy = _cleared(dy, call.extra.query_lengths)
    p, ds = _of_scores(call, dy)
    ds = ds * call.scale
    used, ds, dy = (call.of_queries(x) for x in (_dropped(call, p), ds, dy))
    dq = call.merged(batched_matmul_op(ds, call.of_keys(call.k)))
    dk = sum_op(batched_matmul_op(ds, call.of_queries(call.q), trans_A=True), axis=2)
    dv = sum_op(batched_matmul_op(used, dy, trans_A=True), axis=2)
    extra = before.extra
    return [
        _cleared(dq, extra.query_lengths), _cleared(dk, extra.lengths), _cleared(dv, extra.lengths)
    ]  # fmt: skip


def _of_scores(call: Call, dy: Node) -> tuple[Node, Node]:
    """The weights, and the gradient of the scores: ds = p (dp - Σ p dp)."""
    p = _weights(call, _scores(call))
    dp = batched_matmul_op(call.of_queries(dy), call.of_keys(call.v), trans_B=True)
    weighted = p * _dropped(call, call.merged(dp))
    return p, weighted - p * sum_op(weighted, axis=-1, keepdims=True)


def _of_mask(call: Call, dy: Node) -> Node:
    dy = _cleared(dy, call.extra.query_lengths)
    return sum_to_like(_of_scores(call.real(), dy)[1], call.extra.mask)
