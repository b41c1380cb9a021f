"""Products in floats of 8 bits: operands rounded by one scale each, multiplied as codes.

Codes are those of Micikevicius et al., "FP8 Formats for Deep Learning" (2022): e4m3 has 4 bits of
exponent, 3 of mantissa, no infinities and 448 as its largest number; e5m2 has float16's range with
2 bits of mantissa and 57344, for gradients. The scale makes an operand's largest magnitude the
format's largest number, so that nothing is beyond it. Operands with an infinity or NaN have codes
of NaN alone, and so has their product. `in_fp8.py` puts these operators in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arguments.kinds import Bool, DType
from ..arguments.signature import Signature
from ..dtypes import FLOAT32, rounded
from ..graph.node import Node, Op
from ..graph.spec import Spec, describe

UINT8 = np.dtype(np.uint8)
K_MULTIPLE = 16  # of codes in a row, which ends in zeros


class Format(NamedTuple):
    """Floats of 8 bits: their bits of mantissa, the bias of exponents, and the largest number with
    its code.
    """

    mantissa: int
    bias: int
    largest: float
    code: int

    def encode(self, values: Any) -> np.ndarray:
        """The codes of float32 values as uint8, rounded to nearest, ties to even. What is beyond
        the largest number becomes that, and NaN stays NaN.
        """
        bits = np.asarray(values, FLOAT32, order="C").view(np.uint32)
        magnitude = bits & 0x7FFFFFFF
        cut = 23 - self.mantissa
        even = magnitude + ((1 << cut - 1) - 1) + (magnitude >> cut & 1)
        normal = (even.astype(np.int64) - (127 - self.bias << 23)) >> cut
        # The sum with this power of two has the last place that subnormal numbers have.
        two = FLOAT32.type(2.0 ** (24 - self.bias - self.mantissa))
        subnormal = (magnitude.view(FLOAT32) + two).view(np.uint32) - two.view(np.uint32)
        is_normal = magnitude >= 128 - self.bias << 23
        codes = np.minimum(np.where(is_normal, normal, subnormal), self.code)
        codes |= bits >> 24 & 0x80
        return np.where(magnitude > 0x7F800000, 0x7F, codes).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The float32 values of codes."""
        return self._values()[codes]

    def _values(self) -> np.ndarray:
        codes = np.arange(256)
        exponent, fraction = (codes & 0x7F) >> self.mantissa, codes & (1 << self.mantissa) - 1
        hidden = (exponent > 0) << self.mantissa
        power = np.maximum(exponent, 1) - self.bias - self.mantissa
        values = np.ldexp((fraction + hidden).astype(FLOAT32), power)
        values = np.where(codes & 0x7F > self.code, np.nan, values)
        if self is E5M2:
            values = np.where(codes & 0x7F == self.code + 1, np.inf, values)
        return np.where(codes & 0x80, -values, values).astype(FLOAT32)


E4M3 = Format(3, 7, 448.0, 0x7E)
E5M2 = Format(2, 15, 57344.0, 0x7B)


def format_of(wide: bool) -> Format:
    """e5m2 where `wide`, else e4m3."""
    return E5M2 if wide else E4M3


def codes_and_unit(x: np.ndarray, wide: bool) -> tuple[np.ndarray, np.float32]:
    """The codes of x, and the float that a code of 1 stands for."""
    largest = FLOAT32.type(format_of(wide).largest)
    x = np.asarray(x, FLOAT32)
    most = np.abs(x).max(initial=FLOAT32.type(0))
    if not np.isfinite(most):
        return np.full(x.shape, 0x7F, np.uint8), FLOAT32.type(np.nan)
    if most == 0:
        return np.zeros(x.shape, np.uint8) | np.signbit(x) * np.uint8(0x80), FLOAT32.type(1)
    with np.errstate(over="ignore"):
        scale = np.minimum(largest / most, np.finfo(FLOAT32).max)
    return format_of(wide).encode(x * scale), most / largest


def filled(k: int) -> int:
    """The codes in a row of k."""
    return -(-max(k, 1) // K_MULTIPLE) * K_MULTIPLE


class Fp8QuantizeOp(Op):
    """The codes of a matrix, (rows, columns) and of its transpose, as one of them or both, their
    rows filled up with zeros to a multiple of 16, uint8; and the unit, float32 (1,): what a code of
    1 stands for. `wide`: the format is e5m2 instead of e4m3.
    """

    vocabulary = False
    signature = Signature("x", wide=Bool(False))

    def __init__(self, of_rows: bool, of_columns: bool) -> None:
        self.of_rows, self.of_columns = of_rows, of_columns
        name = "both" if of_rows and of_columns else "rows" if of_rows else "columns"
        self.name = self.kernel = f"fp8_{name}"
        self.outputs = of_rows + of_columns + 1

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, ...]:
        if len(specs[0].shape) != 2:
            raise node.error(f"expected a matrix, got {describe(node, specs)}")
        rows, columns = specs[0].shape
        codes = [Spec((rows, filled(columns)), UINT8)] * self.of_rows
        codes += [Spec((columns, filled(rows)), UINT8)] * self.of_columns
        return (*codes, Spec((1,), FLOAT32))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, *made, unit = arrays
        codes, unit[0] = codes_and_unit(x, node.attrs["wide"])
        for out, values in zip(made, [codes] * self.of_rows + [codes.T] * self.of_columns):
            out[...] = 0
            out[:, : values.shape[1]] = values

    def scalars(self, node: Node) -> tuple[int]:
        return (int(node.attrs["wide"]),)


class Fp8MatMulOp(Op):
    """A Bᵀ of codes (m, k) and (n, k) and their units, in float32, rounded to `dtype`. `wide_A` and
    `wide_B`: these are of e5m2 instead of e4m3.
    """

    name = kernel = "fp8_matmul"
    vocabulary = False
    any_dtype = (0, 2)
    tolerance = 2e-3  # tensor cores add with some 14 bits
    signature = Signature(
        "A", "unit_A", "B", "unit_B",
        wide_A=Bool(False), wide_B=Bool(False), dtype=DType(FLOAT32),
    )  # fmt: skip

    def infer(self, node: Node, *specs: Spec) -> Spec:
        a, _, b, _ = specs
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
            raise node.error(f"expected codes (m, k) and (n, k), got {describe(node, specs)}")
        return Spec((a.shape[0], b.shape[0]), node.attrs["dtype"])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        a, unit_a, b, unit_b, out = arrays
        left = format_of(node.attrs["wide_A"]).decode(a)
        right = format_of(node.attrs["wide_B"]).decode(b)
        sums = np.matmul(left, right.T)
        out[...] = rounded(sums * (unit_a * unit_b), node.attrs["dtype"])

    def scalars(self, node: Node) -> tuple[int, int]:
        return int(node.attrs["wide_A"]), int(node.attrs["wide_B"])

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * output.size * inputs[0].shape[1]


fp8_rows_op = Fp8QuantizeOp(True, False)
fp8_columns_op = Fp8QuantizeOp(False, True)
fp8_both_op = Fp8QuantizeOp(True, True)
fp8_matmul_op = Fp8MatMulOp()


def quantize_op_of(wanted: Sequence[bool]) -> Fp8QuantizeOp:
    """The operator that makes the codes of a matrix, of its transpose, or both."""
    of_rows, of_columns = wanted
    return fp8_both_op if of_rows and of_columns else fp8_rows_op if of_rows else fp8_columns_op
