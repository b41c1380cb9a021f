"""GEMM epilogues: what follows a matrix product, done while its elements are in registers.

Patterns: a product, a row vector that is added, an activation, any of the last two; the same with
the activation's input, which backward reads, as a second result, where there is a kernel of it, or
with the activation's derivative in 8 bits, where backward reads the input for that alone; a product
and the gradient of an activation, or that derivative, as a layer's backward has it; a product and
the sums of one operand over K, the gradients of weights and bias. Residuals are in
gemm_residual.py, behind normalizations, which add theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import is_narrow
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32, normalize_axes
from ..ops.elementwise import add_op, cast_op, rung_attribute
from ..ops.leaf import oneslike_op
from ..ops.matmul import matmul_op
from ..ops.movement import reshape_op
from ..ops.reduce import sum_op
from ..passes.pipeline import Options, Pass
from ..runtime.target import Target
from .shared.body import (
    ACTIVATIONS,
    BY_SIDES,
    GRADIENTS,
    Body,
    FusedGemm,
    Selected,
    close,
    in_shape,
    shaped,
)
from .shared.rewrite import Graph, exchange, strip_views, value_of


class WithQuantizedSlope(FusedGemm):
    """A product whose first value is a quantized derivative."""

    roundings = 2  # of which the second may move that by one


_ACTIVATION = Selected("activation", ACTIVATIONS)
matmul_bias_op = FusedGemm("matmul_bias", _ACTIVATION)  # activation(A B + bias)
# A B + bias, and the activation of that
matmul_bias_both_op = FusedGemm("matmul_bias_both", _ACTIVATION, outputs=2)
# The activation's derivative at A B + bias, quantized, and the activation there
matmul_bias_slope_op = WithQuantizedSlope("matmul_bias_slope", _ACTIVATION, outputs=2)
matmul_map_op = FusedGemm("matmul_map", _ACTIVATION)  # activation(A B)
# f(side, A B); a quantized derivative is uint8
matmul_gradient_op = FusedGemm("matmul_gradient", Selected("gradient", BY_SIDES), any_dtype=(2,))
# A B, and Σ over K of A or B in float32
matmul_sums_op = FusedGemm("matmul_sums", Selected("of_A"), outputs=2)


# Derivatives of SiLU and GELU lie in [-0.13, 1.13]. Quantized, a byte each, 0 and 1 are exact, and
# others are off by 0.0025 at most and 0.0015 in the mean square; bfloat16 rounds what is near 1 by
# 0.004 and 0.0023 there. operators/epilogue.h has the same.
SLOPE_SCALE, SLOPE_ZERO_POINT = 1 / 200, 27


def quantized_slope(slope: Node) -> Node:
    """An activation's derivative as uint8."""
    return cast_op(cast_op(slope, FLOAT32) * (1 / SLOPE_SCALE) + (SLOPE_ZERO_POINT + 0.5), np.uint8)


