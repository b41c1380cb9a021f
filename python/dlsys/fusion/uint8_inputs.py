"""uint8 inputs: a batch of uint8 stays so until the products that read it, in fp32 and tf32.

Pattern: a shuffled batch of uint8 samples, scaled by one number, all of whose readers are products
or fused updates. Tensor cores take uint8 for integers, which they hold exactly: nothing of them is
rounded, and the scale multiplies the sums. In fp32 nothing of the other factor is either, which
they take in three parts. The batch is a quarter as large wherever it is written and read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.lines import attributed_to
from ..graph.node import Node, Op
from ..ops.leaf import constant_op
from ..ops.random.device_batch import shuffled_batch_op, shuffled_rows_op
from ..passes.pipeline import Options, Pass
from .shared.body import ACTIVATIONS, Fused, FusedGemm, Selected, close, in_shape, with_uint8
from .shared.rewrite import Graph, exchange, value_of

# activation(scale · A B) and activation(scale · A B + bias), where A is uint8: the scale is a
# further input.
_ACTIVATION = Selected("activation", ACTIVATIONS)
matmul_u8_op = FusedGemm("matmul_u8", _ACTIVATION, any_dtype=(0,))
matmul_u8_bias_op = FusedGemm("matmul_u8_bias", _ACTIVATION, any_dtype=(0,))
PRODUCTS = {
    "matmul": matmul_u8_op,
    "matmul_map": matmul_u8_op,
    "matmul_bias": matmul_u8_bias_op,
}
Reading = tuple[Op, dict[str, Any]]  # an operator and its attributes


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose batches of uint8 are read as such. The graph must be the
    executor's own, with its updates fused: its nodes change.

    A batch is left as it is where anybody else reads it, or where it is more than scaled by one
    number.
    """
    graph = Graph(fetches)
    for node in graph.order:
        if node.op is shuffled_batch_op and _is_uint8(node):
            readers = _readers(graph, node)
            readings = {x: _reading(x, views) for x, views in readers.items()}
            if readers and all(readings.values()):
                fetches = exchange(fetches, _replaced(graph, node, readers, readings))
                graph = Graph(fetches)
    return list(fetches)


def _is_uint8(batch: Node) -> bool:
    samples, *_, scale, shift = batch.inputs
    if samples.spec.dtype != np.uint8 or scale.spec.size != 1:
        return False
    return shift.op is constant_op and not np.any(shift.attrs["value"])


def _readers(graph: Graph, batch: Node) -> dict[Node, list[Node]]:
    """The nodes that read the samples, each with the views of them that it reads."""
    found: dict[Node, list[Node]] = {}
    for samples in graph.users[batch]:
        if samples.attrs["index"] == 0:
            for reader, view in graph.readers(samples):
                found.setdefault(reader, []).append(view)
    return found


def _reading(reader: Node, views: Sequence[Node]) -> Reading | None:
    """The operator in place of a reader that takes these views in uint8; None without a kernel."""
    positions = [k for k, x in enumerate(reader.inputs) if any(x is view for view in views)]
    op = PRODUCTS.get(reader.op.kernel or "")
    if op is None:
        return reader.op.with_uint8(reader, positions) if isinstance(reader.op, Fused) else None
    if positions != [0] or reader.attrs["trans_A"] or "algo" in reader.attrs:
        return None
    if reader.spec.dtype != np.float32:
        return None
    body = reader.attrs.get("body") or close(reader.inputs, [reader])
    return op, {"activation": "", **reader.attrs, "body": with_uint8(body, positions)}


def _replaced(
    graph: Graph,
    batch: Node,
    readers: dict[Node, list[Node]],
    readings: dict[Node, Reading | None],
) -> dict[Node, Node]:
    """The nodes in place of a batch's values and of its readers."""
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
    for reader, reading in readings.items():
        assert reading is not None
        op, attrs = reading
        with attributed_to(reader):
            views = {x: in_shape(stored, x.spec.shape) for x in readers[reader]}
            made = Node(op, [*(views.get(x, x) for x in reader.inputs), scale], attrs, reader.name)
            made.stand_for(reader)
            if reader.op.outputs == 1:
                replaced[reader] = made
            else:
                for value in graph.users[reader]:
                    replaced[value] = value_of(made, value.attrs["index"], value)
    return replaced


FUSION = Pass(
    "uint8_inputs",
    fuse,
    position=90,
    needs=("matmul_u8", "matmul_u8_bias"),
    when=lambda options: options.precision in ("fp32", "tf32"),
)
