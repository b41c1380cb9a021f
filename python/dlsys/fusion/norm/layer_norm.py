"""Layer and RMS normalization with the residual stream around it: one kernel each way, which reads
and writes every array once.

Patterns: forward an addition of two arrays of one shape, the normalization of their sum, and casts
of it to 16 bits, as products read it under the policy bf16. Backward the gradient of the
normalization with those of scale and bias, an addition to the gradient that it makes, or else to
the one that it is given, casts of the result to 16 bits, and its sum over all rows, the gradient of
a bias in front of the forward addition. Casts from 16 bits of what a kernel reads are part of it.
Whatever is missing of a pattern is left out, down to the normalization alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

from ...arguments.kinds import Bool, Instance
from ...arguments.signature import Signature
from ...dtypes import is_narrow
from ...graph.lines import attributed_to
from ...graph.node import Node, same_nodes
from ...graph.spec import FLOAT32, Spec, normalize_axes
from ...ops.elementwise import add_op, cast_op
from ...ops.norm.layer_norm import (
    EPS,
    row_normalize_gradient_op,
    row_normalize_op,
    row_normalize_sums_op,
)
from ...ops.reduce import sum_op
from ...passes.pipeline import Options, Pass
from ...runtime.target import Target
from ..shared.body import Body, Fused, close, in_shape, shaped
from ..shared.rewrite import Graph, exchange, strip_views, value_of

_NORM: dict[str, Any] = {"body": Instance(Body), "centered": Bool(), "eps": EPS}


class Forward(Fused):
    """Inputs: x, perhaps an addend, scale and bias. Values: the sum of two, the normalized rows in
    one dtype or in two.
    """

    tolerance = 1e-4

    def __init__(self, outputs: int) -> None:
        super().__init__("fused_row_normalize", outputs)
        self.signature = Signature("*inputs", **_NORM)

    def lists(self, node: Node) -> tuple[int, int]:
        return len(node.inputs) - 2, self.outputs

    def scalars(self, node: Node) -> tuple[int, float]:
        return int(node.attrs["centered"]), float(node.attrs["eps"])

    def arrays(self, given: Sequence[Spec], made: Sequence[Spec]) -> tuple[Any, ...]:
        """The kernel's arrays in their order."""
        return tuple(given[:-2]), *given[-2:], tuple(made)


class Backward(Fused):
    """Inputs: x, scale, dy and perhaps what is added, to dy where `early`, else to the gradient of
    x. Values: that gradient in so many dtypes, and so many sums over rows: of dy x̂, of dy, and of
    the gradient.
    """

    tolerance = 1e-4

    def __init__(self, gradients: int, sums: int) -> None:
        super().__init__("fused_row_normalize_gradient", gradients + sums)
        self._made = gradients, sums
        self.signature = Signature("*inputs", **_NORM, early=Bool())

    def lists(self, node: Node) -> tuple[int, int, int]:
        return len(node.inputs) - 3, *self._made

    def scalars(self, node: Node) -> tuple[int, int, float]:
        attrs = node.attrs
        return int(attrs["centered"]), int(attrs["early"]), float(attrs["eps"])

    def arrays(self, given: Sequence[Spec], made: Sequence[Spec]) -> tuple[Any, ...]:
        """The kernel's arrays in their order."""
        gradients = self._made[0]
        return *given[:3], tuple(given[3:]), tuple(made[:gradients]), tuple(made[gradients:])


forward_op = lru_cache(Forward)
backward_op = lru_cache(Backward)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose layer and RMS normalizations are fused. The graph, simplified
    for native devices, must be the executor's own: its nodes change.
    """
    for rewrite in (_forwards, _backwards):
        fetches = exchange(fetches, rewrite(Graph(fetches), options.target))
    return list(fetches)


# ---- what values are read and made ----


class Read(NamedTuple):
    """How a value of x's shape is read: as it is, by casts to 16 bits, and by a sum over rows."""

    as_it_is: bool
    casts: list[Node]
    total: Node | None

    def values(self, node: Node) -> list[Node]:
        """The value in each of the dtypes in which it is read."""
        narrow = [cast_op(node, self.casts[0].spec.dtype)] if self.casts else []
        return [*([node] if self.as_it_is else []), *narrow]

    def replaced(self, node: Node, values: Sequence[Node]) -> dict[Node, Node]:
        """What stands for the node and its casts, from `values` of a fused node."""
        return ({node: values[0]} if self.as_it_is else {}) | {
            cast: shaped(values[-1], cast) for cast in self.casts
        }


