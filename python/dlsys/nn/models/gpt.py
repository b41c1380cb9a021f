"""GPT: a language model of causal transformer blocks, with the state's names of GPT-2's public
checkpoints. Radford et al., "Language models are unsupervised multitask learners" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ... import functional as F
from ...autodiff import Node, Parameter
from ...errors import DataError, GraphError
from ...functional.record import optional, recorded
from ...graph.lines import where
from ...init import Rng, generator, normal
from ...ops.attention.cached import append_to_cache_op, cached_attention_op
from ...ops.elementwise import as_node, cast_like_op
from ..layers import Embedding, Linear
from ..module import Module
from ..norm import LayerNorm, RMSNorm
from ..regularize import Dropout
from ..shapes import known, shape_of

_WORDS = {
    "positions": ("learned", "rotary"),
    "norm": ("layer", "rms"),
    "mlp": ("gelu", "swiglu"),
}
_ROTARY_BASE = 10_000.0
# GPT-2's public checkpoints store these weights as (inputs, outputs), for x @ weight.
_STORED_TRANSPOSED = (
    "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
)  # fmt: skip
_BUFFERS = (".attn.bias", ".attn.masked_bias")  # constant masks that old files carry


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and variants of a `GPT`; as they are by default, with 50,257 tokens, 1,024
    positions, 12 layers, 12 heads and 768 features, those of GPT-2's smallest model.

    vocabulary: how many tokens there are. context: the most positions. hidden: the units of the
    MLP, by default 4 · features, and with "swiglu" 8/3 · features rounded up to a multiple of 64.
    dropout: the probability for embeddings, attention's weights and what blocks add. positions:
    "learned", or "rotary" (Su et al., 2021). norm: "layer" or "rms". mlp: "gelu", in its tanh form
    as GPT-2 has it, or "swiglu" (Shazeer, 2020). bias: of the linear layers. tied: the weight of
    the embedding is that of the last layer. GraphError for values out of range.

    >>> nn.GPTConfig(features=64, heads=4, mlp="swiglu").hidden_units
    192
    """

    vocabulary: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    features: int = 768
    hidden: int | None = None
    dropout: float = 0.0
    positions: str = "learned"
    norm: str = "layer"
    mlp: str = "gelu"
    bias: bool = True
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "context", "layers", "heads", "features")
        wrong = [name for name in sizes if not _is_size(getattr(self, name))]
        wrong += ["hidden"] if not (self.hidden is None or _is_size(self.hidden)) else []
        if wrong:
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong)
            raise GraphError(f"GPTConfig: expected positive integers, got {got} [{where()}]")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise GraphError(
                    f"GPTConfig: {name} is {getattr(self, name)!r}, expected {' or '.join(words)} "
                    f"[{where()}]"
                )
        if self.features % self.heads or (self.positions == "rotary" and self.head_size % 2):
            raise GraphError(
                f"GPTConfig: {self.heads} heads of {self.features} features; heads must divide "
                f"features, and into even extents for rotary positions [{where()}]"
            )

    @property
    def head_size(self) -> int:
        """The features of a head."""
        return self.features // self.heads

    @property
    def hidden_units(self) -> int:
        """The units of an MLP."""
        if self.hidden is not None:
            return self.hidden
        return 4 * self.features if self.mlp == "gelu" else -(-8 * self.features // (3 * 64)) * 64


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class Memory(NamedTuple):
    """Where cached attention stands: the keys and values so far of a layer, Parameters (N, heads,
    context, d), and the position of the first new token, an int64 scalar node.
    """

    keys: Parameter
    values: Parameter
    start: Node


def attend(q: Node, k: Node, v: Node, dropout: Dropout | None = None) -> Node:
    """Causal softmax(q kᵀ / sqrt(d)) v of q, k and v (N, heads, L, d)."""
    drops = dropout is not None and dropout.training
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        causal=True,
        dropout=dropout.probability if dropout is not None and drops else 0.0,
        generator=dropout.source if dropout is not None and drops else None,
    )


