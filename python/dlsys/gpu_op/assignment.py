"""The assignment's kernels as plain functions on NDArrays of either native device."""

from __future__ import annotations

from ..errors import NotApplicableError, ShapeError
from ..ndarray import NDArray, launch
from ..ops.matmul import PRECISIONS, matmul_op
from ..ops.movement import broadcast_to_op
from ..rungs import AUTO, GEMM
from .checks import (
    algorithm_of_rung,
    check_arrays,
    check_separate,
    check_shape,
    checked,
    elementwise,
)
from .fp8 import Fp8Product

__all__ = [
    "array_set", "broadcast_to", "matrix_elementwise_add", "matrix_elementwise_add_by_const",
    "matrix_elementwise_multiply", "matrix_elementwise_multiply_by_const", "matrix_multiply",
    "reduce_sum_axis_zero", "relu", "relu_gradient", "softmax", "softmax_cross_entropy",
]  # fmt: skip


def array_set(arr: NDArray, value: float) -> None:
    """arr[...] = value."""
    check_arrays("array_set", arr)
    launch("fill", arr.ctx, float(value), arr)


def broadcast_to(in_arr: NDArray, out_arr: NDArray) -> None:
    """Repeats `in_arr` along the leading axes of `out_arr`, and along its own axes of extent 1."""
    check_arrays("broadcast_to", in_arr, out_arr)
    checked(broadcast_to_op, (in_arr,), out_arr, shape=out_arr.shape)
    launch("broadcast_to", out_arr.ctx, in_arr, out_arr)


def reduce_sum_axis_zero(in_arr: NDArray, out_arr: NDArray) -> None:
    """out = sum of in (n, ...) over axis 0; the sum of a vector has shape (1,)."""
    op = "reduce_sum_axis_zero"
    check_arrays(op, in_arr, out_arr)
    check_separate(op, out_arr, in_arr)
    if not in_arr.ndim:
        raise ShapeError(f"{op}: the input has shape (), expected at least one axis")
    check_shape(op, "the output", out_arr, in_arr.shape[1:] or (1,))
    launch("reduce_sum", in_arr.ctx, in_arr, 1, 1.0, out_arr)


def matrix_elementwise_add(mat_a: NDArray, mat_b: NDArray, output: NDArray) -> None:
    """output = a + b, all of one shape."""
    elementwise("matrix_elementwise_add", "add", (mat_a, mat_b), output)


def matrix_elementwise_add_by_const(mat: NDArray, value: float, output: NDArray) -> None:
    """output = mat + value."""
    elementwise("matrix_elementwise_add_by_const", "add_const", (mat,), output, float(value))


def matrix_elementwise_multiply(mat_a: NDArray, mat_b: NDArray, output: NDArray) -> None:
    """output = a * b, all of one shape."""
    elementwise("matrix_elementwise_multiply", "mul", (mat_a, mat_b), output)


def matrix_elementwise_multiply_by_const(mat: NDArray, value: float, output: NDArray) -> None:
    """output = mat * value."""
    elementwise("matrix_elementwise_multiply_by_const", "mul_const", (mat,), output, float(value))


def matrix_multiply(
    mat_a: NDArray,
    trans_a: bool,
    mat_b: NDArray,
    trans_b: bool,
    mat_c: NDArray,
    algo: str = "",
    precision: str = "fp32",
) -> None:
    """C (m, n) = A (m, k) @ B (k, n), where A or B may be given transposed.

    `algo` names a rung of the ladder (docs/learn/gemm.md); "auto" leaves it to the heuristic and ""
    to DLSYS_GEMM. `precision` is fp32, tf32, 3xtf32 or fp8 (docs/precision.md), which has one rung.
    NotApplicableError, which lists those that there are, for one that the device lacks or that
    cannot serve the product.
    """
    flags = dict(trans_A=bool(trans_a), trans_B=bool(trans_b))
    of_a, of_b, *_ = checked(matmul_op, (mat_a, mat_b), mat_c, **flags)
    if precision == "fp8":
        if algo not in ("", AUTO):
            raise NotApplicableError(f"matrix_multiply: algo={algo} has no fp8; leave it out")
        product = Fp8Product(mat_a, trans_a, mat_b, trans_b, mat_c)
        product.round()
        product.multiply()
        return
    if precision not in PRECISIONS:
        known = ", ".join((*PRECISIONS, "fp8"))
        raise NotApplicableError(f"matrix_multiply: precision={precision}, expected one of {known}")
    number = algorithm_of_rung("matmul", mat_c.ctx, GEMM, algo)
    code = PRECISIONS[precision]
    launch("matmul", mat_c.ctx, mat_a, of_a, mat_b, of_b, number, code, mat_c)


def relu(in_arr: NDArray, out_arr: NDArray) -> None:
    """out = max(in, 0)."""
    elementwise("relu", "relu", (in_arr,), out_arr)


def relu_gradient(in_arr: NDArray, in_grad_arr: NDArray, out_arr: NDArray) -> None:
    """out = in_grad where in > 0, else 0."""
    elementwise("relu_gradient", "relu_gradient", (in_arr, in_grad_arr), out_arr)


def softmax(in_arr: NDArray, out_arr: NDArray) -> None:
    """out = softmax of in over the last axis."""
    op = "softmax"
    check_arrays(op, in_arr, out_arr)
    check_separate(op, out_arr, in_arr)
    if not in_arr.ndim:
        raise ShapeError(f"{op}: the input has shape (), expected at least one axis")
    check_shape(op, "the output", out_arr, in_arr.shape)
    launch(op, out_arr.ctx, in_arr, out_arr)


def softmax_cross_entropy(in_arr_a: NDArray, in_arr_b: NDArray, out_arr: NDArray) -> None:
    """out (1,) = mean over rows of -sum(b * log softmax(a)) of logits a (n, c), labels b (n, c)."""
    op = "softmax_cross_entropy"
    check_arrays(op, in_arr_a, in_arr_b, out_arr)
    if in_arr_a.ndim != 2:
        raise ShapeError(f"{op}: the logits have shape {in_arr_a.shape}, expected a matrix")
    check_shape(op, "the labels", in_arr_b, in_arr_a.shape)
    check_shape(op, "the output", out_arr, (1,))
    launch("softmax_cross_entropy_mean", out_arr.ctx, in_arr_a, in_arr_b, out_arr)
