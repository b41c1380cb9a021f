"""export: a graph or a model as an ONNX file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...autodiff import Node, Parameter
from ...dtypes import bfloat16
from ...errors import GraphError, ShapeError
from ...graph.infer import infer
from ...graph.node import find_topo_sort
from ...graph.spec import FLOAT32, Spec
from ...inference.form import inference_form
from ...nn import Module
from ..package import onnx_package
from .extents import Merger, assignments, is_even
from .inputs import Input, feeds_of, graph_of
from .model import (
    Port,
    biased,
    checked,
    initializers,
    made_model,
    parameter_dtype,
    pruned,
    shared,
    with_outputs,
    write,
)
from .trace import Emitter, Trace, refusal

OLDEST = 17
_MOST_INSIDE = 2**31 - 2**24  # bytes of weights in the model's file, which ends at 2 GiB


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
    `(None, 1, 28, 28)`, shapes with a dtype, `((None, 20), "int64")`, or arrays or Tensors; a list
    of several, or a dictionary that names them. None in a shape, or a name such as "length", is an
    extent that each run decides; axes of one name have one extent, and None in front is "batch". By
    default a model's input is that of `model.trained_on`. For nodes, a dictionary that gives shapes
    to Variables by name; what these declare without None stays.

    outputs: their names; "output", or "output_0" and so on by default. dynamic_batch: where all
    extents of an input of a model are numbers, as those of arrays, the first is free all the same.
    opset: the version of ONNX's operators, 17 to the newest of the installed package. training:
    the graph as it trains; by default it takes inference form, without dropout and with running
    statistics in batch normalization. metadata: texts by name, which the file has beside the
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
    graph = graph_of(model, inputs, dynamic_batch, training)
    fetches = graph.nodes if training else inference_form(graph.nodes)
    feeds = feeds_of(fetches, graph.shapes)
    names = _output_names(outputs or graph.names, fetches, feeds.values())
    merger = _traced(fetches, feeds, names, opset)
    trace = merger.merged()
    with_outputs(trace, names, fetches[0])
    results = [
        Port(name, _file_dtype(spec.dtype), merger.shape(k))
        for k, (name, spec) in enumerate(trace.outputs)
    ]
    given = [Port(name, _file_dtype(dtype), shape) for name, shape, dtype in feeds.values()]
    about = _metadata(model) | dict(metadata or {})
    _write(Path(path), trace, given, results, opset, about, external_data_above)


def _write(
    path: Path,
    trace: Trace,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    opset: int,
    about: Mapping[str, str],
    most: int,
) -> None:
    arrays = initializers(trace)
    calls = shared(trace.calls, arrays, keep=set(trace.parameters))
    calls = biased(calls, arrays, {port.name for port in outputs})
    model = made_model(calls, inputs, outputs, (), opset, about)
    between = checked(model, arrays)
    weights = {port.name for port in (*inputs, *outputs)} | set(arrays)
    model.graph.value_info.extend(info for info in between if info.name not in weights)
    write(path, model, arrays, most)


# ---- traces ----


def _traced(
    fetches: Sequence[Node], feeds: Mapping[Node, Input], names: Sequence[str], opset: int
) -> Merger:
    """The traces of a graph for several extents."""
    axes: dict[str, tuple[str, int]] = {}  # an input and one of its axes for each name
    for name, shape, _ in feeds.values():
        for axis, extent in enumerate(shape):
            if isinstance(extent, str):
                axes.setdefault(extent, (name, axis))
    numbers, traces = [], []
    for each in assignments(list(axes)):
        try:
            traces.append(_trace(fetches, feeds, each, names, opset))
            numbers.append(each)
        except ShapeError:
            if is_even(each):
                raise
    return Merger(traces, numbers, axes)


def _trace(
    fetches: Sequence[Node],
    feeds: Mapping[Node, Input],
    numbers: Mapping[str, int],
    names: Sequence[str],
    opset: int,
) -> Trace:
    """The trace of a graph for some extents, in which the names of inputs and outputs are taken."""
    order = find_topo_sort(fetches)
    leaves = {
        x: Spec(tuple(numbers[n] if isinstance(n, str) else n for n in shape), dtype)
        for x, (_, shape, dtype) in feeds.items()
    }
    parameters = [node for node in order if isinstance(node, Parameter)]
    leaves |= {x: Spec(x.shape, parameter_dtype(x)) for x in parameters}
    specs = infer(order, leaves)
    g = Emitter(opset)
    for name in (*names, *(x.name for x in feeds)):
        g.names.unique(name)
    g.trace.parameters = {g.names.unique(x.name): x for x in parameters}
    leaf_names = {x: x.name for x in feeds} | {x: n for n, x in g.trace.parameters.items()}
    new: dict[Node, Node] = {}
    for leaf, name in leaf_names.items():
        new[leaf] = leaf.derive([], specs[leaf])
        g.bind(new[leaf], name)
    for node, spec in specs.items():
        if node not in new:
            new[node] = node.derive([new[x] for x in node.inputs], spec)
            g.add(new[node])
    if g.refused:
        raise refusal(g.refused)
    g.trace.outputs = [(g.value(new[node]), specs[node]) for node in fetches]
    g.trace.calls = pruned(g.trace, opset)
    return g.trace


# ---- names and what goes with a model ----


def _output_names(
    names: Sequence[str] | None, fetches: Sequence[Node], feeds: Iterable[Input]
) -> list[str]:
    count, taken = len(fetches), [one.name for one in feeds]
    plain = ["output"] if count == 1 else [f"output_{k}" for k in range(count)]
    made = list(names or plain)
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
