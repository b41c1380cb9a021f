"""fuse: one kernel in place of several, where a product or a loss has the numbers at hand.

Each rewrite is one function over a simplified native graph, forward and backward together; a fused
node keeps what it replaced as its body (ops/fused.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..graph.node import Node, Op, attributed_to, output_op
from ..graph.shapes import normalize_axes
from ..ops.elementwise import add_op
from ..ops.fused import (
    ACTIVATIONS,
    GRADIENTS,
    Body,
    FusedLoss,
    close,
    cross_entropy_pair_op,
    matmul_bias_op,
    matmul_gradient_op,
    matmul_map_op,
    matmul_sums_op,
    sparse_cross_entropy_pair_op,
)
from ..ops.layout import reshape_op
from ..ops.loss import (
    cross_entropy_gradient_op,
    cross_entropy_rows_op,
    sparse_cross_entropy_gradient_op,
    sparse_cross_entropy_rows_op,
)
from ..ops.matmul import matmul_op
from ..ops.reduce import mean_op, sum_op
from .graph import Graph, exchange, whole

Rewrite = Callable[[Graph], dict[Node, Node]]


def fuse(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph of fewer kernels. The graph, simplified for native devices, must be
    the executor's own: its nodes change.
    """
    for rewrite in REWRITES:
        fetches = exchange(fetches, rewrite(Graph(fetches)))
    return list(fetches)


def product_epilogues(graph: Graph) -> dict[Node, Node]:
    """A product, a row vector that is added, an activation: any of the last two. Or a product and
    the gradient of an activation, as a layer's backward has it.
    """
    replaced = {}
    for node in graph.order:
        if node.op is matmul_op:
            found = _with_epilogue(graph, node)
            if found is not None:
                replaced[found[0]] = found[1]
    return replaced


def operand_sums(graph: Graph) -> dict[Node, Node]:
    """A product and the sums of one operand over the depth: the gradients of weights and bias."""
    sums: dict[tuple[Node, int], Node] = {}
    for node in graph.order:
        if node.op is sum_op and _keeps_last(node):
            sums.setdefault((whole(node.inputs[0]), node.spec.size), node)
    replaced: dict[Node, Node] = {}
    for node in graph.order if sums else ():
        if node.op is not matmul_op:
            continue
        for k, depth_first in ((1, not node.attrs["trans_B"]), (0, node.attrs["trans_A"])):
            operand = node.inputs[k]
            total = sums.get((whole(operand), operand.spec.shape[1])) if depth_first else None
            if total is None or not graph.before(node.inputs, (node, total)):
                continue
            with attributed_to(node):
                pair = _with_sums(node, total, operand, of_A=k == 0)
                replaced[node] = _value(pair, 0, node)
                replaced[total] = _shaped(_value(pair, 1, total), total)
            del sums[whole(operand), operand.spec.shape[1]]
            break
    return replaced


def loss_pairs(graph: Graph) -> dict[Node, Node]:
    """Softmax cross-entropy summed over the rows, and its gradient for rows that all count the
    same.
    """
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op not in LOSSES or not node.inputs[2].op.filled:
            continue
        rows_op, pair_op = LOSSES[node.op]
        x, labels, dy = node.inputs
        totals = [
            total
            for rows in graph.users[x]
            if rows.op is rows_op and rows.inputs == [x, labels]
            for total in graph.users[rows]
            if total.op in (mean_op, sum_op) and total.spec.size == 1 and total not in replaced
        ]
        with attributed_to(node):
            total = totals[0] if totals else sum_op(rows_op(x, labels))
            body = close((x, labels), (_flat(total, ()), node))
            count = total.inputs[0].spec.size
            scale = 1.0 if total.op is sum_op else 1.0 / count if count else float("nan")
            pair = pair_op(x, labels, body, scale=scale, dy=float(dy.attrs["value"]))
            pair.stand_for(node)
            replaced[node] = _value(pair, 1, node)
            if totals:
                replaced[total] = _shaped(_value(pair, 0, total), total)
    return replaced