def times_quantized(quantized: Node, y: Node) -> Node:
    """y times a quantized derivative of its shape, in y's dtype."""
    wide = FLOAT32 if is_narrow(y.spec.dtype) else y.spec.dtype
    slope = (cast_op(quantized, wide) - SLOPE_ZERO_POINT) * SLOPE_SCALE
    return cast_op(cast_op(y, wide) * slope, y.spec.dtype)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose products have epilogues. The graph, simplified for native
    devices, must be the executor's own: its nodes change. A product that names a rung stays alone
    where the fused kernel lacks the rung.
    """
    for rewrite in (_epilogues, _operand_sums):
        fetches = exchange(fetches, rewrite(Graph(fetches), options.target))
    return list(fetches)


def _epilogues(graph: Graph, target: Target) -> dict[Node, Node]:
    kernels = ("matmul_bias", "matmul_map", "matmul_gradient")
    found = _Epilogues(graph, target)
    for node in graph.order:
        if _is_open(node, target, kernels):
            found.visit(node)
    return found.replaced


def _is_open(node: Node, target: Target, kernels: Sequence[str]) -> bool:
    """True for a product whose storage type, and rung if it names one, the fused kernels have."""
    if node.op is not matmul_op or not all(target.has(k, node.spec.dtype) for k in kernels):
        return False
    rung = node.attrs.get("algo")
    return rung is None or all(rung in target.rungs(kernel) for kernel in kernels)


def _operand_sums(graph: Graph, target: Target) -> dict[Node, Node]:
    sums: dict[tuple[Node, int], Node] = {}
    for node in graph.order:
        if node.op is sum_op and _keeps_last(node) and node.spec.dtype == np.float32:
            sums.setdefault((strip_views(node.inputs[0]), node.spec.size), node)
    replaced: dict[Node, Node] = {}
    for node in graph.order if sums else ():
        if not _is_open(node, target, ("matmul_sums",)):
            continue
        for k, k_first in ((1, not node.attrs["trans_B"]), (0, node.attrs["trans_A"])):
            operand = node.inputs[k]
            total = sums.get((strip_views(operand), operand.spec.shape[1])) if k_first else None
            if total is None or not graph.before(node.inputs, (node, total)):
                continue
            with attributed_to(node):
                made = _with_sums(node, total, operand, of_A=k == 0)
                replaced[node] = value_of(made, 0, node)
                replaced[total] = shaped(value_of(made, 1, total), total)
            del sums[strip_views(operand), operand.spec.shape[1]]
            break
    return replaced


class _Tail(NamedTuple):
    """What follows a product, up to `last`, of which `value` may be a view."""

    last: Node
    value: Node
    bias: Node | None = None
    activation: str = ""
    side: Node | None = None  # whose product with the activation's gradient this is


class _Epilogues:
    """The products of a graph that take what follows them.

    Attributes:
        replaced: what takes the place of a node.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        self._graph, self._target = graph, target
        self.replaced: dict[Node, Node] = {}
        # The quantized derivatives of gradients that are replaced by products with them.
        self._slopes: dict[Node, Node] = {}

    def visit(self, product: Node) -> None:
        """Replaces what follows a product; a layer's backward comes after its forward."""
        tail = _tail_of(self._graph, product)
        last = tail.last
        if last is product:
            return
        if last in self._slopes:
            tail = tail._replace(side=self._slopes[last], last=self.replaced[last])
            self.replaced[last] = shaped(_fused(product, tail, "mul_quantized"), last)
            return
        if tail.bias is not None and not tail.activation and self._takes_both(product, tail):
            return
        with attributed_to(last):
            gradient = "" if tail.side is None else last.op.kernel or ""
            self.replaced[last] = shaped(_fused(product, tail, gradient), last)

    def _takes_both(self, product: Node, tail: _Tail) -> bool:
        """True where an activation's input, which others read too, and the activation are values of
        one product, or the activation's derivative and that, where backward reads the input alone.
        """
        if not _is_open(product, self._target, ("matmul_bias_both",)):
            return False
        users = self._graph.users[tail.value]
        applied = next((user for user in users if _activates(user, tail.value)), None)
        if applied is None:
            return False
        gradients = _gradients_of(self._graph, tail.value, applied)
        if gradients and _is_open(product, self._target, ("matmul_bias_slope",)):
            self._replace_by_slope(product, tail, applied, gradients)
        else:
            self.replaced |= _with_both(product, tail, applied)
        return True

    def _replace_by_slope(
        self, product: Node, tail: _Tail, applied: Node, gradients: Sequence[Node]
    ) -> None:
        """An activation's derivative, with which its gradients are products, and the activation."""
        shape = product.spec.shape
        with attributed_to(tail.last):
            x = in_shape(tail.last, shape)
            slope = quantized_slope(gradients[0].op(x, oneslike_op(x)))
            body = close(_inputs(product, tail.bias), (slope, in_shape(applied, shape)))
            attrs = _flags(product) | {"activation": applied.op.kernel}
            made = matmul_bias_slope_op(*product.inputs, tail.bias, body=body, **attrs)
            made.stand_for(applied)
            self.replaced[applied] = shaped(value_of(made, 1, applied), applied)
        for node in gradients:
            with attributed_to(node):
                self._slopes[node] = in_shape(value_of(made, 0), node.spec.shape)
                self.replaced[node] = times_quantized(self._slopes[node], node.inputs[1])
                self.replaced[node].stand_for(node)


def _tail_of(graph: Graph, product: Node) -> _Tail:
    """The longest chain behind a product that an epilogue has: a bias and an activation, any of the
    two, or an activation's gradient. Its values may be views that reshape the product's rows.
    """
    columns = product.spec.shape[1]
    tail = _Tail(product, product)
    while (user := graph.only_user(tail.value)) is not None:
        if user.op is reshape_op and user.spec.shape[-1:] == (columns,):
            tail = tail._replace(value=user)
            continue
        value = tail.value
        if tail.activation or tail.side is not None or user.spec[:2] != value.spec[:2]:
            break
        other = user.inputs[-1] if user.inputs[0] is value else user.inputs[0]
        if user.op is add_op and tail.bias is None and _is_row(other, columns):
            tail = tail._replace(bias=other)
        elif _activates(user, value):
            tail = tail._replace(activation=user.op.kernel or "")
        elif (
            _is_gradient(user, value) and tail.bias is None and other.spec.shape == user.spec.shape
        ):
            tail = tail._replace(side=other)
        else:
            break
        tail = tail._replace(last=user, value=user)
    return tail


