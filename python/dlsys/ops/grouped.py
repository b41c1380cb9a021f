"""Grouped products: consecutive groups of rows, each multiplied by a matrix of its own, as the
tokens of a mixture of experts are; and the products over the rows of each group, their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arguments.kinds import Bool, Rung
from ..arguments.signature import Signature
from ..errors import OutOfRangeError
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe, promote
from ..rungs import GEMM
from .elementwise import rung_attribute
from .matmul import algorithm_number, precision_number, sum_of_outer_products, without_swap

__all__ = ["grouped_contraction_op", "grouped_matmul_op"]

_SIZES = (np.dtype(np.int32), np.dtype(np.int64))


def _groups(node: Node, sizes: np.ndarray, rows: int) -> Iterator[tuple[int, slice]]:
    """Each group with its rows. OutOfRangeError for a size that is negative or that is more than
    the rows that are left.
    """
    begin = 0
    for group, size in enumerate(map(int, sizes)):
        if not 0 <= size <= rows - begin:
            raise OutOfRangeError(
                f"{node.op.name}: group size {size} at position {group} is out of range: there are "
                f"{rows - begin + 1}, counted from 0 [{node.where}]"
            )
        yield group, slice(begin, begin + size)
        begin += size


class GroupedProduct(Op):
    """Base of products by groups of rows, whose sizes are values that kernels read as they run."""

    tolerance = 1e-4
    has_precision = tunable = fallible = True
    any_dtype = (2,)
    autocast = "bf16"
    autocast_inputs = (0, 1)
    ladder = GEMM

    def check_sizes(self, node: Node, sizes: Spec) -> None:
        """ShapeError where these are no sizes of groups."""
        if len(sizes.shape) != 1:
            raise node.error(f"expected group sizes (groups,), got {sizes.shape}")
        if sizes.dtype is not None and sizes.dtype not in _SIZES:
            raise node.error(
                f"group sizes must be int32 or int64, got {node.inputs[2].name} of {sizes.dtype}; "
                "declare or cast them"
            )

    def measured_inputs(self, node: Node) -> dict[int, np.ndarray]:
        """The sizes that the autotuner measures with: all groups alike."""
        x, _, sizes = (given.spec for given in node.inputs)
        each = x.shape[0] // max(sizes.shape[0], 1)
        return {2: np.full(sizes.shape, each, sizes.dtype)}

    def multiply(self, node: Node) -> Any:
        """numpy's product, as multiply(a, b, out=out), by the node's rung."""
        return sum_of_outer_products if node.attrs.get("algo") == "naive" else np.matmul


class GroupedMatMulOp(GroupedProduct):
    """y = x @ w[g] for the rows of group g: x (m, k), w (groups, k, n) and group_sizes (groups,) to
    (m, n). Group 0 is the first rows, as many as its size says, group 1 those behind it. With
    trans_w, w is (groups, n, k). Rows behind all groups are zeros.

    The sizes, int32 or int64, may change from run to run. OutOfRangeError where one is negative or
    they are more than the rows; on a GPU, which tells of that later, such a size counts as the
    nearest one that fits.
    """

    name = kernel = "grouped_matmul"
    signature = Signature("x", "w", "group_sizes", trans_w=Bool(False), algo=Rung(GEMM))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, w, sizes = specs
        if len(x.shape) != 2 or len(w.shape) != 3:
            raise node.error(
                f"expected a matrix and a matrix for each group, got {describe(node, specs)}"
            )
        self.check_sizes(node, sizes)
        if w.shape[0] != sizes.shape[0]:
            raise node.error(f"numbers of groups differ: {describe(node, specs)}")
        inner, columns = w.shape[:0:-1] if node.attrs["trans_w"] else w.shape[1:]
        if x.shape[1] != inner:
            hint = ""
            if x.shape[1] == columns:
                hint = f"; did you mean trans_w={not node.attrs['trans_w']}?"
            raise node.error(f"inner dimensions differ: {describe(node, specs)}{hint}")
        shape = x.shape[0], columns
        return Spec(shape, promote(node, x, w), x.declared or w.declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, w, sizes, y = arrays
        w = np.swapaxes(w, -1, -2) if node.attrs["trans_w"] else w
        end = 0
        for group, rows in _groups(node, sizes, len(x)):
            self.multiply(node)(x[rows], w[group], out=y[rows])
            end = rows.stop
        y[end:] = 0

    def scalars(self, node: Node) -> tuple[int, ...]:
        return int(node.attrs["trans_w"]), algorithm_number(node), precision_number(node)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * output.size * inputs[0].shape[1]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, w, sizes = node.inputs
        trans_w, algo = node.attrs["trans_w"], rung_attribute(node)
        dx = grouped_matmul_op(output_grad, w, sizes, trans_w=not trans_w, **algo)
        of_rows = (output_grad, x) if trans_w else (x, output_grad)
        return [dx, grouped_contraction_op(*of_rows, sizes, **algo), None]

    def simplify(self, node: Node) -> Node | None:
        """A transpose of w goes into the flag."""
        x, w, sizes = node.inputs
        w, trans_w = without_swap(w, node.attrs["trans_w"])
        if w is node.inputs[1]:
            return None
        return grouped_matmul_op(x, w, sizes, trans_w=trans_w, **rung_attribute(node))


class GroupedContractionOp(GroupedProduct):
    """z[g] = xᵀ @ y over the rows of group g: x (m, k), y (m, n) and group_sizes (groups,), as
    `grouped_matmul` has them, to (groups, k, n). A group without rows gives zeros.
    """

    name = kernel = "grouped_contraction"
    vocabulary = False
    signature = Signature("x", "y", "group_sizes", algo=Rung(GEMM))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, y, sizes = specs
        if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[0] != y.shape[0]:
            raise node.error(f"expected two matrices of the same rows, got {describe(node, specs)}")
        self.check_sizes(node, sizes)
        shape = sizes.shape[0], x.shape[1], y.shape[1]
        return Spec(shape, promote(node, x, y), x.declared or y.declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y, sizes, z = arrays
        for group, rows in _groups(node, sizes, len(x)):
            self.multiply(node)(x[rows].T, y[rows], out=z[group])

    def scalars(self, node: Node) -> tuple[int, ...]:
        return algorithm_number(node), precision_number(node)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * inputs[0].size * output.shape[2]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, y, sizes = node.inputs
        algo = rung_attribute(node)
        dx = grouped_matmul_op(y, output_grad, sizes, trans_w=True, **algo)
        dy = grouped_matmul_op(x, output_grad, sizes, **algo)
        return [dx, dy, None]


grouped_matmul_op = GroupedMatMulOp()
grouped_contraction_op = GroupedContractionOp()
