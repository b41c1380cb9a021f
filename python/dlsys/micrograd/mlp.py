"""MLP: layers of tanh over columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..eager.device import Device
from ..errors import DataError
from .tensor import Tensor


class Layer:
    """tanh(weight x + bias) of samples x (inputs, batch): weight (outputs, inputs) and bias
    (outputs, 1) begin uniform within 1 / sqrt(inputs).
    """

    def __init__(self, inputs: int, outputs: int, rng: np.random.Generator) -> None:
        bound = inputs**-0.5
        self.weight = Tensor(rng.uniform(-bound, bound, (outputs, inputs)))
        self.bias = Tensor(rng.uniform(-bound, bound, (outputs, 1)))

    def __call__(self, x: Tensor) -> Tensor:
        return (self.weight @ x + self.bias).tanh()

    def parameters(self) -> list[Tensor]:
        """The weight and the bias."""
        return [self.weight, self.bias]


class MLP:
    """Layers of tanh over samples that are columns: x (inputs, batch) to (outputs[-1], batch).

    MLP(300, [300, 300, 1]) has three layers. seed: of the weights; other ones each time without it.
    """

    def __init__(self, inputs: int, outputs: Sequence[int], seed: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = [inputs, *outputs]
        self.layers = [Layer(m, n, rng) for m, n in zip(self.sizes, self.sizes[1:])]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self) -> list[Tensor]:
        """Weights and biases, layer by layer."""
        return [p for layer in self.layers for p in layer.parameters()]

    def zero_grad(self) -> None:
        """Sets all gradients to zero."""
        for p in self.parameters():
            p.grad.data = np.zeros(p.shape)

    def to(self, device: Device) -> MLP:
        """Moves all parameters, in place; returns itself.

        device: as of `dl.tensor`.
        """
        for p in self.parameters():
            p.to(device)
        return self

    def copy(self) -> MLP:
        """A model of its own with the same weights, on the same device."""
        made = MLP(self.sizes[0], self.sizes[1:], seed=0)
        for new, p in zip(made.parameters(), self.parameters()):
            new.to(p.device).data = np.asarray(p.data)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the weights into an .npz file of numpy."""
        with open(path, "wb") as file:
            np.savez(file, *[np.asarray(p.data) for p in self.parameters()])

    def load(self, path: str | os.PathLike[str]) -> MLP:
        """Takes over what `save` wrote; returns itself. DataError for another model's file."""
        with np.load(path, allow_pickle=False) as file:
            arrays: list[Any] = [file[name] for name in file.files]
        shapes = [p.shape for p in self.parameters()]
        if [a.shape for a in arrays] != shapes:
            raise DataError(f"{path}: shapes {[a.shape for a in arrays]}, expected {shapes}")
        for p, array in zip(self.parameters(), arrays):
            p.data = array
        return self

    def __repr__(self) -> str:
        return f"MLP({self.sizes[0]}, {self.sizes[1:]})"
