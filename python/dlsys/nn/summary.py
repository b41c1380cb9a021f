"""The table of a model's layers: what each makes, how much it holds, how much it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..autodiff import Node, Parameter, Spec, find_topo_sort
from ..describe import drawn_by
from ..graph.infer import infer
from ..passes.simplify import simplify


class Call(NamedTuple):
    """One use of a layer: its name in the model ("" is the model), its arguments and its output.

    module: the layer. inputs: what it was called with. output: what it returned.
    """

    name: str
    module: Any  # a Module
    inputs: tuple[Any, ...]
    output: Any


class Row(NamedTuple):
    """One use of a layer. A container's counts include its children's; state that was counted in
    a use before counts 0 in the next.

    name: in the model, "" for the model itself. kind: the layer with its options. shape: of the
    output; where there are several, all of theirs. parameters: how many numbers. operations:
    floating-point operations.
    """

    name: str  # in the model; "" is the model itself
    kind: str
    shape: tuple[Any, ...]  # of the output; where there are several, all of theirs
    parameters: int
    operations: int  # floating-point operations


class Summary:
    """The result of `Module.summary`; print it.

    Attributes: `rows` in the order of use, the model's first; `parameters` and `buffers` in
    elements, `operations` forward, `nbytes` of all state.
    """

    def __init__(self, rows: list[Row], buffers: int, nbytes: int) -> None:
        self.rows = rows
        self.parameters = rows[0].parameters
        self.operations = rows[0].operations
        self.buffers = buffers
        self.nbytes = nbytes

    def __str__(self) -> str:
        head = ("layer", "kind", "output", "parameters", "operations")
        cells = [
            (_indented(row.name), row.kind, str(row.shape), f"{row.parameters:,}", f"{row[4]:,}")
            for row in self.rows
        ]
        widths = [max(len(line[k]) for line in [head, *cells]) for k in range(len(head))]
        lines = [
            "  ".join(f"{c:<{w}}" if k < 3 else f"{c:>{w}}" for k, (c, w) in enumerate(columns))
            for columns in (list(zip(line, widths)) for line in [head, *cells])
        ]
        rule = "-" * len(lines[0])
        total = (
            f"{self.parameters:,} parameters and {self.buffers:,} elements in buffers, "
            f"{self.nbytes:,} bytes; {self.operations:,} operations"
        )
        return "\n".join([lines[0], rule, *lines[1:], rule, total])

    __repr__ = __str__
    _repr_html_ = drawn_by("summary_html")


def summarize(x: Node, calls: Sequence[Call]) -> Summary:
    """The summary of a model from the calls that it made on x, an input of known shape."""
    model = calls[0].module
    order = find_topo_sort(_nodes([call.output for call in calls]))
    specs = infer(order, {x: x.spec})
    costs = _costs(specs, _nodes(calls[0].output))
    seen, rows = set(), []
    for call in calls:
        held = [] if call.module in seen else call.module.parameters()
        seen.add(call.module)
        rows.append(
            Row(
                call.name,
                type(call.module).__name__,
                _shape(call.output, specs),
                sum(_spec(parameter).size for parameter in held),
                sum(costs[node] for node in _between(call.inputs, call.output)),
            )
        )
    state = [_spec(value) for _, value in model.named_state()]
    buffers = sum(_spec(value).size for value in model.buffers())
    return Summary(rows, buffers, sum(spec.nbytes for spec in state))


def _costs(specs: Mapping[Node, Any], outputs: Iterable[Node]) -> Counter[Node]:
    """Operations of each node of the user's graph: of what it became when shapes were known."""
    costs: Counter[Node] = Counter()
    for node in find_topo_sort(simplify(specs, list(outputs))):
        if not node.op.leaf and not node.op.view:
            made = node.spec if node.op.outputs == 1 else node.spec[0]
            costs[node.origin] += node.op.cost(node, [x.spec for x in node.inputs], made)
    return costs


def _between(inputs: Any, outputs: Any) -> set[Node]:
    """The nodes that lead from some inputs to outputs; the outputs count, the inputs do not."""
    seen = set(_nodes(inputs))
    stack, found = list(_nodes(outputs)), set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            found.add(node)
            stack.extend(node.inputs)
    return found


def _nodes(value: Any) -> Iterator[Node]:
    """The nodes in what a layer was given or made: one, or several in containers."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Mapping):
        yield from _nodes(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)


def _shape(output: Any, specs: Mapping[Node, Any]) -> tuple[Any, ...]:
    if isinstance(output, Node):
        return specs[output].shape
    return tuple(specs[node].shape for node in _nodes(output))


def _spec(parameter: Parameter) -> Spec:
    return Spec(parameter.shape, parameter.dtype)


def _indented(name: str) -> str:
    """The last part of a path, two spaces in for each part."""
    return "  " * len(name.split(".")) + name.split(".")[-1] if name else "model"
