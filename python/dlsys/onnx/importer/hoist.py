"""Weights that a file has in Constant nodes, or inside of branches and loops, as initializers of
the model: what is trained has to be known before anything is computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..package import onnx_package

# The inputs of operators that are weights, by position.
_WEIGHTS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "DeformConv"), (1, 2)),
    **dict.fromkeys(("MatMul", "Add", "Mul"), (0, 1)),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), (1, 2, 3)),
    "BatchNormalization": (1, 2, 3, 4),
    **dict.fromkeys(("InstanceNormalization", "LayerNormalization", "GroupNormalization"), (1, 2)),
    "RMSNormalization": (1,),
    "PRelu": (1,),
}


def hoist(model: Any) -> None:
    """Moves the float constants of a ModelProto that only weights read to its initializers. A name
    that stands for several values stays where it is.
    """
    graphs = list(_graphs(model.graph))
    made = Counter(name for graph in graphs for name in _defined(graph))
    weights = _weights(graphs)
    for graph in graphs:
        for node in [n for n in graph.node if n.op_type == "Constant" and not n.domain]:
            value = next((a.t for a in node.attribute if a.name == "value"), None)
            if value is not None and _is_weight(value, node.output[0], made, weights):
                model.graph.initializer.add().CopyFrom(value)
                model.graph.initializer[-1].name = node.output[0]
                graph.node.remove(node)
        for tensor in list(graph.initializer) if graph is not model.graph else ():
            if _is_weight(tensor, tensor.name, made, weights):
                model.graph.initializer.add().CopyFrom(tensor)
                graph.initializer.remove(tensor)


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside of it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _defined(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield from node.output
    yield from {*(t.name for t in graph.initializer), *(v.name for v in graph.input)}


def _weights(graphs: list[Any]) -> set[str]:
    """The names that nothing but weights of operators read."""
    found: set[str] = set()
    others = {v.name for graph in graphs for v in graph.output}
    for graph in graphs:
        for node in graph.node:
            places = () if node.domain else _WEIGHTS.get(node.op_type, ())
            for k, name in enumerate(node.input):
                (found if k in places else others).add(name)
    return found - others


def _is_weight(tensor: Any, name: str, made: Counter[str], weights: set[str]) -> bool:
    types = onnx_package().TensorProto
    kind = tensor.data_type in (types.FLOAT, types.FLOAT16)
    return kind and math.prod(tensor.dims) > 1 and name in weights and made[name] == 1
