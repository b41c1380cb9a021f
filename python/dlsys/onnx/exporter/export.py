"""export: a graph or a model as an ONNX file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...autodiff import Node, Variable
from ...data.dataset import is_tokens
from ...dtypes import as_dtype, bfloat16
from ...eager.tensor import Tensor
from ...errors import GraphError, ShapeError
from ...graph.infer import infer
from ...graph.node import find_topo_sort
from ...graph.spec import FLOAT32, Spec
from ...nn import Module
from ..package import onnx_package
from . import rules
from .extents import Merger, assignments
from .inference import inference_form
from .model import (
    Port,
    biased,
    checked,
    initializers,
    made_model,
    pruned,
    shared,
    with_outputs,
    write,
)
from .trace import Emitter, Trace, refusal

OLDEST = 17
_MOST_INSIDE = 2**31 - 2**24  # bytes of weights in the model's file, which ends at 2 GiB
Shape = tuple[int | str | None, ...]

assert rules  # its import fills the table


def export(
    model: Module | Callable[..., Any] | Node | Sequence[Node] | Mapping[str, Node],
    path: str | os.PathLike[str],
    inputs: Any = None,
    *,
    outputs: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    opset: int = 21,
    training: bool = False,
    metadata: Mapping[str, str] | None = None,
    external_data_above: int = _MOST_INSIDE,
) -> None:
    """Writes a model, or a graph as it was built, as an ONNX file that other runtimes run.

    model: a Module (also one that was used with Tensors), a function of nodes, a node, several, or
    a dictionary of nodes by the names of the outputs. A loss among the nodes makes its labels
    inputs of the file. path: of the file; it replaces one that is there when it is complete.

    inputs: what a Module or function is called with: shapes with the batch such as
    `(None, 1, 28, 28)`, or arrays or Tensors of these shapes and dtypes; a list of several, or a
    dictionary that names them. None in a shape, or a name such as "length", is an extent that each
    run decides; axes of one name have one extent. By default a model's input is that of
    `model.trained_on`. For nodes, the dictionary gives shapes to Variables by name where they
    declare none, and Variables keep what they declare.

    outputs: their names; "output", or "output_0" and so on by default. dynamic_batch: axis 0 of
    each input of a model, and of each Variable that leaves it open, is free and called "batch".
    opset: the version of ONNX's operators, 17 to the newest of the installed package. training:
    the graph as it trains; by default it takes inference form, without dropout and with running
    statistics in batch normalization. metadata: texts by name, kept in the file beside the
    version of dlsys and, where the model has them, the names of its classes and the normalization
    of its inputs. external_data_above: bytes of weights above which these lie in a file beside it,
    `NAME.data`; ONNX's own limit is 2 GiB.

    Parameters are initializers under their names. float64 stays float64; bfloat16 is written as
    float32, which has its values. The file is checked with full shape inference.

    Raises GraphError that lists all operators of the graph that ONNX cannot express, with the
    reason and the line of each; ShapeError where inputs do not fit; DataError where nothing can be
    written at `path`; DlsysError without the package onnx.

    >>> dl.onnx.export(nn.MLP((4, 16, 3), seed=0), "mlp.onnx", inputs=(None, 4))
    """
    newest = onnx_package().defs.onnx_opset_version()
    if not OLDEST <= opset <= newest:
        raise GraphError(f"export: opset is {opset}, expected {OLDEST} to {newest}")
    given, nodes, names = _graph_of(model, inputs, dynamic_batch, training)
    fetches = nodes if training else inference_form(nodes)
    shapes = _feeds_of(fetches, given, dynamic_batch)
    symbols = list(dict.fromkeys(n for shape, _ in shapes.values() for n in shape
                                 if isinstance(n, str)))  # fmt: skip
    numbers = assignments(symbols)
    traces = [_trace(fetches, shapes, each, opset) for each in numbers]
    axes = {}
    for node, (shape, _) in shapes.items():
        for axis, extent in enumerate(shape):
            if isinstance(extent, str):
                axes.setdefault(extent, (node.name, axis))
    merger = Merger(traces, numbers, axes)
    trace = merger.merged()
    made = _output_names(outputs or names, len(nodes), [x.name for x in shapes])
    with_outputs(trace, made, fetches[0])
    ports = [
        Port(name, _file_dtype(spec.dtype), merger.shape(k))
        for k, (name, spec) in enumerate(trace.outputs)
    ]
    fed = [Port(x.name, _file_dtype(spec), shape) for x, (shape, spec) in shapes.items()]
    about = _metadata(model) | dict(metadata or {})
    _write(Path(path), trace, fed, ports, opset, about, external_data_above)


def _write(
    path: Path,
    trace: Trace,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    opset: int,
    about: Mapping[str, str],
    most: int,
) -> None:
    calls = pruned(trace, opset)
    arrays = initializers(trace, calls)
    calls = shared(calls, arrays, keep=set(trace.parameters))
    calls = biased(calls, arrays, {port.name for port in outputs})
    model = made_model(calls, inputs, outputs, (), opset, about)
    between = checked(model, arrays)
    weights = {port.name for port in (*inputs, *outputs)} | set(arrays)
    model.graph.value_info.extend(info for info in between if info.name not in weights)
    write(path, model, arrays, most)


# ---- the graph ----


def _graph_of(
    model: Any, inputs: Any, dynamic_batch: bool, training: bool
) -> tuple[dict[str, Shape], list[Node], list[str] | None]:
    """Shapes that are given to Variables by name, the nodes of the outputs, and their names."""
    if isinstance(model, Node):
        model = [model]
    if isinstance(model, Mapping):
        return _named_shapes(inputs), list(model.values()), list(map(str, model))
    if isinstance(model, (list, tuple)):
        return _named_shapes(inputs), list(model), None
    if not callable(model):
        raise GraphError(f"export: expected a Module, a function or nodes, got {model!r}")
    variables = [
        Variable(name, tuple(None if isinstance(n, str) else n for n in shape), dtype)
        for name, shape, dtype in _model_inputs(model, inputs, dynamic_batch)
    ]
    shapes = {n: s for n, s, _ in _model_inputs(model, inputs, dynamic_batch)}
    if isinstance(model, Module):
        with model.in_mode(training):
            made = model(*variables)
    else:
        made = model(*variables)
    names = list(map(str, made)) if isinstance(made, Mapping) else None
    nodes = list(made.values()) if isinstance(made, Mapping) else made
    nodes = list(nodes) if isinstance(nodes, (list, tuple)) else [nodes]
    if not all(isinstance(node, Node) for node in nodes):
        kinds = ", ".join(type(node).__name__ for node in nodes)
        raise GraphError(f"export: {type(model).__name__} gave {kinds} of nodes, expected nodes")
    return shapes, nodes, names


def _model_inputs(model: Any, inputs: Any, dynamic_batch: bool) -> list[tuple[str, Shape, Any]]:
    """Name, shape and dtype of each input of a model."""
    about = getattr(model, "trained_on", None)
    if inputs is None and about is not None:
        kind = np.dtype(about.dtype)
        example = (
            (None, *about.shape),
            (kind if kind.kind in "iu" and kind.itemsize > 1 else FLOAT32),
        )
        return [("input", _free("input", example[0], dynamic_batch), example[1])]
    if inputs is None:
        raise ShapeError(
            "export: a model that was not trained by fit needs the shapes of its inputs, such as "
            "inputs=(None, 1, 28, 28)"
        )
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    elif isinstance(inputs, list):
        named = {f"input_{k}": one for k, one in enumerate(inputs)}
    else:
        named = {"input": inputs}
    found = []
    for name, one in named.items():
        shape, dtype = _shape_of(name, one)
        found.append((name, _free(name, shape, dynamic_batch), dtype))
    return found


def _named_shapes(inputs: Any) -> dict[str, Shape]:
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        raise ShapeError("export: inputs of nodes are shapes by the names of their Variables")
    return {name: _shape_of(name, one)[0] for name, one in inputs.items()}


def _shape_of(name: str, one: Any) -> tuple[Shape, Any]:
    """The shape and dtype of an example, or of a shape, float32."""
    if isinstance(one, Tensor):
        return tuple(one.shape), one.dtype
    if isinstance(one, np.ndarray):
        return one.shape, FLOAT32 if one.dtype == np.float64 else one.dtype
    if isinstance(one, Node) and one.shape is not None:
        return tuple(one.shape), one.dtype or FLOAT32
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], tuple):
        return one[0], as_dtype(one[1])
    plain = isinstance(one, tuple) and all(
        n is None or isinstance(n, str) or (isinstance(n, int) and n >= 0) for n in one
    )
    if not plain:
        raise ShapeError(
            f"export: {name} is {one!r}, expected a shape such as (None, 784), a shape and a dtype, "
            "or an array"
        )
    return one, FLOAT32


def _free(name: str, shape: Shape, dynamic_batch: bool) -> Shape:
    """A shape with names for its free axes: axis 0 is the batch's where it has no other."""
    found: list[int | str | None] = []
    for axis, extent in enumerate(shape):
        if axis == 0 and dynamic_batch and not isinstance(extent, str):
            extent = "batch"
        elif extent is None:
            extent = f"{name}_{axis}"
        found.append(extent)
    return tuple(found)


