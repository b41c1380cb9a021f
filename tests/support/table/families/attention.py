"""The rows of samples.py for attention: every way to hide keys, against the matrix of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.ops.attention import attention as ops
from dlsys.ops.attention import heads, packed
from support.table.families.random import SEED, keeps
from support.table.rows import Case, Domain, Sample, Shape, case, refuse, signed

KEEP = 0.75

# ---- formulas ----


def hidden(q: Any, k: Any, given: dict[str, Any], causal: bool) -> np.ndarray:
    """What is added to the scores."""
    batch, heads, rows, columns = *q.shape[:3], k.shape[2]
    added = np.zeros((batch, heads, rows, columns))
    mask, lengths = given.get("mask"), given.get("lengths")
    if mask is not None:
        added = added + (np.where(mask, 0, -np.inf) if mask.dtype == bool else mask)
    if lengths is not None:
        added[np.arange(columns) >= lengths[:, None, None, None] + np.zeros(added.shape)] = -np.inf
    if causal:
        added[:, :, ~np.tri(rows, columns, dtype=bool)] = -np.inf
    return added


def weights(q: Any, k: Any, given: dict[str, Any], causal: bool, scale: Any) -> np.ndarray:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("nhld,nhsd->nhls", q, k) * scale + hidden(q, k, given, causal)
    largest = scores.max(axis=-1, keepdims=True, initial=-1e30)
    e = np.exp(scores - largest)
    total = e.sum(axis=-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def attended(
    q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...] = (), causal: bool = False,
    scale: Any = None, dropped: bool = False,
) -> np.ndarray:  # fmt: skip
    more = dict(zip(given, rest))
    p = weights(q, k, more, causal, scale)
    if dropped:
        p = p * keeps(p.shape, KEEP) / KEEP
    y = np.einsum("nhls,nhsd->nhld", p, np.repeat(v, q.shape[1] // v.shape[1], axis=1))
    lengths = more.get("query_lengths")
    if lengths is not None:
        y[np.arange(y.shape[2]) >= lengths[:, None, None] + np.zeros(y.shape[:3])] = 0
    return y


def largest_value(q: Any, k: Any, v: Any, *rest: Any, **attrs: Any) -> np.ndarray:
    """A result is a mean of values, each of which a weight's error moves."""
    y = attended(q, k, v, *rest, **attrs)
    return np.zeros_like(y) + np.abs(v).max(initial=0) / (KEEP if attrs.get("dropped") else 1)


