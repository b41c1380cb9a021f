"""Tensor: a matrix whose `data` and `grad.data` are read and assigned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..eager import create, tensor
from ..eager.autograd import no_grad
from ..eager.device import Device, engine_of
from ..errors import GraphError, ShapeError
from ..functional import math, reduce
from ..graph.lines import where
from ..runtime.device import cpu, unavailable


class Data(Sequence[Any]):
    """The values of a matrix, which read like nested lists; computed when they are read."""

    __slots__ = ("tensor",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: tensor.Tensor) -> None:
        self.tensor = values

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns)"""
        return self.tensor.shape

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.tensor.tolist()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.tensor.numpy().astype(dtype or np.float32, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self.tolist()[key]

    def __eq__(self, other: Any) -> bool:
        return self.tolist() == (other.tolist() if isinstance(other, Data) else other)

    def __repr__(self) -> str:
        return repr(self.tolist())


class Gradient:
    """The gradient of a Tensor: zeros until `backward` adds to it. `data` may be assigned."""

    def __init__(self, of: Tensor) -> None:
        self._of = of

    @property
    def data(self) -> Data:
        """The values."""
        grad = self._of._value.grad
        return Data(zeros(self.shape, self.device) if grad is None else grad)

    @data.setter
    def data(self, values: Any) -> None:
        new = matrix(values, self.device, self.shape)
        self._of._value.grad = None if new is zeros(self.shape, self.device) else new

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns)"""
        return self._of.shape

    @property
    def device(self) -> str:
        """Where it is."""
        return self._of.device

    def __repr__(self) -> str:
        return f"Gradient({self.data})"


class Tensor:
    """A float32 matrix with a gradient, made of nested lists, an array, or a number (1 × 1); a
    flat list is one row.

    device: "cpu", which is numpy where there is no native library, "gpu" ("cuda" is the same) or
    "numpy"; None is "cpu". `data` and `grad.data` read like nested lists, and may be assigned.
    Operators broadcast; `@` is the matrix product.

    Raises ShapeError for what is no matrix, DeviceError for a device that cannot be used.
    """

    def __init__(self, data: Any, device: Device = None) -> None:
        self._value: Any = matrix(data, "cpu" if device is None else device)
        self._next: tensor.Tensor | None = None  # assigned, and a leaf when it is used
        self._leaf(self._value)

    @classmethod
    def of(cls, value: tensor.Tensor) -> Tensor:
        """The matrix that operations made."""
        self = cls.__new__(cls)
        self._value, self._next = value, None
        return self

    def _leaf(self, value: tensor.Tensor) -> None:
        """Starts from a value without history; it looks at the value."""
        self._value, self._next = value.as_leaf(), None

    def value(self) -> Any:
        """The value that operations take. What `backward` has gone through before is a constant."""
        if self._next is not None:
            grad = self._value.grad
            self._leaf(self._next)
            self._value.grad = grad
        elif self._value.consumed:
            self._value = self._value.detach()
        return self._value

    @property
    def data(self) -> Data:
        """The values: `loss.data[0][0]` is a number."""
        return Data(self._value if self._next is None else self._next)

    @data.setter
    def data(self, values: Any) -> None:
        self._next = matrix(values, self.device, self.shape)

    @property
    def grad(self) -> Gradient:
        """The gradient, which `backward` adds to."""
        return Gradient(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns)"""
        return self._value.shape

    @property
    def device(self) -> str:
        """Where it is: "cpu:0", "gpu:0", "numpy"."""
        return self._value.device

    def to(self, device: Device) -> Tensor:
        """Moves it, in place, and its gradient; what it was computed from is forgotten. Returns
        itself. DeviceError for a device that cannot be used.
        """
        name, grad = named(device), self._value.grad
        if name != self.device:
            is_leaf = self._value.is_leaf and self._value.requires_grad
            with no_grad():
                moved = self.data.tensor.to(name)
            if is_leaf:
                self._leaf(moved)
                self._value.grad = None if grad is None else grad.to(name)
            else:
                self._value, self._next = moved, None
        return self

    def backward(self) -> None:
        """Adds the gradient of this 1 × 1 matrix to `grad` of all that it was computed from."""
        if self.shape != (1, 1):
            raise GraphError(
                f"backward: expected a loss of shape (1, 1), got {self.shape}; sum() it first "
                f"[{where()}]"
            )
        self._value.backward()

    @property
    def T(self) -> Tensor:
        """The transposed matrix."""
        return Tensor.of(self.value().transpose())

    def sum(self) -> Tensor:
        """The sum of all elements, 1 × 1."""
        return self._apply(lambda x: reduce.sum(x, keepdims=True))

    def mean(self) -> Tensor:
        """The mean of all elements, 1 × 1."""
        return self._apply(lambda x: reduce.mean(x, keepdims=True))

    def tanh(self) -> Tensor:
        """tanh of each element."""
        return self._apply(lambda x: x.tanh())

    def relu(self) -> Tensor:
        """max(x, 0) of each element."""
        return self._apply(lambda x: x.relu())

    def exp(self) -> Tensor:
        """The exponential of each element."""
        return self._apply(math.exp)

    def log(self) -> Tensor:
        """The natural logarithm of each element."""
        return self._apply(math.log)

    def _apply(self, function: Callable[[Any], Any]) -> Tensor:
        return Tensor.of(function(self.value()))

    def __neg__(self) -> Tensor:
        return self._apply(lambda x: -x)

    def __add__(self, other: Any) -> Tensor:
        return Tensor.of(self.value() + _operand(other, self.device))

    def __sub__(self, other: Any) -> Tensor:
        return Tensor.of(self.value() - _operand(other, self.device))

    def __rsub__(self, other: Any) -> Tensor:
        return Tensor.of(_operand(other, self.device) - self.value())

    def __mul__(self, other: Any) -> Tensor:
        return Tensor.of(self.value() * _operand(other, self.device))

    def __truediv__(self, other: Any) -> Tensor:
        return Tensor.of(self.value() / _operand(other, self.device))

    def __rtruediv__(self, other: Any) -> Tensor:
        return Tensor.of(_operand(other, self.device) / self.value())

    def __pow__(self, exponent: float) -> Tensor:
        return Tensor.of(self.value() ** exponent)

    def __matmul__(self, other: Any) -> Tensor:
        return Tensor.of(self.value() @ _operand(other, self.device))

    __radd__, __rmul__ = __add__, __mul__

    def __repr__(self) -> str:
        return f"Tensor({self.data}, device={self.device!r})"


