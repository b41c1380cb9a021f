"""Folding: what does not depend on an input is computed once.

A batch normalization by running statistics is a factor and a term a channel, which go into the
filter and the bias of the convolution before it, or the weight and bias of the linear layer: y =
(conv(x, f) + b - mean) · r + bias with r = scale / sqrt(variance + eps) is conv(x, f · r) +
(b - mean) · r + bias. Then every node over Parameters and constants alone becomes a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..autodiff import Executor
from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort, same_nodes
from ..ops.conv.convolution import convolution_bias_op, convolution_op
from ..ops.elementwise import add_op
from ..ops.leaf import Parameter
from ..ops.matmul import batched_matmul_op, matmul_op
from ..ops.norm.batch_norm import batch_normalize_op
from ..ops.quantize import dequantize_op
from ..rungs import AUTO


class _Affine(NamedTuple):
    """A convolution or linear layer: its product, the weight's axis of outputs, and its bias."""

    product: Node
    axis: int
    bias: Node | None


def folded(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over Parameters of their own, with the values of now; effects are left out."""
    return _with_values(_without_normalization(fetches))


def _without_normalization(fetches: Sequence[Node]) -> list[Node]:
    """The fetches with each batch normalization that can be folded in what is before it."""
    order = find_topo_sort(fetches)
    users = Counter(x for node in order for x in node.inputs) + Counter(fetches)
    new: dict[Node, Node] = {}
    for node in order:
        inputs = [new[x] for x in node.inputs]
        affine = _affine_before(node, users)
        if affine is not None:
            new[node] = _scaled(node, affine, new[affine.product.inputs[0]])
        elif same_nodes(inputs, node.inputs):
            new[node] = node
        else:
            new[node] = node.derive(inputs, node.spec)
            new[node].partial = node.partial
    return [new[node] for node in fetches]


def _affine_before(node: Node, users: Counter[Node]) -> _Affine | None:
    """The layer that a batch normalization of fixed statistics can go into."""
    if node.op is not batch_normalize_op or node.attrs["training"]:
        return None
    if node.attrs.get("algo", AUTO) != AUTO:  # it names a rung, which computes it by itself
        return None
    before, *numbers = node.inputs
    if not all(isinstance(x, Parameter) for x in numbers) or users[before] != 1:
        return None
    bias, product = None, before
    if before.op is add_op and isinstance(before.inputs[1], Parameter):
        product, bias = before.inputs
    if product.op is convolution_bias_op:
        bias = product.inputs[2]
    axis = 0
    if product.op in (matmul_op, batched_matmul_op) and len(node.shape or ()) == 2:
        axis = 0 if product.attrs["trans_B"] else 1
    elif product.op not in (convolution_op, convolution_bias_op) or product is not before:
        return None
    fixed = isinstance(product.inputs[1], Parameter) and len(product.inputs[1].shape) > 1
    alone = users[product] == 1 and (bias is None or isinstance(bias, Parameter))
    return _Affine(product, axis, bias) if fixed and alone else None


def _scaled(node: Node, affine: _Affine, x: Node) -> Node:
    """The layer with the normalization in its weight and bias, computed in float64."""
    mean, variance, scale, shift = (_value(p).astype(np.float64) for p in node.inputs[1:])
    factor = scale / np.sqrt(variance + node.attrs["eps"])
    weight = affine.product.inputs[1]
    value = _value(weight)
    column = [1] * value.ndim
    column[affine.axis] = -1
    start = 0.0 if affine.bias is None else _value(affine.bias)
    dtype = np.float64 if value.dtype == np.float64 else np.float32
    folded_weight = Parameter(
        (value * factor.reshape(column)).astype(dtype), weight.name, trainable=False
    )
    term = Parameter(((start - mean) * factor + shift).astype(dtype), node.name, trainable=False)
    attrs = {key: value for key, value in affine.product.attrs.items() if value is not None}
    with attributed_to(node):
        if affine.product.op in (convolution_op, convolution_bias_op):
            return convolution_bias_op(x, folded_weight, term, **attrs)
        return affine.product.op(x, folded_weight, **attrs) + term


def _value(parameter: Node) -> np.ndarray:
    assert isinstance(parameter, Parameter)
    return parameter.asnumpy()


def _with_values(fetches: Sequence[Node]) -> list[Node]:
    """The fetches with a Parameter for every node that no feed and no random number decides."""
    order = find_topo_sort(fetches)
    fixed: set[Node] = set()
    for node in order:
        decided = node.op.leaf != "feed" and not node.op.random and node.op.outputs == 1
        decided = decided and node.op is not dequantize_op  # integer kernels read its input
        if decided and all(x in fixed for x in node.inputs):
            fixed.add(node)
    used = {x for node in order if node not in fixed for x in node.inputs} | set(fetches)
    wanted = [node for node in order if node in fixed and node in used and not _is_free(node)]
    values = Executor(wanted).run({}, True) if wanted else []
    new: dict[Node, Node] = {
        node: Parameter(value, node.name, _dtype_of(node), trainable=False)
        for node, value in zip(wanted, values)
    }
    for node in order:
        if node in fixed or node.op.leaf:
            new.setdefault(node, node)
            continue
        inputs = [new[x] for x in node.inputs]
        new[node] = node.derive(inputs, node.spec)
        new[node].partial = node.partial
    return [new[node] for node in fetches]


def _is_free(node: Node) -> bool:
    """True for what a device makes without reading it, such as zeros, and for small constants."""
    return node.op.constant_fill or node.op.leaf == "constant"


def _dtype_of(node: Node) -> object:
    return node.dtype if node.spec is not None and node.spec.declared else None
