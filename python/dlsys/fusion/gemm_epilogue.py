"""fuse: one kernel in place of several, where a product or a loss has the numbers at hand.

Each rewrite is one function over a simplified native graph, forward and backward together; a fused
node keeps what it replaced as its body (fusion/body.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..graph.lines import attributed_to
from ..graph.node import Node, Op, output_op, same_nodes
from ..graph.spec import normalize_axes
from ..ops.elementwise import add_op
from ..ops.loss.cross_entropy import (
    cross_entropy_gradient_op,
    cross_entropy_rows_op,
    sparse_cross_entropy_gradient_op,
    sparse_cross_entropy_rows_op,
)
from ..ops.matmul import matmul_op
from ..ops.movement import reshape_op
from ..ops.reduce import mean_op, sum_op
from ..passes.rewrite import Graph, exchange, value_of, whole
from .body import (
    ACTIVATIONS,
    GRADIENTS,
    Body,
    FusedHead,
    FusedLoss,
    Layer,
    close,
    fused_cross_entropy_op,
    fused_sparse_cross_entropy_op,
    head_op,
    matmul_bias_op,
    matmul_gradient_op,
    matmul_map_op,
    matmul_sums_op,
)

Rewrite = Callable[[Graph], dict[Node, Node]]


def fuse(fetches: Sequence[Node], gpu: bool = False) -> list[Node]:
    """The fetches over a graph of fewer kernels. The graph, simplified for native devices, must be
    the executor's own: its nodes change. `gpu`: with the rewrites that only a GPU has kernels for.
    """
    graph = Graph(fetches)
    for rewrite in (*REWRITES, *(GPU_REWRITES if gpu else ())):
        replaced = rewrite(graph)
        if replaced:
            fetches = exchange(fetches, replaced)
            graph = Graph(fetches)
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
                replaced[node] = value_of(pair, 0, node)
                replaced[total] = shaped(value_of(pair, 1, total), total)
            del sums[whole(operand), operand.spec.shape[1]]
            break
    return replaced


def loss_pairs(graph: Graph) -> dict[Node, Node]:
    """Softmax cross-entropy summed over the rows, and its gradient for rows that all count the
    same.
    """
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op not in LOSSES or not node.inputs[2].op.constant_fill:
            continue
        rows_op, pair_op = LOSSES[node.op]
        x, labels, dy = node.inputs
        losses = [
            rows
            for rows in graph.users[x]
            if rows.op is rows_op and same_nodes(rows.inputs, (x, labels))
        ]
        totals = [
            total
            for rows in losses
            for total in (rows, *graph.users[rows])  # the loss of one row is its own total
            if total.op in (rows_op, mean_op, sum_op) and total.spec.size == 1
            if total not in replaced
        ]
        with attributed_to(node):
            total = totals[0] if totals else sum_op(rows_op(x, labels))
            body = close((x, labels), (in_shape(total, ()), node))
            count = total.inputs[0].spec.size if total.op is mean_op else 1
            scale = 1.0 / count if count else float("nan")
            pair = pair_op(x, labels, body, scale=scale, dy=float(dy.attrs["value"]))
            pair.stand_for(node)
            replaced[node] = value_of(pair, 1, node)
            if totals:
                replaced[total] = shaped(value_of(pair, 0, total), total)
    return replaced


def dense_heads(graph: Graph) -> dict[Node, Node]:
    """A loss pair, the small dense layers below it that nobody else reads the last of, and their
    gradients back, for which a GPU keeps a few rows in one block all the way.
    """
    replaced: dict[Node, Node] = {}
    heads: dict[Node, Sequence[Node]] = {}  # each node that was replaced: its head's inputs
    for node in graph.order:
        head = _find_head(graph, node) if isinstance(node.op, FusedLoss) else None
        if head is None:
            continue
        members = {node, *head.values, *head.layers}
        if _reaches(head.inputs, members, heads):
            continue
        with attributed_to(node):
            made = _fused_head(head)
        for k, old in enumerate(head.values):
            replaced[old] = shaped(value_of(made, k, old), old)
        heads.update(dict.fromkeys(members, head.inputs))
    return replaced


def in_shape(node: Node, shape: tuple[int, ...]) -> Node:
    """A node's numbers in a shape."""
    return node if node.spec.shape == shape else reshape_op(node, shape)