# A gradient of the rows' loss: the loss, and both at once.
LOSSES: dict[Op, tuple[Op, FusedLoss]] = {
    cross_entropy_gradient_op: (cross_entropy_rows_op, cross_entropy_pair_op),
    sparse_cross_entropy_gradient_op: (sparse_cross_entropy_rows_op, sparse_cross_entropy_pair_op),
}
REWRITES: tuple[Rewrite, ...] = (loss_pairs, product_epilogues, operand_sums)


def _with_epilogue(graph: Graph, product: Node) -> tuple[Node, Node] | None:
    """The last node of what follows a product, and what takes its place."""
    columns = product.spec.shape[1]
    last, value = product, product  # `value` may be a view that reshapes `last`
    bias = side = None
    activation = ""
    while (user := graph.only_user(value)) is not None:
        if user.op is reshape_op and user.spec.shape[-1:] == (columns,):
            value = user
            continue
        if activation or side is not None or user.spec[:2] != value.spec[:2]:
            break
        other = user.inputs[-1] if user.inputs[0] is value else user.inputs[0]
        if user.op is add_op and bias is None and _is_row(other, columns):
            bias = other
        elif user.op.kernel in ACTIVATIONS and len(user.inputs) == 1:
            activation = user.op.kernel
        elif user.op.kernel in GRADIENTS and user.inputs[1] is value and bias is None:
            side = other
        else:
            break
        last = value = user
    if last is product:
        return None
    with attributed_to(last):
        fused = _fused_product(product, bias, side, activation, last)
        return last, _shaped(fused, last)


def _fused_product(
    product: Node, bias: Node | None, side: Node | None, activation: str, last: Node
) -> Node:
    flags = {name: product.attrs[name] for name in ("trans_A", "trans_B")}
    if side is not None:
        flat = _flat(side, product.spec.shape)
        body = _body(product, flat, last, {side: flat} if flat is not side else {})
        fused = matmul_gradient_op(
            *product.inputs, flat, body=body, gradient=last.op.kernel, **flags
        )
    elif bias is not None:
        body = _body(product, bias, last)
        fused = matmul_bias_op(*product.inputs, bias, body=body, activation=activation, **flags)
    else:
        fused = matmul_map_op(
            *product.inputs, body=_body(product, None, last), activation=activation, **flags
        )
    fused.stand_for(last)
    return fused


def _body(
    product: Node, third: Node | None, last: Node, shown: dict[Node, Node] | None = None
) -> Body:
    inputs = [*product.inputs] if third is None else [*product.inputs, third]
    return close(inputs, [_flat(last, product.spec.shape)], shown)


def _with_sums(product: Node, total: Node, operand: Node, of_A: bool) -> Node:
    flat = _flat(total, (total.spec.size,))
    shown = {total.inputs[0]: operand}
    body = close(product.inputs, (product, flat), shown if total.inputs[0] is not operand else {})
    flags = {name: product.attrs[name] for name in ("trans_A", "trans_B")}
    pair = matmul_sums_op(*product.inputs, body=body, of_A=of_A, **flags)
    pair.stand_for(product)
    return pair


def _is_row(node: Node, columns: int) -> bool:
    return node.spec.shape[-1:] == (columns,) and node.spec.size == columns


def _keeps_last(node: Node) -> bool:
    """Whether a sum leaves the last axis of several, and that one whole."""
    ndim = len(node.inputs[0].spec.shape)
    axes = normalize_axes(node, node.attrs["axis"], ndim)
    return ndim > 1 and axes == tuple(range(ndim - 1))


def _flat(node: Node, shape: tuple[int, ...]) -> Node:
    return node if node.spec.shape == shape else reshape_op(node, shape)


def _value(pair: Node, index: int, like: Node) -> Node:
    value = output_op(
        pair, index=index, name=like.name
    )  # pair[index] would tie the two in a circle
    value.stand_for(like)
    return value


def _shaped(node: Node, like: Node) -> Node:
    """A node in the shape of the one that it replaces."""
    if node.spec.shape == like.spec.shape:
        return node
    view = reshape_op(node, like.spec.shape)
    view.stand_for(like)
    return view
