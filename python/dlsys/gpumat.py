"""Matrices that multiply into each other, under the names that programs for gpumat use.

    from dlsys.gpumat import PyGpuMatrix

A PyGpuMatrix is made of a numpy array, which takes its values when `loadFromDevice` is called.
The layers and losses below are a dozen lines each over `dlsys.Tensor`; new programs use that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .eager.create import full
from .eager.device import Device, engine_of
from .eager.random import rand
from .eager.tensor import Tensor
from .errors import ShapeError
from .functional import conv, loss
from .graph.lines import where
from .ndarray import NDArray


class PyGpuMatrix:
    """A float32 matrix of rows × columns on a device, and the numpy array that it was made of.

    array: float32 with rows · columns elements, row by row. device: "gpu", "cpu", "numpy"; the best
    there is where it is None. Operations take the extents of their operands, which are checked.

    Raises ShapeError for an array that does not fit, DeviceError for a device that cannot be used.
    """

    def __init__(self, array: np.ndarray, rows: int, columns: int, device: Device = None) -> None:
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            got = getattr(array, "dtype", type(array).__name__)
            raise ShapeError(f"PyGpuMatrix: expected a float32 numpy array, got {got} [{where()}]")
        if array.size != rows * columns:
            raise ShapeError(
                f"PyGpuMatrix: {rows} × {columns} needs {rows * columns} elements, and the array "
                f"has {array.size}, shape {array.shape} [{where()}]"
            )
        self.array, self.rows, self.columns = array, rows, columns
        self.device = engine_of(device).name
        self.loadToDevice()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""
        return self.rows, self.columns

    @property
    def tensor(self) -> Tensor:
        """The values on the device."""
        return self._tensor

    def loadToDevice(self) -> None:  # noqa: N802 (the name that programs use)
        """Copies the array into the device's values."""
        self._tensor = Tensor(self.array.reshape(self.shape), self.device)

    def loadFromDevice(self) -> None:  # noqa: N802
        """Waits for the device and copies its values into the array."""
        value = self._tensor.ndarray()
        if isinstance(value, NDArray) and self.array.flags.c_contiguous:
            value.copyto(self.array.reshape(self.shape))
        else:
            self.array[...] = self._tensor.numpy().reshape(self.array.shape)

    # ---- each leaves its result on the device ----
    def mul(self, M: int, N: int, K: int, B: PyGpuMatrix, C: PyGpuMatrix) -> None:  # noqa: N803
        """C = self @ B, for self M × K, B K × N and C M × N."""
        self._into("mul", C, lambda a, b: a @ b, (M, N), (self, (M, K)), (B, (K, N)))

    def add(self, M: int, N: int, B: PyGpuMatrix, C: PyGpuMatrix) -> None:  # noqa: N803
        """C = self + B, all M × N."""
        self._into("add", C, lambda a, b: a + b, (M, N), (self, (M, N)), (B, (M, N)))

    def subtract(self, M: int, N: int, B: PyGpuMatrix, C: PyGpuMatrix) -> None:  # noqa: N803
        """C = self - B, all M × N."""
        self._into("subtract", C, lambda a, b: a - b, (M, N), (self, (M, N)), (B, (M, N)))

    def product(self, M: int, N: int, B: PyGpuMatrix, C: PyGpuMatrix) -> None:  # noqa: N803
        """C = self · B element by element, all M × N."""
        self._into("product", C, lambda a, b: a * b, (M, N), (self, (M, N)), (B, (M, N)))

    def scale(self, M: int, N: int, factor: float, C: PyGpuMatrix) -> None:  # noqa: N803
        """C = factor · self, both M × N."""
        self._into("scale", C, lambda a: a * float(factor), (M, N), (self, (M, N)))

    def transpose(self, M: int, N: int, C: PyGpuMatrix) -> None:  # noqa: N803
        """C = selfᵀ, for self M × N and C N × M."""
        self._into("transpose", C, lambda a: a.T.copy(), (N, M), (self, (M, N)))

    def fill(self, value: float) -> None:
        """One number everywhere.

        value: the number.
        """
        self._tensor = full(self.shape, float(value), self.device)

    def random(self, low: float = 0.0, high: float = 1.0) -> None:
        """Numbers uniform in [low, high), those of `dlsys.manual_seed` on every device."""
        drawn: Any = rand(*self.shape, device=self.device)
        self._tensor = drawn * (high - low) + low

    def _into(
        self, name: str, C: PyGpuMatrix, function: Callable[..., Tensor],  # noqa: N803
        shape: tuple[int, int], *operands: tuple[PyGpuMatrix, tuple[int, int]],
    ) -> None:  # fmt: skip
        for operand, expected in [*operands, (C, shape)]:
            if operand.shape != expected:
                role = "C" if operand is C else "A" if operand is self else "B"
                raise ShapeError(
                    f"{name}: {role} is {operand.rows} × {operand.columns}, expected "
                    f"{expected[0]} × {expected[1]} [{where()}]"
                )
        C._tensor = function(*[operand._tensor for operand, _ in operands])

    def __repr__(self) -> str:
        return f"PyGpuMatrix({self._tensor.numpy()!r}, {self.rows}, {self.columns})"


