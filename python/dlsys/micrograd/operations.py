"""Operations: arithmetic on the `data` of matrices, without gradients."""

from __future__ import annotations

from typing import Any

from ..eager import create
from ..eager.autograd import no_grad
from ..eager.device import Device
from .tensor import Data, matrix, named, zeros

Shape = tuple[int, int]
Made = tuple[Data, tuple[int, ...]]


class Operations:
    """Arithmetic on one device ("cpu", "gpu" or "cuda", "numpy") that returns `(data, shape)`.

    Operands are `data` of Tensors, what other operations returned, or nested lists. shape: that of
    the operands, or for `matrix_multiply` and `matrix_transpose` of the first; None for any.
    ShapeError for operands of another shape, DeviceError for a device that cannot be used.
    """

    def __init__(self, device: Device) -> None:
        self.device = named(device)

    def zeros_matrix_like(self, matrix: Any = None, shape: Shape | None = None) -> Made:
        """Zeros in a shape, or in that of a matrix."""
        found = self._extents(matrix, shape)
        return Data(zeros(found, self.device)), found

    def ones_matrix_like(self, matrix: Any = None, shape: Shape | None = None) -> Made:
        """Ones in a shape, or in that of a matrix."""
        found = self._extents(matrix, shape)
        return Data(create.ones(found, device=self.device)), found

    def matrix_add(self, a: Any, b: Any, shape: Shape | None = None) -> Made:
        """a + b"""
        return self._made(lambda x, y: x + y, shape, a, b)

    def matrix_subtract(self, a: Any, b: Any, shape: Shape | None = None) -> Made:
        """a - b"""
        return self._made(lambda x, y: x - y, shape, a, b)

    def matrix_elementwise_mul(self, a: Any, b: Any, shape: Shape | None = None) -> Made:
        """a · b, element by element."""
        return self._made(lambda x, y: x * y, shape, a, b)

    def matrix_scalar_mul(self, scalar: float, a: Any, shape: Shape | None = None) -> Made:
        """scalar · a"""
        return self._made(lambda x: x * scalar, shape, a)

    def matrix_scalar_add(self, scalar: float, a: Any, shape: Shape | None = None) -> Made:
        """scalar + a"""
        return self._made(lambda x: x + scalar, shape, a)

    def matrix_power(self, a: Any, exponent: float, shape: Shape | None = None) -> Made:
        """Each element to a power.

        exponent: a number.
        """
        return self._made(lambda x: x**exponent, shape, a)

    def matrix_tanh(self, a: Any, shape: Shape | None = None) -> Made:
        """tanh of each element."""
        return self._made(lambda x: x.tanh(), shape, a)

    def matrix_relu(self, a: Any, shape: Shape | None = None) -> Made:
        """max(x, 0) of each element."""
        return self._made(lambda x: x.relu(), shape, a)

    def matrix_transpose(self, a: Any, shape: Shape | None = None) -> Made:
        """The transposed matrix."""
        return self._made(lambda x: x.transpose(), shape, a)

    def matrix_sum(self, a: Any, shape: Shape | None = None) -> Made:
        """The sum of all elements, 1 × 1."""
        return self._made(lambda x: x.sum(keepdims=True), shape, a)

    def matrix_multiply(self, a: Any, b: Any, shape: Shape | None = None) -> Made:
        """The matrix product of a, of `shape`, and b."""
        with no_grad():
            made = matrix(a, self.device, shape) @ matrix(b, self.device)
        return Data(made), made.shape

    def _made(self, function: Any, shape: Shape | None, *operands: Any) -> Made:
        with no_grad():
            first = matrix(operands[0], self.device, shape)
            others = [matrix(x, self.device, first.shape) for x in operands[1:]]
            made = function(first, *others)
        return Data(made), made.shape

    def _extents(self, of: Any, shape: Shape | None) -> Any:
        return tuple(shape) if shape is not None else matrix(of, self.device).shape
