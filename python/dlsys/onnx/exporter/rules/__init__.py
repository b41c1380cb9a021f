"""The rules by which operators become ONNX nodes, a file a family.

A rule is a function of the Emitter, the node, whose specs are known, and the names of its inputs.
It returns the name of the result (a tuple of them for several), or a graph of simpler operators of
ours that have rules, or None to leave the node to its operator's own `simplify`.
"""

from . import (
    elementwise,
    images,
    layout,
    losses,
    mathematics,
    norm,
    products,
    quantize,
    reductions,
    refused,
)
