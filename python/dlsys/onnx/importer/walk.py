"""The walk over an ONNX graph: node by node, values by name.

A value is a numpy array where it is known before anything runs or no device holds its dtype, else
a Node or a Tensor, a list for a sequence, and None for an optional that is empty. What only depends
on known values is computed at once by host rules, so that shapes that the graph computes are
numbers when a rule needs them. With Tensors any value can be looked at; with Nodes one that a feed
decides is refused where a rule needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ... import autodiff
from ... import functional as F
from ...dtypes import STORAGE
from ...eager.tensor import Tensor
from ...errors import DataError, DlsysError, quoted
from ...graph.node import Node
from ...ops.quantize import quantize_op
from ..package import onnx_package
from .call import Call
from .host import HostOp
from .reader import MOST_ELEMENTS, array_of
from .registry import RULES, Rule, Unfit

MOST_DEPTH = 24  # functions that call functions, and graphs within graphs
# The names of numpy's floats that kernels are written over, and of all that every device holds.
STORED = tuple(dtype.name for dtype in STORAGE if isinstance(dtype, np.dtype))
# Operators that commute with quantization: they move elements, or select the largest.
_COMMUTING = {"Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
HELD = (*STORED, "int32", "int64", "uint8", "bool")


def on_device(array: Any, device: Any) -> bool:
    """True where a device holds arrays of this dtype as they are."""
    name = str(getattr(array, "dtype", None))
    return name in HELD or (name == "float64" and device == "numpy")


def _is_quantized(x: Any) -> bool:
    """True for a Node of 8 bits with one scale."""
    return isinstance(x, Node) and x.op is quantize_op and not x.inputs[1].shape


class Scope:
    """Values by name, within those of a graph around it."""

    def __init__(self, above: Scope | None = None, depth: int = 0) -> None:
        self.values: dict[str, Any] = {}
        self.above, self.depth = above, depth

    def __getitem__(self, name: str) -> Any:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.above
        raise DataError(f"ONNX value {quoted(name)} is read before a node or an input makes it")


class Walker:
    """Walks the graphs of one model for one kind of values.

    model: the ModelProto. folder: of its external data. device: of Tensors, "numpy" or another;
    None for Nodes.
    """

    def __init__(self, model: Any, folder: Path | None, device: Any) -> None:
        self.folder, self.device, self.symbolic = folder, device, device is None
        self.versions = {entry.domain: entry.version for entry in model.opset_import}
        self.functions = {(f.domain, f.name): f for f in model.functions}

    # ---- graphs ----
    def graph(self, graph: Any, inputs: list[Any], scope: Scope | None) -> list[Any]:
        """The outputs of a subgraph for its inputs, within the scope of the node that has it."""
        inner = Scope(scope, 0 if scope is None else scope.depth + 1)
        if inner.depth > MOST_DEPTH:
            raise DataError(f"ONNX graphs are nested deeper than {MOST_DEPTH}")
        for tensor in graph.initializer:
            inner.values[tensor.name] = array_of(tensor, self.folder)
        inner.values |= {given.name: value for given, value in zip(graph.input, inputs)}
        self.nodes(graph.node, [out.name for out in graph.output], inner, {}, self.versions)
        return [inner[out.name] for out in graph.output]

    def nodes(
        self, nodes: Any, wanted: list[str], scope: Scope, given: dict[str, Any],
        versions: dict[str, int],
    ) -> None:  # fmt: skip
        """Computes nodes in order; values are dropped behind the last node that reads them."""
        last: dict[str, int] = {}
        for k, node in enumerate(nodes):
            last |= dict.fromkeys(_reads(node), k)
        for k, node in enumerate(nodes):
            outputs = self.node(node, scope, given, versions)
            if len(outputs) < sum(map(bool, node.output)):
                raise DataError(
                    f"ONNX {node.op_type} {quoted(node.name)} has {len(node.output)} outputs, "
                    f"expected at most {len(outputs)}"
                )
            scope.values |= {name: y for name, y in zip(node.output, outputs) if name}
            for name in (*_reads(node), *node.output):
                if last.get(name, k) == k and name not in wanted:
                    scope.values.pop(name, None)

    def node(
        self, node: Any, scope: Scope, given: dict[str, Any], versions: dict[str, int]
    ) -> list[Any]:
        """The outputs of one node. DataError that names it, whatever is wrong with it."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = versions.get(domain, versions.get("ai.onnx", 1) if domain == "" else 1)
        call = Call(node, {}, version, self, scope)
        try:
            call.attrs = _attributes(node, given)
            inputs = [scope[name] if name else None for name in node.input]
            made = self._compute(domain, call, inputs)
            return list(made) if isinstance(made, tuple) else [made]
        except DlsysError as error:
            if "ONNX" in str(error):
                raise
            raise call.error(str(error)) from error
        except MemoryError:
            raise call.error("its result does not fit in memory") from None
        except RecursionError:
            raise call.error("graphs are nested too deep") from None
        except Exception as error:  # of attributes and shapes that no valid model has
            text = str(error).splitlines() or [type(error).__name__]
            raise call.error(f"its inputs or attributes do not fit: {text[0]}") from error

    # ---- one operator ----
    def _compute(self, domain: str, call: Call, inputs: list[Any]) -> Any:
        function = self.functions.get((call.node.domain, call.node.op_type))
        if function is not None:
            return self._function(function, call, inputs)
        rule = RULES.get((domain, call.node.op_type))
        if rule is None:
            return self._schema_function(domain, call, inputs)
        first = inputs[0] if inputs else None
        if call.node.op_type in _COMMUTING and call.count == 1 and _is_quantized(first):
            return self._around(domain, call, inputs)
        if rule.nodes is not None:
            try:
                return rule.nodes(call, *inputs)
            except Unfit:
                assert rule.host is not None
        moving = [x for x in inputs if isinstance(x, (Node, Tensor))]
        if rule.graph is not None and (moving or rule.host is None):
            try:
                return self._on_graph(rule, call, inputs)
            except Unfit:
                if rule.host is None:
                    raise call.error("these dtypes or attributes are not supported") from None
        assert rule.host is not None
        if moving and self.symbolic:
            return self._host_nodes(rule, call, inputs)
        with np.errstate(all="ignore"):
            return rule.host(call, *map(self.look, inputs))

    def _around(self, domain: str, call: Call, inputs: list[Any]) -> Any:
        """What an operator makes of a quantized Node, between a dequantization and a quantization
        by the same numbers.
        """
        numbers = inputs[0].inputs[1:]
        floats = F.dequantize(inputs[0], *numbers)
        return F.quantize(self._compute(domain, call, [floats, *inputs[1:]]), *numbers)

    def _on_graph(self, rule: Rule, call: Call, inputs: list[Any]) -> Any:
        taken = []
        for k, x in enumerate(inputs):
            if k in rule.known:
                taken.append(self.look(x))
                continue
            if x is not None:
                if getattr(x.dtype, "kind", "f") not in rule.kinds:
                    raise Unfit
                if isinstance(x, np.ndarray) and not on_device(x, self.device):
                    raise Unfit
            taken.append(self.value(x))
        return rule.graph(call, *taken)  # type: ignore[misc]

    def value(self, x: Any) -> Any:
        """An array as a constant Node or a Tensor; others as they are."""
        if not isinstance(x, np.ndarray):
            return x
        return autodiff.constant(x) if self.symbolic else Tensor(x, self.device)

    def _host_nodes(self, rule: Rule, call: Call, inputs: list[Any]) -> Any:
        """The node of a host rule, which closes over the inputs that are known."""
        if rule.dynamic:
            raise call.error(
                "the shape of its result depends on values; call the model on Tensors or use run"
            )
        moving = [k for k, x in enumerate(inputs) if isinstance(x, Node)]

        def function(*arrays: np.ndarray) -> Any:
            full = list(inputs)
            for k, x in zip(moving, arrays):
                full[k] = x
            return rule.host(call, *full)  # type: ignore[misc]

        op = HostOp(call.node.op_type, function, call.count)
        made = op(*(inputs[k] for k in moving))
        return made if call.count == 1 else tuple(made[k] for k in range(call.count))

    def look(self, x: Any) -> Any:
        """The array of a value. DataError for a Node that a feed decides."""
        if isinstance(x, Tensor):
            return x.numpy()
        if isinstance(x, autodiff.Parameter):
            return x.asnumpy()
        if isinstance(x, Node):
            raise DataError(
                "a value that only a feed decides is needed while the graph is built; call the "
                "model on Tensors or use run"
            )
        return [self.look(item) for item in x] if isinstance(x, list) else x

    # ---- functions ----
    def _function(self, function: Any, call: Call, inputs: list[Any]) -> tuple[Any, ...]:
        """A function of the model or of a schema, walked in a scope of its own."""
        inner = Scope(None, call.scope.depth + 1)
        if inner.depth > MOST_DEPTH:
            raise call.error(f"functions are nested deeper than {MOST_DEPTH}")
        inner.values = dict.fromkeys(function.input) | dict(zip(function.input, inputs))
        given = {a.name: _attribute(a) for a in function.attribute_proto} | call.attrs
        versions = self.versions | {e.domain: e.version for e in function.opset_import}
        self.nodes(function.node, list(function.output), inner, given, versions)
        return tuple(inner.values.get(name) for name in function.output)

    def _schema_function(self, domain: str, call: Call, inputs: list[Any]) -> Any:
        """The body that the standard gives an operator without a rule."""
        onnx, name = onnx_package(), call.node.op_type
        defs = onnx_package("onnx.defs")
        try:
            schema = defs.get_schema(name, call.version, domain)
        except Exception:
            raise call.error(
                f"unknown operator of domain {quoted(domain or 'ai.onnx')}, version {call.version}"
            ) from None
        if schema.has_function:
            body = schema.function_body
            defaults = {k: _attribute(a.default_value) for k, a in schema.attributes.items()
                        if a.default_value.name}  # fmt: skip
            call.attrs = defaults | call.attrs
            return self._function(body, call, inputs)
        if schema.has_context_dependent_function:
            types = [self._type(x).SerializeToString() for x in inputs]
            data = schema.get_context_dependent_function(call.node.SerializeToString(), types)
            return self._function(onnx.FunctionProto.FromString(data), call, inputs)
        raise call.error("the operator is not supported")

    def _type(self, x: Any) -> Any:
        helper, onnx = onnx_package("onnx.helper"), onnx_package()
        if x is None:
            return onnx.TypeProto()
        return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)


def guard(shape: Any) -> tuple[int, ...]:
    """A shape that a model asks for. DataError where it is negative or larger than any array."""
    extents = tuple(int(n) for n in shape)
    size = 1
    for n in extents:
        size *= max(n, 1)
    if any(n < 0 for n in extents) or size > MOST_ELEMENTS // 8:
        raise DataError(f"a result of shape {extents} is too large or negative")
    return extents


def _attribute(attribute: Any) -> Any:
    return onnx_package("onnx.helper").get_attribute_value(attribute)


def _attributes(node: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Attributes by name; those that refer to the function's own are taken from these."""
    found = {}
    for a in node.attribute:
        if not a.ref_attr_name:
            found[a.name] = _attribute(a)
        elif a.ref_attr_name in given:
            found[a.name] = given[a.ref_attr_name]
    return found


def _reads(node: Any) -> list[str]:
    """The names that a node reads, with those that its subgraphs take from around them."""
    names = [name for name in node.input if name]
    for a in node.attribute:
        for graph in (*a.graphs, *([a.g] if a.HasField("g") else [])):
            names += [out.name for out in graph.output]
            for inner in graph.node:
                names += _reads(inner)
    return names