def grouped_sum(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(axis=2)


def of_scores(p: Any, q: Any, v: Any, dy: Any, factors: Any) -> np.ndarray:
    """The gradient of the scores, with the matrices of the derivatives of softmax."""
    dp = np.einsum("nhld,nhsd->nhls", dy, np.repeat(v, q.shape[1] // v.shape[1], axis=1)) * factors
    jacobian = np.einsum("nhls,st->nhlst", p, np.eye(p.shape[-1]))
    jacobian = jacobian - p[..., :, None] * p[..., None, :]
    return np.einsum("nhls,nhlst->nhlt", dp, jacobian)


def differentiated(
    q: Any, k: Any, v: Any, dy: Any, causal: bool = False, dropped: bool = False
) -> np.ndarray:
    """The gradients of q, k and v in a row."""
    p = weights(q, k, {}, causal, None)
    factors = keeps(p.shape, KEEP) / KEEP if dropped else np.ones(p.shape)
    ds = of_scores(p, q, v, dy, factors) * q.shape[-1] ** -0.5
    dq = np.einsum("nhls,nhsd->nhld", ds, np.repeat(k, q.shape[1] // k.shape[1], axis=1))
    dk = grouped_sum(np.einsum("nhls,nhld->nhsd", ds, q), k.shape[1])
    dv = grouped_sum(np.einsum("nhls,nhld->nhsd", p * factors, dy), k.shape[1])
    return np.concatenate([dq.ravel(), dk.ravel(), dv.ravel()])


def of_mask(q: Any, k: Any, v: Any, dy: Any, mask: Any) -> np.ndarray:
    """The gradient of a mask (L, S) of floats."""
    p = weights(q, k, {"mask": mask}, False, None)
    return of_scores(p, q, v, dy, np.ones(p.shape)).sum(axis=(0, 1))


def by_head(x: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Runs of heads of (N, L, heads · size), each (N, count, L, size)."""
    size = x.shape[2] // sum(counts)
    ends = np.cumsum(counts)
    return [
        np.stack([x[:, :, h * size : (h + 1) * size] for h in range(end - count, end)], axis=1)
        for count, end in zip(counts, ends)
    ]


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part[:, h] for part in parts for h in range(part.shape[1])], axis=-1)


def attended_packed(
    qkv: Any, *rest: Any, heads: int, kv_heads: int, dropped: bool = False, **attrs: Any
) -> np.ndarray:
    q, k, v = by_head(qkv, (heads, kv_heads, kv_heads))
    return joined(attended(q, k, v, *rest, dropped=dropped, **attrs))


def differentiated_packed(
    qkv: Any, dy: Any, heads: int, kv_heads: int, causal: bool = False, dropped: bool = False
) -> np.ndarray:
    q, k, v = by_head(qkv, (heads, kv_heads, kv_heads))
    found = differentiated(q, k, v, *by_head(dy, (heads,)), causal, dropped)
    ends = np.cumsum([q.size, k.size])
    return joined(*(x.reshape(of.shape) for x, of in zip(np.split(found, ends), (q, k, v))))


# ---- what is built ----


def build(op: Callable[..., Any], first: bool = False) -> Callable[..., Any]:
    """A node of attention whose further inputs `given` names."""

    def node(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...] = (), **attrs: Any) -> Any:
        if not first:
            return op(q, k, v, **dict(zip(given, rest)), **attrs)
        flags = dict(mask="masked", lengths="padded", query_lengths="queries_padded")
        return op(q, k, v, *rest, **{flags[name]: True for name in given}, **attrs)[0]

    return node


DRAWN = dict(seed=SEED, node=0, threshold=round(KEEP * 2**32), keep=1 / KEEP)


def build_dropped(q: Any, k: Any, v: Any, dropped: bool, causal: bool = False) -> Any:
    return ops.dropped_attention_op(
        q, k, v, ad.Parameter(np.int64(0)), causal=causal, **DRAWN
    )[0]  # fmt: skip


def build_gradient(
    q: Any, k: Any, v: Any, dy: Any, causal: bool = False, dropped: bool = False
) -> Any:
    if dropped:
        step = ad.Parameter(np.int64(0))
        y, lse = ops.dropped_attention_op(q, k, v, step, causal=causal, **DRAWN)
        made = ops.dropped_attention_gradient_op(
            q, k, v, y, lse, dy, step, causal=causal, **DRAWN
        )  # fmt: skip
    else:
        y, lse = ops.attention_op(q, k, v, causal=causal)
        made = ops.attention_gradient_op(q, k, v, y, lse, dy, causal=causal)
    dq, dk, dv = (ad.reshape_op(x, (-1,)) for x in made)
    return ad.concat_op(ad.concat_op(dq, dk), dv)


def build_of_mask(q: Any, k: Any, v: Any, dy: Any, mask: Any) -> Any:
    return ops.composed_gradient_op(q, k, v, dy, q, k, v, mask, masked=True, order=1, of=ops.MASK)


def build_dropped_second(q: Any, k: Any, v: Any, dy: Any) -> Any:
    """Of <dq, 0> + <dk, 0> + <dv, v> for dy: what dropout leaves of the weights, times v."""
    step = ad.Parameter(np.int64(0))
    zeros = ad.zeroslike_op(q), ad.zeroslike_op(k)
    return ops.dropped_composed_gradient_op(q, k, v, dy, *zeros, v, step, order=2, of=3, **DRAWN)


def build_packed(
    qkv: Any, *rest: Any, given: tuple[str, ...] = (), dropped: bool = False, **attrs: Any
) -> Any:
    if dropped:
        step = ad.Parameter(np.int64(0))
        return packed.dropped_packed_attention_op(qkv, step, **attrs, **DRAWN)[0]
    flags = dict(mask="masked", lengths="padded", query_lengths="queries_padded")
    return packed.packed_attention_op(qkv, *rest, **{flags[x]: True for x in given}, **attrs)[0]


def build_packed_gradient(qkv: Any, dy: Any, dropped: bool = False, **attrs: Any) -> Any:
    if dropped:
        step = ad.Parameter(np.int64(0))
        y, lse = packed.dropped_packed_attention_op(qkv, step, **attrs, **DRAWN)
        return packed.dropped_packed_gradient_op(qkv, y, lse, dy, step, **attrs, **DRAWN)
    y, lse = packed.packed_attention_op(qkv, **attrs)
    return packed.packed_gradient_op(qkv, y, lse, dy, **attrs)


# ---- cases ----


def truth(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.random(shape) < 0.6


def up_to(most: int, dtype: type = np.int64) -> Domain:
    return lambda rng, shape: rng.integers(0, most + 1, shape).astype(dtype)


def qkv(
    n: int, kv: int, group: int, rows: int, columns: int, size: int, value_size: int | None = None
) -> tuple[Shape, Shape, Shape]:
    value_size = size if value_size is None else value_size
    return (n, kv * group, rows, size), (n, kv, columns, size), (n, kv, columns, value_size)


def hiding(shapes: tuple[Shape, ...], causal: bool = False, **given: tuple[Shape, Domain]) -> Case:
    domain = (signed,) * 3 + tuple(domain for _, domain in given.values())
    more = tuple(shape for shape, _ in given.values())
    return case(*shapes, *more, domain=domain, given=tuple(given), causal=causal)


SMALL = qkv(2, 1, 2, 5, 7, 4, 3)
CASES = (
    case(*qkv(1, 1, 1, 1, 1, 1)), case(*SMALL), case(*SMALL, causal=True, scale=0.3),
    case(*qkv(2, 2, 1, 0, 3, 4)), case(*qkv(2, 1, 1, 3, 0, 4)), case(*qkv(0, 1, 1, 3, 2, 4)),
    case(*qkv(1, 1, 2, 140, 130, 16), causal=True), case(*qkv(1, 1, 1, 260, 520, 2)),
    case(*qkv(1, 1, 1, 5, 70, 40, 24)), case(*qkv(1, 1, 1, 17, 40, 130), causal=True),
    case(*qkv(1, 9, 1, 3, 14, 16)), case(*qkv(1, 1, 1, 3, 5, 264)),
    hiding(SMALL, mask=((5, 7), truth)), hiding(SMALL, mask=((2, 1, 1, 7), truth)),
    hiding(SMALL, causal=True, mask=((2, 2, 5, 1), truth)),
    hiding(SMALL, lengths=((2,), up_to(7))),
    hiding(SMALL, causal=True, lengths=((2,), up_to(7, np.int32)), query_lengths=((2,), up_to(5))),
    hiding(qkv(2, 1, 1, 6, 150, 8), mask=((2, 1, 6, 150), truth), lengths=((2,), up_to(150))),
)  # fmt: skip
BIASED = (
    hiding(SMALL, mask=((2, 5, 7), signed)), hiding(SMALL, causal=True, mask=((7,), signed)),
    hiding(qkv(1, 2, 1, 7, 80, 8), mask=((2, 1, 80), signed)),
)  # fmt: skip
BACKWARD = tuple(
    case(*shapes, (*shapes[0][:3], shapes[2][3]), causal=causal)
    for shapes, causal in (
        (SMALL, False), (SMALL, True), (qkv(1, 2, 1, 9, 35, 24), True),
        (qkv(1, 9, 1, 20, 30, 5), False), (qkv(2, 1, 1, 0, 3, 4), False),
    )
)  # fmt: skip
REFUSED = (
    refuse(r"expected q, k and v \(N, heads, positions, size\)", (2, 3), (2, 3), (2, 3)),
    refuse("expected q .* k .* and v", (1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)),
    refuse("3 heads of keys do not divide 4 of queries", *qkv(1, 4, 1, 2, 2, 2)[:1],
           *qkv(1, 3, 1, 2, 2, 2)[1:]),
    refuse(r"mask \(3, 7\) does not broadcast", *SMALL, (3, 7), given=("mask",)),
    refuse(r"expected lengths \(2,\) of int32 or int64", *SMALL, (2,), given=("lengths",)),
)  # fmt: skip
DROPPED = tuple(
    case(*shapes, dropped=True, causal=causal)
    for shapes, causal in ((SMALL, False), (qkv(1, 2, 1, 9, 35, 8), True))
)

PACKED = (
    case((2, 5, 16), heads=2, kv_heads=1), case((1, 140, 48), heads=1, kv_heads=1, causal=True),
    case((2, 9, 90), heads=4, kv_heads=1, scale=0.3), case((0, 3, 12), heads=1, kv_heads=1),
    case((2, 0, 12), heads=1, kv_heads=1),
    case((2, 5, 32), (2,), heads=2, kv_heads=1, given=("lengths",), domain=(signed, up_to(5))),
    case((2, 6, 32), (2, 2, 6, 6), heads=2, kv_heads=1, given=("mask",), domain=(signed, truth)),
)  # fmt: skip
PACKED_BACKWARD = tuple(
    case(shape, (*shape[:2], width), heads=heads, kv_heads=kv_heads, causal=causal)
    for shape, width, heads, kv_heads, causal in (
        ((2, 5, 32), 16, 2, 1, False), ((1, 9, 72), 24, 1, 1, True),
    )
)  # fmt: skip
PACKED_REFUSED = (
    refuse(r"expected \(N, positions, 4 · size\)", (2, 3, 7), heads=2, kv_heads=1),
    refuse("2 heads of keys do not divide 3 of queries", (2, 3, 14), heads=3, kv_heads=2),
)


def largest_packed(qkv: Any, *rest: Any, heads: int, kv_heads: int, **attrs: Any) -> np.ndarray:
    width = qkv.shape[2] * heads // (heads + 2 * kv_heads)
    most = np.abs(qkv).max(initial=0) / (KEEP if attrs.get("dropped") else 1)
    return np.full((*qkv.shape[:2], width), most)


def largest_packed_gradient(*arrays: Any, **attrs: Any) -> np.ndarray:
    return np.abs(differentiated_packed(*arrays, **attrs)).max(initial=1)


# Worst: 2.2 ulp of the largest value, of sums over up to 300 weights. Second gradients come from
# the composition, whose sums over keys cancel.
ATTENTION = (
    Sample(
        "attention", ops.attention, attended, CASES, scale=largest_value, ulps=8,
        gradient_ulps=32, roundings=3, differentiable=(0, 1, 2), specials=False,
        refusals=REFUSED, build=build(ops.attention),
    ),
    Sample(
        "attention_op", ops.attention_op, attended, (*CASES[1:3], CASES[-2]),
        scale=largest_value, ulps=8, gradient_ulps=32, roundings=3, differentiable=(0, 1, 2),
        specials=False, build=build(ops.attention_op, first=True),
    ),
    Sample(
        "attention_biased", ops.attention, attended, BIASED, scale=largest_value, ulps=8,
        gradient_ulps=32, roundings=8, differentiable=(0, 1, 2, 3), specials=False,
        build=build(ops.attention),
    ),
    Sample(
        "dropped_attention", ops.dropped_attention_op, attended, DROPPED, scale=largest_value,
        ulps=8, gradient_ulps=32, roundings=3, specials=False, build=build_dropped,
    ),
    Sample(
        "attention_gradient", ops.attention_gradient_op, differentiated, BACKWARD, ulps=64,
        scale=lambda *arrays, **attrs: np.abs(differentiated(*arrays, **attrs)).max(initial=1),
        roundings=16, differentiable=(), specials=False, build=build_gradient,
    ),
    Sample(
        "dropped_attention_gradient", ops.dropped_attention_gradient_op, differentiated,
        tuple(Case(one.shapes, {**one.attrs, "dropped": True}) for one in BACKWARD[:3]),
        scale=lambda *arrays, **attrs: np.abs(differentiated(*arrays, **attrs)).max(initial=1),
        ulps=64, roundings=16, differentiable=(), specials=False, build=build_gradient,
    ),
    Sample(
        "packed_attention", packed.packed_attention, attended_packed, PACKED,
        scale=largest_packed,
        ulps=8, gradient_ulps=32, roundings=3, differentiable=(0,), specials=False,
        refusals=PACKED_REFUSED, build=build_packed,
    ),
    Sample(
        "packed_attention_op", packed.packed_attention_op, attended_packed, PACKED[:1],
        scale=largest_packed,
        ulps=8, gradient_ulps=32, roundings=3, differentiable=(0,), specials=False,
        build=build_packed,
    ),
    Sample(
        "dropped_packed_attention", packed.dropped_packed_attention_op, attended_packed,
        tuple(Case(one.shapes, {**one.attrs, "dropped": True}) for one in PACKED[:3]),
        scale=largest_packed,
        ulps=8, gradient_ulps=32, roundings=3, specials=False, build=build_packed,
    ),
    Sample(
        "packed_attention_gradient", packed.packed_gradient_op, differentiated_packed,
        PACKED_BACKWARD, ulps=64, roundings=16, differentiable=(), specials=False,
        scale=largest_packed_gradient,
        build=build_packed_gradient,
    ),
    Sample(
        "dropped_packed_attention_gradient", packed.dropped_packed_gradient_op,
        differentiated_packed,
        tuple(Case(one.shapes, {**one.attrs, "dropped": True}) for one in PACKED_BACKWARD),
        ulps=64, roundings=16, differentiable=(), specials=False,
        scale=largest_packed_gradient,
        build=build_packed_gradient,
    ),
    Sample(
        "split_heads", heads.split_heads_op,
        lambda x, heads, first, count: np.stack(
            np.split(x, heads, axis=2)[first : first + count], axis=1
        ),
        (case((2, 3, 20), heads=5, first=1, count=3), case((1, 4, 6), heads=1, first=0, count=1)),
        refusals=(refuse("heads 2 to 5 of 4 are not in", (2, 3, 8), heads=4, first=2, count=3),),
    ),
    Sample(
        "join_heads", heads.join_heads_op, lambda *parts, counts: joined(*parts),
        (case((2, 3, 4, 5), (2, 1, 4, 5), counts=(3, 1)), case((1, 2, 3, 4), counts=(2,))),
        refusals=(
            refuse("else alike, got", (2, 3, 4, 5), (2, 3, 5, 5), counts=(3, 3)),
            refuse("of \\(3, 2\\) heads", (2, 3, 4, 5), (2, 3, 4, 5), counts=(3, 2)),
        ),
    ),
    Sample(
        "attention_of_mask", ops.composed_gradient_op, of_mask,
        (case(*qkv(1, 2, 1, 3, 4, 2), (1, 2, 3, 2), (3, 4)),), ulps=64, roundings=32,
        scale=lambda q, k, v, dy, mask: np.abs(dy).max() * np.abs(v).max() * np.ones(mask.shape),
        differentiable=(), specials=False, build=build_of_mask,
    ),
    Sample(
        "dropped_attention_second", ops.dropped_composed_gradient_op,
        lambda q, k, v, dy: attended(q, k, v, dropped=True),
        (case(*qkv(1, 2, 1, 3, 4, 2), (1, 2, 3, 2)),), ulps=64, roundings=16,
        differentiable=(), specials=False, build=build_dropped_second,
    ),
)  # fmt: skip