def _is_gradient(node: Node, dy: Node) -> bool:
    """True for the gradient of an activation, of dy."""
    return node.op.kernel in GRADIENTS and node.inputs[1] is dy


def _activates(node: Node, x: Node) -> bool:
    """True for an activation of x alone, in its dtype."""
    return node.op.kernel in ACTIVATIONS and len(node.inputs) == 1 and node.spec[:2] == x.spec[:2]


def _with_both(product: Node, tail: _Tail, applied: Node) -> dict[Node, Node]:
    """An activation's input, which others read too, and the activation, by one product."""
    last, shape = tail.last, product.spec.shape
    with attributed_to(last):
        outputs = in_shape(last, shape), in_shape(applied, shape)
        body = close(_inputs(product, tail.bias), outputs)
        attrs = _flags(product) | {"activation": applied.op.kernel}
        made = matmul_bias_both_op(*product.inputs, tail.bias, body=body, **attrs)
        made.stand_for(last)
        values = {last: value_of(made, 0, last), applied: value_of(made, 1, applied)}
        return {node: shaped(value, node) for node, value in values.items()}


def _gradients_of(graph: Graph, x: Node, applied: Node) -> list[Node]:
    """The gradients of an activation of x, if nobody reads x but for them."""
    kernel = f"{applied.op.kernel}_gradient"
    found = [user for user in graph.users[x] if user is not applied]
    alone = all(
        user.op.kernel == kernel and user.inputs[0] is x and user.inputs[1] is not x
        for user in found
    )
    of_input = kernel in GRADIENTS and not graph.is_fetched(x)
    return found if alone and of_input else []


def _fused(product: Node, tail: _Tail, gradient: str) -> Node:
    """The product with its epilogue; `gradient` is its kernel where the tail has a side."""
    bias, side, last = tail.bias, tail.side, tail.last
    flags = _flags(product)
    if side is not None:
        flat = in_shape(side, product.spec.shape)
        body = _body(product, flat, last, {side: flat} if flat is not side else {})
        fused = matmul_gradient_op(*product.inputs, flat, body=body, gradient=gradient, **flags)
    elif bias is not None:
        flags["activation"] = tail.activation
        fused = matmul_bias_op(*product.inputs, bias, body=_body(product, bias, last), **flags)
    else:
        flags["activation"] = tail.activation
        fused = matmul_map_op(*product.inputs, body=_body(product, None, last), **flags)
    fused.stand_for(last)
    return fused


def _flags(product: Node) -> dict[str, Any]:
    flags = {name: product.attrs[name] for name in ("trans_A", "trans_B")}
    return flags | rung_attribute(product)


def _body(
    product: Node, third: Node | None, last: Node, aliases: dict[Node, Node] | None = None
) -> Body:
    return close(_inputs(product, third), [in_shape(last, product.spec.shape)], aliases)


def _inputs(product: Node, third: Node | None) -> list[Node]:
    return [*product.inputs] if third is None else [*product.inputs, third]


def _with_sums(product: Node, total: Node, operand: Node, of_A: bool) -> Node:
    flat = in_shape(total, (total.spec.size,))
    aliases = {total.inputs[0]: operand}
    body = close(product.inputs, (product, flat), aliases if total.inputs[0] is not operand else {})
    made = matmul_sums_op(*product.inputs, body=body, of_A=of_A, **_flags(product))
    made.stand_for(product)
    return made


def _is_row(node: Node, columns: int) -> bool:
    return node.spec.shape[-1:] == (columns,) and node.spec.size == columns


def _keeps_last(node: Node) -> bool:
    """True for a sum over all axes but the last of several."""
    ndim = len(node.inputs[0].spec.shape)
    axes = normalize_axes(node, node.attrs["axis"], ndim)
    return ndim > 1 and axes == tuple(range(ndim - 1))


FUSION = Pass(
    "gemm_epilogue",
    fuse,
    position=30,
    needs=("matmul_bias", "matmul_map", "matmul_gradient", "matmul_sums"),
)
