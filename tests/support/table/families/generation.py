"""The rows of samples.py for generation: the cache of keys and values, the draw of a token, and the
matrix-vector products that `fusion/matvec.py` builds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.fusion import matvec, matvec_chain
from dlsys.fusion.shared.body import close
from dlsys.ops.attention import cached
from dlsys.ops.norm import layer_norm as norm
from dlsys.ops.optim import assign
from dlsys.ops.random import token
from dlsys.runtime.interface import interface
from support.table.families.fused.gemm import FORMULAS, operator
from support.table.families.norm import by_row
from support.table.families.random import SEED, philox_words
from support.table.rows import Case, Domain, Sample, Shape, case, refuse, signed, uniform

Array = np.ndarray
EPS = 1e-3


def at(value: int) -> Domain:
    return lambda rng, shape: np.full(shape, value, np.int64)


# ---- formulas ----


def appended(keys: Array, values: Array, k: Array, v: Array, start: Array) -> tuple[Array, Array]:
    keys, values = keys.copy(), values.copy()
    for row in range(k.shape[2]):
        if 0 <= start + row < keys.shape[2]:
            keys[:, :, start + row], values[:, :, start + row] = k[:, :, row], v[:, :, row]
    return keys, values


def attended(q: Array, keys: Array, values: Array, start: Array, scale: float) -> Array:
    batch, heads, length, d = q.shape
    y = np.zeros((batch, length, heads, d))
    for n, h, row in np.ndindex(batch, heads, length):
        seen = slice(0, int(start) + row + 1)
        scores = np.exp(scale * keys[n, h, seen] @ q[n, h, row])
        y[n, row, h] = scores @ values[n, h, seen] / scores.sum()
    return y.reshape(batch, length, heads * d)


def drawn(logits: Array, settings: Array, seed: Array, step: Array) -> Array:
    """The tokens by the definition, token by token."""
    temperature, top_k, top_p = map(float, settings)
    tokens = []
    for row, values in enumerate(logits):
        high, low = philox_words(int(step), 0, row)[:2]
        number = ((high << 21) + (low >> 11)) / 2.0**53
        ranked = np.argsort(-values, kind="stable").tolist()
        ranked = ranked[: 1 if temperature == 0 else int(top_k) or None]
        shifted = (values - values.max()) / (temperature or 1)
        chance = {i: np.exp(shifted[i]) for i in ranked}
        total, kept, reached = sum(chance.values()), [], 0.0
        for i in ranked:
            if top_p == 1 or reached < top_p * total:
                kept.append(i)
                reached += chance[i]
        sums = np.cumsum([chance[i] for i in sorted(kept)])
        tokens.append(sorted(kept)[int(np.searchsorted(sums, number * sums[-1], side="right"))])
    return np.array(tokens, np.int64)


def layer(x: Array, w: Array, *rest: Array, **attrs: Any) -> Array:
    others = list(rest)
    if attrs["normalizes"]:
        x = by_row(x, others.pop(0), others.pop(0), None, attrs["centered"], EPS)
    y = x @ w.T
    y = FORMULAS[attrs["activation"]](y + others.pop(0) if attrs["biased"] else y)
    return y + others.pop(0) if attrs["adds"] else y


def layer_scale(x: Array, w: Array, *rest: Array, **attrs: Any) -> Array:
    """The sizes of all terms; rows that are normalized have values of about 1."""
    others = [np.abs(value) for value in rest]
    size = np.abs(x)
    if attrs["normalizes"]:
        scale, bias = others.pop(0), others.pop(0)
        size = 3 * scale + bias + np.zeros_like(x)
    return size @ np.abs(w).T + sum((value for value in others), np.zeros(1))


# ---- nodes ----


def build(x: Any, w: Any, *rest: Any, **attrs: Any) -> Any:
    inputs, others = (x, w, *rest), list(rest)
    if attrs["normalizes"]:
        options = dict(centered=attrs["centered"], eps=EPS, groups=None)
        x = norm.row_normalize_op(x, others.pop(0), others.pop(0), **options)
    y = ad.matmul_op(x, w, trans_B=True)
    y = y + others.pop(0) if attrs["biased"] else y
    y = operator(attrs["activation"])(y) if attrs["activation"] else y
    y = y + others.pop(0) if attrs["adds"] else y
    return matvec.matvec_op(*inputs, body=close(inputs, (y,)), eps=EPS, **attrs)


def chained(x: Array, *operands: Array, activations: tuple[str, ...]) -> Array:
    count = len(activations)
    for k, activation in enumerate(activations):
        x = FORMULAS[activation](x @ operands[k].T + operands[count + k])
    return x


def chained_scale(x: Array, *operands: Array, activations: tuple[str, ...]) -> Array:
    return chained(*map(np.abs, (x, *operands)), activations=("",) * len(activations))


def build_chain(x: Any, *operands: Any, activations: tuple[str, ...]) -> Any:
    count, y = len(activations), x
    for k, name in enumerate(activations):
        y = ad.matmul_op(y, operands[k], trans_B=True) + operands[count + k]
        y = operator(name)(y) if name else y
    numbers = [interface.activations.get(name, 0) << 8 * k for k, name in enumerate(activations)]
    inputs = x, *operands
    return matvec_chain.matvec_chain_op(*inputs, body=close(inputs, (y,)), activations=sum(numbers))


def chains() -> list[Case]:
    """Of two layers to four, outputs that blocks have none of, and weights in and without reach."""
    sizes = (
        (1, (400, 120, 84, 10), ("relu", "relu", "")), (4, (36, 8, 5), ("gelu_tanh", "")),
        (3, (4, 260, 12, 40, 1), ("", "relu", "gelu_tanh", "relu")), (2, (512, 64, 3), ("", "")),
    )  # fmt: skip
    made = []
    for m, widths, activations in sizes:
        weights = [(n, k) for k, n in zip(widths, widths[1:])]
        biases = [(n,) for n in widths[1:]]
        made.append(case((m, widths[0]), *weights, *biases, activations=activations))
    return made


def layers() -> list[Case]:
    """Rows of one block and of several, tails of n and k, warps that share k, and all patterns."""
    made = []
    sizes = (
        (1, 4, 1), (1, 768, 17), (2, 128, 40), (3, 36, 9), (5, 132, 33), (8, 260, 70),
        (1, 1500, 9), (2, 3072, 5), (1, 8200, 3), (1, 12, 5000),
    )  # fmt: skip
    for index, (m, k, n) in enumerate(sizes):
        for pattern in (0, 7, 1 + index % 6):
            normalizes, biased, adds = (bool(pattern >> bit & 1) for bit in range(3))
            shapes: list[Shape] = [(m, k), (n, k)]
            shapes += [(k,), (k,)] * normalizes + [(n,)] * biased + [(m, n)] * adds
            activation = ("", "gelu_tanh", "relu")[index % 3] if pattern else ""
            made.append(
                case(
                    *shapes, normalizes=normalizes, biased=biased, adds=adds,
                    centered=index % 2 == 0, activation=activation,
                )
            )  # fmt: skip
    return made


def caches() -> list[tuple[Shape, Shape, int]]:
    """New rows, a cache and a start: of one split of keys and of eight, of rows for one block and
    for several.
    """
    return [
        ((1, 2, 1, 4), (1, 2, 5, 4), 0), ((1, 2, 1, 16), (1, 2, 40, 16), 39),
        ((2, 3, 5, 8), (2, 3, 33, 8), 11), ((1, 1, 17, 64), (1, 1, 130, 64), 0),
        ((1, 2, 1, 64), (1, 2, 1100, 64), 1023), ((1, 1, 9, 12), (1, 1, 1024, 12), 1000),
        ((1, 1, 1, 132), (1, 1, 600, 132), 3), ((1, 1, 4, 512), (1, 1, 9, 512), 2),
    ]  # fmt: skip


LOGITS = ((1, 1), (1, 7), (3, 40), (2, 1025), (1, 60_001))
SETTINGS = ((0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (0.7, 5.0, 1.0), (1.3, 0.0, 0.6), (1.0, 9.0, 0.3))


def stored(*inputs: Any) -> Any:
    """Both Parameters of a cache, which one fetch updates."""
    return assign.group_op(*cached.append_to_cache_op(*inputs))


ties = lambda rng, shape: rng.integers(0, 3, shape).astype(np.float64)  # noqa: E731
spread = uniform(-8, 8)

GENERATION = (
    Sample(
        "append_to_cache", cached.append_to_cache_op, appended,
        (
            *(case(to, to, new, new, (), domain=(signed,) * 4 + (at(start),))
              for new, to, start in caches()),
            case(*((1, 1, 3, 4),) * 2, *((1, 1, 2, 4),) * 2, (), domain=(signed,) * 4 + (at(2),)),
        ),
        ulps=0, differentiable=(), states=2, storages=(), specials=False, build=stored,
        refusals=(
            refuse(
                r"expected \(N, heads, L, d\) and a cache \(N, heads, capacity, d\), got "
                r"\(1, 2, 4, 3\) and \(1, 2, 3, 3\)",
                *((1, 2, 3, 3),) * 2, *((1, 2, 4, 3),) * 2, (),
                dtypes=("float32",) * 4 + ("int64",), states=2,
            ),
            refuse(
                r"a start of one int64, got float32", *((1, 2, 3, 3),) * 4, (),
                dtypes=("float32",) * 5, states=2,
            ),
        ),
    ),
    Sample(
        "cached_attention", cached.cached_attention_op, attended,
        tuple(
            case(new, to, to, (), scale=0.25, domain=(signed,) * 3 + (at(start),))
            for new, to, start in caches()
        ),
        scale=lambda q, keys, values, start, scale: np.full(
            (q.shape[0], q.shape[2], q.shape[1] * q.shape[3]), 2.0
        ),
        ulps=16, differentiable=(), storages=(), specials=False,  # worst: 2.9
        refusals=(
            refuse(
                r"got \(1, 2, 4, 3\) and \(1, 2, 3, 3\)", (1, 2, 4, 3), *((1, 2, 3, 3),) * 2, (),
                dtypes=("float32",) * 3 + ("int64",), scale=1.0,
            ),
        ),
    ),
    Sample(
        "draw_token", token.draw_token_op, drawn,
        tuple(
            case(
                shape, (3,), (), (),
                domain=(domain, lambda rng, shape, s=settings: np.array(s), at(SEED), at(step)),
            )
            for shape in LOGITS for domain in (spread, ties)
            for step, settings in enumerate(SETTINGS)
        ),
        ulps=0, differentiable=(), storages=(), specials=False,
        refusals=(
            refuse(
                r"expected logits \(rows, n\) and settings \(3,\), got \(4,\) and \(3,\)",
                (4,), (3,), (), (), dtypes=("float32", "float32", "int64", "int64"),
            ),
            refuse(
                r"expected logits and settings in floats, got \S+ int64",
                (1, 4), (3,), (), (), dtypes=("int64", "float32", "int64", "int64"),
            ),
        ),
    ),
    Sample(
        "matvec", matvec.matvec_op, layer, tuple(layers()), scale=layer_scale, ulps=4,
        differentiable=(), specials=False, storages=(), build=build, fused=True,
    ),
    Sample(
        "matvec_chain", matvec_chain.matvec_chain_op, chained, tuple(chains()),
        scale=chained_scale, ulps=4, differentiable=(), specials=False, storages=(),
        build=build_chain, fused=True,
    ),
)  # fmt: skip
