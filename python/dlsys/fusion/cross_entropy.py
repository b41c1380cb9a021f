"""Fused cross-entropy: the loss summed over the rows, and its gradient, from one reading of the
logits.

Pattern: the gradient of softmax cross-entropy where all rows count the same, and the sum or mean of
the rows' losses of the same logits and labels, if anybody wants that. Class indices go with logits
of 16 bits as they lie in memory, where the loss is of a float32 copy of them and its gradient is
only read rounded to the same dtype: the copies are parts of the kernel, which computes in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import Instance, Number
from ..arguments.signature import Signature
from ..dtypes import is_narrow
from ..graph.lines import attributed_to
from ..graph.node import Node, Op, same_nodes
from ..ops.elementwise import cast_op
from ..ops.leaf import constant_op, placeholder_op
from ..ops.loss.cross_entropy import (
    cross_entropy_gradient_op,
    cross_entropy_rows_op,
    sparse_cross_entropy_gradient_op,
    sparse_cross_entropy_rows_op,
)
from ..ops.reduce import mean_op, sum_op
from ..passes.pipeline import Options, Pass
from ..runtime.target import Target
from .body import Body, Fused, close, in_shape, shaped
from .rewrite import Graph, exchange, strip_views, value_of

WORKSPACE = 512  # int32 by which the kernel's blocks reduce: kMaxPartials and an arrival counter


class FusedCrossEntropy(Fused):
    """Σ of the rows' losses times `scale`, and the gradient of each row's loss times `dy`: values
    () and (…, classes) of logits, labels and a workspace. Labels out of range are refused. The sum
    is float32 where the body has it so.
    """

    tolerance = 1e-4
    fallible = True
    zeroed_workspace = (-1,)

    def __init__(self, name: str, of_any_dtype: tuple[int, ...], inplace: bool = False) -> None:
        super().__init__(name, 2, of_any_dtype)
        self.inplace = inplace
        factors = dict(scale=Number(nan=True), dy=Number(nan=True))
        self.signature = Signature("logits", "labels", body=Instance(Body), **factors)

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        body: Body = attrs["body"]
        inputs = (*inputs, constant_op(np.zeros(WORKSPACE, np.int32), name="workspace"))
        over_all = Body((*body.inputs, placeholder_op("workspace")), body.outputs)
        return super().make(inputs, attrs | {"body": over_all}, name)

    def scalars(self, node: Node) -> tuple[float, float]:
        return node.attrs["scale"], node.attrs["dy"]


fused_cross_entropy_op = FusedCrossEntropy("fused_cross_entropy", (2,))  # which reads labels again
fused_sparse_cross_entropy_op = FusedCrossEntropy("fused_sparse_cross_entropy", (1, 2), True)

# By the gradient of the rows' losses: these, and the operator of both.
_LOSSES: dict[Op, tuple[Op, FusedCrossEntropy]] = {
    cross_entropy_gradient_op: (cross_entropy_rows_op, fused_cross_entropy_op),
    sparse_cross_entropy_gradient_op: (sparse_cross_entropy_rows_op, fused_sparse_cross_entropy_op),
}


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph with its losses fused. The graph, simplified for native devices,
    must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op in _LOSSES and node.inputs[2].op.constant_fill:
            _fuse(graph, node, replaced, options.target)
    return exchange(fetches, replaced)


def _fuse(graph: Graph, node: Node, replaced: dict[Node, Node], target: Target) -> None:
    rows_op, op = _LOSSES[node.op]
    x, labels, dy = node.inputs
    source, copies = _in_16_bits(graph, node, op, target)
    totals = [
        total
        for user in graph.users[x]
        if user.op is rows_op and same_nodes(user.inputs, (x, labels))
        for total in (user, *graph.users[user])  # the loss of one row is its own total
        if total.op in (rows_op, mean_op, sum_op) and total.spec.size == 1
        if total not in replaced
    ]
    with attributed_to(node):
        total = totals[0] if totals else sum_op(rows_op(x, labels))
        given = in_shape(source, x.spec.shape)
        gradient = cast_op(node, source.spec.dtype) if copies else node
        aliases = {source: given} if source is not given else {}
        body = close((given, labels), (in_shape(total, ()), gradient), aliases)
        count = total.inputs[0].spec.size if total.op is mean_op else 1
        scale = 1.0 / count if count else float("nan")
        made = op(given, labels, body, scale=scale, dy=float(dy.attrs["value"]))
        made.stand_for(node)
        value = value_of(made, 1, node)
        replaced.update({copy: shaped(value, copy) for copy in copies or [node]})
        if totals:
            replaced[total] = shaped(value_of(made, 0, total), total)


def _in_16_bits(
    graph: Graph, node: Node, op: FusedCrossEntropy, target: Target
) -> tuple[Node, list[Node]]:
    """The logits of 16 bits, perhaps in another shape, whose copy a loss's gradient is computed
    from, and the copies of the gradient in their dtype, if nothing else reads it; the logits as
    they are, and no copies, where it is otherwise.
    """
    x = node.inputs[0]
    copied = strip_views(x)
    if op is not fused_sparse_cross_entropy_op or not copied.op.casts:
        return x, []
    source = copied.inputs[0]
    dtype = source.spec.dtype
    readers = [reader for reader, _ in graph.readers(node)]
    narrow = is_narrow(dtype) and target.has(op.kernel, dtype)
    if narrow and all(one.op.casts and one.spec.dtype is dtype for one in readers):
        return source, readers
    return x, []


FUSION = Pass(
    "cross_entropy", fuse, position=20, needs=("fused_cross_entropy", "fused_sparse_cross_entropy")
)
