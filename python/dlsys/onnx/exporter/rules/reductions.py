"""Reductions over axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....graph.node import Node
from ....graph.spec import normalize_axes
from ..registry import rule
from ..trace import Emitter

INT64 = np.dtype(np.int64)


def _reduction(op_type: str) -> Any:
    def emit(g: Emitter, node: Node, x: str) -> str | None:
        if "axis" not in node.attrs:
            return None  # a kernel over three axes, which `simplify` never leaves here
        dtype, shape = node.spec.dtype, node.inputs[0].spec.shape
        axes = normalize_axes(node, node.attrs["axis"], len(shape))
        wide = INT64 if dtype.kind in "iub" else dtype
        y = g.reduce(op_type, g.cast(x, node.inputs[0].spec.dtype, wide), axes,
                     node.attrs["keepdims"])  # fmt: skip
        return g.cast(y, wide, dtype)

    return emit


for _name, _op_type in {
    "sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin",
    "prod": "ReduceProd", "logsumexp": "ReduceLogSumExp",
}.items():  # fmt: skip
    rule(_name, _op_type)(_reduction(_op_type))


@rule("argmax argmin", "ArgMax, ArgMin")
def _extreme(g: Emitter, node: Node, x: str) -> str | None:
    """Over one axis; several are brought together by `simplify`, and the kernel's is the middle."""
    dtype = node.inputs[0].spec.dtype
    ndim = len(node.inputs[0].spec.shape)
    keepdims = False
    axes: tuple[int, ...] = (1,)
    if "axis" in node.attrs:
        axes = normalize_axes(node, node.attrs["axis"], ndim)
        keepdims = node.attrs["keepdims"]
        if len(axes) != 1:
            return None
    op_type = "ArgMax" if node.op.name == "argmax" else "ArgMin"
    wide = np.dtype(np.int32) if dtype.kind in "iub" and dtype.itemsize < 4 else dtype
    return g(op_type, g.cast(x, dtype, wide), axis=axes[0], keepdims=int(keepdims))
