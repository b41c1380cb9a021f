"""The rules of ONNX operators, by family; importing this package fills the table of registry.py."""

from __future__ import annotations

from . import (
    control,
    elementwise,
    images,
    indexing,
    layout,
    losses,
    norm,
    products,
    quantized,
    recurrent,
    reduce,
    signal,
    strings,
)  # fmt: skip

__all__ = [
    "control", "elementwise", "images", "indexing", "layout", "losses", "norm", "products",
    "quantized", "recurrent", "reduce", "signal", "strings",
]  # fmt: skip
