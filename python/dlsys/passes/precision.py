"""precision: sets the precision of products and convolutions.

`fp32` is true float32. `tf32` multiplies matrices, and convolves, on the tensor cores of GPUs from
sm_80 on: their operands keep 10 bits of mantissa, the sums stay float32. `3xtf32` does so thrice,
with each operand of a matrix product as the sum of two, and errors like float32's. Where there are
no tensor cores, on the CPU, and where a kernel has no such form, both are fp32: of batched products
by their heuristic, of most convolutions of few channels, of all convolutions with 3xtf32. `bf16`,
and `fp8` with it, is a policy of storage (executor/autocast.py), exact where tf32 multiplies it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import GraphError
from ..graph.node import Node, find_topo_sort
from ..ops.matmul import PRECISIONS

POLICIES = (*PRECISIONS, "bf16", "fp8")  # that an executor takes


def check_precision(precision: str) -> str:
    """The precision itself; GraphError for one that does not exist."""
    if precision not in POLICIES:
        why = "; float16 would need loss scaling" if precision in ("fp16", "float16") else ""
        raise GraphError(f"precision is {precision!r}, expected one of {', '.join(POLICIES)}{why}")
    return precision


def of_products(precision: str) -> str:
    """The precision by which an executor's products multiply what is left in float32."""
    return precision if precision in PRECISIONS else "tf32"


def set_precision(fetches: Sequence[Node], precision: str) -> list[Node]:
    """Marks the nodes of an executor's own graph; fp32, the default, needs no mark."""
    if check_precision(precision) != "fp32":
        for node in find_topo_sort(fetches):
            if node.op.has_precision:
                node.attrs = {**node.attrs, "precision": of_products(precision)}
    return list(fetches)