class Layer:
    """y = forward(x), then dx = backward(dy), which adds to the gradients of the layer's weights.

    A layer defines `compute`; the gradients are those of what it computes.
    """

    weights: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(str(w.shape) for w in self.weights)})"

    def compute(self, x: Any) -> Any:
        """The output for x."""
        raise NotImplementedError

    def forward(self, x: Any) -> Tensor:
        """The output for a Tensor, an array or a PyGpuMatrix, which `backward` goes back to."""
        self._x = _leaf(x)
        self._y = self.compute(self._x)
        return self._y.detach()

    def backward(self, dy: Any) -> Tensor:
        """The gradient by the input, for that by the output of the last `forward`."""
        self._y.backward(_values(dy))
        assert self._x.grad is not None
        return self._x.grad

    def update(self, rate: float) -> None:
        """A step of gradient descent; the gradients begin anew.

        rate: the learning rate.
        """
        self.weights = tuple([_leaf(w.detach() - rate * w.grad) for w in self.weights])


class Linear(Layer):
    """y = x weightᵀ + bias for x (n, inputs).

    inputs, outputs: the widths. device: as of `dl.tensor`.
    """

    def __init__(self, inputs: int, outputs: int, device: Device = None) -> None:
        self.weights = (
            _uniform((outputs, inputs), inputs, device),
            _uniform((outputs,), inputs, device),
        )

    def compute(self, x: Any) -> Any:
        weight, bias = self.weights
        return x @ weight.T + bias


class ReLU(Layer):
    """y = max(x, 0)"""

    def compute(self, x: Any) -> Any:
        return x.relu()


class Conv2d(Layer):
    """Cross-correlation of x (n, inputs, height, width) with a square window.

    outputs: how many filters. stride, padding: of both axes. device: as of `dl.tensor`.
    """

    def __init__(
        self, inputs: int, outputs: int, window: int, stride: int = 1, padding: int = 0,
        device: Device = None,
    ) -> None:  # fmt: skip
        fan, self._at = inputs * window**2, (stride, padding)
        shape = (outputs, inputs, window, window)
        self.weights = _uniform(shape, fan, device), _uniform((outputs,), fan, device)

    def compute(self, x: Any) -> Any:
        weight, bias = self.weights
        stride, padding = self._at
        return conv.conv2d(x, weight, bias, stride, padding)


class MaxPool2d(Layer):
    """The maximum of each window of x (n, channels, height, width).

    stride: of both axes, the window where it is None.
    """

    def __init__(self, window: int, stride: int | None = None) -> None:
        self._at = window, stride

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._at}"

    def compute(self, x: Any) -> Any:
        return conv.max_pool2d(x, *self._at)


class AvgPool2d(MaxPool2d):
    """The mean of each window of x (n, channels, height, width).

    stride: of both axes, the window where it is None.
    """

    def compute(self, x: Any) -> Any:
        return conv.avg_pool2d(x, *self._at)


class MSE:
    """The mean of (prediction - target)²; `backward()` is the gradient by the prediction."""

    _function = staticmethod(loss.mse_loss)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def forward(self, prediction: Any, target: Any) -> Tensor:
        """The loss of arrays, Tensors or PyGpuMatrix of one shape."""
        self._x = _leaf(prediction)
        self._loss = self._function(self._x, _values(target))
        return self._loss

    def backward(self) -> Tensor:
        """The gradient of the last `forward`."""
        self._loss.backward()
        assert self._x.grad is not None
        return self._x.grad


class MAE(MSE):
    """The mean of |prediction - target|; its gradient is 0 where they are equal."""

    _function = staticmethod(loss.l1_loss)


def _values(x: Any) -> Any:
    return x.tensor if isinstance(x, PyGpuMatrix) else x


def _leaf(x: Any) -> Any:
    """The values as a leaf that gradients are for."""
    x = _values(x)
    held = x.detach() if isinstance(x, Tensor) else Tensor(x, dtype="float32")
    return held.as_leaf()


def _uniform(shape: tuple[int, ...], fan: int, device: Device) -> Any:
    """Weights uniform within 1 / sqrt(fan)."""
    drawn: Any = rand(*shape, device=device)
    return _leaf((drawn * 2 - 1) * fan**-0.5)
