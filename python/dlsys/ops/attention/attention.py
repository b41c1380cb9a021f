"""Scaled dot-product attention as one operator, whose T × T matrix no device holds.

y = softmax(q kᵀ · scale) v is computed block by block with the online softmax of Milakov and
Gimelshein (2018), as in Dao et al., "FlashAttention" (2022), and Dao, "FlashAttention-2" (2023).
For the gradient the logarithm of each row's sum of exponentials is saved, from which backward
recomputes the weights of a block. Dropout draws its mask by counters, the same mask again in
backward, and stores none.

The rung `naive` is a composition of other operators (composition.py) and holds the matrix. What is
rarely asked for is computed by it too: gradients of a mask, and gradients of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arguments.kinds import Bool, Instance, Int, Number, Rung
from ...arguments.signature import Signature, declared
from ...errors import GraphError
from ...graph.node import Node, Op
from ...graph.spec import Spec, promote
from ...rungs import ATTENTION
from ..leaf import zeroslike_op
from ..matmul import algorithm_number, precision_number
from ..norm.storage import dtype_of_sums
from ..random.sampling import PROBABILITY, Generator, attached
from . import blocks, composition
from .problem import Extra, Problem

_OPTIONS = dict(
    causal=Bool(False), scale=Number(None, finite=True), masked=Bool(False), padded=Bool(False),
    queries_padded=Bool(False), algo=Rung(ATTENTION),
)  # fmt: skip
# A word below `threshold`, a count of 2^32, leaves a weight, times `keep`; any other makes it 0.
_DROPOUT = dict(seed=Int(), node=Int(), threshold=Int(low=0, high=2**32), keep=Number())
_FLAGS = ("causal", "masked", "padded", "queries_padded")


class AttentionBase(Op):
    """What attention and its gradients have in common.

    Behind the inputs that `names` has stand those that attributes announce: a mask, lengths,
    query_lengths and, where weights are dropped, the step of the draw.
    """

    vocabulary = False
    names: tuple[str, ...] = ("q", "k", "v")
    more: dict[str, Any] = {}  # attributes of its own

    def __init__(self, drops: bool) -> None:
        self.random = drops
        first = len(self.names)
        self.any_dtype = tuple(range(first, first + len(Extra._fields)))
        kinds = {**_OPTIONS, **(_DROPOUT if drops else {}), **self.more}
        self.signature = Signature(*self.names, "*optional", **kinds)

    def extra(self, node: Node, values: Sequence[Any]) -> Extra:
        """The optional inputs, of a node's inputs, their specs or arrays."""
        rest = iter(values[len(self.names) :])
        flags = (*(node.attrs[key] for key in _FLAGS[1:]), self.random)
        return Extra(*(next(rest) if there else None for there in flags))

    def parts(self, node: Node, values: Sequence[Any]) -> Sequence[Any]:
        """q, k and v of a node's inputs, their specs or arrays."""
        return values[:3]

    def problem(self, node: Node, specs: Sequence[Spec]) -> Problem:
        """The extents of a node's arrays. ShapeError where they do not fit."""
        return Problem.of(node, self.parts(node, specs), self.extra(node, specs))

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs) - len(self.names),)

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        attrs = node.attrs
        bits = (*(attrs[key] for key in _FLAGS), self.random)
        flags = sum(int(bit) << k for k, bit in enumerate(bits))
        drawn = (attrs.get(key, 0) for key in ("seed", "node", "threshold"))
        scale = scale_of(attrs, self.problem(node, [x.spec for x in node.inputs]).size)
        own = (attrs[key] for key in self.more)
        how = algorithm_number(node), precision_number(node)
        return flags, scale, *drawn, float(attrs.get("keep", 1)), *own, *how

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        p = self.problem(node, inputs)
        pairs = p.rows * p.columns
        if node.attrs["causal"]:
            seen = min(p.rows, p.columns)
            pairs = seen * (seen + 1) // 2 + (p.rows - seen) * p.columns
        return 2 * p.batch * p.heads * pairs * self.depth(p)

    def depth(self, p: Problem) -> int:
        """Multiplications for each pair of a query and a key."""
        raise NotImplementedError


