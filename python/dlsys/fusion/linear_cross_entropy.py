"""Fused linear cross-entropy: the loss of a linear layer's logits, and its gradient, without the
logits in memory.

Pattern: fused cross-entropy (cross_entropy.py) over a product x Wᵀ of 16 bits that nothing else
reads, whose gradient only products read, as in the last layer of a language model. In place of
logits the product stores their exponentials, in place of a gradient are those and a factor a row:
softmax - one-hot is (e - 1ₗ Σ e) / Σ e, where e are exponentials of logits less any number of their
row, such as the label's. A product over the rows has the factor on its other operand, one over the
classes on its result. The loss kernel, which reads and writes all logits, is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arguments.kinds import Instance, Number
from ..arguments.signature import Signature
from ..dtypes import bfloat16, is_narrow
from ..graph.lines import attributed_to
from ..graph.node import Node, same_nodes
from ..graph.spec import FLOAT32
from ..ops.elementwise import cast_op, exp_op, log_op
from ..ops.indexing import one_hot_op
from ..ops.matmul import matmul_op
from ..ops.movement import reshape_op
from ..ops.reduce import sum_op
from ..ops.sorting import take_along_axis_op
from ..passes.pipeline import Options, Pass
from ..runtime.target import Target
from .shared.body import Body, Fused, close, in_shape, shaped
from .shared.rewrite import Graph, exchange, strip_views, value_of

UNIT = 2.0**-40  # the label's exponential, as the kernel has it


class LinearCrossEntropy(Fused):
    """Inputs: x (rows, features), the same before it was rounded, or x again, weights (classes,
    features), labels (rows), and the workspace of fused_sparse_cross_entropy. Values: the sum of
    the rows' losses times `scale`, (); g (rows, classes) and factors (rows, 1), whose product is
    the gradient of each row's loss times `dy`; x times the factors. Labels out of range are
    refused.
    """

    tolerance = 1e-4
    fallible = True
    zeroed_workspace = (-1,)
    signature = Signature(
        "x", "exact", "weights", "labels", "workspace",
        body=Instance(Body), scale=Number(nan=True), dy=Number(nan=True),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__("linear_cross_entropy", 4, any_dtype=(3, 4))

    def scalars(self, node: Node) -> tuple[float, float]:
        return node.attrs["scale"], node.attrs["dy"]


linear_cross_entropy_op = LinearCrossEntropy()


class RowFactors(Fused):
    """The product of matrices a and b, each row times a factor, (rows, 1)."""

    tolerance = 1e-4
    signature = Signature("a", "b", "factors", body=Instance(Body))

    def __init__(self) -> None:
        super().__init__("matmul_row_factors", any_dtype=(2,))


matmul_row_factors_op = RowFactors()


def matmul_row_factors(a: Node, b: Node, factors: Node) -> Node:
    """The operator with what it computes as its body."""
    inputs = a, b, factors
    return matmul_row_factors_op(*inputs, body=close(inputs, (_scaled(matmul_op(a, b), factors),)))


def _exact(x: Node) -> Node:
    """What x is a rounded copy of, in its shape, or else x."""
    copy = strip_views(x)
    if copy.op is not cast_op or copy.inputs[0].spec.dtype != FLOAT32:
        return x
    return in_shape(copy.inputs[0], x.spec.shape)


def _scaled(x: Node, factors: Node) -> Node:
    """x times the factors of its rows, rounded once."""
    if not is_narrow(x.spec.dtype):
        return x * factors
    return cast_op(cast_op(x, FLOAT32) * factors, x.spec.dtype)


def linear_cross_entropy(
    x: Node, weights: Node, labels: Node, workspace: Node, scale: float, dy: float
) -> Node:
    """The operator with what it computes as its body, whose scalars are those given."""
    rows, classes = x.spec.shape[0], weights.spec.shape[0]
    logits = matmul_op(x, weights, trans_B=True)
    if is_narrow(logits.spec.dtype):
        logits = cast_op(logits, FLOAT32)
    of_label = take_along_axis_op(logits, reshape_op(labels, (rows, 1)))
    exponentials = exp_op(logits - of_label) * UNIT
    total = sum_op(exponentials, axis=1, keepdims=True)
    g = cast_op(
        exponentials - one_hot_op(labels, classes, dtype=total.spec.dtype) * total, x.spec.dtype
    )
    loss = sum_op(log_op(total * (1 / UNIT))) * scale
    factors = dy / total
    exact = _exact(x)
    scaled = _scaled(x, factors) if exact is x else cast_op(exact * factors, x.spec.dtype)
    inputs = x, exact, weights, labels, workspace
    body = close(inputs, (in_shape(loss, ()), g, factors, scaled))
    return linear_cross_entropy_op(*inputs, body=body, scale=scale, dy=dy)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose losses of linear layers are fused. The graph, simplified for
    native devices, must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op.kernel == "fused_sparse_cross_entropy":
            with attributed_to(node):
                replaced |= _fuse(graph, node, options.target)
    return exchange(fetches, replaced)


def _fuse(graph: Graph, node: Node, target: Target) -> dict[Node, Node]:
    """What stands for a loss and its gradient; nothing where the pattern is not there."""
    logits, labels, workspace = node.inputs
    product = strip_views(logits)
    if product.op is not matmul_op or product.spec.dtype is not bfloat16:
        return {}
    x, weights = product.inputs
    along = (product.attrs["trans_A"], product.attrs["trans_B"]) == (False, True)
    alone = same_nodes([reader for reader, _ in graph.readers(product)], [node])
    if not along or not alone or "algo" in product.attrs:
        return {}
    values = {value.attrs["index"]: value for value in graph.users[node]}
    if 1 not in values or graph.is_fetched(node):
        return {}
    readers = [*graph.readers(values[1])]
    if not all(_multiplies(reader, view, product) for reader, view in readers):
        return {}
    rows, classes = product.spec.shape
    scalars = node.attrs["scale"], node.attrs["dy"]
    made = linear_cross_entropy(x, weights, in_shape(labels, (rows,)), workspace, *scalars)
    given = [one.spec for one in made.inputs]
    if not target.fits(made.op.name, *given, *scalars, *made.spec):
        return {}
    made.stand_for(node)
    g, factors, scaled = value_of(made, 1, values[1]), value_of(made, 2), value_of(made, 3)
    replaced = {reader: _product(reader, g, factors, scaled, target) for reader, _ in readers}
    if 0 in values:
        replaced[values[0]] = shaped(value_of(made, 0, values[0]), values[0])
    return replaced


def _multiplies(reader: Node, view: Node, product: Node) -> bool:
    """True for a product of the gradient of x Wᵀ with a matrix, or of its transpose with x."""
    if reader.op is not matmul_op or view.spec.shape != product.spec.shape:
        return False
    one, other = reader.inputs
    flags = reader.attrs["trans_A"], reader.attrs["trans_B"]
    of_weights = flags == (True, False) and other is product.inputs[0]
    return one is view and other is not view and (of_weights or not flags[0])


def _product(reader: Node, g: Node, factors: Node, scaled: Node, target: Target) -> Node:
    """The product `reader` with a gradient that is g times the factors of its rows; `scaled` is x
    times these.
    """
    other = reader.inputs[1]
    with attributed_to(reader):
        if reader.attrs["trans_A"]:
            made = matmul_op(g, scaled, **reader.attrs)
        elif not _has_factors(reader, factors, target):
            made = _scaled(matmul_op(g, other, **reader.attrs), factors)
        else:
            made = matmul_row_factors(g, other, factors)
    made.stand_for(reader)
    return made


def _has_factors(reader: Node, factors: Node, target: Target) -> bool:
    """True where a kernel makes the product `reader` with factors of its rows."""
    a, b = (x.spec for x in reader.inputs)
    plain = not reader.attrs["trans_B"] and "algo" not in reader.attrs
    return plain and target.fits("matmul_row_factors", a, b, factors.spec, reader.spec)


FUSION = Pass(
    "linear_cross_entropy",
    fuse,
    position=21,
    when=lambda options: options.target.has("linear_cross_entropy", bfloat16),
)
