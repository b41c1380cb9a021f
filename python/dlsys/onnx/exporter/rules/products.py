"""Matrix products."""

from __future__ import annotations

from ....graph.node import Node
from ....ops.einsum import equation
from ..registry import rule
from ..trace import Emitter
from .elementwise import operands


@rule("matmul", "Gemm, MatMul")
def _matmul(g: Emitter, node: Node, *inputs: str) -> str | None:
    a, b = operands(g, node, inputs, node.spec.dtype)
    flags = node.attrs["trans_A"], node.attrs["trans_B"]
    if node.spec.dtype.kind == "f" and any(flags):
        return g("Gemm", a, b, transA=int(flags[0]) or None, transB=int(flags[1]) or None)
    return _batched(g, node, a, b)


@rule("batched_matmul", "MatMul, Gemm, Transpose")
def _batched_matmul(g: Emitter, node: Node, *inputs: str) -> str | None:
    if all(len(x.spec.shape) == 2 for x in node.inputs):
        return _matmul(g, node, *inputs)
    return _batched(g, node, *operands(g, node, inputs, node.spec.dtype))


def _batched(g: Emitter, node: Node, a: str, b: str) -> str:
    sides = []
    for name, x, flag in zip((a, b), node.inputs, ("trans_A", "trans_B")):
        order = list(range(len(x.spec.shape)))
        order[-2:] = order[:-3:-1]
        sides.append(g("Transpose", name, perm=order) if node.attrs[flag] else name)
    return g("MatMul", *sides)


@rule("product times_vector", "MatMul")
def _product(g: Emitter, node: Node, *inputs: str) -> str:
    return g("MatMul", *operands(g, node, inputs, node.spec.dtype))


@rule("einsum", "Einsum")
def _einsum(g: Emitter, node: Node, *inputs: str) -> str | None:
    if node.attrs["like"] or not all(node.attrs["operands"]) or node.spec.dtype.kind == "b":
        return None
    return g("Einsum", *operands(g, node, inputs, node.spec.dtype), equation=equation(node))
