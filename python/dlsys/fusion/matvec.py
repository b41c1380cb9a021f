"""Matrix-vector products of generation: a linear layer of a few rows with what surrounds it, whose
time is that of reading the weights.

Patterns: a product with a transposed matrix, of at most as many rows as the kernel takes, with a
layer or RMS normalization of its input before it, and behind it a row vector that is added, an
activation, and an array of the result's shape that is added. Whatever is missing is left out. Only
graphs without gradients have it: what backward reads would have to be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arguments.kinds import Bool, Instance
from ..arguments.signature import Signature
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32
from ..ops.elementwise import add_op
from ..ops.matmul import matmul_op
from ..ops.movement import reshape_op
from ..ops.norm.layer_norm import EPS, row_normalize_op
from ..passes.pipeline import Options, Pass
from ..runtime.target import Target
from .shared.body import ACTIVATIONS, Body, Fused, Selected, close, in_shape, shaped
from .shared.rewrite import Graph, exchange, strip_views

_ACTIVATION = Selected("activation", ACTIVATIONS)


class MatvecOp(Fused):
    """Inputs: x (m, k) and weights (n, k); then, as the attributes say, scale and bias (k) of a
    normalization, a bias (n) and a residual (m, n).
    """

    tolerance = 1e-4

    def __init__(self) -> None:
        super().__init__("matvec")
        self.signature = Signature(
            "*inputs", body=Instance(Body), normalizes=Bool(), biased=Bool(), adds=Bool(),
            centered=Bool(), eps=EPS, activation=_ACTIVATION.kind,
        )  # fmt: skip

    def lists(self, node: Node) -> tuple[int, int, int]:
        attrs = node.attrs
        return 2 * attrs["normalizes"], int(attrs["biased"]), int(attrs["adds"])

    def scalars(self, node: Node) -> tuple[int, float, int]:
        attrs = node.attrs
        return int(attrs["centered"]), float(attrs["eps"]), _ACTIVATION.code(node)


matvec_op = MatvecOp()


class Layer(NamedTuple):
    """What is found around a product."""

    product: Node
    norm: Node | None
    bias: Node | None
    activation: str
    residual: Node | None
    last: Node


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose products of few rows are fused with their surroundings. The
    graph, simplified for native devices, must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    if any(node.backward for node in graph.order):
        return list(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        if node.op is matmul_op and _fits(node, options.target):
            layer = _layer(graph, node)
            with attributed_to(layer.last):
                replaced[layer.last] = shaped(_made(layer), layer.last)
    return exchange(fetches, replaced)


def _fits(node: Node, target: Target) -> bool:
    x, w = (operand.spec for operand in node.inputs)
    flags = node.attrs["trans_A"], node.attrs["trans_B"], node.attrs.get("algo")
    if flags != (False, True, None) or {x.dtype, w.dtype} != {FLOAT32}:
        return False
    return target.fits("matvec", x, w, (), (), (), 0, 0.0, 0, node.spec)


def _layer(graph: Graph, product: Node) -> Layer:
    """The product with what surrounds it that nothing else reads."""
    norm = strip_views(product.inputs[0])
    alone = norm.op is row_normalize_op and norm.attrs["groups"] is None
    found = norm if alone and _rows_of(norm) == product.inputs[0].spec.shape else None
    columns = product.spec.shape[1]
    bias = residual = None
    activation = ""
    last = value = product
    while (user := graph.only_user(value)) is not None:
        if user.op is reshape_op and user.spec.shape[-1:] == (columns,):
            value = user
            continue
        if residual is not None or user.spec[:2] != value.spec[:2]:
            break
        other = user.inputs[-1] if user.inputs[0] is value else user.inputs[0]
        is_row = other.spec.shape[-1:] == (columns,) and other.spec.size == columns
        if user.op is add_op and other is not value:
            before = graph.before([other], [product]) or strip_views(other).op.leaf
            if is_row and bias is None and not activation and strip_views(other).op.leaf:
                bias = other
            elif other.spec.shape == user.spec.shape and before:
                residual = other
            else:
                break
        elif user.op.kernel in ACTIVATIONS and len(user.inputs) == 1 and not activation:
            activation = user.op.kernel or ""
        else:
            break
        last = value = user
    return Layer(product, found, bias, activation, residual, last)


def _rows_of(norm: Node) -> tuple[int, int]:
    length = norm.inputs[1].spec.size
    return norm.spec.size // length, length


def _made(layer: Layer) -> Node:
    product, norm = layer.product, layer.norm
    x, w = product.inputs
    aliases: dict[Node, Node] = {}
    inputs, attrs = [x, w], dict[str, Any](centered=False, eps=1.0)
    if norm is not None:
        inputs[0] = in_shape(norm.inputs[0], x.spec.shape)
        if inputs[0] is not norm.inputs[0]:
            aliases[norm.inputs[0]] = inputs[0]
        inputs += norm.inputs[1:]
        attrs = {name: norm.attrs[name] for name in ("centered", "eps")}
    if layer.bias is not None:
        inputs.append(layer.bias)
    if layer.residual is not None:
        flat = in_shape(layer.residual, product.spec.shape)
        if flat is not layer.residual:
            aliases[layer.residual] = flat
        inputs.append(flat)
    body = close(inputs, [in_shape(layer.last, product.spec.shape)], aliases)
    made = matvec_op(
        *inputs,
        body=body,
        normalizes=norm is not None,
        biased=layer.bias is not None,
        adds=layer.residual is not None,
        activation=layer.activation,
        **attrs,
    )
    made.stand_for(layer.last)
    return made


FUSION = Pass(
    "matvec",
    fuse,
    position=25,
    needs=("matvec",),
    when=lambda options: not options.one_by_one and options.precision == "fp32",
)
