"""Reductions over axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....graph.node import Node
from ....graph.spec import normalize_axes
from ....ops.comparison import isfinite_op, where_op
from ....ops.elementwise import cast_op, exp_op, log_op
from ....ops.movement import reshape_op
from ....ops.reduce import max_op, sum_op
from ..registry import rule
from ..trace import Emitter
from .elementwise import comparable

INT64 = np.dtype(np.int64)


def _reduction(op_type: str) -> Any:
    def emit(g: Emitter, node: Node, x: str) -> Any:
        if "axis" not in node.attrs:
            return None  # a kernel over three axes, which `simplify` never leaves here
        dtype, shape = node.spec.dtype, node.inputs[0].spec.shape
        axes = normalize_axes(node, node.attrs["axis"], len(shape))
        wide = INT64 if dtype.kind in "iub" else dtype
        if op_type == "ReduceLogSumExp" and g.opset >= 28 and axes:
            return _logsumexp(g, node)
        y = g.reduce(op_type, g.cast(x, node.inputs[0].spec.dtype, wide), axes,
                     node.attrs["keepdims"])  # fmt: skip
        return g.cast(y, wide, dtype)

    return emit


def _logsumexp(g: Emitter, node: Node) -> Node:
    """Of differences to the largest: ONNX Runtime computes what 28 defines as it stands there, and
    the exponentials overflow.
    """
    x, axis = cast_op(node.inputs[0], node.spec.dtype), node.attrs["axis"]
    largest = max_op(x, axis, keepdims=True)
    largest = where_op(isfinite_op(largest), largest, 0.0)
    total = log_op(sum_op(exp_op(x - largest), axis, keepdims=node.attrs["keepdims"]))
    return total + reshape_op(largest, node.spec.shape)


for _name, _op_type in {
    "sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin",
    "prod": "ReduceProd", "logsumexp": "ReduceLogSumExp",
}.items():  # fmt: skip
    rule(_name, _op_type)(_reduction(_op_type))


def _extreme(op_type: str) -> Any:
    def emit(g: Emitter, node: Node, x: str) -> str | None:
        """Over one axis; several are brought together by `simplify`, for a kernel over the middle
        one.
        """
        spec, keepdims = node.inputs[0].spec, False
        axes: tuple[int, ...] = (1,)
        if "axis" in node.attrs:
            axes = normalize_axes(node, node.attrs["axis"], len(spec.shape))
            keepdims = node.attrs["keepdims"]
            if len(axes) != 1:
                return None
        given = g.cast(x, spec.dtype, comparable(spec.dtype))
        return g(op_type, given, axis=axes[0], keepdims=int(keepdims))

    return emit


rule("argmax", "ArgMax")(_extreme("ArgMax"))
rule("argmin", "ArgMin")(_extreme("ArgMin"))