@recorded
def _heads(qkv: Node, heads: int) -> Node:
    """qkv (N, L, 3 · features) as (3, N, heads, L, d)."""
    _, length, width = qkv.shape
    x = F.reshape(qkv, (-1, length, 3, heads, width // (3 * heads)))
    return F.transpose(x, (2, 0, 3, 1, 4))


@recorded
def _merged(x: Node) -> Node:
    """x (N, heads, L, d) as (N, L, heads · d)."""
    return F.flatten(F.transpose(x, (0, 2, 1, 3)), 2)


@recorded
def rotate(x: Node, context: int, start: Node | None = None) -> Node:
    """x (N, heads, L, d) with the pair (i, i + d/2) of each position l turned by the angle
    l / 10000^(2i / d): rotary positions (Su et al., 2021), in the halves that GPT-NeoX pairs.

    context: the most positions. start: the first position, 0 unless given.
    """
    half = x.shape[-1] // 2
    angles = np.arange(context)[:, None] / _ROTARY_BASE ** (np.arange(half) / half)
    cos, sin = (
        cast_like_op(_rows(as_node(wave(angles).astype(np.float32)), x.shape[2], start), x)
        for wave in (np.cos, np.sin)
    )
    a, b = x[..., :half], x[..., half:]
    return F.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@recorded
def _positioned(x: Node, table: Node, start: Node | None = None) -> Node:
    """x (N, L, features) + L rows of a table (context, features), from row `start` on."""
    return x + _rows(table, x.shape[1], start)


def _rows(table: Any, length: int, start: Node | None) -> Any:
    """`length` rows of a table (context, …), from row `start` on."""
    start = optional(start)
    return table[:length] if start is None else F.take(table, start + np.arange(length))


class CausalSelfAttention(Module):
    """Each position attends to itself and those before: x (N, L, features) to the same shape.

    Parameters are `c_attn`, of queries, keys and values, and `c_proj`. config: a `GPTConfig`.
    """

    def __init__(self, config: GPTConfig, rng: np.random.Generator) -> None:
        n = config.features
        self.c_attn = _linear(config, n, 3 * n, rng)
        self.c_proj = _linear(config, n, n, rng, residual=True)
        self.dropout = Dropout(config.dropout, rng=rng) if config.dropout else None
        self.config = config

    def forward(self, x: Node, memory: Memory | None = None) -> Any:
        """x (N, L, features) in the same shape; with `memory` a tuple of it and of what stores the
        new keys and values there.
        """
        qkv = self.c_attn(x)
        if memory is None and self.config.positions != "rotary":
            return self.c_proj(self._attended(qkv))
        parts = _heads(qkv, self.config.heads)
        q, k, v = parts[0], parts[1], parts[2]
        start = None if memory is None else memory.start
        if self.config.positions == "rotary":
            q, k = (rotate(part, self.config.context, start) for part in (q, k))
        if memory is None:
            return self.c_proj(_merged(attend(q, k, v, dropout=self.dropout)))
        stored = append_to_cache_op(memory.keys, memory.values, k, v, memory.start)
        scale = 1 / math.sqrt(self.config.head_size)
        y = cached_attention_op(q, stored[0], stored[1], memory.start, scale=scale)
        return self.c_proj(y), stored

    def _attended(self, qkv: Node) -> Node:
        """Causal attention of the parts of qkv (N, L, 3 · features), without transposes."""
        drops = self.dropout if self.dropout is not None and self.dropout.training else None
        return F.packed_attention(
            qkv,
            self.config.heads,
            causal=True,
            dropout=0.0 if drops is None else drops.probability,
            generator=None if drops is None else drops.source,
        )


class FeedForward(Module):
    """The MLP of a block: `c_fc`, the activation, `c_proj`; with "swiglu" the activation is
    silu(`c_gate`) · `c_fc`. config: a `GPTConfig`.
    """

    def __init__(self, config: GPTConfig, rng: np.random.Generator) -> None:
        n, hidden = config.features, config.hidden_units
        self.c_fc = _linear(config, n, hidden, rng)
        self.c_gate = _linear(config, n, hidden, rng) if config.mlp == "swiglu" else None
        self.c_proj = _linear(config, hidden, n, rng, residual=True)

    def forward(self, x: Node) -> Node:
        if self.c_gate is None:
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))


