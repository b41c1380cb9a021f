"""Attention written by hand: product, scale, masks, softmax, dropout, product, and the gradients of
all that, as the operators of attention, which hold no matrix of weights.

Pattern: softmax of the product of a (N, heads, L, d), or (N, L, d), with the transpose of b, which
may be scaled, masked by constants and dropped, times v. Where gradients read the weights, all of
them must be those of this chain. Masks are constants in which every row sees a key, since softmax
of a row that sees none is NaN and attention 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..graph.lines import attributed_to
from ..graph.node import Node, same_nodes
from ..ops.attention.attention import (
    attention_gradient_op,
    attention_op,
    dropped_attention_gradient_op,
    dropped_attention_op,
)
from ..ops.comparison import where_op
from ..ops.elementwise import add_op, div_byconst_op, mul_byconst_op, mul_op, sub_op
from ..ops.leaf import constant_op
from ..ops.loss.softmax import softmax_op
from ..ops.matmul import batched_matmul_op
from ..ops.movement import reshape_op, transpose_op
from ..ops.random.sampling import masked_op
from ..ops.reduce import sum_op
from ..passes.pipeline import Options, Pass
from ..settings import settings
from .shared.rewrite import Graph, exchange, value_of

_SCALES = {mul_byconst_op: lambda c: c, div_byconst_op: lambda c: 1 / c}


class _Scores(NamedTuple):
    """The chain from a softmax's input up to the product of a with the transpose of b."""

    chain: list[Node]
    a: Node
    b: Node
    scale: float
    causal: bool
    mask: np.ndarray | None  # all others as one

    @property
    def inputs(self) -> tuple[Node, Node]:
        return self.a, self.b


