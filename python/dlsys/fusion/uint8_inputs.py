"""keep_bytes: a batch of bytes stays bytes until the products that read it, in tf32.

Tensor cores take bytes for whole numbers, which tf32 holds exactly: nothing is rounded, and the
scale multiplies the sums. The batch is a quarter as large wherever it is written and read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.lines import attributed_to
from ..graph.node import Node
from ..ops.leaf import constant_op
from ..ops.matmul import matmul_op
from ..ops.random.device_batch import shuffled_batch_op, shuffled_rows_op
from ..passes.rewrite import Graph, exchange, value_of, whole
from .body import (
    Body,
    close,
    matmul_bias_op,
    matmul_map_op,
    matmul_u8_bias_op,
    matmul_u8_op,
    on_bytes,
)
from .gemm_epilogue import in_shape
from .weight_update_op import FusedUpdate, fused_update

PRODUCTS = {
    matmul_op: matmul_u8_op,
    matmul_map_op: matmul_u8_op,
    matmul_bias_op: matmul_u8_bias_op,
}


def keep_bytes(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph whose batches of bytes are read as such, for a GPU in tf32. The
    graph must be the executor's own, with its updates fused: its nodes change.

    A batch is left as it is where anybody else reads it, or where it is more than scaled by one
    number.
    """
    graph = Graph(fetches)
    for node in graph.order:
        if node.op is shuffled_batch_op and _are_bytes(node):
            readers = _readers(graph, node)
            if readers and all(_takes_bytes(reader, shown) for reader, shown in readers.items()):
                fetches = exchange(fetches, _replaced(graph, node, readers))
                graph = Graph(fetches)
    return list(fetches)


def _are_bytes(batch: Node) -> bool:
    samples, *_, scale, shift = batch.inputs
    if samples.spec.dtype != np.uint8 or scale.spec.size != 1:
        return False
    return shift.op is constant_op and not np.any(shift.attrs["value"])


def _readers(graph: Graph, batch: Node) -> dict[Node, list[Node]]:
    """Who reads the samples, and as which views; the samples themselves where they are fetched."""
    found: dict[Node, list[Node]] = {}
    stack = [x for x in graph.users[batch] if x.attrs["index"] == 0]
    while stack:
        view = stack.pop()
        if graph.is_fetched(view):
            found[view] = [view]
        for user in graph.users[view]:
            if whole(user) is user:
                found.setdefault(user, []).append(view)
            else:
                stack.append(user)
    return found


def _takes_bytes(reader: Node, shown: Sequence[Node]) -> bool:
    """Whether there is a kernel that reads a batch, as these views, in bytes."""
    numbers = [k for k, x in enumerate(reader.inputs) if any(x is view for view in shown)]
    if reader.op in PRODUCTS:
        return numbers == [0] and not reader.attrs["trans_A"]
    if not isinstance(reader.op, FusedUpdate):
        return False
    of = [factor for factor in map(reader.op.factor, numbers) if factor is not None]
    once = len(of) == len(numbers) == len({product for product, _ in of})
    summed = any(reader.attrs["sums"][product] == word for product, word in of)
    return once and not summed and not reader.op.of_bytes


def _replaced(graph: Graph, batch: Node, readers: dict[Node, list[Node]]) -> dict[Node, Node]:
    """What takes the place of a batch and of its readers."""
    samples, labels, step, scale, _ = batch.inputs
    replaced: dict[Node, Node] = {}
    with attributed_to(batch):
        rows = Node(shuffled_rows_op, (samples, labels, step), batch.attrs, batch.name)
        rows.stand_for(batch)
        stored = value_of(rows, 0)
    for value in graph.users[batch]:
        if value.attrs["index"] == 1:
            with attributed_to(value):
                replaced[value] = value_of(rows, 1, value)
    for reader, shown in readers.items():
        with attributed_to(reader):
            views = {x: in_shape(stored, x.spec.shape) for x in shown}
            made = _reading_bytes(reader, views, scale)
            made.stand_for(reader)
            replaced[reader] = made
            if reader.op.outputs > 1:
                del replaced[reader]
                for value in graph.users[reader]:
                    replaced[value] = value_of(made, value.attrs["index"], value)
    return replaced


def _reading_bytes(reader: Node, views: dict[Node, Node], scale: Node) -> Node:
    """A product, or an update with products, that reads bytes for some of its factors."""
    inputs = [views.get(x, x) for x in reader.inputs]
    numbers = [k for k, x in enumerate(reader.inputs) if x in views]
    attrs = dict(reader.attrs)
    op = reader.op
    if isinstance(op, FusedUpdate):
        factors = [factor for factor in map(op.factor, numbers) if factor is not None]
        of = dict(factors)
        words = tuple(of.get(product, "") for product in range(op.products))
        body: Body = attrs["body"]
        attrs["body"] = on_bytes(body, [k - len(op.writes) for k in numbers])
        op = fused_update(op.update, op.products, op.outputs, words)
    else:
        body = attrs.get("body") or close(reader.inputs, [reader])
        attrs = {"activation": "", **attrs, "body": on_bytes(body, numbers)}
        op = PRODUCTS[op]
    return Node(op, [*inputs, scale], attrs, reader.name)