class GPTBlock(Module):
    """x + attn(ln_1(x)), then x + mlp(ln_2(x)): x (N, L, features) to the same shape. config: a
    `GPTConfig`.
    """

    def __init__(self, config: GPTConfig, rng: np.random.Generator) -> None:
        self.ln_1 = _norm(config)
        self.attn = CausalSelfAttention(config, rng)
        self.ln_2 = _norm(config)
        self.mlp = FeedForward(config, rng)
        self.dropouts = [Dropout(config.dropout, rng=rng) for _ in range(2)]
        self.dropouts = self.dropouts if config.dropout else []

    def forward(self, x: Node, memory: Memory | None = None) -> Any:
        """x in the same shape; with `memory` a tuple of it and of what stores keys and values."""
        made = self.attn(self.ln_1(x), memory)
        y, *stored = made if memory is not None else (made,)
        x = x + self._dropped(y, 0)
        x = x + self._dropped(self.mlp(self.ln_2(x)), 1)
        return (x, *stored) if memory is not None else x

    def _dropped(self, x: Node, index: int) -> Node:
        return self.dropouts[index](x) if self.dropouts else x


class GPT(Module):
    """A causal language model: tokens (N, L), int32 or int64, to logits (N, L, vocabulary) of the
    token that follows each position. L is known when the graph is built, and at most the context.

    config: a `GPTConfig`. options: its fields as keywords, `nn.GPT(layers=4, features=128)`.
    seed: what weights are drawn from: normal with deviation 0.02, divided by sqrt(2 · layers)
    where a product is added to the residual stream, as in GPT-2. State has the names of GPT-2's
    public checkpoints, `wte.weight`, `h.0.attn.c_attn.weight`, …, and `load_gpt2` reads those;
    weights are (outputs, inputs) here. GraphError for fields out of range.

    >>> model = nn.GPT(vocabulary=65, context=32, layers=2, heads=2, features=16, seed=0)
    >>> model(dl.zeros(3, 8, dtype="int64")).shape
    (3, 8, 65)
    """

    def __init__(
        self, config: GPTConfig | None = None, *, seed: Rng = None, **options: Any
    ) -> None:
        unknown = sorted(options.keys() - {field.name for field in fields(GPTConfig)})
        if unknown:
            raise GraphError(f"GPT: GPTConfig has no field {', '.join(unknown)} [{where()}]")
        config = replace(config or GPTConfig(), **options)
        object.__setattr__(self, "made_with", ((), {**asdict(config), "seed": seed}))
        rng = generator(seed)
        drawn = partial(normal, deviation=0.02)
        self.config = config
        self.wte = Embedding(config.vocabulary, config.features, initializer=drawn, rng=rng)
        learned = config.positions == "learned"
        self.wpe = (
            Embedding(config.context, config.features, initializer=drawn, rng=rng)
            if learned
            else None
        )
        self.dropout = Dropout(config.dropout, rng=rng) if config.dropout else None
        self.h = [GPTBlock(config, rng) for _ in range(config.layers)]
        self.ln_f = _norm(config)
        self.lm_head = (
            None
            if config.tied
            else Linear(config.features, config.vocabulary, bias=False, initializer=drawn, rng=rng)
        )

    def forward(self, tokens: Node) -> Node:
        """tokens (N, L) to logits (N, L, vocabulary)."""
        x = self._embedded(tokens, None)
        for block in self.h:
            x = block(x)
        return self._logits(x)

    def cached(
        self, tokens: Node, start: Node, memory: Sequence[tuple[Parameter, Parameter]]
    ) -> tuple[Node, list[Node]]:
        """The logits (N, vocabulary) behind the last of tokens (N, L) at the positions from `start`
        on, and the updates that store their keys and values in the memory: what generation computes
        for new tokens.

        start: an int64 scalar; start + L is at most the context. memory: for each layer the keys
        and values of the positions before, Parameters (N, heads, context, head_size); what stands
        at later positions has no influence.
        """
        x, made = self._embedded(tokens, start), []
        for block, (keys, values) in zip(self.h, memory):
            x, stored = block(x, Memory(keys, values, start))
            made.append(stored)
        return self._logits(x[:, -1]), made

    def load_gpt2(self, values: Mapping[str, Any]) -> None:
        """Takes over the weights of a GPT-2 checkpoint: arrays or PyTorch tensors by the names of
        the public files, with or without the prefix `transformer.`, whose linear layers are stored
        as (inputs, outputs). DataError for a name that is missing or unexpected, or another shape;
        nothing is changed then.
        """
        self.load_state_dict(gpt2_weights(values))

    def gpt2_state_dict(self) -> dict[str, np.ndarray]:
        """The weights as GPT-2's public checkpoints have them, for other programs to load."""
        return {
            name: np.ascontiguousarray(value.T) if name.endswith(_STORED_TRANSPOSED) else value
            for name, value in self.state_dict().items()
        }

    def _embedded(self, tokens: Node, start: Node | None) -> Node:
        length = known("GPT", shape_of("GPT", tokens, "batch positions")[1], "positions")
        if length > self.config.context:
            raise GraphError(
                f"GPT: {length} positions are more than the context of {self.config.context}; give "
                f"fewer tokens or make the model with a larger context [{where()}]"
            )
        x = self.wte(tokens)
        if self.wpe is not None:
            x = _positioned(x, self.wpe.weight, start)
        return x if self.dropout is None else self.dropout(x)

    def _logits(self, x: Node) -> Node:
        x = self.ln_f(x)
        return F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)