def _read(graph: Graph, node: Node, columns: int | None = None) -> Read:
    """How a value is read; sums over rows only where these have that many columns."""
    as_it_is, total = False, None
    casts: list[Node] = []
    for user, view in graph.readers(node):
        is_cast = user is not node and user.op is cast_op and is_narrow(user.spec.dtype)
        if is_cast and (not casts or casts[0].spec.dtype == user.spec.dtype):
            casts.append(user)
        elif total is None and user is not node and _sums_rows(user, view, columns):
            total = user
        else:
            as_it_is = True
    return Read(as_it_is, casts, total)


def _sums_rows(user: Node, view: Node, columns: int | None) -> bool:
    """True for the sum over the rows of a view of a value."""
    shape = view.spec.shape
    if user.op is not sum_op or user.spec.dtype != FLOAT32 or shape[-1:] != (columns,):
        return False
    axes = normalize_axes(user, user.attrs["axis"], len(shape))
    return len(shape) > 1 and axes == tuple(range(len(shape) - 1))


def _stored(node: Node) -> Node:
    """What a value is a copy of in float32, or else the value."""
    x = node.inputs[0] if node.op is cast_op and node.spec.dtype == FLOAT32 else node
    return x if is_narrow(x.spec.dtype) else node


def _adds(node: Node | None) -> bool:
    """True for the sum of two arrays of its shape."""
    return (
        node is not None
        and node.op is add_op
        and all(x.spec.shape == node.spec.shape and not x.op.constant_fill for x in node.inputs)
    )


def _precede(graph: Graph, inputs: Sequence[Node], nodes: Sequence[Node]) -> bool:
    """True where the inputs can be computed before all of the nodes, so that these can be one."""
    computed = [x for x in inputs if not (x.op.constant_fill or strip_views(x).op.leaf)]
    return graph.before(computed, nodes)


def _fused(
    op: Forward | Backward,
    node: Node,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    target: Target,
    **attrs: Any,
) -> list[Node]:
    """The values of a fused node over `inputs`, for `outputs`, with the settings of `node`; none
    where the target has no kernel for such arrays.
    """
    attrs |= {name: node.attrs[name] for name in ("centered", "eps")}
    made = op(*inputs, body=close(inputs, outputs), name=node.name, **attrs)
    made.stand_for(node)
    given = [x.spec for x in inputs]
    specs = [made.spec] if len(outputs) == 1 else [*made.spec]
    narrow = {spec.dtype for spec in (*given, *specs)} - {FLOAT32}
    if len(narrow) > 1 or not all(is_narrow(d) and target.has(op.kernel, d) for d in narrow):
        return []
    if not target.fits(op.name, *op.arrays(given, specs), *op.scalars(made)):
        return []
    return [made] if len(outputs) == 1 else [value_of(made, k) for k in range(len(outputs))]


# ---- forward ----


def _forwards(graph: Graph, target: Target) -> dict[Node, Node]:
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op is row_normalize_op and node.attrs["groups"] is None:
            with attributed_to(node):
                replaced |= _forward(graph, node, target, replaced)
    return replaced


def _forward(
    graph: Graph, node: Node, target: Target, replaced: Mapping[Node, Node]
) -> dict[Node, Node]:
    """What stands for a normalization and the addition before it; nothing where there is no kernel
    for them.
    """
    x, *affine = node.inputs
    adds = _adds(x) and x not in replaced and _precede(graph, [*x.inputs, *affine], [x, node])
    terms = [_stored(term) for term in (x.inputs if adds else (x,))]
    read, total = _read(graph, node), [x] if adds else []
    outputs = [*total, *read.values(node)]
    values = _fused(forward_op(len(outputs)), node, [*terms, *affine], outputs, target)
    if not values:
        return {}
    return dict(zip(total, values)) | read.replaced(node, values[len(total) :])


