"""in_fp8: the policy `precision="fp8"`, which is bf16 with matrix products in floats of 8 bits.

After `executor/autocast.py` has made a graph one of bfloat16, each product of two matrices reads
codes of its operands (fp8.py): e4m3 of activations and weights, e5m2 of gradients, whose range is
wider. A matrix is rounded once, whoever reads it, along the rows and the columns that its products
want. A bias is added by the product. Products of stacks of matrices, convolutions and attention
stay as they are, and so does the last layer, whose result only losses read: its own product and
those of its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..dtypes import FLOAT32, bfloat16
from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort, output_op
from ..graph.spec import Spec
from .elementwise import add_op
from .fp8 import fp8_matmul_bias_op, fp8_matmul_op, quantize_op_of
from .matmul import matmul_op


def in_fp8(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph whose products are in fp8. The graph must be the executor's own: its
    nodes change.
    """
    order, fetched = find_topo_sort(fetches), set(fetches)
    users: dict[Node, list[Node]] = {node: [] for node in order}
    for node in order:
        for x in node.inputs:
            users[x].append(node)
    products = _products(order, users, fetched)
    # By operand: whether its codes are read along its rows, and along its columns.
    wanted: dict[Node, list[bool]] = {}
    for node in products:
        for x, across in _operands(node):
            wanted.setdefault(x, [False, False])[across] = True
    made: dict[Node, Node] = {}
    for x, ways in wanted.items():
        with attributed_to(x):
            made[x] = quantize_op_of(ways)(x, wide=_is_gradient(x))
    replaced: dict[Node, Node] = {}
    for node in products:
        way = _to_bias(node, users, fetched)
        found = _product(node, wanted, made, _bias_of(way))
        for view in way[1:-1]:
            found = view.derive([found], view.spec)
        replaced[way[-1]] = found
    for node in find_topo_sort([replaced.get(node, node) for node in order]):
        node.inputs = [replaced.get(x, x) for x in node.inputs]
    return [replaced.get(node, node) for node in fetches]


def _operands(node: Node) -> list[tuple[Node, bool]]:
    """A product's operands, each with True where K lies along its columns."""
    (A, B), attrs = node.inputs, node.attrs
    return [(A, attrs["trans_A"]), (B, not attrs["trans_B"])]


def _to_bias(node: Node, users: Mapping[Node, Sequence[Node]], fetched: Set[Node]) -> list[Node]:
    """A product, views of it and its sum with a Parameter's row, each the only reader of the one
    before; the product alone where it has no such sum.
    """
    way = [node]
    while len(users[way[-1]]) == 1 and way[-1] not in fetched:
        way += users[way[-1]]
        if way[-1].op is add_op and _bias_of(way) is not None:
            return way
        if not way[-1].op.view or way[-1].spec.shape[-1:] != node.spec.shape[-1:]:
            break
    return [node]


def _bias_of(way: Sequence[Node]) -> Node | None:
    """What the last node of a way adds to the one before: a row of a Parameter, or a copy of it."""
    if len(way) == 1:
        return None
    (row,) = [x for x in way[-1].inputs if x is not way[-2]] or [way[-2]]
    source = row.inputs[0] if row.op.casts else row
    fits = row.spec == Spec(way[0].spec.shape[1:], way[0].spec.dtype, row.spec.declared)
    return row if source.op.leaf == "state" and fits else None


def _product(
    node: Node, wanted: dict[Node, list[bool]], made: dict[Node, Node], bias: Node | None
) -> Node:
    inputs: list[Node] = []
    with attributed_to(node):
        for x, across in _operands(node):
            codes = output_op(made[x], index=int(across and wanted[x][0]))
            inputs += [codes, output_op(made[x], index=sum(wanted[x]))]
        wide_A, wide_B = map(_is_gradient, node.inputs)
        dtype = node.spec.dtype
        op = fp8_matmul_op if bias is None else fp8_matmul_bias_op
        inputs += [] if bias is None else [bias]
        found = op(*inputs, wide_A=wide_A, wide_B=wide_B, dtype=dtype)
    found.stand_for(node)
    return found


def _is_gradient(x: Node) -> bool:
    """True where a value belongs to the backward pass, and not only its copy in another form."""
    while (x.op.casts or x.op.view or x.op.movement) and not x.op.projection:
        x = x.inputs[0]
    return x.backward


def _products(
    order: Sequence[Node], users: Mapping[Node, Sequence[Node]], fetched: Set[Node]
) -> list[Node]:
    """The products that are made in fp8, in their order."""
    found = [
        node for node in order
        if node.op is matmul_op and "algo" not in node.attrs
        and node.spec.dtype in (FLOAT32, bfloat16)
    ]  # fmt: skip
    last = {x for x in found if x not in fetched and _only_losses_read(x, users)}
    return [x for x in found if x not in last and not any(_is_gradient_of(x, y) for y in last)]


def _only_losses_read(node: Node, users: Mapping[Node, Sequence[Node]]) -> bool:
    """True where forward reads a value, or its sum with a bias, in operators alone that take it in
    float32, as losses do.
    """
    readers = [user for user in users[node] if not user.backward]
    return bool(readers) and all(
        _only_losses_read(user, users)
        if user.op.view or user.op.casts or user.op.name == "add"
        else user.op.autocast == "float32"
        for user in readers
    )


def _is_gradient_of(node: Node, product: Node) -> bool:
    """True for a product of one of another's operands with the gradient of its result."""
    return any(
        _is_gradient(dy) and dy.spec.shape == product.spec.shape and x in set(product.inputs)
        for dy, x in (node.inputs, node.inputs[::-1])
    )