def _feeds_of(
    fetches: Sequence[Node], given: Mapping[str, Shape], dynamic_batch: bool
) -> dict[Node, tuple[Shape, Any]]:
    """The Variables of a graph, each with its shape, names for free axes, and its dtype."""
    order = find_topo_sort(fetches)
    found: dict[Node, tuple[Shape, Any]] = {}
    unknown = set(given) - {x.name for x in order if x.op.leaf == "feed"}
    for node in order:
        if node.op.leaf != "feed":
            continue
        shape, declared = given.get(node.name), node.shape
        if shape is None and declared is None:
            raise ShapeError(
                f"export: {node.name} declares no shape; give it, inputs={{{node.name!r}: (None, "
                f"784)}}, say [{node.where}]"
            )
        if shape is None:
            shape = _free(node.name, declared, dynamic_batch and declared[:1] == (None,))
        elif declared is not None and not _fits(shape, declared):
            raise ShapeError(
                f"export: {node.name} declares {declared}, got {shape} for it [{node.where}]"
            )
        shape = _free(node.name, shape, False)
        found[node] = (shape, node.dtype or FLOAT32)
    if unknown and fetches:
        used = ", ".join(x.name for x in found) or "none"
        raise ShapeError(f"export: no Variable is called {sorted(unknown)[0]}; there are {used}")
    return found


