"""Attention of q, k and v that were cut out of one array, as an operator that reads them where they
are, without the slices and transposes before it, those behind it, and those of its gradients.

Pattern: three chains of reshapes, transposes and slices from one array to the inputs of attention,
through which their elements lie there as `packed_attention` wants them. Where attention has
gradients, those of q, k and v must be placed into zeros and added up, at the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..graph.lines import attributed_to
from ..graph.node import Node, Op, find_topo_sort, same_nodes
from ..ops.attention.attention import (
    attention_gradient_op,
    attention_op,
    dropped_attention_gradient_op,
    dropped_attention_op,
)
from ..ops.attention.heads import heads_of, join_heads_op, split_heads
from ..ops.attention.packed import (
    dropped_packed_attention_op,
    dropped_packed_gradient_op,
    packed_attention_op,
    packed_gradient_op,
)
from ..ops.elementwise import add_op
from ..ops.indexing import getitem_op, place_op, region_of, window_op
from ..ops.movement import reshape_op, transpose_op
from ..passes.pipeline import Options, Pass
from ..passes.simplify import simplify
from ..settings import settings
from .shared.rewrite import Graph, exchange, value_of

_PACKED: dict[Op, Op] = {
    attention_op: packed_attention_op,
    dropped_attention_op: dropped_packed_attention_op,
    attention_gradient_op: packed_gradient_op,
    dropped_attention_gradient_op: dropped_packed_gradient_op,
}


class _Found(NamedTuple):
    """A match: attention, the array that holds its inputs, and the heads of each.

    back: its gradient. total: the gradient of `middle`, a node between the array and the inputs,
    from which it goes back by what leads there.
    """

    node: Node
    root: Node
    counts: tuple[int, int, int]
    back: Node | None = None
    middle: Node | None = None
    total: Node | None = None


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose attention reads and writes arrays of all heads."""
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op in (attention_op, dropped_attention_op):
            found = _match(graph, node)
            if found is not None:
                _replace(graph, found, options, replaced)
    if not replaced:
        return list(fetches)
    fetches = exchange(fetches, replaced)
    specs = {node: node.spec for node in find_topo_sort(fetches)}
    return simplify(specs, fetches, options.target)  # transposes of transposes


# ---- where elements are ----


def _cut(x: np.ndarray, node: Node) -> np.ndarray:
    """A window of contiguous elements; of a view it takes those that leave a view."""
    offset, shape = node.attrs["offset"], node.attrs["shape"]
    count = math.prod(shape)
    while x.ndim > 1:
        inner = math.prod(x.shape[1:])
        first, last = offset // inner, (offset + count - 1) // inner
        if first < last:
            if offset % inner == 0 == count % inner:
                return x[first : last + 1].reshape(shape)
            break
        x, offset = x[first], offset - first * inner
    return x.reshape(-1)[offset : offset + count].reshape(shape)


_MOVES: dict[Any, Callable[[np.ndarray, Node], np.ndarray]] = {
    reshape_op: lambda x, node: x.reshape(node.spec.shape),
    transpose_op: lambda x, node: x.transpose(transpose_op.permutation(node, x.ndim)),
    getitem_op: lambda x, node: (
        (region := region_of(node, "x", x.shape)) and x[region.slices].reshape(region.shape)
    ),
    window_op: _cut,
}


class _Layout(NamedTuple):
    """Where the elements of a view are in an array: the first one, and strides; the stride of an
    axis of one position does not count.
    """

    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, view: np.ndarray, base: np.ndarray) -> _Layout | None:
        """None for a copy. Elements are bytes here."""
        if not np.may_share_memory(view, base):
            return None
        strides = (s if n > 1 else 0 for s, n in zip(view.strides, view.shape))
        first = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return cls(first, tuple(strides))


def _array(shape: tuple[int, ...]) -> np.ndarray:
    """An array to take views of; its memory is never touched."""
    return np.empty(shape, np.int8)


def _moves(node: Node, base: Node | None = None) -> list[Node]:
    """The nodes, first to last, that make a node from `base`, or from the first of those before it
    that does more than to move elements.
    """
    moves = []
    while node is not base and node.op in _MOVES:
        moves.append(node)
        node = node.inputs[0]
    return moves[::-1]


def _root(node: Node) -> Node:
    moves = _moves(node)
    return moves[0].inputs[0] if moves else node


def _layout_in(node: Node, base: Node) -> _Layout | None:
    """Where the elements of a node are in one that it comes from."""
    array = view = _array(base.spec.shape)
    for move in _moves(node, base):
        view = _MOVES[move.op](view, move)
    return _Layout.of(view, array)


# ---- what is matched ----


