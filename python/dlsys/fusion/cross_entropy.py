"""Fused cross-entropy: the loss summed over the rows, and its gradient, from one reading of the
logits.

Pattern: the gradient of softmax cross-entropy where all rows count the same, and the sum or mean of
the rows' losses of the same logits and labels, if anybody wants that. Class indices go with logits
of 16 bits as they lie in memory, where the loss is of a float32 copy of them and its gradient is
only read rounded to the same dtype: the copies are parts of the kernel, which computes in float32.
So they are of losses and gradients that stay apart, because rows count differently.
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
from ..graph.spec import FLOAT32, Spec
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
from .shared.body import Body, Fused, close, in_shape, shaped
from .shared.rewrite import Graph, exchange, strip_views, value_of

SHORT_ROW = 32  # classes, at most, of numpy's form
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


class FusedSparseCrossEntropy(FusedCrossEntropy):
    """With class indices, for which numpy has a form of its own. Classes come first in it, as numpy
    reduces short rows one at a time.
    """

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        if not pays_on_numpy(inputs[0]):
            return []
        shape = inputs[0].shape[-1], inputs[1].size
        return [Spec((2, *shape), FLOAT32), Spec((2, shape[1]), FLOAT32)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        logits, labels, _, *scratch, total, gradient = arrays
        classes = logits.shape[-1]
        if not scratch or labels.min() < 0 or labels.max() >= classes:
            super().numpy(node, *arrays[:3], total, gradient)  # raises the error of labels
            return
        (shifted, exp), (row, losses) = scratch
        np.copyto(exp, logits.reshape(-1, classes).T)
        np.maximum.reduce(exp, axis=0, out=row)
        np.subtract(exp, row, out=shifted)
        np.exp(shifted, out=exp)
        np.add.reduce(exp, axis=0, out=row)
        np.log(row, out=losses)
        own = labels.reshape(-1), np.arange(len(row))
        np.subtract(losses, shifted[own], out=losses)
        np.multiply(np.add.reduce(losses), node.attrs["scale"], out=total)
        np.divide(node.attrs["dy"], row, out=row)
        np.multiply(exp, row, out=exp)
        exp[own] -= node.attrs["dy"]
        np.copyto(gradient.reshape(-1, classes), exp.T)


def pays_on_numpy(logits: Spec) -> bool:
    """True for logits that numpy's form is for and faster."""
    short = 0 < logits.shape[-1] <= SHORT_ROW
    return logits.dtype == FLOAT32 and short and logits.size > 0


fused_cross_entropy_op = FusedCrossEntropy("fused_cross_entropy", (2,))  # which reads labels again
fused_sparse_cross_entropy_op = FusedSparseCrossEntropy("fused_sparse_cross_entropy", (1, 2), True)


class OfNarrowLogits(Fused):
    """The losses of rows, float32, or their gradient, of logits of 16 bits, by the kernel of the
    operator over a float32 copy of them.
    """

    tolerance = 1e-4
    fallible = True

    def __init__(self, name: str, op: Op, inplace: bool = False) -> None:
        super().__init__(name, any_dtype=(1,))
        self.kernel, self.inplace = op.kernel, inplace


narrow_losses_op = OfNarrowLogits("narrow_cross_entropy", sparse_cross_entropy_rows_op)
narrow_gradient_op = OfNarrowLogits(
    "narrow_cross_entropy_gradient", sparse_cross_entropy_gradient_op, True
)

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
        elif node.op in _OF_NARROW:
            _without_casts(graph, node, replaced, options.target)
    return exchange(fetches, replaced)


def _fuse(graph: Graph, node: Node, replaced: dict[Node, Node], target: Target) -> None:
    rows_op, op = _LOSSES[node.op]
    x, labels, dy = node.inputs
    sparse = op is fused_sparse_cross_entropy_op
    if not target.has(op.kernel) or not (target.native or pays_on_numpy(x.spec)):
        return
    source = _copied(x, op.kernel, target) if sparse else None
    copies = [] if source is None else _copies(graph, node, source.spec.dtype)
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
        given, gradient = x, node
        aliases: dict[Node, Node] = {}
        if source is not None and copies:
            given, aliases = _given(source, x)
            gradient = cast_op(node, source.spec.dtype)
        body = close((given, labels), (in_shape(total, ()), gradient), aliases)
        count = total.inputs[0].spec.size if total.op is mean_op else 1
        scale = 1.0 / count if count else float("nan")
        made = op(given, labels, body, scale=scale, dy=float(dy.attrs["value"]))
        made.stand_for(node)
        value = value_of(made, 1, node)
        replaced.update({copy: shaped(value, copy) for copy in copies or [node]})
        if totals:
            replaced[total] = shaped(value_of(made, 0, total), total)


def _copied(x: Node, kernel: str | None, target: Target) -> Node | None:
    """What x is a float32 copy of, perhaps in another shape, where it is of 16 bits and a kernel
    takes it so; else None.
    """
    copy = strip_views(x)
    if not copy.op.casts or x.spec.dtype != FLOAT32:
        return None
    dtype = copy.inputs[0].spec.dtype
    return copy.inputs[0] if is_narrow(dtype) and target.has(kernel, dtype) else None


def _copies(graph: Graph, node: Node, dtype: Any) -> list[Node]:
    """The copies of a node in a dtype, if nothing else reads it; else none."""
    readers = [reader for reader, _ in graph.readers(node)]
    return readers if all(one.op.casts and one.spec.dtype is dtype for one in readers) else []


_OF_NARROW: dict[Op, OfNarrowLogits] = {
    sparse_cross_entropy_rows_op: narrow_losses_op,
    sparse_cross_entropy_gradient_op: narrow_gradient_op,
}


def _without_casts(graph: Graph, node: Node, replaced: dict[Node, Node], target: Target) -> None:
    """Losses of rows, or their gradient, over the logits of 16 bits that they see a copy of."""
    op, (x, *others) = _OF_NARROW[node.op], node.inputs
    source = _copied(x, op.kernel, target)
    if source is None:
        return
    copies = [node] if op is narrow_losses_op else _copies(graph, node, source.spec.dtype)
    with attributed_to(node):
        given, aliases = _given(source, x)
        output = node if op is narrow_losses_op else cast_op(node, source.spec.dtype)
        made = op(given, *others, body=close((given, *others), (output,), aliases))
        made.stand_for(node)
        replaced.update({copy: shaped(made, copy) for copy in copies})


def _given(source: Node, x: Node) -> tuple[Node, dict[Node, Node]]:
    """A source in the shape of x, and the aliases of a body whose input that is."""
    given = in_shape(source, x.spec.shape)
    return given, {} if given is source else {source: given}


FUSION = Pass("cross_entropy", fuse, position=20, needs=("fused_sparse_cross_entropy",))
