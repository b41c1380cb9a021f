"""One bit an element instead of relu's output, where only relu's gradient within the sums of a
batch normalization reads it for that: a sixteenth of the bytes.

Pattern: relu(normalized x + addend), as batch_norm.py makes it of 16 bits with channels last, and
the sums of its gradient. The map keeps a bit for each element that is positive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arguments.signature import Signature
from ..dtypes import is_narrow
from ..graph.lines import attributed_to
from ..graph.node import Node, Op
from ..graph.spec import Spec
from ..ops.elementwise import add_op
from ..ops.norm.batch_norm import batch_normalize_sums_op
from ..passes.pipeline import Options, Pass
from .batch_norm import FusedNorm, NormalizeMap, ReluSums, batch_normalize_map_op, relu_sums_ops
from .body import close
from .rewrite import Graph, exchange, value_of

_BYTE = np.dtype(np.uint8)


class PositiveBitsOp(Op):
    """A bit for each element of x that is positive, eight a byte from the lowest bit on."""

    name = kernel = "positive_bits"
    vocabulary = False
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return Spec((-(-specs[0].size // 8),), _BYTE, specs[0].declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, bits = arrays
        bits[...] = np.packbits(x.ravel() > 0, bitorder="little")


class KeepByBitsOp(Op):
    """The elements of x whose bit is set, 0 for the others; inputs: bits, x."""

    name = kernel = "keep_by_bits"
    vocabulary = False
    any_dtype = (0,)
    signature = Signature("bits", "x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[1]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        bits, x, y = arrays
        kept = np.unpackbits(bits, count=x.size, bitorder="little").reshape(x.shape)
        np.multiply(x, 0, out=y)
        np.copyto(y, x, where=kept.astype(bool))


class ReluBits(NormalizeMap):
    """relu(normalized x + addend) as a NormalizeMap, and a bit for each positive element."""

    def __init__(self) -> None:
        FusedNorm.__init__(self, "batch_normalize_relu_bits", 2)


class ReluBitsSums(ReluSums):
    """The sums of `ReluSums` by the bits of relu's output."""

    def __init__(self, dys: int) -> None:
        super().__init__(True, dys)
        self.any_dtype = (3, *self.any_dtype)


positive_bits_op = PositiveBitsOp()
keep_by_bits_op = KeepByBitsOp()
batch_normalize_relu_bits_op = ReluBits()
relu_bits_sums_ops = {dys: ReluBitsSums(dys) for dys in (1, 2)}


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose gradients of relu read bits. The graph must be the executor's
    own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for sums in graph.order:
        if sums.op in (relu_sums_ops[True, 1], relu_sums_ops[True, 2]):
            y = sums.inputs[3]
            if keeps_bits(y):
                if y not in replaced:
                    replaced[y] = with_bits(y)
                _read_bits(graph, sums, value_of(replaced[y].inputs[0], 1), replaced)
    return exchange(fetches, replaced)


def keeps_bits(y: Node) -> bool:
    """True where a kernel can write the bits together with y."""
    by_eight = len(y.spec.shape) == 2 and y.spec.shape[1] % 8 == 0
    is_relu = y.op is batch_normalize_map_op and y.attrs["activation"] == "relu"
    return is_relu and by_eight and is_narrow(y.spec.dtype)


def with_bits(y: Node) -> Node:
    """y as the first value of an operator that keeps its bits."""
    with attributed_to(y):
        body = close(y.inputs, (y, positive_bits_op(y)))
        made = batch_normalize_relu_bits_op(*y.inputs, body=body, eps=y.attrs["eps"])
        made.stand_for(y)
        return value_of(made, 0, y)


def _read_bits(graph: Graph, sums: Node, bits: Node, replaced: dict[Node, Node]) -> None:
    """Puts the sums by bits in place of those by relu's output."""
    x, mean, variance, _, *dys, _ = sums.inputs
    eps = sums.attrs["eps"]
    with attributed_to(sums):
        dz = keep_by_bits_op(bits, dys[0] if len(dys) == 1 else add_op(*dys))
        of_dz = batch_normalize_sums_op(x, mean, variance, dz, eps=eps, training=True)
        inputs = (x, mean, variance, bits, *dys)
        body = close(inputs, (value_of(of_dz, 0), value_of(of_dz, 1), dz))
        made = relu_bits_sums_ops[len(dys)](*inputs, body=body, eps=eps)
    made.stand_for(sums)
    for value in graph.users[sums]:
        replaced[value] = value_of(made, value.attrs["index"], value)


FUSION = Pass("relu_bits", fuse, position=55, needs=("batch_normalize_relu_bits",))
