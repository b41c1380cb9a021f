"""Matrix products: of two matrices, of many (batched), of what `@` takes, linear, outer.
`einsum.py` has the general form.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments.kinds import Bool, Int, Rung
from ..arguments.signature import Signature, declared
from ..graph.node import Node, Op, same_nodes
from ..graph.spec import Spec, describe, merge_shapes, promote
from ..rungs import GEMM
from .elementwise import add, as_node, rung_attribute
from .movement import reshape_op, transpose_op
from .reduce import broadcast_like_op, sum_to_like

__all__ = ["batched_matmul_op", "linear_op", "matmul_op", "outer_op", "product_op"]

# The precisions of GEMM and the codes by which kernels know them; see passes/precision.py.
PRECISIONS = {"fp32": 0, "tf32": 1, "3xtf32": 2}


def precision_number(node: Node) -> int:
    """The precision of a node as kernels take it."""
    return PRECISIONS[node.attrs.get("precision", "fp32")]


def algorithm_number(node: Node) -> int:
    """The algorithm of a node as kernels take it; 0 leaves it to the kernel's heuristic."""
    return node.attrs["algorithm"].number if "algorithm" in node.attrs else 0


def sum_of_outer_products(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """numpy's rung `naive`: the columns of a times the rows of b, one k after the other."""
    out[...] = 0
    for k in range(a.shape[-1]):
        out += a[..., :, k, None] * b[..., k, None, :]


class Product(Op):
    """Base of GEMM operators: flags for transposes, the rule that both K agree, and `algo`, the
    rung of the ladder by which it is computed, which its gradients inherit.
    """

    tolerance = 1e-4
    signature = Signature("A", "B", trans_A=Bool(False), trans_B=Bool(False), algo=Rung(GEMM))
    has_precision = tunable = True
    autocast = "bf16"
    ladder = GEMM

    def extents(self, node: Node, *specs: Spec) -> tuple[int, int]:
        """Rows and columns of the product over the last two axes. ShapeError where it has none."""
        a, b = specs[0].shape, specs[1].shape
        rows, inner = a[:-3:-1] if node.attrs["trans_A"] else a[-2:]
        inner_B, columns = b[:-3:-1] if node.attrs["trans_B"] else b[-2:]
        if inner != inner_B:
            hint = ""
            if inner == columns:
                hint = f"; did you mean trans_B={not node.attrs['trans_B']}?"
            elif str(rows) == str(inner_B):  # no question about an unknown extent, see extents.py
                hint = f"; did you mean trans_A={not node.attrs['trans_A']}?"
            raise node.error(f"inner dimensions differ: {describe(node, specs)}{hint}")
        return rows, columns

    def scalars(self, node: Node) -> tuple[int, ...]:
        flags = int(node.attrs["trans_A"]), int(node.attrs["trans_B"])
        return *flags, algorithm_number(node), precision_number(node)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * output.size * inputs[0].shape[-2 if node.attrs["trans_A"] else -1]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        a, b, out = arrays
        a = np.swapaxes(a, -1, -2) if node.attrs["trans_A"] else a
        b = np.swapaxes(b, -1, -2) if node.attrs["trans_B"] else b
        multiply = sum_of_outer_products if node.attrs.get("algo") == "naive" else np.matmul
        multiply(a, b, out=out)


class MatMulOp(Product):
    """A @ B of two matrices, each used as its transpose when trans_A or trans_B says so."""

    name = kernel = "matmul"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if len(specs[0].shape) != 2 or len(specs[1].shape) != 2:
            raise node.error(f"expected two matrices, got {describe(node, specs)}")
        shape = self.extents(node, *specs)
        return Spec(shape, promote(node, *specs), specs[0].declared or specs[1].declared)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        A, B = node.inputs
        trans_A, trans_B = node.attrs["trans_A"], node.attrs["trans_B"]
        algo = rung_attribute(node)
        if not trans_A:
            dA = matmul_op(output_grad, B, trans_B=not trans_B, **algo)
        else:
            dA = matmul_op(B, output_grad, trans_A=trans_B, trans_B=True, **algo)
        if not trans_B:
            dB = matmul_op(A, output_grad, trans_A=not trans_A, **algo)
        else:
            dB = matmul_op(output_grad, A, trans_A=True, trans_B=trans_A, **algo)
        return [dA, dB]

    def simplify(self, node: Node) -> Node | None:
        """Takes transposes of its inputs into its flags."""
        inputs, flags = list(node.inputs), [node.attrs["trans_A"], node.attrs["trans_B"]]
        for k, x in enumerate(inputs):
            if x.op is transpose_op:
                inputs[k], flags[k] = x.inputs[0], not flags[k]
        if same_nodes(inputs, node.inputs):
            return None
        algo = rung_attribute(node)
        return matmul_op(inputs[0], inputs[1], trans_A=flags[0], trans_B=flags[1], **algo)


class BatchedMatMulOp(Product):
    """A @ B over the last two axes, (…, m, k) and (…, k, n) to (…, m, n); the axes before them
    broadcast by numpy's rule. trans_A and trans_B exchange the last two axes.
    """

    name = kernel = "batched_matmul"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        a, b = specs[0].shape, specs[1].shape
        if len(a) < 2 or len(b) < 2:
            raise node.error(f"expected at least two dimensions, got {describe(node, specs)}")
        rows, columns = self.extents(node, *specs)
        batch = merge_shapes(a[:-2], b[:-2])
        if batch is None:
            raise node.error(f"leading dimensions do not broadcast: {describe(node, specs)}")
        declared = specs[0].declared or specs[1].declared
        return Spec((*batch, rows, columns), promote(node, *specs), declared)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        A, B = node.inputs
        trans_A, trans_B = node.attrs["trans_A"], node.attrs["trans_B"]
        algo = rung_attribute(node)
        if not trans_A:
            dA = product_like_op(output_grad, B, A, trans_A=False, trans_B=not trans_B, **algo)
        else:
            dA = product_like_op(B, output_grad, A, trans_A=trans_B, trans_B=True, **algo)
        if not trans_B:
            dB = product_like_op(A, output_grad, B, trans_A=not trans_A, trans_B=False, **algo)
        else:
            dB = product_like_op(output_grad, A, B, trans_A=True, trans_B=trans_A, **algo)
        return [dA, dB]

    def simplify(self, node: Node) -> Node | None:
        """Transposes go into the flags; what one product of matrices can do becomes that."""
        A, trans_A = without_swap(node.inputs[0], node.attrs["trans_A"])
        B, trans_B = without_swap(node.inputs[1], node.attrs["trans_B"])
        algo = rung_attribute(node)
        if len(B.spec.shape) == 2 and (len(A.spec.shape) == 2 or not trans_A):
            rows = A if len(A.spec.shape) == 2 else reshape_op(A, (_rows(A), A.spec.shape[-1]))
            return reshape_op(matmul_op(rows, B, trans_A, trans_B, **algo), node.spec.shape)
        if same_nodes((A, B), node.inputs):
            return None
        return batched_matmul_op(A, B, trans_A, trans_B, **algo)


class ProductLikeOp(Op):
    """A @ B as `batched_matmul` has it, summed over the leading axes along which `like` was
    repeated: the gradient of a batched product.
    """

    name = "product_like"
    signature = Signature(
        "A", "B", "like", trans_A=Bool(False), trans_B=Bool(False), algo=Rung(GEMM)
    )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return Spec(specs[2].shape, promote(node, *specs[:2]), any(s.declared for s in specs[:2]))

    def simplify(self, node: Node) -> Node:
        A, B, like = node.inputs
        trans_A, trans_B = node.attrs["trans_A"], node.attrs["trans_B"]
        same_batch = A.spec.shape[:-2] == B.spec.shape[:-2]
        if len(like.spec.shape) == 2 and same_batch and trans_A and not trans_B:
            rows_A = reshape_op(A, (_rows(A), A.spec.shape[-1]))
            rows_B = reshape_op(B, (_rows(B), B.spec.shape[-1]))
            return matmul_op(rows_A, rows_B, trans_A=True, **rung_attribute(node))
        return sum_to_like(batched_matmul_op(A, B, **node.attrs), like)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        A, B = node.inputs[:2]
        product = batched_matmul_op(A, B, **node.attrs)
        dA, dB = batched_matmul_op.gradient(product, broadcast_like_op(output_grad, product))
        return [dA, dB, None]


def _rows(x: Node) -> int:
    """The extent of all axes but the last together."""
    return int(np.prod(x.spec.shape[:-1], dtype=np.int64))


def without_swap(x: Node, flag: bool) -> tuple[Node, bool]:
    """x without a transpose that only exchanges its last two axes, and the flag that stands for
    it.
    """
    if x.op is transpose_op and x.spec is not None:
        ndim = len(x.spec.shape)
        axes = transpose_op.permutation(x, ndim)
        if ndim >= 2 and axes == (*range(ndim - 2), ndim - 1, ndim - 2):
            return x.inputs[0], not flag
    return x, flag


class ProductOp(Op):
    """A @ B by numpy's rules: of matrices, of stacks of them whose leading axes broadcast, and of
    vectors, which count as a row on the left and as a column on the right.
    """

    name = "product"
    signature = Signature("A", "B", algo=Rung(GEMM))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        a, b = specs[0].shape, specs[1].shape
        if not a or not b:
            raise node.error(f"expected at least one dimension, got {describe(node, specs)}; use *")
        batch = merge_shapes(a[:-2], b[:-2])
        if a[-1] != _as_columns(b)[-2] or batch is None:
            other = len(b) > 1 and a[-1] == b[-1] and batch is not None
            hint = "; did you mean F.matmul(A, B, transpose_b=True)?" if other else ""
            raise node.error(
                f"{describe(node, specs)} do not fit: expected (…, m, k) and (…, k, n) with "
                f"leading axes that broadcast{hint}"
            )
        declared = any(spec.declared for spec in specs)
        shape = batch + a[-2:-1] + (b[-1:] if len(b) > 1 else ())
        return Spec(shape, promote(node, *specs), declared)

    def simplify(self, node: Node) -> Node:
        A, B = node.inputs
        product = batched_matmul_op(
            reshape_op(A, _as_rows(A.spec.shape)),
            reshape_op(B, _as_columns(B.spec.shape)),
            **rung_attribute(node),
        )
        return reshape_op(product, node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [
            product_gradient_op(*node.inputs, output_grad, side=side, **rung_attribute(node))
            for side in (0, 1)
        ]


class ProductGradientOp(Op):
    """The gradient of <A @ B, dy> for A (side 0) or B (side 1); the shapes need not be known."""

    name = "product_gradient"
    signature = Signature("A", "B", "dy", side=Int(low=0, high=1), algo=Rung(GEMM))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[node.attrs["side"]]._replace(dtype=promote(node, *specs))

    def simplify(self, node: Node) -> Node:
        shapes = _as_rows(node.inputs[0].spec.shape), _as_columns(node.inputs[1].spec.shape)
        A, B = (reshape_op(x, shape) for x, shape in zip(node.inputs, shapes))
        lead = merge_shapes(shapes[0][:-2], shapes[1][:-2]) or ()
        dy = reshape_op(node.inputs[2], (*lead, shapes[0][-2], shapes[1][-1]))
        algo = rung_attribute(node)
        if node.attrs["side"] == 0:
            grad = product_like_op(dy, B, A, trans_B=True, **algo)
        else:
            grad = product_like_op(A, dy, B, trans_A=True, **algo)
        return reshape_op(grad, node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        inputs, side, algo = list(node.inputs), node.attrs["side"], rung_attribute(node)
        inputs[side] = output_grad
        grads: list[Node | None] = [None, None, product_op(*inputs[:2], **algo)]
        grads[1 - side] = product_gradient_op(*inputs, side=1 - side, **algo)
        return grads


def _as_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the left operand of a product; a vector is a row."""
    return shape if len(shape) > 1 else (1, *shape)


def _as_columns(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the right operand of a product; a vector is a column."""
    return shape if len(shape) > 1 else (*shape, 1)


class OuterOp(Op):
    """a_i b_j of two vectors."""

    name = "outer"
    signature = Signature("a", "b")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if len(specs[0].shape) != 1 or len(specs[1].shape) != 1:
            raise node.error(f"expected two vectors, got {describe(node, specs)}")
        shape = specs[0].shape + specs[1].shape
        return Spec(shape, promote(node, *specs), any(spec.declared for spec in specs))

    def simplify(self, node: Node) -> Node:
        a, b = node.inputs
        return reshape_op(a, (*a.spec.shape, 1)) * reshape_op(b, (1, *b.spec.shape))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        a, b = node.inputs
        return [times_vector_op(output_grad, b), times_vector_op(transpose_op(output_grad), a)]


class TimesVectorOp(Op):
    """The product of a matrix (m, n) with a vector (n,)."""

    name = "times_vector"
    signature = Signature("A", "v")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if len(specs[0].shape) != 2 or specs[1].shape != specs[0].shape[1:]:
            raise node.error(f"expected (m, n) and (n,), got {describe(node, specs)}")
        declared = any(spec.declared for spec in specs)
        return Spec(specs[0].shape[:1], promote(node, *specs), declared)

    def simplify(self, node: Node) -> Node:
        A, v = node.inputs
        return reshape_op(matmul_op(A, reshape_op(v, (*v.spec.shape, 1))), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        A, v = node.inputs
        return [outer_op(output_grad, v), times_vector_op(transpose_op(A), output_grad)]


matmul_op = MatMulOp()
batched_matmul_op = BatchedMatMulOp()
product_like_op = ProductLikeOp()
product_op = ProductOp()
product_gradient_op = ProductGradientOp()
outer_op = OuterOp()
times_vector_op = TimesVectorOp()


def product(a: Any, b: Any, algo: str | None = None) -> Node:
    """a @ b, where each is a node or an array, by a rung of the ladder or by the setting's."""
    A, B = as_node(a), as_node(b)
    known = A.spec is not None and B.spec is not None
    matrices = known and len(A.spec.shape) == len(B.spec.shape) == 2
    return matmul_op(A, B, algo=algo) if matrices else product_op(A, B, algo=algo)


@declared(trans_A=Bool(), trans_B=Bool(), algo=Rung(GEMM))
def linear_op(
    A: Node,
    B: Node,
    bias: Node | None = None,
    trans_A: bool = False,
    trans_B: bool = False,
    algo: str | None = None,
) -> Node:
    """A @ B + bias: A (…, inputs), B (inputs, outputs), bias (outputs,) to (…, outputs); trans_A
    and trans_B exchange the last two axes first. algo: the rung of the product's ladder, such as
    "warp"; without it DLSYS_GEMM counts. ShapeError when they do not fit.
    """
    y = batched_matmul_op(A, B, trans_A, trans_B, algo=algo)
    return y if bias is None else add(y, bias)
