"""A product in floats of 8 bits on NDArrays, in its two steps."""

from __future__ import annotations

from ..dtypes import FLOAT32
from ..errors import NotApplicableError
from ..ndarray import NDArray, empty, launch
from ..ops.fp8 import UINT8, filled, quantize_op_of
from ..runtime.target import target_of


class Fp8Product:
    """C (m, n) = A @ B, where A or B may be given transposed, both rounded to e4m3 by a scale of
    their own (docs/precision.md). NotApplicableError on a device without such products.
    """

    def __init__(self, a: NDArray, trans_a: bool, b: NDArray, trans_b: bool, c: NDArray) -> None:
        if not target_of(c.ctx).has("fp8_matmul"):
            raise NotApplicableError(
                f"matrix_multiply: {c.ctx} has no products in fp8; use fp32, tf32 or 3xtf32"
            )
        self._c = c
        self._operands = [_Codes(a, trans_a), _Codes(b, not trans_b)]

    @property
    def nbytes(self) -> int:
        """The bytes of both operands' codes."""
        return sum(x.codes.nbytes for x in self._operands)

    def round(self) -> None:
        """Makes the codes of both operands."""
        for x in self._operands:
            x.make()

    def multiply(self) -> None:
        """Multiplies the codes."""
        a, b = self._operands
        arguments = a.codes, a.unit, b.codes, b.unit, 0, 0, self._c
        launch("fp8_matmul", self._c.ctx, *arguments)


class _Codes:
    """An operand's codes, along its columns where `across`."""

    def __init__(self, x: NDArray, across: bool) -> None:
        self._x = x
        self._kernel = quantize_op_of((not across, across)).name
        rows, k = x.shape[::-1] if across else x.shape
        self.codes, self.unit = empty((rows, filled(k)), x.ctx, UINT8), empty((1,), x.ctx, FLOAT32)

    def make(self) -> None:
        launch(self._kernel, self._x.ctx, self._x, 0, self.codes, self.unit)