class AttentionOp(AttentionBase):
    """softmax(q kᵀ · scale) v, and the logarithm of each row's sum of exponentials: (N, heads, L,
    dv) and (N, heads, L), the latter float32 for floats of 16 bits.
    """

    name = kernel = "attention"
    autocast = "bf16"
    autocast_inputs: tuple[int, ...] = (0, 1, 2)
    roundings = 2  # of the weights, and of the result
    outputs = 2
    tolerance = 1e-4
    has_precision = tunable = True
    ladder = ATTENTION

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        p = self.problem(node, specs)
        dtype = floats_of(node, *specs[:3])
        declared = any(spec.declared for spec in specs[:3])
        rows = (p.batch, p.heads, p.rows)
        sums = Spec(rows, dtype_of_sums(dtype), declared)
        return Spec((*rows, p.value_size), dtype, declared), sums

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        *inputs, y, lse = arrays
        blocks.forward(arrays_of(self, node, inputs), y, lse)

    def compose(self, node: Node) -> list[Node]:
        """Its values by other operators."""
        return composition.forward(nodes_of(self, node))

    @staticmethod
    def check_sums(node: Node, output_grad: Any) -> None:
        """GraphError where a gradient of the logarithms of the sums is given."""
        if output_grad[1] is not None:
            raise GraphError(
                f"{node.op.name}: the logarithms of the sums have no gradient; only the output is "
                f"differentiable [{node.where}]"
            )

    def mask_is_differentiable(self, node: Node) -> bool:
        """True for a mask of floats."""
        mask = self.extra(node, node.inputs).mask
        return mask is not None and getattr(mask.dtype, "kind", "f") == "f"

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        self.check_sums(node, output_grad)
        extra = node.inputs[3:]
        dy = zeroslike_op(node[0]) if output_grad[0] is None else output_grad[0]
        back = _GRADIENTS[self.random](*node.inputs[:3], node[0], node[1], dy, *extra, **node.attrs)
        of_mask: list[Node | None] = [None] * len(extra)
        if self.mask_is_differentiable(node):
            of_mask[0] = _COMPOSED[self.random](
                *node.inputs[:3], dy, *node.inputs[:3], *extra, **node.attrs, order=1, of=MASK
            )
        return [back[0], back[1], back[2], *of_mask]

    def depth(self, p: Problem) -> int:
        return p.size + p.value_size


class AttentionGradientOp(AttentionBase):
    """The gradients of q, k and v from those of y, where the weights are computed anew."""

    name = kernel = "attention_gradient"
    autocast = "bf16"
    autocast_inputs: tuple[int, ...] = (0, 1, 2, 3, 5)
    roundings = 3  # of y in the sums of rows, of the scores' gradients, and of the result
    names: tuple[str, ...] = ("q", "k", "v", "y", "lse", "dy")
    outputs = 3
    tolerance = 1e-4
    has_precision = tunable = True
    ladder = ATTENTION

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        p = self.problem(node, specs)
        made = (p.batch, p.heads, p.rows, p.value_size)
        if specs[3].shape != made or specs[5].shape != made or specs[4].shape != made[:3]:
            raise node.error(
                f"y {specs[3].shape}, lse {specs[4].shape} and dy {specs[5].shape} are not those "
                f"of attention that gives {made}"
            )
        dtype = floats_of(node, *specs[:4], specs[5])
        return tuple(Spec(x.shape, dtype, x.declared) for x in specs[:3])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        *inputs, dq, dk, dv = arrays
        y, lse, dy = inputs[3:6]
        blocks.backward(arrays_of(self, node, inputs), y, lse, dy, dq, dk, dv)

    def compose(self, node: Node) -> list[Node]:
        """Its values by other operators."""
        return composition.backward(nodes_of(self, node), node.inputs[5])

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        q, k, v, _, _, dy, *extra = node.inputs
        towards = [
            zeroslike_op(x) if grad is None else grad for x, grad in zip((q, k, v), output_grad)
        ]
        last = _COMPOSED[self.random]
        found: list[Node | None] = [
            last(q, k, v, dy, *towards, *extra, **node.attrs, order=2, of=of)
            for of in range(MASK + 1 if node.attrs["masked"] else MASK)
        ]
        of_q, of_k, of_v, of_dy, *of_mask = found
        rest = [None] * (len(extra) - len(of_mask))
        return [of_q, of_k, of_v, None, None, of_dy, *of_mask, *rest]

    def depth(self, p: Problem) -> int:
        return 2 * (p.size + p.value_size)  # scores that are computed anew do not count


MASK = 4  # behind q, k, v and dy