class _Found(NamedTuple):
    """A match. `inner` are the nodes that go; `gradients` are those of a, b and v, by number, each
    perhaps as its transpose.
    """

    inner: list[Node]
    scores: _Scores
    dropout: Node | None
    y: Node
    v: Node
    dy: Node | None
    gradients: dict[Node, tuple[int, bool]]


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph with its attention as one operator, and one for its gradients."""
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op is softmax_op:
            found = _match(graph, node)
            if found is not None and _is_alone(graph, found):
                _replace(found, options, replaced)
    return exchange(fetches, replaced)


# ---- what is matched ----


def _match(graph: Graph, softmax: Node) -> _Found | None:
    scores = _scores_of(softmax.inputs[0])
    if scores is None:
        return None
    dropout = next((x for x in graph.users[softmax] if x.op is masked_op), None)
    used = softmax if dropout is None else dropout
    y = next((x for x in graph.users[used] if _is_product(x, used, None)), None)
    if y is None or y.inputs[1].spec.shape[:-2] != scores.b.spec.shape[:-2]:
        return None
    inner = [*scores.chain, *dict.fromkeys((softmax, used))]
    found = _Found(inner, scores, dropout, y, y.inputs[1], None, {})
    summed = next((x for x in graph.users[softmax] if x.op is mul_op), None)
    return found if summed is None else _with_gradients(graph, found, softmax, used)


def _is_product(
    node: Node, a: Node | None, b: Node | None, trans_A: bool = False, trans_B: bool = False
) -> bool:
    """True for a batched product of these operands, of any where they are None."""
    return (
        node.op is batched_matmul_op
        and (node.attrs["trans_A"], node.attrs["trans_B"]) == (trans_A, trans_B)
        and "algo" not in node.attrs
        and (a is None or node.inputs[0] is a)
        and (b is None or node.inputs[1] is b)
    )


def _scores_of(node: Node) -> _Scores | None:
    chain, masks, scale = [node], [], 1.0
    while not _is_product(node, None, None, trans_B=True):
        masked = _mask_of(node) if scale == 1 else None  # masks follow the scale
        if masked is not None:
            node, mask = masked
            masks.append(mask)
        elif node.op in _SCALES:
            scale *= _SCALES[node.op](node.attrs["const"])
            node = node.inputs[0]
        else:
            return None
        chain.append(node)
    a, b = node.inputs
    shape = node.spec.shape
    if len(shape) not in (3, 4) or a.spec.shape[:-2] != b.spec.shape[:-2]:
        return None
    later = [k for k, mask in enumerate(masks) if _is_causal(mask, shape)]
    others = [mask for k, mask in enumerate(masks) if k not in later[:1]]
    found = _Scores(chain, a, b, scale, bool(later), _joined(others))
    return found if _rows_see(found, shape) else None


def _mask_of(node: Node) -> tuple[Node, np.ndarray] | None:
    """What a node masks, and by which constant: truth values, True where a key takes part, or
    floats that are added.
    """
    if node.op is where_op and node.inputs[0].op is constant_op:
        condition, a, b = node.inputs
        hidden = np.asarray(condition.attrs["value"])
        for x, other, visible in ((b, a, ~hidden), (a, b, hidden)):
            if _is_filled(other, -np.inf) and x.spec.shape == node.spec.shape:
                return x, visible
    if node.op is add_op:
        for x, other in (node.inputs, node.inputs[::-1]):
            if other.op is constant_op and x.spec.shape == node.spec.shape:
                return x, np.asarray(other.attrs["value"])
    return None


def _is_filled(node: Node, number: float) -> bool:
    filled = node.op is constant_op or node.op.constant_fill
    return filled and bool(np.all(np.asarray(node.attrs["value"]) == number))


def _is_causal(mask: np.ndarray, shape: tuple[int, ...]) -> bool:
    rows, columns = shape[-2:]
    alone = mask.dtype == bool and mask.size == rows * columns
    return alone and np.array_equal(
        mask.reshape(rows, columns), np.tri(rows, columns, dtype=np.bool_)
    )


def _joined(masks: Sequence[np.ndarray]) -> np.ndarray | None:
    """Masks as one: of truth values where all are, else of floats."""
    if not masks:
        return None
    if all(mask.dtype == bool for mask in masks):
        return np.logical_and.reduce(np.broadcast_arrays(*masks))
    floats = next(mask.dtype for mask in masks if mask.dtype != bool)
    added = [np.where(m, 0, -np.inf).astype(floats) if m.dtype == bool else m for m in masks]
    return sum(added[1:], added[0])


def _rows_see(scores: _Scores, shape: tuple[int, ...]) -> bool:
    """True where every row sees a key."""
    visible = np.ones((1, 1), bool)
    if scores.mask is not None:
        visible = scores.mask if scores.mask.dtype == bool else scores.mask > -np.inf
    if scores.causal:
        visible = visible & np.tri(*shape[-2:], dtype=np.bool_)
    return shape[-1] > 0 and bool(visible.any(axis=-1).all())


def _with_gradients(graph: Graph, found: _Found, softmax: Node, used: Node) -> _Found | None:
    """The match with the chain back: dp = dy vᵀ, ds = p dp - p Σ p dp, through scale and masks."""
    weighted = next(
        (x for x in graph.users[softmax] if x.op is mul_op and _of_weights(found, x, softmax)), None
    )
    if weighted is None:
        return None
    dp = next(x for x in weighted.inputs if x is not softmax)
    inner = [*found.inner, weighted, dp]
    if found.dropout is not None:
        dp = dp.inputs[0]
        inner.append(dp)
    total = next((x for x in graph.users[weighted] if x.op is sum_op), None)
    shared = next(
        (x for x in graph.users[softmax] if x.op is mul_op and total in {*x.inputs}), None
    )
    ds = next((x for x in graph.users[weighted] if x.op is sub_op), None)
    if total is None or shared is None or ds is None:
        return None
    if not same_nodes(ds.inputs, (weighted, shared)):
        return None
    inner += [total, shared]
    last = _through(graph, ds, found.scores, inner)
    if last is None or not total.attrs["keepdims"] or total.attrs["axis"] not in (-1, (-1,)):
        return None
    dy, gradients = dp.inputs[0], {}
    for x in graph.users[last]:
        a, b = found.scores.inputs
        if _is_product(x, last, b):
            gradients[x] = 0, False
        elif _is_product(x, last, a, trans_A=True):
            gradients[x] = 1, False
        elif _is_product(x, a, last, trans_A=True):
            gradients[x] = 1, True
    for x in graph.users[used]:
        if _is_product(x, used, dy, trans_A=True) and graph.position[x] > graph.position[dp]:
            gradients[x] = 2, False
    return found._replace(inner=inner, dy=dy, gradients=gradients)


def _of_weights(found: _Found, node: Node, softmax: Node) -> bool:
    """True for the product of the weights with their gradient."""
    dp = next((x for x in node.inputs if x is not softmax), None)
    if dp is not None and found.dropout is not None:
        same = dp.op is masked_op and dp.attrs == found.dropout.attrs
        dp = dp.inputs[0] if same and dp.inputs[1] is found.dropout.inputs[1] else None
    return dp is not None and _is_product(dp, None, found.v, trans_B=True)


def _through(graph: Graph, ds: Node, scores: _Scores, inner: list[Node]) -> Node | None:
    """The gradient of the product, from that of the softmax's input: what the chain did."""
    for one in scores.chain[:-1]:
        inner.append(ds)
        if one.op in _SCALES:
            same = {"const": one.attrs["const"]}
            step = [x for x in graph.users[ds] if x.op is one.op and x.attrs == same]
        elif one.op is where_op:
            zero_at = 1 if _is_filled(one.inputs[1], -np.inf) else 2
            step = [x for x in graph.users[ds] if _is_masked(x, one.inputs[0], zero_at)]
        else:
            inner.pop()  # a mask that is added changes nothing
            step = [ds]
        if len(step) != 1:
            return None
        ds = step[0]
    inner.append(ds)
    return ds


