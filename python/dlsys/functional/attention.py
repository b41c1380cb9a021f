"""Attention."""

from __future__ import annotations

from ..graph.node import Node
from ..ops.attention.attention import attention
from ..ops.attention.packed import packed_attention as packed
from ..ops.elementwise import as_node
from ..ops.random.sampling import Generator
from .record import Array, optional, recorded

__all__ = ["packed_attention", "scaled_dot_product_attention"]


@recorded
def scaled_dot_product_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    lengths: Array | None = None,
    query_lengths: Array | None = None,
    algo: str | None = None,
    training: bool = True,
    generator: Generator | None = None,
) -> Array:
    """softmax(q kᵀ · scale) v: q (N, heads, L, d), k (N, kv heads, S, d) and v (N, kv heads, S,
    dv) to (N, heads, L, dv), without a matrix of all weights. Three axes are one sample's, or the
    samples of one head, and two one head's of one sample.

    Floats of one dtype. Where kv heads divide heads, each serves as many neighboring heads of q
    (grouped queries). mask: broadcasts to (N, heads, L, S); bool, True where a key takes part, or
    floats that are added to the scores, -inf to hide a key. causal: position l sees the keys 0 to
    l. scale: 1 / sqrt(d) unless given. dropout: the probability that a weight is 0, while
    `training`; the others are divided by 1 minus it. lengths: (N,), int32 or int64, the keys of
    each sample: what stands behind them is not read. query_lengths: likewise of q, whose rows
    behind them give 0. A row that sees no key gives 0 too, as in PyTorch. generator: the source of
    dropout's numbers; that of `ad.seed` where it is None.

    algo: the rung of the ladder, "naive", "tiled" or, on GPUs of sm_90a, "flash", for attention and
    its gradient; without it DLSYS_ATTENTION names it. Gradients of q, k and v come from kernels.
    That of a mask of floats, and gradients of gradients, come from a composition of matrix products
    and softmax that holds all weights; differentiating these again is refused with GraphError.
    ShapeError where shapes or dtypes do not fit, SignatureError for an unknown rung or unless
    0 <= dropout < 1.

    After Vaswani et al. (2017); blocks after Dao et al., "FlashAttention" (2022).

    >>> q, k, v = (dl.ones(1, 2, 3, 4) for _ in range(3))
    >>> F.scaled_dot_product_attention(q, k, v, causal=True).shape
    (1, 2, 3, 4)
    """
    q, k, v = as_node(q), as_node(k), as_node(v)
    ndim = q.ndim
    if ndim in (2, 3):
        q, k, v = (_in_four_axes(x, ndim) for x in (q, k, v))
    y = attention(
        q,
        k,
        v,
        mask=optional(mask),
        causal=causal,
        scale=scale,
        dropout=dropout if training else 0.0,
        lengths=optional(lengths),
        query_lengths=optional(query_lengths),
        algo=algo,
        generator=generator,
    )
    if ndim == 2:
        return y[0, 0]
    return y[:, 0] if ndim == 3 else y


@recorded
def packed_attention(
    qkv: Array,
    heads: int,
    kv_heads: int | None = None,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    lengths: Array | None = None,
    algo: str | None = None,
    training: bool = True,
    generator: Generator | None = None,
) -> Array:
    """Self-attention of q, k and v as one projection makes them: qkv (N, L, (heads + 2 · kv_heads)
    · d), whose features are the heads of q, then those of k and of v, to (N, L, heads · d).

    The same as `scaled_dot_product_attention` of the parts, but nothing is transposed: kernels read
    the parts where they are and write the output as the next projection reads it. kv_heads:
    `heads` unless given; each head of k and v serves heads / kv_heads neighboring ones of q. mask,
    causal, scale, dropout, lengths, algo, training and generator, and the errors, as there.

    >>> F.packed_attention(dl.ones(1, 3, 24), heads=2, causal=True).shape
    (1, 3, 8)
    """
    return packed(
        as_node(qkv),
        heads,
        kv_heads,
        mask=optional(mask),
        causal=causal,
        scale=scale,
        dropout=dropout if training else 0.0,
        lengths=optional(lengths),
        algo=algo,
        generator=generator,
    )


def _in_four_axes(x: Node, ndim: int) -> Node:
    """(L, d) or (N, L, d) as (N, 1, L, d)."""
    return x[None, None] if ndim == 2 else x[:, None]
