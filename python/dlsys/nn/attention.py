"""Attention, and the transformer's layers. Parameters are named and laid out as PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import functional as F
from ..arguments.kinds import Bool, Int, OneOf
from ..arguments.signature import declared
from ..autodiff import Node, Parameter
from ..errors import GraphError
from ..functional.record import optional, recorded
from ..graph.lines import where
from ..init import RNG, Initializer, Rng, generator, normal, xavier_uniform, zeros
from ..ops.random.sampling import PROBABILITY, Generator
from .kinds import Function
from .layers import SIZE, Linear, drawn
from .module import Module, changed
from .norm import LayerNorm
from .regularize import Dropout
from .shapes import known, shape_of

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"relu": F.relu, "gelu": F.gelu}
QKV = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@recorded
def project(
    x: Node, weight: Node, bias: Node | None, heads: int, rows: tuple[int, int], batch_first: bool
) -> Node:
    """x (N, L, inputs), or (L, N, inputs), in heads (N, heads, L, d), by some rows of a bias and of
    a weight, which is taken undivided where it has no more. One of N and L may be unknown when the
    graph is built.
    """
    features = rows[1] - rows[0]
    part = slice(*rows)
    weight = weight if weight.shape[0] == features else weight[part]
    x = F.linear(x, weight, None if bias is None else bias[part])
    a, b = (-1 if n is None else n for n in x.shape[:2])
    x = F.reshape(x, (a, b, heads, features // heads))
    return F.transpose(x, (0, 2, 1, 3) if batch_first else (1, 2, 0, 3))


@recorded
def merge_heads(x: Node, batch_first: bool) -> Node:
    """x (N, heads, L, d) as (N, L, heads · d), or as (L, N, heads · d)."""
    x = F.transpose(x, (0, 2, 1, 3) if batch_first else (2, 0, 1, 3))
    return F.flatten(x, 2)


@recorded
def attention_weights(
    query: Node,
    key: Node,
    mask: Node | None = None,
    padding: Node | None = None,
    causal: bool = False,
) -> Node:
    """softmax(query keyᵀ / sqrt(d)) of query (N, heads, L, d) and key (N, heads, S, d): weights
    (N, heads, L, S).

    mask (L, S), (N · heads, L, S) or (N, heads, L, S) and padding (N, S): True hides a key, floats
    are added to the scores. causal: position l sees the keys up to l. A row with every key hidden
    is NaN. After Vaswani et al. (2017).
    """
    heads, length, size = query.shape[1:]
    scores = F.matmul(query * (1 / math.sqrt(size)), key, transpose_b=True)
    if causal:
        length = known("attention", length, "queries")
        width = known("attention", key.shape[2], "keys")
        scores = F.where(np.triu(np.ones((length, width), bool), 1), -math.inf, scores)
    mask, padding = optional(mask), optional(padding)
    if mask is not None:
        scores = _masked(scores, _by_heads(mask, heads) if _is_3d(mask) else mask)
    if padding is not None:
        scores = _masked(scores, padding[:, None, None, :])
    return F.softmax(scores, -1)


def _is_3d(mask: Node) -> bool:
    return mask.shape is not None and len(mask.shape) == 3


def _by_heads(mask: Node, heads: int) -> Node:
    """A mask (N · heads, L, S) as (N, heads, L, S)."""
    lengths = [known("attention", extent, "positions of a mask") for extent in mask.shape[1:]]
    return F.reshape(mask, (-1, heads, *lengths))


def _masked(scores: Node, mask: Node) -> Node:
    return F.where(mask, -math.inf, scores) if _hides(mask) else scores + mask


def _hides(mask: Node) -> bool:
    """True for a mask of truth values, False for one of floats. GraphError for any other."""
    if mask.dtype is None:
        raise GraphError(
            f"attention: the dtype of the mask {mask.name} is not known when the graph is built; "
            f"declare it: bool hides keys where it is True, floats are added [{where()}]"
        )
    if mask.dtype.kind not in "bf":
        raise GraphError(
            f"attention: the mask {mask.name} is {mask.dtype}, expected bool, True where a key is "
            f"hidden, or floats that are added to the scores [{where()}]"
        )
    return bool(mask.dtype.kind == "b")


@recorded
def attend(
    query: Node,
    key: Node,
    value: Node,
    mask: Node | None = None,
    padding: Node | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    generator: Generator | None = None,
) -> Node:
    """attention_weights(…) value, without the weights: (N, heads, L, d). A row with every key
    hidden is 0, and weights are dropped with a probability.
    """
    joined = _joined_masks(mask, padding, query.shape[1])
    return F.scaled_dot_product_attention(
        query, key, value, joined, causal=causal, dropout=dropout, generator=generator
    )


@recorded
def attend_to_itself(
    qkv: Node,
    heads: int,
    mask: Node | None = None,
    padding: Node | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    generator: Generator | None = None,
) -> Node:
    """`attend` of the parts of qkv (N, L, 3 · features), without transposes: (N, L, features)."""
    joined = _joined_masks(mask, padding, heads)
    return F.packed_attention(
        qkv, heads, mask=joined, causal=causal, dropout=dropout, generator=generator
    )


def _joined_masks(mask: Node | None, padding: Node | None, heads: int) -> Node | None:
    """A mask and padding of `attention_weights` as `scaled_dot_product_attention` takes them."""
    mask, padding = optional(mask), optional(padding)
    masks = [] if mask is None else [_by_heads(mask, heads) if _is_3d(mask) else mask]
    masks += [] if padding is None else [padding[:, None, None, :]]
    visible = [F.logical_not(one) for one in masks if _hides(one)]
    added = [one for one in masks if not _hides(one)]
    both = visible[0] & visible[1] if len(visible) == 2 else visible[0] if visible else None
    bias = added[0] + added[1] if len(added) == 2 else added[0] if added else None
    if both is not None and bias is not None:
        both = F.where(both, bias, -math.inf)
    return bias if both is None else both


class MultiheadAttention(Module):
    """Attention in `heads` subspaces of features / heads extents each: softmax(Q Kᵀ / sqrt(d)) V
    with Q, K, V projections of query, key and value, joined by a last projection.

    query (L, N, features), key (S, N, kdim), value (S, N, vdim), to (L, N, features); with
    batch_first N stands before L and S. kdim and vdim are `features` unless given. `dropout` is the
    probability of dropping a weight in training. Parameters are `in_proj_weight` (3 · features,
    features), or `q_proj_weight`, `k_proj_weight` and `v_proj_weight` where kdim or vdim differ,
    `in_proj_bias`, `out_proj.weight` and `out_proj.bias`, as in PyTorch; weights begin in Xavier's
    uniform form and biases at 0. Vaswani et al. (2017). initializer: a function of `init` for the
    projections.

    GraphError unless `heads` divides `features`.

    >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = dl.randn(3, 5, 8)
    >>> layer(x, x, x).shape
    (3, 5, 8)
    """

    @declared(
        features=SIZE, heads=SIZE, dropout=PROBABILITY, bias=Bool(), kdim=SIZE, vdim=SIZE,
        batch_first=Bool(), initializer=Function(), rng=RNG,
    )  # fmt: skip
    def __init__(
        self,
        features: int,
        heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        initializer: Initializer = xavier_uniform,
        rng: Rng = None,
    ) -> None:
        if features % heads:
            raise GraphError(
                f"MultiheadAttention: {heads} heads do not divide {features} features [{where()}]"
            )
        rng = generator(rng)
        widths = (features, kdim or features, vdim or features)
        if set(widths) == {features}:
            shape = (3 * features, features)
            self.in_proj_weight = Parameter(
                drawn("MultiheadAttention", initializer, shape, rng), "in_proj_weight"
            )
        else:
            for name, width in zip(QKV, widths):
                weight = drawn("MultiheadAttention", initializer, (features, width), rng)
                setattr(self, name, Parameter(weight, name))
        self.in_proj_bias = Parameter(zeros((3 * features,)), "in_proj_bias") if bias else None
        self.out_proj = Linear(features, features, bias, initializer=initializer, rng=rng)
        self.dropout = Dropout(dropout, rng=rng) if dropout else None
        self.features, self.heads, self.batch_first = features, heads, batch_first

    def forward(
        self,
        query: Node,
        key: Node | None = None,
        value: Node | None = None,
        *,
        key_padding_mask: Node | None = None,
        attn_mask: Node | None = None,
        causal: bool = False,
        need_weights: bool = False,
    ) -> Any:
        """The output; with `need_weights` also the weights (N, heads, L, S).

        Without a key it is self-attention; the value is the key unless given. key_padding_mask
        (N, S): True hides a key, floats are added to its scores. attn_mask (L, S) or
        (N · heads, L, S): likewise for each query. causal: each position sees itself and those
        before. A query that sees no key gives 0 before the last projection, and NaN where weights
        are asked for, as in PyTorch. ShapeError for inputs without three axes.
        """
        key = query if key is None else key
        value = key if value is None else value
        drop = self.dropout if self.dropout is not None and self.dropout.training else None
        drawn: dict[str, Any] = dict(
            dropout=0.0 if drop is None else drop.probability,
            generator=None if drop is None else drop.source,
        )
        if query is key is value and self._packs and not need_weights:
            self._check_shape(query)
            qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return self.out_proj(
                attend_to_itself(qkv, self.heads, attn_mask, key_padding_mask, causal, **drawn)
            )
        q, k, v = (self._project(x, part) for part, x in enumerate((query, key, value)))
        if need_weights:
            weights = attention_weights(q, k, attn_mask, key_padding_mask, causal)
            used = weights if self.dropout is None else self.dropout(weights)
            y = self.out_proj(merge_heads(F.matmul(used, v), self.batch_first))
            return y, weights
        y = attend(q, k, v, attn_mask, key_padding_mask, causal, **drawn)
        return self.out_proj(merge_heads(y, self.batch_first))

    @property
    def _packs(self) -> bool:
        """True where self-attention takes Q, K and V as one product makes them."""
        return self.batch_first and hasattr(self, "in_proj_weight")

    def _check_shape(self, x: Node) -> None:
        order = "batch positions features" if self.batch_first else "positions batch features"
        extents = shape_of("MultiheadAttention", x, order)[:2]
        if extents == (None, None):
            known("MultiheadAttention", None, "positions")

    def _project(self, x: Node, part: int) -> Node:
        """Q, K or V of an input, in heads."""
        self._check_shape(x)
        rows = (part * self.features, (part + 1) * self.features)
        own = hasattr(self, QKV[part])
        weight = getattr(self, QKV[part]) if own else self.in_proj_weight
        return project(x, weight, self.in_proj_bias, self.heads, rows, self.batch_first)

    def options(self) -> str:
        dropout = 0.0 if self.dropout is None else self.dropout.probability
        given = dict(
            dropout=dropout, bias=self.in_proj_bias is not None, batch_first=self.batch_first
        )
        usual = dict(dropout=0.0, bias=True, batch_first=False)
        return ", ".join([f"{self.features}, {self.heads}", *changed(given, usual)])


class TransformerEncoderLayer(Module):
    """Self-attention and a network of two linear layers, each added to what it reads: x (L, N,
    features) to the same shape; (N, L, features) with batch_first.

    norm_first normalizes what each reads (`norm1`, `norm2`), else the sums. `dropout` is the
    probability for attention's weights, the hidden layer and what is added. activation: "relu" or
    "gelu". Names are PyTorch's: `self_attn.…`, `linear1`, `linear2`, `norm1`, `norm2`. Vaswani et
    al. (2017); for norm_first Xiong et al. (2020). Raises what `MultiheadAttention` raises.
    """

    @declared(
        features=SIZE, heads=SIZE, hidden=SIZE, dropout=PROBABILITY,
        activation=OneOf(*ACTIVATIONS), batch_first=Bool(), norm_first=Bool(), rng=RNG,
    )  # fmt: skip
    def __init__(
        self,
        features: int,
        heads: int,
        hidden: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        batch_first: bool = False,
        norm_first: bool = False,
        *,
        rng: Rng = None,
    ) -> None:
        rng = generator(rng)
        self.self_attn = MultiheadAttention(
            features, heads, dropout, batch_first=batch_first, rng=rng
        )
        self.linear1, self.linear2 = (
            Linear(m, n, initializer=xavier_uniform, rng=rng)
            for m, n in ((features, hidden), (hidden, features))
        )
        self.norm1, self.norm2 = LayerNorm(features), LayerNorm(features)
        self.dropouts = [Dropout(dropout, rng=rng) for _ in range(3)] if dropout else []
        self.activation, self.norm_first = activation, norm_first

    def forward(
        self,
        x: Node,
        attn_mask: Node | None = None,
        key_padding_mask: Node | None = None,
        causal: bool = False,
    ) -> Node:
        """x (L, N, features), or (N, L, features), in the same shape; the masks are those of
        `MultiheadAttention`.

        attn_mask, key_padding_mask and causal: as of `MultiheadAttention`.
        """

        def attend(x: Node) -> Node:
            y = self.self_attn(
                x, key_padding_mask=key_padding_mask, attn_mask=attn_mask, causal=causal
            )
            return self._dropped(y, 0)

        if self.norm_first:
            x = x + attend(self.norm1(x))
            return x + self._transform(self.norm2(x))
        x = self.norm1(x + attend(x))
        return self.norm2(x + self._transform(x))

    def _transform(self, x: Node) -> Node:
        hidden = self._dropped(ACTIVATIONS[self.activation](self.linear1(x)), 1)
        return self._dropped(self.linear2(hidden), 2)

    def _dropped(self, x: Node, index: int) -> Node:
        return self.dropouts[index](x) if self.dropouts else x

    def options(self) -> str:
        return ", ".join(
            changed(
                dict(activation=self.activation, norm_first=self.norm_first),
                dict(activation="relu", norm_first=False),
            )
        )


class TransformerBlock(TransformerEncoderLayer):
    """`TransformerEncoderLayer` as language models have it: batch first, normalized first, "gelu",
    4 · features hidden units; with `causal` each position sees itself and those before, so that
    blocks fit into a `Sequential`. After Radford et al. (2019).

    features, heads, dropout: as of `MultiheadAttention`.

    >>> nn.TransformerBlock(8, 2, causal=True)(dl.randn(3, 5, 8)).shape
    (3, 5, 8)
    """

    @declared(features=SIZE, heads=SIZE, dropout=PROBABILITY, causal=Bool(), rng=RNG)
    def __init__(
        self,
        features: int,
        heads: int,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        rng: Rng = None,
    ) -> None:
        super().__init__(
            features, heads, 4 * features, dropout, "gelu",
            batch_first=True, norm_first=True, rng=rng,
        )  # fmt: skip
        self.causal = causal

    def forward(
        self,
        x: Node,
        attn_mask: Node | None = None,
        key_padding_mask: Node | None = None,
        causal: bool = False,
    ) -> Node:
        """x (N, L, features) in the same shape.

        attn_mask, key_padding_mask and causal: as of `MultiheadAttention`.
        """
        return super().forward(x, attn_mask, key_padding_mask, causal or self.causal)

    def options(self) -> str:
        return "causal=True" if self.causal else ""


@recorded
def add_rows(x: Node, rows: Node) -> Node:
    """x (N, L, features) + the first L rows."""
    length = shape_of("LearnedPositions", x, "batch positions features")[1]
    length = known("LearnedPositions", length, "positions")
    if length > rows.shape[0]:
        raise GraphError(
            f"LearnedPositions: x has {length} positions and weight {rows.shape[0]} rows; give it "
            f"a larger count [{where()}]"
        )
    return x + rows[:length]


class LearnedPositions(Module):
    """x (N, L, features) + the first L rows of weight (count, features), which begin normal with
    deviation 0.02. GraphError at use for an unknown L or one above count.
    """

    @declared(count=SIZE, features=SIZE, rng=RNG)
    def __init__(self, count: int, features: int, *, rng: Rng = None) -> None:
        self.weight = Parameter(normal((count, features), rng, deviation=0.02), "weight")

    def forward(self, x: Node) -> Node:
        return add_rows(x, self.weight)

    def options(self) -> str:
        return "{}, {}".format(*self.weight.shape)


@recorded
def add_sinusoids(x: Node, base: float) -> Node:
    """x (N, L, features) + the waves of `SinusoidalPositions`."""
    _, length, features = shape_of("SinusoidalPositions", x, "batch positions features")
    length = known("SinusoidalPositions", length, "positions")
    features = known("SinusoidalPositions", features, "features")
    pairs = np.arange((features + 1) // 2)
    angles = np.arange(length)[:, None] / base ** (2 * pairs / features)
    waves = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, -1)[:, :features]
    return x + waves.astype(np.float32)


class SinusoidalPositions(Module):
    """x (N, L, features) + sin(l / base^(2k / features)) at feature 2k of position l, and the
    cosine at 2k + 1. Vaswani et al. (2017). GraphError at use for unknown L or features.
    """

    @declared(base=Int(low=2))
    def __init__(self, base: int = 10_000) -> None:
        self.base = base

    def forward(self, x: Node) -> Node:
        return add_sinusoids(x, self.base)

    def options(self) -> str:
        return "" if self.base == 10_000 else f"base={self.base}"
