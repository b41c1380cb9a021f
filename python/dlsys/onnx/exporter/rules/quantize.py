"""Quantization, as QuantizeLinear and DequantizeLinear around operators of floats (QDQ)."""

from __future__ import annotations

import numpy as np

from ....graph.node import Node
from ..registry import rule
from ..trace import Emitter


@rule("quantize", "QuantizeLinear")
def _quantize(g: Emitter, node: Node, x: str, scale: str, zero: str) -> str:
    x = g.cast(x, node.inputs[0].spec.dtype, np.dtype(np.float32))
    return g("QuantizeLinear", x, scale, zero, axis=_axis(node))


@rule("dequantize", "DequantizeLinear")
def _dequantize(g: Emitter, node: Node, x: str, scale: str, zero: str) -> str:
    """ONNX has no zero point for int32 but 0, which is left out."""
    given = None if node.inputs[0].spec.dtype == np.int32 else zero
    return g("DequantizeLinear", x, scale, given, axis=_axis(node))


def _axis(node: Node) -> int | None:
    return node.attrs["axis"] if node.inputs[1].spec.shape else None
