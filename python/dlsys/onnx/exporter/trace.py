"""A trace: the calls of ONNX operators that compute a graph for one assignment of its extents.

Rules write calls through an Emitter. Extents that shapes depend on, such as those of Reshape, are
noted apart from other constants: `extents.py` compares traces of several assignments and computes
at run time what differs between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...dtypes import bfloat16
from ...errors import GraphError
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops.leaf import Parameter
from .registry import NO_RULE, RULES, is_composed, refusal_of

Value = str | tuple[str, ...]


class Call(NamedTuple):
    """One node of an ONNX graph. `node` is the node of ours that it is made for."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    node: Node


@dataclass
class Trace:
    """Calls in an order in which they can run, and the constants that they read, by name."""

    calls: list[Call] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    extents: dict[str, tuple[int, ...]] = field(default_factory=dict)  # int64 vectors
    parameters: dict[str, Parameter] = field(default_factory=dict)
    outputs: list[tuple[str, Spec]] = field(default_factory=list)


class Refused(Exception):
    """An operator that ONNX cannot express; its text is the reason."""


class Names:
    """Unique names: the first of its kind as it is, others with a number."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._next: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """The name, or the next free one like it."""
        made, count = name, self._next.get(name, 1)
        while made in self._used:
            made, count = f"{name}_{count}", count + 1
        self._next[name] = count
        self._used.add(made)
        return made


class Emitter:
    """What rules write to. `g("Relu", x)` adds a call and gives the name of its output.

    opset: the version of ONNX's operators.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.trace = Trace()
        self.names = Names()
        self.refused: dict[Node, str] = {}
        self._values: dict[Node, Value] = {}
        self._node: Any = None  # the node whose calls are being written

    # ---- what rules call ----
    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Adds a call. An input is a name, None for one that is left out, or an array.

        Attributes that are None are left out. Several outputs are a tuple of names.
        """
        given = tuple(
            "" if x is None else x if isinstance(x, str) else self.constant(x) for x in inputs
        )
        while given and not given[-1]:
            given = given[:-1]
        base = self._node.op.name if self._node.op.name.isidentifier() else op_type.lower()
        made = tuple(self.names.unique(f"{base}_{op_type}") for _ in range(outputs))
        present = {key: value for key, value in attributes.items() if value is not None}
        self.trace.calls.append(Call(op_type, given, made, present, self._node))
        return made[0] if outputs == 1 else made

    def constant(self, value: Any, dtype: Any = None) -> str:
        """The name of an array that belongs to the graph."""
        name = self.names.unique("constant")
        self.trace.arrays[name] = np.asarray(value, dtype)
        return name

    def extents(self, values: Sequence[int]) -> str:
        """The name of an int64 vector of extents, or of positions that follow from extents."""
        name = self.names.unique("shape")
        self.trace.extents[name] = tuple(map(int, values))
        return name

    def axes(self, values: Sequence[int]) -> str:
        """The name of an int64 vector that no extent decides."""
        return self.constant(values, np.int64)

    def cast(self, x: str, have: Any, want: Any) -> str:
        """x, which is of the dtype `have`, in another."""
        if have == want:
            return x
        if want is bfloat16:  # values of bfloat16 are held in float32
            return self("Cast", self("Cast", x, to="bfloat16"), to="float32")
        return self("Cast", x, to=np.dtype(want).name)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """x in another shape, in which 0 means no elements."""
        return self("Reshape", x, self.extents(shape), allowzero=1 if 0 in shape else None)

    def reduce(self, op_type: str, x: str, axes: Sequence[int], keepdims: bool) -> str:
        """A reduction over axes, which are an attribute or an input by the version."""
        if not axes:
            return x
        if self.opset < 18 and op_type != "ReduceSum":
            return self(op_type, x, axes=list(axes), keepdims=int(keepdims))
        return self(op_type, x, self.axes(axes), keepdims=int(keepdims))

    # ---- nodes ----
    def value(self, node: Node) -> str:
        """The name of a node's one value."""
        found = self._values[node] if node in self._values else self.add(node)
        assert isinstance(found, str), f"{node.name} has several values"
        return found

    def bind(self, node: Node, name: str) -> None:
        """Says which name has the value of a leaf."""
        self._values[node] = name

    def add(self, node: Node) -> Value:
        """Writes the calls of a node whose specs are known, and those that it still needs."""
        if node in self._values:
            return self._values[node]
        outside, self._node = self._node, node if self._node is None else self._node
        try:
            value = self._made(node)
        except Refused as reason:
            self.refused[node.origin] = str(reason)
            count = node.op.outputs
            value = "refused" if count == 1 else ("refused",) * count
        finally:
            self._node = outside
        self._values[node] = value
        return value

    def _made(self, node: Node) -> Value:
        if node.op.leaf == "constant":
            return self.constant(node.attrs["value"].astype(node.spec.dtype, copy=False))
        if node.op.projection:
            values = self.add(node.inputs[0])
            return values[node.attrs["index"]]
        reason = refusal_of(node.op)
        if reason is not None:
            raise Refused(reason)
        rule = RULES.get(node.op)
        inputs = [self.value(x) for x in node.inputs]
        made = rule.emit(self, node, *inputs) if rule is not None else None
        if made is None:
            made = node.op.simplify(node)
        if made is None and is_composed(node.op):
            values = tuple(map(self.value, node.op.compose(node)))  # type: ignore[attr-defined]
            return values if node.op.outputs > 1 else values[0]
        if made is None:
            raise Refused(NO_RULE)
        return self.add(made) if isinstance(made, Node) else made


def refusal(refused: dict[Node, str]) -> GraphError:
    """The error that lists every operator of a graph that ONNX cannot express, and why."""
    lines = [f"{node.op.name} ({why}) [{node.where}]" for node, why in refused.items()]
    return GraphError(f"this graph has no ONNX form: {'; '.join(dict.fromkeys(lines))}")