def _is_masked(node: Node, condition: Node, zero_at: int) -> bool:
    same = node.op is where_op and node.inputs[0] is condition
    return same and _is_filled(node.inputs[zero_at], 0.0)


def _is_alone(graph: Graph, found: _Found) -> bool:
    """True where nothing else reads what goes."""
    known = {*found.inner, *found.gradients, found.y}
    return not any(
        graph.is_fetched(node) or not known.issuperset(graph.users[node]) for node in found.inner
    )


# ---- what is made ----


def _replace(found: _Found, options: Options, replaced: dict[Node, Node]) -> None:
    scores, shape = found.scores, found.y.spec.shape
    attrs: dict[str, Any] = dict(scale=scores.scale, causal=scores.causal)
    more: list[Node] = []
    if scores.mask is not None:
        attrs["masked"] = True
        more.append(constant_op(_in_four_axes(scores.mask), dtype=_dtype_of(scores)))
    forward, backward = attention_op, attention_gradient_op
    if found.dropout is not None:
        forward, backward = dropped_attention_op, dropped_attention_gradient_op
        drawn = found.dropout.attrs
        attrs |= {key: drawn[key] for key in ("seed", "node", "threshold")}
        attrs["keep"] = drawn["scale"]
        more.append(found.dropout.inputs[1])
    with attributed_to(found.y):
        q, k, v = (_by_head(x) for x in (scores.a, scores.b, found.v))
        made = forward(q, k, v, *more, **attrs)
        made.stand_for(found.y)
        if not _fits(made, options):
            return
        y = value_of(made, 0)
        replaced[found.y] = _like(y, found.y, shape)
    if found.dy is None:
        return
    first = next(iter(found.gradients))
    with attributed_to(first):
        lse = value_of(made, 1)
        back = backward(q, k, v, y, lse, _by_head(found.dy), *more, **attrs)
        back.stand_for(first)
        for node, (number, transposed) in found.gradients.items():
            gradient = value_of(back, number)
            if transposed:
                gradient = transpose_op(gradient, (0, 1, 3, 2))
            replaced[node] = _like(gradient, node, node.spec.shape)


def _dtype_of(scores: _Scores) -> Any:
    assert scores.mask is not None
    return scores.mask.dtype if scores.mask.dtype == bool else scores.a.spec.dtype


def _in_four_axes(mask: np.ndarray) -> np.ndarray:
    """A mask of (N, L, S) scores as one of (N, 1, L, S)."""
    return mask[:, None] if mask.ndim == 3 else mask


def _by_head(x: Node) -> Node:
    """(N, L, size) as (N, 1, L, size)."""
    shape = x.spec.shape
    return x if len(shape) == 4 else reshape_op(x, (shape[0], 1, *shape[1:]))


def _like(made: Node, node: Node, shape: tuple[int, ...]) -> Node:
    if made.spec.shape == shape:
        made.name = node.name
        return made
    return reshape_op(made, shape, name=node.name)


def _fits(made: Node, options: Options) -> bool:
    """True where the target's kernel takes the arrays, no slower than what was written."""
    specs = [x.spec for x in made.inputs]
    scalars = made.op.scalars(made)
    return options.target.fits("attention", *specs[:3], tuple(specs[3:]), *scalars, *made.spec)


FUSION = Pass(
    "attention",
    fuse,
    position=3,
    needs=("attention", "attention_gradient"),
    when=lambda options: settings.attention != "naive",
)
