"""Layers made of layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import overload

from ..arguments.signature import declared
from ..autodiff import Node
from ..errors import GraphError
from .kinds import Function
from .module import Module

Layer = Callable[[Node], Node]


class Sequential(Module):
    """One layer after the other; a layer is a Module or any function of a node, such as
    `F.relu`. Named by number, `0.weight`; `model[0]` is the first and can be replaced or deleted,
    `model[:-1]` a Sequential of the same layers but the last. `append`, `extend` and `insert` are
    those of lists, and give the model back.

    GraphError for what cannot be called.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model(dl.zeros(3, 4)).shape
    (3, 2)
    >>> model[:-1]
    Sequential(
      0: Linear(4, 8)
      1: ReLU()
    )
    """

    def __init__(self, *layers: Layer) -> None:
        for k, layer in enumerate(layers):
            self._set(k, layer)

    def __iter__(self) -> Iterator[Layer]:
        return iter([layer for name, layer in vars(self).items() if name.isdigit()])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> Layer:
        found = list(self)[index]
        return Sequential(*found) if isinstance(found, list) else found

    def __setitem__(self, index: int, layer: Layer) -> None:
        self._set(range(len(self))[operator.index(index)], layer)

    def __delitem__(self, index: int | slice) -> None:
        layers = list(self)
        del layers[index]
        self._replace(layers)

    def append(self, layer: Layer) -> Sequential:
        """Adds a layer behind the last."""
        self._set(len(self), layer)
        return self

    def extend(self, layers: Iterable[Layer]) -> Sequential:
        """Adds layers behind the last."""
        for layer in layers:
            self.append(layer)
        return self

    def insert(self, index: int, layer: Layer) -> Sequential:
        """Adds a layer before the one at an index."""
        layers = list(self)
        layers.insert(index, _checked(len(layers), layer))
        self._replace(layers)
        return self

    def _replace(self, layers: list[Layer]) -> None:
        for k in range(len(self)):
            delattr(self, str(k))
        for k, layer in enumerate(layers):
            self._set(k, layer)

    def _set(self, k: int, layer: Layer) -> None:
        setattr(self, str(k), _checked(k, layer))

    def forward(self, x: Node) -> Node:
        for layer in self:
            x = layer(x)
        return x


def _checked(k: int, layer: Layer) -> Layer:
    """The layer of this number. GraphError for what cannot be called."""
    if not callable(layer):
        raise GraphError(
            f"Sequential: layer {k} is {layer!r}, expected a Module or a function of a node"
        )
    return layer


class Residual(Module):
    """body(x) + shortcut(x), the shortcut x itself unless given. He et al., "Deep residual learning
    for image recognition" (2016).

    >>> nn.Residual(nn.Linear(3, 3))(dl.ones(2, 3)).shape
    (2, 3)
    """

    @declared(body=Function(), shortcut=Function())
    def __init__(self, body: Layer, shortcut: Layer | None = None) -> None:
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Node) -> Node:
        return self.body(x) + (x if self.shortcut is None else self.shortcut(x))
