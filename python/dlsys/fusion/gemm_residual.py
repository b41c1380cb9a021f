"""Residuals of GEMM: an array of the result's shape, added by the product itself.

Pattern: a product, with a bias or without, of which nobody reads anything but its sum with another
array of its shape and dtype, and relu of that sum. So are the blocks of a residual network forward,
and backward the places where the gradient of a block meets what passes it by. Normalizations, which
read the sum anyway, and scattered sums have taken theirs before; what pointwise programs make of
the sum, or of the other array, together with the addition is left to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..dtypes import STORAGE
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..ops.elementwise import add_op, rung_attribute
from ..ops.matmul import PRECISIONS
from ..passes.pipeline import Options, Pass
from ..passes.precision import of_products
from .shared.body import FusedGemm, Selected, close, in_shape, shaped
from .shared.rewrite import Graph, exchange, strip_views


class Residual(FusedGemm):
    """A product that is added to its last input, whose memory may become the result's."""

    def __init__(self, name: str, position: int) -> None:
        super().__init__(name, Selected("activation", ("relu",)))
        self.inplace = (position,)


matmul_add_op = Residual("matmul_add", 2)  # A B + r, or relu of that
matmul_bias_add_op = Residual("matmul_bias_add", 3)  # A B + bias + r
_SUMS = {"matmul": matmul_add_op, "matmul_bias": matmul_bias_add_op}  # by the product's kernel


class _Sum(NamedTuple):
    """A product and what is added to it; `last` is the sum, or relu of that."""

    product: Node
    residual: Node
    last: Node


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose products add residuals. The graph must be the executor's own:
    its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    depth: dict[Node, int] = {}  # the longest way to a node
    for node in graph.order:
        depth[node] = max((depth[x] + 1 for x in node.inputs), default=0)
        found = _sum_of(graph, node, options, depth) if node.op is add_op else None
        if found is not None:
            replaced[found.last] = _fused(found)
    return exchange(fetches, replaced)


def _sum_of(graph: Graph, total: Node, options: Options, depth: Mapping[Node, int]) -> _Sum | None:
    """A sum as a product makes it: of two products the one with the longer way to it, which leaves
    the other one time.
    """
    if total.spec.dtype not in STORAGE or any(x.spec[:2] != total.spec[:2] for x in total.inputs):
        return None
    user = graph.only_user(total)
    relu = user is not None and user.op.kernel == "relu"
    if user is not None and user.op.elementwise and not relu:
        return None
    found: list[_Sum] = []
    for x, other in zip(total.inputs, total.inputs[::-1]):
        product = _product_behind(graph, x)
        alone = other.op.elementwise and graph.only_user(other) is not None
        if product is not None and _is_open(product, options) and not alone:
            found.append(_Sum(product, other, user if relu and user is not None else total))
    return max(found, key=lambda one: depth[one.product], default=None)


def _product_behind(graph: Graph, x: Node) -> Node | None:
    """The product that a value shows, of which nobody reads anything else."""
    product = strip_views(x)
    while graph.only_user(x) is not None and x is not product:
        x = x.inputs[0]
    return product if x is product and graph.only_user(x) is not None else None


def _is_open(product: Node, options: Options) -> bool:
    """True for a product that ends in no activation, for whose dtype, and rung if it names one,
    there is a kernel, which takes less time than two at the precision that it will have.
    """
    op = _SUMS.get(product.op.kernel or "")
    if op is None or product.attrs.get("activation"):
        return False
    target, y = options.target, product.spec
    if not target.has(op.kernel, y.dtype):
        return False
    flags = [int(product.attrs[name]) for name in ("trans_A", "trans_B")]
    numbers = *flags, 0, PRECISIONS[of_products(options.precision)], 0
    fits = target.fits(op.name, *(x.spec for x in product.inputs), y, *numbers, y)
    return fits and product.attrs.get("algo") in (None, *target.rungs(op.kernel))


def _fused(found: _Sum) -> Node:
    product, last = found.product, found.last
    residual = in_shape(found.residual, product.spec.shape)
    inputs = [*product.inputs, residual]
    with attributed_to(last):
        aliases = {found.residual: residual} if residual is not found.residual else {}
        body = close(inputs, [in_shape(last, product.spec.shape)], aliases)
        flags = {name: product.attrs[name] for name in ("trans_A", "trans_B")}
        activation = "relu" if last.op.kernel == "relu" else ""
        attrs = flags | rung_attribute(product) | {"activation": activation}
        made = _SUMS[product.op.kernel or ""](*inputs, body=body, **attrs)
        made.stand_for(last)
        return shaped(made, last)


FUSION = Pass(
    "gemm_residual", fuse, position=59, needs=(matmul_add_op.name, matmul_bias_add_op.name)
)