def _fits(shape: Shape, declared: Shape) -> bool:
    return len(shape) == len(declared) and all(b is None or a == b for a, b in zip(shape, declared))


def _trace(
    fetches: Sequence[Node],
    shapes: Mapping[Node, tuple[Shape, Any]],
    numbers: Mapping[str, int],
    opset: int,
) -> Trace:
    """The trace of a graph for some extents."""
    order = find_topo_sort(fetches)
    leaves = {
        x: Spec(tuple(numbers[n] if isinstance(n, str) else n for n in shape), dtype)
        for x, (shape, dtype) in shapes.items()
    }
    for node in order:
        if node.op.leaf == "state":
            leaves[node] = Spec(node.shape, node.dtype)
    specs = infer(order, leaves)
    g = Emitter(opset)
    new: dict[Node, Node] = {}
    for node in order:
        if node.op.leaf in ("feed", "state"):
            name = node.name if node.op.leaf == "feed" else g.names.unique(node.name)
            g.names.unique(name)
            new[node] = node.derive([], specs[node])
            g.bind(new[node], name)
            if node.op.leaf == "state":
                g.trace.parameters[name] = node  # type: ignore[assignment]
    for node, spec in specs.items():
        if node not in new:
            new[node] = node.derive([new[x] for x in node.inputs], spec)
            g.add(new[node])
    if g.refused:
        raise refusal(g.refused)
    g.trace.outputs = [(g.value(new[node]), specs[node]) for node in fetches]
    return g.trace


# ---- names and what goes with a model ----


def _output_names(names: Sequence[str] | None, count: int, taken: Sequence[str]) -> list[str]:
    made = (
        list(names)
        if names
        else ["output"]
        if count == 1
        else [f"output_{k}" for k in range(count)]
    )
    if len(made) != count or len({*made, *taken}) != count + len(taken):
        raise GraphError(
            f"export: expected {count} names of outputs, all different and none of an input, got "
            f"{', '.join(made)}"
        )
    return made


def _file_dtype(dtype: Any) -> Any:
    return FLOAT32 if dtype is bfloat16 else dtype


def _metadata(model: Any) -> dict[str, str]:
    found = {"dlsys_version": __version__}
    about = getattr(model, "trained_on", None)
    if about is not None:
        found["labels"] = json.dumps(list(about.classes))
        found["normalization"] = json.dumps({"mean": about.mean, "std": about.std})
        found["trained_on_dtype"] = about.dtype
        found["trained_on_shape"] = json.dumps(about.shape)
    return found