def matrix(data: Any, device: Device, shape: tuple[int, ...] | None = None) -> Any:
    """Data, a pair of data and its shape, nested lists, an array or a number as a matrix on a
    device. ShapeError unless it is one, of `shape` where that is given.
    """
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], (Data, Tensor)):
        data = data[0]
    if isinstance(data, Tensor):
        data = data.data
    if isinstance(data, Data):
        made = data.tensor.to(named(device))
    else:
        made = tensor.Tensor(
            np.atleast_2d(tensor.Tensor(data, "numpy").numpy()), named(device), "float32"
        )
    if len(made.shape) != 2 or (shape is not None and made.shape != tuple(shape)):
        expected = "a matrix" if shape is None else f"shape {tuple(shape)}"
        raise ShapeError(f"micrograd: expected {expected}, got shape {made.shape} [{where()}]")
    return made


@lru_cache(maxsize=256)
def zeros(shape: tuple[int, int], device: str) -> Any:
    """Zeros, the same ones for each call, which nobody changes."""
    return create.zeros(shape, device=device)


def _operand(other: Any, device: str) -> Any:
    if isinstance(other, Tensor):
        return other.value()
    return other if isinstance(other, (int, float)) else matrix(other, device)


def named(device: Device) -> str:
    """The name of a device: "cpu" is where the host computes, with the native library or numpy."""
    return engine_of("numpy" if device == "cpu" and not _has_native() else device).name


@lru_cache(maxsize=1)
def _has_native() -> bool:
    return unavailable(cpu(0)) is None
