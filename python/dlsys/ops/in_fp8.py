"""in_fp8: the policy `precision="fp8"`, which is bf16 with matrix products in floats of 8 bits.

After `executor/autocast.py` has made a graph one of bfloat16, each product of two matrices reads
codes of its operands (fp8.py): e4m3 of activations and weights, e5m2 of gradients, whose range is
wider. A matrix is rounded once, whoever reads it, along the rows and the columns that its products
want. Products of stacks of matrices, convolutions and attention stay as they are, and so does the
last layer, whose result only losses read: its own product and those of its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..dtypes import FLOAT32, bfloat16
from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort, output_op
from .fp8 import fp8_matmul_op, quantize_op_of
from .matmul import matmul_op


def in_fp8(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph whose products are in fp8. The graph must be the executor's own: its
    nodes change.
    """
    order = find_topo_sort(fetches)
    products = _products(order, fetches)
    # By operand: whether its codes are read along its rows, and along its columns.
    wanted: dict[Node, list[bool]] = {}
    for node in products:
        for x, across in _operands(node):
            wanted.setdefault(x, [False, False])[across] = True
    made: dict[Node, Node] = {}
    for x, ways in wanted.items():
        with attributed_to(x):
            made[x] = quantize_op_of(ways)(x, wide=_is_gradient(x))
    replaced = {node: _product(node, wanted, made) for node in products}
    for node in find_topo_sort([replaced.get(node, node) for node in order]):
        node.inputs = [replaced.get(x, x) for x in node.inputs]
    return [replaced.get(node, node) for node in fetches]


def _operands(node: Node) -> list[tuple[Node, bool]]:
    """A product's operands, each with True where K lies along its columns."""
    (A, B), attrs = node.inputs, node.attrs
    return [(A, attrs["trans_A"]), (B, not attrs["trans_B"])]


def _product(node: Node, wanted: dict[Node, list[bool]], made: dict[Node, Node]) -> Node:
    inputs: list[Node] = []
    with attributed_to(node):
        for x, across in _operands(node):
            codes = output_op(made[x], index=int(across and wanted[x][0]))
            inputs += [codes, output_op(made[x], index=sum(wanted[x]))]
        wide_A, wide_B = map(_is_gradient, node.inputs)
        dtype = node.spec.dtype
        found = fp8_matmul_op(*inputs, wide_A=wide_A, wide_B=wide_B, dtype=dtype)
    found.stand_for(node)
    return found


def _is_gradient(x: Node) -> bool:
    """True where a value belongs to the backward pass, and not only its copy in another form."""
    while (x.op.casts or x.op.view or x.op.movement) and not x.op.projection:
        x = x.inputs[0]
    return x.backward


def _products(order: Sequence[Node], fetches: Sequence[Node]) -> list[Node]:
    """The products that are made in fp8, in their order."""
    users: dict[Node, list[Node]] = {node: [] for node in order}
    for node in order:
        for x in node.inputs:
            users[x].append(node)
    found = [
        node for node in order
        if node.op is matmul_op and "algo" not in node.attrs
        and node.spec.dtype in (FLOAT32, bfloat16)
    ]  # fmt: skip
    last = {x for x in found if x not in set(fetches) and _only_losses_read(x, users)}
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
