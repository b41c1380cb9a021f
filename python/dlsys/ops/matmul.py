"""Matrix products."""

from __future__ import annotations

import numpy as np

from ..graph.node import Node, Op, Spec, same_nodes
from ..graph.shapes import describe, promote
from ..graph.signature import Bool, Signature
from .movement import transpose_op

# The precisions of products and the numbers by which kernels know them; see passes/precision.py.
PRECISIONS = {"fp32": 0, "tf32": 1}


def precision_number(node: Node) -> int:
    """What a kernel is told of a node's precision."""
    return PRECISIONS[node.attrs.get("precision", "fp32")]


def algorithm_number(node: Node) -> int:
    """Which implementation a kernel is told to use; 0 leaves it to the kernel's own rule."""
    return node.attrs["algorithm"].number if "algorithm" in node.attrs else 0


class Product(Op):
    """What products of matrices share: flags for transposes, and the rule of the inner extents."""

    tolerance = 1e-4
    signature = Signature("A", "B", trans_A=Bool(False), trans_B=Bool(False))

    def extents(self, node: Node, *specs: Spec) -> tuple[int, int]:
        """Rows and columns of the product over the last two axes. ShapeError where it has none."""
        a, b = specs[0].shape, specs[1].shape
        rows, inner = a[:-3:-1] if node.attrs["trans_A"] else a[-2:]
        inner_B, columns = b[:-3:-1] if node.attrs["trans_B"] else b[-2:]
        if inner != inner_B:
            hint = ""
            if inner == columns:
                hint = f"; did you mean trans_B={not node.attrs['trans_B']}?"
            elif rows == inner_B:
                hint = f"; did you mean trans_A={not node.attrs['trans_A']}?"
            raise node.error(f"inner dimensions differ: {describe(node, specs)}{hint}")
        return rows, columns

    def scalars(self, node: Node) -> tuple[int, ...]:
        return int(node.attrs["trans_A"]), int(node.attrs["trans_B"])

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * output.size * inputs[0].shape[-2 if node.attrs["trans_A"] else -1]


class MatMulOp(Product):
    """A @ B of two matrices, each used as its transpose when trans_A or trans_B says so."""

    name = kernel = "matmul"
    precise = tunable = True

    def scalars(self, node: Node) -> tuple[int, ...]:
        return *super().scalars(node), algorithm_number(node), precision_number(node)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if len(specs[0].shape) != 2 or len(specs[1].shape) != 2:
            raise node.error(f"expected two matrices, got {describe(node, specs)}")
        shape = self.extents(node, *specs)
        return Spec(shape, promote(node, *specs), specs[0].declared or specs[1].declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        a, b, out = arrays
        np.matmul(a.T if node.attrs["trans_A"] else a, b.T if node.attrs["trans_B"] else b, out=out)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        A, B = node.inputs
        if not node.attrs["trans_A"]:
            dA = matmul_op(output_grad, B, trans_B=not node.attrs["trans_B"])
        else:
            dA = matmul_op(B, output_grad, trans_A=node.attrs["trans_B"], trans_B=True)
        if not node.attrs["trans_B"]:
            dB = matmul_op(A, output_grad, trans_A=not node.attrs["trans_A"])
        else:
            dB = matmul_op(output_grad, A, trans_A=True, trans_B=node.attrs["trans_A"])
        return [dA, dB]

    def simplify(self, node: Node) -> Node | None:
        """Takes transposes of its inputs into its flags."""
        inputs, flags = list(node.inputs), [node.attrs["trans_A"], node.attrs["trans_B"]]
        for k, x in enumerate(inputs):
            if x.op is transpose_op:
                inputs[k], flags[k] = x.inputs[0], not flags[k]
        if same_nodes(inputs, node.inputs):
            return None
        return matmul_op(inputs[0], inputs[1], trans_A=flags[0], trans_B=flags[1])


matmul_op = MatMulOp()