def shaped(node: Node, like: Node) -> Node:
    """A node in the shape of the one that it replaces."""
    view = in_shape(node, like.spec.shape)
    if view is not node:
        view.stand_for(like)
    return view


# A gradient of the rows' loss: the loss, and both at once.
LOSSES: dict[Op, tuple[Op, FusedLoss]] = {
    cross_entropy_gradient_op: (cross_entropy_rows_op, fused_cross_entropy_op),
    sparse_cross_entropy_gradient_op: (sparse_cross_entropy_rows_op, fused_sparse_cross_entropy_op),
}
REWRITES: tuple[Rewrite, ...] = (loss_pairs, product_epilogues, operand_sums)
GPU_REWRITES: tuple[Rewrite, ...] = (dense_heads,)
PRODUCTS = (matmul_op, matmul_bias_op, matmul_map_op)
HEAD_WEIGHTS = 32768  # numbers of all weights of a head, which lie in a block's shared memory
HEAD_WIDTH = 1024  # of a layer


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
            if other.spec.shape != user.spec.shape:
                break
            side = other
        else:
            break
        last = value = user
    if last is product:
        return None
    with attributed_to(last):
        fused = _fused_product(product, bias, side, activation, last)
        return last, shaped(fused, last)


def _fused_product(
    product: Node, bias: Node | None, side: Node | None, activation: str, last: Node
) -> Node:
    flags = {name: product.attrs[name] for name in ("trans_A", "trans_B")}
    if side is not None:
        flat = in_shape(side, product.spec.shape)
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
    return close(inputs, [in_shape(last, product.spec.shape)], shown)


def _with_sums(product: Node, total: Node, operand: Node, of_A: bool) -> Node:
    flat = in_shape(total, (total.spec.size,))
    shown = {total.inputs[0]: operand}
    body = close(product.inputs, (product, flat), shown if total.inputs[0] is not operand else {})
    flags = {name: product.attrs[name] for name in ("trans_A", "trans_B")}
    pair = matmul_sums_op(*product.inputs, body=body, of_A=of_A, **flags)
    pair.stand_for(product)
    return pair


class _Head(NamedTuple):
    """What becomes a head: its layers first to last, and the gradients of their inputs last to
    first.
    """

    pair: Node
    loss: Node  # the values of the pair
    dlogits: Node
    layers: list[Node]
    gradients: list[Node]

    @property
    def inputs(self) -> list[Node]:
        biases = [layer.inputs[2] for layer in self.layers if layer.op is matmul_bias_op]
        weights = [layer.inputs[1] for layer in self.layers]
        return [self.layers[0].inputs[0], *weights, *biases, *self.pair.inputs[1:]]

    @property
    def values(self) -> list[Node]:
        return [self.loss, self.dlogits, *self.layers[:-1], *self.gradients]


def _find_head(graph: Graph, pair: Node) -> _Head | None:
    values = {node.attrs["index"]: node for node in graph.users[pair]}
    layers = _layers_of_head(graph, pair)
    if 1 not in values or not layers:
        return None
    loss = values[0] if 0 in values else output_op(pair, index=0)
    gradients: list[Node] = []
    dy = values[1]
    for layer in reversed(layers):
        dx = next((x for x in _readers(graph, dy) if _passes_back(x, dy, layer)), None)
        if dx is None:
            break
        gradients.append(dx)
        dy = dx
    return _Head(pair, loss, values[1], layers, gradients)


