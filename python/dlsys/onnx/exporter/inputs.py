"""The graph of what is exported: its nodes, its Variables, and the shapes of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...autodiff import Node, Variable
from ...data.dataset import is_tokens
from ...dtypes import as_dtype
from ...eager.tensor import Tensor
from ...errors import GraphError, ShapeError, quoted
from ...graph.node import find_topo_sort
from ...graph.spec import FLOAT32
from ...nn import Module

Shape = tuple[int | str | None, ...]
Known = tuple[int | str, ...]  # with names for free extents


class Input(NamedTuple):
    """An input of a model: its name, shape and dtype."""

    name: str
    shape: Known
    dtype: Any


class Graph(NamedTuple):
    """nodes: of the outputs. names: theirs, where the model has some. shapes: those that are given
    to Variables, by name.
    """

    nodes: list[Node]
    names: list[str] | None
    shapes: Mapping[str, Shape]


def graph_of(model: Any, inputs: Any, dynamic_batch: bool, training: bool) -> Graph:
    """The graph of a model, a function or nodes."""
    if isinstance(model, Node):
        return Graph([model], None, _named_shapes(inputs))
    if isinstance(model, Mapping):
        return Graph(_nodes(model, model.values()), list(map(str, model)), _named_shapes(inputs))
    if isinstance(model, (list, tuple)):
        return Graph(_nodes(model, model), None, _named_shapes(inputs))
    if not callable(model):
        raise GraphError(f"export: expected a Module, a function or nodes, got {quoted(model)}")
    found = _model_inputs(model, inputs, dynamic_batch)
    variables = [
        Variable(name, tuple(None if isinstance(n, str) else n for n in shape), dtype)
        for name, shape, dtype in found
    ]
    if isinstance(model, Module):
        with model.in_mode(training):
            made = model(*variables)
    else:
        made = model(*variables)
    shapes: dict[str, Shape] = {one.name: one.shape for one in found}
    if isinstance(made, Mapping):
        return Graph(_nodes(model, made.values()), list(map(str, made)), shapes)
    several = made if isinstance(made, (list, tuple)) else [made]
    return Graph(_nodes(model, several), None, shapes)


def _nodes(model: Any, made: Any) -> list[Node]:
    """What was given or made as a list of nodes; lists of them, such as states, are joined."""
    nodes: list[Node] = []
    for one in made:
        nodes += _nodes(model, one) if isinstance(one, (list, tuple)) else [one]
    kinds = [type(node).__name__ for node in nodes if not isinstance(node, Node)]
    if kinds or not nodes:
        wrong = ", ".join(kinds) or "nothing"
        raise GraphError(
            f"export: {type(model).__name__} gives {wrong}, expected nodes; "
            "forward works on nodes as on Tensors"
        )
    return nodes


def _model_inputs(model: Any, inputs: Any, dynamic_batch: bool) -> list[Input]:
    """The inputs of a model, by default of the data that it was trained on."""
    about = getattr(model, "trained_on", None)
    if inputs is None and about is None:
        raise ShapeError(
            "export: a model that was not trained by fit needs the shapes of its inputs, such as "
            "inputs=(None, 1, 28, 28)"
        )
    if about is not None and inputs is None:
        kind = np.dtype(about.dtype)
        inputs = (None, *about.shape), kind if is_tokens(kind) else FLOAT32
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    elif isinstance(inputs, list):
        named = {f"input_{k}": one for k, one in enumerate(inputs)}
    else:
        named = {"input": inputs}
    found = []
    for name, one in named.items():
        shape, dtype = _shape_of(name, one)
        found.append(Input(name, _free(name, shape, dynamic_batch), dtype))
    return found


def _named_shapes(inputs: Any) -> dict[str, Shape]:
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        raise ShapeError("export: inputs of nodes are shapes by the names of their Variables")
    return {name: _shape_of(name, one)[0] for name, one in inputs.items()}


def _shape_of(name: str, one: Any) -> tuple[Shape, Any]:
    """The shape and dtype of an example, or of a shape, float32 where it names no dtype."""
    if isinstance(one, Tensor):
        return tuple(one.shape), one.dtype
    if isinstance(one, np.ndarray):
        return one.shape, FLOAT32 if one.dtype == np.float64 else one.dtype
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], tuple):
        return _shape_of(name, one[0])[0], as_dtype(one[1])
    plain = isinstance(one, tuple) and all(
        n is None or isinstance(n, str) or (type(n) is int and n >= 0) for n in one
    )
    if not plain:
        raise ShapeError(
            f"export: {name} is {quoted(one)}, expected a shape such as (None, 784), a shape and a "
            "dtype, or an array"
        )
    return one, FLOAT32


def _free(name: str, shape: Shape, dynamic_batch: bool = False) -> Known:
    """A shape with names for its free extents; one of numbers alone has a free batch if asked."""
    if dynamic_batch and shape and all(isinstance(extent, int) for extent in shape):
        shape = (None, *shape[1:])
    names = ("batch", *(f"{name}_{axis}" for axis in range(1, len(shape))))
    return tuple(free if extent is None else extent for free, extent in zip(names, shape))


def feeds_of(fetches: Sequence[Node], given: Mapping[str, Shape]) -> dict[Node, Input]:
    """The Variables of a graph as inputs. ShapeError for one whose shape nobody tells."""
    found: dict[Node, Input] = {}
    for node in find_topo_sort(fetches):
        if node.op.leaf != "feed":
            continue
        shape, declared = given.get(node.name), node.shape
        if shape is None and declared is None:
            raise ShapeError(
                f"export: {node.name} declares no shape; give it one, inputs={{{node.name!r}: "
                f"(None, 784)}} for instance [{node.where}]"
            )
        if shape is not None and declared is not None and not _fits(shape, declared):
            raise ShapeError(
                f"export: {node.name} declares {declared}, got {shape} for it [{node.where}]"
            )
        if any(one.name == node.name for one in found.values()):
            raise GraphError(
                f"export: two Variables are called {node.name}, and a file tells inputs by name; "
                f"name one otherwise [{node.where}]"
            )
        known = _free(node.name, declared if shape is None else shape)
        found[node] = Input(node.name, known, node.dtype or FLOAT32)
    unknown = sorted(set(given) - {one.name for one in found.values()})
    if unknown:
        used = ", ".join(one.name for one in found.values()) or "none"
        raise ShapeError(f"export: {unknown[0]} is no Variable of the graph; there are {used}")
    return found


def _fits(shape: Shape, declared: Shape) -> bool:
    return len(shape) == len(declared) and all(b is None or a == b for a, b in zip(shape, declared))
