"""Attention that reads q, k and v where one projection left them, side by side in the features of
one array, and writes its output as the next projection reads it, so that nothing is transposed. Its
gradient makes that of the one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arguments.kinds import Bool, Instance, Int, Number, Rung
from ...arguments.signature import declared
from ...graph.node import Node
from ...graph.spec import Spec
from ...rungs import ATTENTION
from ..leaf import zeroslike_op
from ..norm.storage import dtype_of_sums
from ..random.sampling import PROBABILITY, Generator
from . import blocks, composition
from .attention import (
    MASK,
    AttentionGradientOp,
    AttentionOp,
    Forms,
    arrays_of,
    composed_gradient_op,
    dropped_composed_gradient_op,
    floats_of,
    nodes_of,
)
from .heads import heads_of, join_heads_op, split_heads

_HEADS = dict(heads=Int(low=1), kv_heads=Int(low=1))


class _Packed:
    """Where q, k and v are in an array (N, L, (heads + 2 · kv_heads) · size): heads of q, then
    those of k and of v.
    """

    @staticmethod
    def counts(node: Node) -> tuple[int, int, int]:
        """Heads of q, k and v."""
        return node.attrs["heads"], node.attrs["kv_heads"], node.attrs["kv_heads"]

    def parts(self, node: Node, values: Sequence[Any]) -> Sequence[Any]:
        x, counts = values[0], self.counts(node)
        if isinstance(x, Node):
            return split_heads(x, counts)
        if isinstance(x, np.ndarray):
            return heads_of(x, counts)
        if len(x.shape) != 3 or x.shape[2] % sum(counts):
            raise node.error(
                f"{node.inputs[0].name} {x.shape} does not hold {counts[0]} heads of queries and "
                f"{counts[1]} each of keys and values; expected (N, positions, "
                f"{sum(counts)} · size)"
            )
        size = x.shape[2] // sum(counts)
        return [x._replace(shape=(x.shape[0], count, x.shape[1], size)) for count in counts]

    def composed(self, node: Node, dy: Node, towards: Sequence[Node], order: int, of: int) -> Node:
        """A gradient that no kernel computes, by heads."""
        op = (composed_gradient_op, dropped_composed_gradient_op)[node.op.random]
        extra = node.inputs[len(node.op.names) :]  # type: ignore[attr-defined]
        attrs = {key: value for key, value in node.attrs.items() if key not in _HEADS}
        q, k, v = self.parts(node, node.inputs)
        return op(q, k, v, dy, *towards, *extra, **attrs, order=order, of=of)


class PackedAttentionOp(_Packed, AttentionOp):
    """Attention of q, k and v in one array (N, L, (heads + 2 · kv_heads) · size): (N, L, heads ·
    size), and the logarithm of each row's sum of exponentials, (N, heads, L).
    """

    name = kernel = "packed_attention"
    autocast_inputs = (0,)
    names = ("qkv",)
    more = _HEADS

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        p = self.problem(node, specs)
        dtype, shape = floats_of(node, specs[0]), (p.batch, p.rows, p.heads * p.size)
        sums = Spec((p.batch, p.heads, p.rows), dtype_of_sums(dtype), specs[0].declared)
        return Spec(shape, dtype, specs[0].declared), sums

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        *inputs, y, lse = arrays
        (by_head,) = heads_of(y, self.counts(node)[:1])
        blocks.forward(arrays_of(self, node, inputs), by_head, lse)

    def compose(self, node: Node) -> list[Node]:
        y, lse = composition.forward(nodes_of(self, node))
        return [join_heads_op(y, counts=self.counts(node)[:1]), lse]

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        self.check_sums(node, output_grad)
        extra = node.inputs[1:]
        dy = zeroslike_op(node[0]) if output_grad[0] is None else output_grad[0]
        back = _GRADIENTS[self.random](*node.inputs[:1], node[0], node[1], dy, *extra, **node.attrs)
        of_mask: list[Node | None] = [None] * len(extra)
        if self.mask_is_differentiable(node):
            (by_head,) = split_heads(dy, self.counts(node)[:1])
            towards = self.parts(node, node.inputs)
            of_mask[0] = self.composed(node, by_head, towards, order=1, of=MASK)
        return [back, *of_mask]


class PackedAttentionGradientOp(_Packed, AttentionGradientOp):
    """The gradient of q, k and v in one array, where the weights are computed anew."""

    name = kernel = "packed_attention_gradient"
    autocast_inputs = (0, 1, 3)
    names = ("qkv", "y", "lse", "dy")
    more = _HEADS
    outputs = 1

    def infer(self, node: Node, *specs: Spec) -> Spec:
        p = self.problem(node, specs)
        made, sums = (p.batch, p.rows, p.heads * p.size), (p.batch, p.heads, p.rows)
        if specs[1].shape != made or specs[3].shape != made or specs[2].shape != sums:
            raise node.error(
                f"y {specs[1].shape}, lse {specs[2].shape} and dy {specs[3].shape} are not those "
                f"of attention that gives {made} and {sums}"
            )
        return specs[0]._replace(dtype=floats_of(node, specs[0], specs[1], specs[3]))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        *inputs, dqkv = arrays
        counts = self.counts(node)
        y, dy = (heads_of(inputs[k], counts[:1])[0] for k in (1, 3))
        made = heads_of(dqkv, counts)
        blocks.backward(arrays_of(self, node, inputs), y, inputs[2], dy, *made)

    def compose(self, node: Node) -> list[Node]:
        (dy,) = split_heads(node.inputs[3], self.counts(node)[:1])
        made = composition.backward(nodes_of(self, node), dy)
        return [join_heads_op(*made, counts=self.counts(node))]

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        counts = self.counts(node)
        (by_head,) = split_heads(node.inputs[3], counts[:1])
        towards = split_heads(output_grad, counts)
        last = MASK + 1 if node.attrs["masked"] else MASK
        found = [self.composed(node, by_head, towards, order=2, of=of) for of in range(last)]
        of_q, of_k, of_v, of_dy, *of_mask = found
        rest = [None] * (len(node.inputs) - len(self.names) - len(of_mask))
        dqkv = join_heads_op(of_q, of_k, of_v, counts=counts)
        return [dqkv, None, None, join_heads_op(of_dy, counts=counts[:1]), *of_mask, *rest]


packed_attention_op, dropped_packed_attention_op = map(PackedAttentionOp, (False, True))
packed_gradient_op, dropped_packed_gradient_op = map(PackedAttentionGradientOp, (False, True))
_GRADIENTS = packed_gradient_op, dropped_packed_gradient_op  # without dropout and with it


@declared(
    heads=Int(low=1), kv_heads=Int(None, low=1), causal=Bool(), scale=Number(finite=True),
    dropout=PROBABILITY, algo=Rung(ATTENTION), generator=Instance(Generator),
)  # fmt: skip
def packed_attention(
    qkv: Node,
    heads: int,
    kv_heads: int | None = None,
    mask: Node | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    lengths: Node | None = None,
    algo: str | None = None,
    generator: Generator | None = None,
) -> Node:
    """softmax(q kᵀ · scale) v of qkv (N, L, (heads + 2 · kv_heads) · d): (N, L, heads · d).

    `functional.packed_attention` says what the arguments are. ShapeError where shapes or dtypes do
    not fit.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    attrs: dict[str, Any] = dict(causal=causal, scale=scale, heads=heads, kv_heads=kv_heads)
    if algo is not None:
        attrs["algo"] = algo
    forms = Forms(packed_attention_op, dropped_packed_attention_op)
    return forms.output((qkv,), (mask, lengths, None), attrs, dropout, generator)