def _match(graph: Graph, node: Node) -> _Found | None:
    parts = node.inputs[:3]
    q, k, v = (x.spec.shape for x in parts)
    if 0 in (*q, *k) or k != v or q[2] != k[2]:
        return None
    root, counts = _root(parts[0]), (q[1], k[1], k[1])
    width = sum(counts) * q[3]
    if any(_root(x) is not root for x in parts) or root.spec.size != q[0] * q[2] * width:
        return None
    packed = _array((q[0], q[2], width))
    wanted = [_Layout.of(view, packed) for view in heads_of(packed, counts)]
    if [_layout_in(x, root) for x in parts] != wanted:
        return None
    found = _Found(node, root, counts)
    backs = [
        x
        for value in graph.users[node]
        for x in graph.users[value]
        if x.op in (attention_gradient_op, dropped_attention_gradient_op)
    ]
    backs = list(dict.fromkeys(backs))
    if not backs:
        return found
    return _with_gradient(graph, found, backs[0]) if len(backs) == 1 else None


def _with_gradient(graph: Graph, found: _Found, back: Node) -> _Found | None:
    """The match with the gradients of q, k and v, placed and added up."""
    parts = found.node.inputs[:3]
    values = {x.attrs["index"]: x for x in graph.users[back]}
    ways = [_way_to_place(graph, values[k]) for k in range(3) if k in values]
    there = [way for way in ways if way is not None]
    if len(there) != 3 or not same_nodes(back.inputs[:3], parts):
        return None
    total = _sum_of(graph, [way[-1] for way in there])
    if total is None:
        return None
    placed = [_layout_of_placed(way) for way in there]
    shared = set.intersection(*({found.root, *_moves(x)} for x in parts))
    for middle in (found.root, *_moves(parts[0])):
        if middle in shared and middle.spec.shape == total.spec.shape:
            if [_layout_in(x, middle) for x in parts] == placed:
                return found._replace(back=back, middle=middle, total=total)
    return None


def _way_to_place(graph: Graph, node: Node) -> list[Node] | None:
    """The nodes from a gradient up to the one that places it into zeros."""
    way = [node]
    while way[-1].op is not place_op:
        user = graph.only_user(way[-1])
        if user is None or user.op not in (reshape_op, transpose_op, place_op):
            return None
        way.append(user)
    return way if way[-1].attrs["value"] == 0 else None


def _sum_of(graph: Graph, nodes: Sequence[Node]) -> Node | None:
    """The node that adds up these and no others."""
    total, wanted = nodes[0], set(nodes)

    def terms(node: Node) -> set[Node]:
        if node.op is add_op:
            return terms(node.inputs[0]) | terms(node.inputs[1])
        return {node}

    while terms(total) < wanted:
        user = graph.only_user(total)
        if user is None or user.op is not add_op:
            return None
        total = user
    return total if terms(total) == wanted else None


def _layout_of_placed(way: Sequence[Node]) -> _Layout | None:
    """Where the elements of a gradient are in the array that it is placed into."""
    place = way[-1]
    array = _array(place.spec.shape)
    starts, steps = place.attrs["starts"], place.attrs["steps"]
    sizes = place.inputs[0].spec.shape
    if any(step != 1 for step, size in zip(steps, sizes) if size > 1):
        return None
    view = array[tuple(slice(at, at + size) for at, size in zip(starts, sizes))]
    for node in reversed(way[1:-1]):
        if node.op is reshape_op:
            view = view.reshape(node.inputs[0].spec.shape)
        else:
            view = view.transpose(np.argsort(transpose_op.permutation(node, view.ndim)))
    return _Layout.of(view, array)


# ---- what is made ----


def _replace(graph: Graph, found: _Found, options: Options, replaced: dict[Node, Node]) -> None:
    node, counts = found.node, found.counts
    batch, _, length, size = node.inputs[0].spec.shape
    attrs = {**node.attrs, "heads": counts[0], "kv_heads": counts[1]}
    with attributed_to(node):
        qkv = reshape_op(found.root, (batch, length, sum(counts) * size))
        made = _PACKED[node.op].make([qkv, *node.inputs[3:]], attrs, None)
        made.stand_for(node)
        if not _fits(made, options):
            return
        y, lse = value_of(made, 0), value_of(made, 1)
        values = {x.attrs["index"]: x for x in graph.users[node]}
        for index, value in values.items():
            replaced[value] = split_heads(y, counts[:1])[0] if index == 0 else lse
    if found.back is None:
        return
    assert found.middle is not None and found.total is not None
    back = found.back
    with attributed_to(back):
        dy = join_heads_op(back.inputs[5], counts=counts[:1])
        inputs = [qkv, y, lse, dy, *back.inputs[6:]]
        gradient = _PACKED[back.op].make(inputs, {**back.attrs, **attrs}, None)
        gradient.stand_for(back)
        moved = reshape_op(gradient, found.root.spec.shape)
        for move in _moves(found.middle, found.root):
            moved = move.op.make([moved], dict(move.attrs), None)
        replaced[found.total] = moved


def _fits(made: Node, options: Options) -> bool:
    """True where the target's kernel takes the arrays, no slower than the composition."""
    specs = [x.spec for x in made.inputs]
    scalars = made.op.scalars(made)
    return options.target.fits("packed_attention", specs[0], tuple(specs[1:]), *scalars, *made.spec)


FUSION = Pass(
    "packed_attention",
    fuse,
    position=4,
    needs=("packed_attention", "packed_attention_gradient"),
    when=lambda options: settings.attention != "naive",
)