def _linear(
    config: GPTConfig, inputs: int, outputs: int, rng: np.random.Generator, residual: bool = False
) -> Linear:
    deviation = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
    initializer = partial(normal, deviation=deviation)
    return Linear(inputs, outputs, config.bias, initializer=initializer, rng=rng)


def _norm(config: GPTConfig) -> Module:
    return LayerNorm(config.features) if config.norm == "layer" else RMSNorm(config.features)


def decay_groups(model: Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters of a model as two groups for an optimizer: matrices and embeddings, which
    decay, and vectors, biases and the gains of normalizations, which do not. weight_decay: of the
    first, as of `Optimizer`.

    >>> [len(group["params"]) for group in nn.decay_groups(nn.Linear(2, 3), 0.1)]
    [1, 1]
    """
    groups: dict[bool, list[Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[len(parameter.shape) > 1].append(parameter)
    made = [{"params": groups[True], "weight_decay": weight_decay}]
    return made + [{"params": groups[False], "weight_decay": 0.0}]


def gpt2_weights(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A GPT-2 checkpoint's weights under the names and in the layout of `GPT`."""
    found = {}
    for name, value in values.items():
        own = name.removeprefix("transformer.")
        if own.endswith(_BUFFERS):
            continue
        array = np.asarray(value)
        found[own] = array.T if own.endswith(_STORED_TRANSPOSED) else array
    if "wte.weight" in found and np.array_equal(
        found.get("lm_head.weight", np.zeros(0)), found["wte.weight"]
    ):
        del found["lm_head.weight"]  # saved under both of its names
    return found


def gpt2_config(values: Mapping[str, Any], heads: int | None = None) -> GPTConfig:
    """The sizes of the model that a GPT-2 checkpoint is of.

    heads: which its arrays do not say; features / 64, as of every public GPT-2, unless given.
    DataError where there is no such model.
    """
    weights = gpt2_weights(values)
    lacking = [n for n in ("wte.weight", "wpe.weight", "ln_f.weight") if n not in weights]
    if lacking:
        raise DataError(
            f"a GPT-2 checkpoint has {', '.join(lacking)}, which these {len(weights)} arrays lack"
        )
    vocabulary, features = weights["wte.weight"].shape
    layers = len({name.split(".")[1] for name in weights if name.startswith("h.")})
    first = weights.get("h.0.mlp.c_fc.weight")
    if not layers or first is None or (heads is None and features % 64):
        raise DataError(
            f"a GPT-2 checkpoint of {features} features and {layers} layers: expected h.0 and so "
            "on, and heads=… where a head does not have 64 features"
        )
    return GPTConfig(
        vocabulary=vocabulary,
        context=len(weights["wpe.weight"]),
        layers=layers,
        heads=heads or features // 64,
        features=features,
        hidden=len(first) if len(first) != 4 * features else None,
        tied="lm_head.weight" not in weights,
    )