def _layers_of_head(graph: Graph, pair: Node) -> list[Node]:
    """The layers first to last; none where somebody else wants the logits."""
    layers: list[Node] = []
    room = HEAD_WEIGHTS
    source = pair.inputs[0]
    while len(layers) < FusedHead.MOST_LAYERS:
        node = whole(source)
        if node.op not in PRODUCTS or node.attrs["trans_A"]:
            break
        weight = node.inputs[1].spec
        room -= weight.size
        last = not layers
        if node.spec.shape[-1] != source.spec.shape[-1]:  # its rows are others
            break
        if room < 0 or not 0 < max(weight.shape) <= HEAD_WIDTH or not min(weight.shape):
            break
        if last and (node.attrs.get("activation") or not same_nodes(_readers(graph, node), [pair])):
            break
        layers.append(node)
        source = node.inputs[0]
    return layers[::-1]


def _passes_back(node: Node, dy: Node, layer: Node) -> bool:
    """Whether a node is the gradient of a layer's input, of dy, that of what the layer made."""
    if node.op not in (matmul_op, matmul_gradient_op) or node.attrs["trans_A"]:
        return False
    same_weight = node.inputs[1] is layer.inputs[1]
    transposed = node.attrs["trans_B"] != layer.attrs["trans_B"]
    side = node.inputs[2] if node.op is matmul_gradient_op else layer.inputs[0]
    own = whole(node.inputs[0]) is whole(dy) and whole(side) is whole(layer.inputs[0])
    return same_weight and transposed and own


def _readers(graph: Graph, node: Node) -> list[Node]:
    """Who reads a node, through views too; the node itself is among them where it is fetched."""
    found = [node] if graph.is_fetched(node) else []
    for user in graph.users[node]:
        found += _readers(graph, user) if whole(user) is not user else [user]
    return found


def _reaches(
    inputs: Sequence[Node], goals: set[Node], heads: Mapping[Node, Sequence[Node]]
) -> bool:
    """Whether inputs are made of any of the goals, where a replaced node needs all that its head
    does.
    """
    stack, seen = list(inputs), set(inputs)
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        for x in (*node.inputs, *heads.get(node, ())):
            if x not in seen:
                seen.add(x)
                stack.append(x)
    return False


def _fused_head(head: _Head) -> Node:
    pair, layers, gradients = head.pair, head.layers, head.gradients
    slopes = [dx.op is matmul_gradient_op and dx.attrs["gradient"] or "" for dx in gradients]
    slopes += [""] * (len(layers) - len(gradients))
    plans = [
        Layer(
            transposed=layer.attrs["trans_B"],
            has_bias=layer.op is matmul_bias_op,
            activation=layer.attrs.get("activation") or "",
            slope=slope,
        )
        for layer, slope in zip(layers, reversed(slopes))
    ]
    rows, classes = layers[-1].spec.shape
    flat = [in_shape(head.loss, ()), in_shape(head.dlogits, (rows, classes))]
    x = head.inputs[0]
    sides = [dx.inputs[2] for dx in gradients if dx.op is matmul_gradient_op]
    shown = {side: x for side in sides if side is not x and whole(side) is whole(x)}
    body = close(head.inputs, [*flat, *head.values[2:]], shown)
    op = head_op(pair.op, len(layers), sum(plan.has_bias for plan in plans), len(gradients))
    attrs = {name: pair.attrs[name] for name in ("scale", "dy")}
    made = op(*head.inputs, body=body, layers=tuple(plans), **attrs)
    made.stand_for(pair)
    return made


def _is_row(node: Node, columns: int) -> bool:
    return node.spec.shape[-1:] == (columns,) and node.spec.size == columns


def _keeps_last(node: Node) -> bool:
    """Whether a sum leaves the last axis of several, and that one whole."""
    ndim = len(node.inputs[0].spec.shape)
    axes = normalize_axes(node, node.attrs["axis"], ndim)
    return ndim > 1 and axes == tuple(range(ndim - 1))