# ---- backward ----


class Back(NamedTuple):
    """The gradient of x, the gradients of scale and bias, of which either may be missing, and what
    is added: to dy where `early`, else to the gradient of x, which `last` is then.
    """

    gradient: Node | None
    sums: Node | None
    dy: Node
    other: Node | None = None
    early: bool = False
    last: Node | None = None


def _backwards(graph: Graph, target: Target) -> dict[Node, Node]:
    replaced: dict[Node, Node] = {}
    done: set[Node | None] = set()
    for node in graph.order:
        if node.op not in (row_normalize_gradient_op, row_normalize_sums_op) or node in done:
            continue
        if node.attrs["groups"] is None:
            with attributed_to(node):
                back = _way_back(graph, node, done)
                done |= {back.gradient, back.sums}
                made = _backward(graph, node, back, target)
            if made:
                done.add(node.inputs[2] if back.early else back.last)
                replaced |= made
    return replaced


def _way_back(graph: Graph, node: Node, done: Set[Node | None]) -> Back:
    x, scale, dy = node.inputs
    found = {
        user.op: user
        for user in graph.users[dy]
        if same_nodes(user.inputs, node.inputs) and user.attrs == node.attrs
    }
    gradient, sums = found.get(row_normalize_gradient_op), found.get(row_normalize_sums_op)
    nodes = [one for one in (gradient, sums) if one is not None]
    back = Back(gradient, sums, dy, last=gradient)
    last = graph.only_user(gradient) if gradient is not None else None
    if last is not None and last not in done and _adds(last):
        other = next(x for x in last.inputs if x is not gradient)
        if _precede(graph, [*node.inputs, other], [*nodes, last]):
            return back._replace(other=other, last=last)
    alone = not graph.is_fetched(dy) and {*nodes}.issuperset(graph.users[dy])
    if dy not in done and alone and _adds(dy) and _precede(graph, [x, scale], [dy]):
        return back._replace(dy=dy.inputs[0], other=dy.inputs[1], early=True)
    return back


def _backward(graph: Graph, node: Node, back: Back, target: Target) -> dict[Node, Node]:
    """What stands for the gradients of a normalization and what surrounds them; nothing where there
    is no kernel for them.
    """
    x, scale, _ = node.inputs
    other = [] if back.other is None else [_stored(back.other)]
    inputs = [_stored(x), scale, _stored(back.dy), *other]
    read, gradients = Read(False, [], None), []
    if back.last is not None:
        columns = scale.spec.size if back.sums is not None else None
        read = _read(graph, back.last, columns)
        gradients = read.values(back.last)
    sums, total = _sums_of(graph, back.sums), read.total
    totals = [] if total is None else [in_shape(total, (scale.spec.size,))]
    outputs = [*gradients, *sums, *totals]
    op = backward_op(len(gradients), len(sums) + len(totals))
    values = _fused(op, node, inputs, outputs, target, early=back.early)
    if not values:
        return {}
    of_x, of_sums = values[: len(gradients)], values[len(gradients) :]
    replaced = dict(zip(sums, of_sums))
    if back.last is not None:
        replaced |= read.replaced(back.last, of_x)
    if total is not None:
        replaced[total] = shaped(of_sums[-1], total)
    return replaced


def _sums_of(graph: Graph, sums: Node | None) -> list[Node]:
    """The values of an operator with two, where there is one."""
    if sums is None:
        return []
    known = {value.attrs["index"]: value for value in graph.users[sums]}
    return [known[k] if k in known else value_of(sums, k) for k in (0, 1)]


# Under DLSYS_DEBUG=nan operators stay apart, so that it can name one.
FUSION = Pass(
    "layer_norm",
    fuse,
    position=55,
    needs=("fused_row_normalize", "fused_row_normalize_gradient"),
    when=lambda options: not options.one_by_one,
)