class ComposedGradientOp(AttentionBase):
    """A gradient that no kernel computes, by way of the composition, which holds T × T matrices.

    For input `of` among q, k, v, dy and the mask: of order 1 the gradient of <y, dy>, which is for
    the mask; of order 2 that of <dq, gq> + <dk, gk> + <dv, gv>; of order 3 that of <dmask, gq>.
    """

    name = "attention_composed_gradient"
    names = ("q", "k", "v", "dy", "gq", "gk", "gv")
    more = dict(order=Int(low=1, high=3), of=Int(low=0, high=MASK))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        self.problem(node, specs)
        of = node.attrs["of"]
        return self.extra(node, specs).mask if of == MASK else specs[of]

    def simplify(self, node: Node) -> Node:
        dy, *towards = node.inputs[3:7]
        return nodes_of(self, node).gradient(dy, towards, node.attrs["order"], node.attrs["of"])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        if node.attrs["order"] > 1:
            raise GraphError(
                "attention: its second gradients cannot be differentiated again; write "
                f"softmax(q kᵀ) v with F.matmul and F.softmax for third ones [{node.where}]"
            )
        q, k, v, dy, _, _, _, *extra = node.inputs
        attrs = {key: value for key, value in node.attrs.items() if key not in self.more}
        towards = [output_grad] * 3
        found: list[Node | None] = [
            self(q, k, v, dy, *towards, *extra, **attrs, order=3, of=of) for of in range(MASK + 1)
        ]
        return [*found[:MASK], None, None, None, found[MASK], *[None] * (len(extra) - 1)]


def scale_of(attrs: dict[str, Any], size: int) -> float:
    """The factor of the scores: 1 / sqrt(size) unless it was given."""
    scale = attrs["scale"]
    return float(scale) if scale is not None else 1 / math.sqrt(max(size, 1))


def floats_of(node: Node, *specs: Spec) -> Any:
    """The dtype of arrays that must be floats of one. ShapeError unless they are."""
    dtype = promote(node, *specs)
    if dtype is not None and dtype.kind != "f":
        raise node.error(f"expected q, k and v of floats, got {dtype}")
    return dtype


def nodes_of(op: AttentionBase, node: Node) -> composition.Call:
    """A node as what composes it of other operators."""
    q, k, v = op.parts(node, node.inputs)
    scale, extra = scale_of(node.attrs, q.spec.shape[-1]), op.extra(node, node.inputs)
    return composition.Call(q, k, v, extra, node.attrs["causal"], scale, node.attrs)


def arrays_of(op: AttentionBase, node: Node, arrays: Sequence[np.ndarray]) -> blocks.Arrays:
    """A node with its arrays, as the numpy forms take it."""
    q, k, v = op.parts(node, arrays)
    scale, extra = scale_of(node.attrs, q.shape[-1]), op.extra(node, arrays)
    return blocks.Arrays(q, k, v, extra, node.attrs["causal"], scale, node.attrs)


class Forms(NamedTuple):
    """An operator without dropout and with it."""

    plain: AttentionBase
    dropped: AttentionBase

    def output(
        self, inputs: Sequence[Node], optional: Sequence[Node | None], attrs: dict[str, Any],
        dropout: float, generator: Generator | None,
    ) -> Node:  # fmt: skip
        """The output of attention. optional: mask, lengths and query_lengths."""
        announced = {key: x is not None for key, x in zip(_FLAGS[1:], optional)}
        inputs = [*inputs, *(x for x in optional if x is not None)]
        if not dropout:
            return self.plain(*inputs, **attrs, **announced)[0]
        generator, identity = attached(generator)
        drawn = dict(threshold=round((1 - dropout) * 2**32), keep=1 / (1 - dropout))
        made = self.dropped(*inputs, generator.step, **attrs, **announced, **identity, **drawn)
        made.effects = (generator.advance,)
        return made[0]


attention_op, dropped_attention_op = AttentionOp(False), AttentionOp(True)
attention_gradient_op = AttentionGradientOp(False)
dropped_attention_gradient_op = AttentionGradientOp(True)
composed_gradient_op, dropped_composed_gradient_op = map(ComposedGradientOp, (False, True))
_GRADIENTS = attention_gradient_op, dropped_attention_gradient_op  # without dropout and with it
_COMPOSED = composed_gradient_op, dropped_composed_gradient_op


@declared(
    causal=Bool(), scale=Number(finite=True), dropout=PROBABILITY,
    algo=Rung(ATTENTION), generator=Instance(Generator),
)  # fmt: skip
def attention(
    q: Node,
    k: Node,
    v: Node,
    mask: Node | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    lengths: Node | None = None,
    query_lengths: Node | None = None,
    algo: str | None = None,
    generator: Generator | None = None,
) -> Node:
    """softmax(q kᵀ · scale) v of q (N, heads, L, d), k (N, kv heads, S, d) and v (N, kv heads, S,
    dv): (N, heads, L, dv).

    `functional.scaled_dot_product_attention` says what the rest is. ShapeError where shapes or
    dtypes do not fit.
    """
    attrs: dict[str, Any] = dict(causal=causal, scale=scale)
    if algo is not None:
        attrs["algo"] = algo
    forms = Forms(attention_op, dropped_attention_op)
    return forms.output((q, k, v), (mask, lengths, query_lengths), attrs, dropout, generator)
