"""Layers made of layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import overload

from ..autodiff import Node
from ..errors import GraphError
from ..graph.signature import declared
from .kinds import Function
from .module import Module

Layer = Callable[[Node], Node]


class Sequential(Module):
    """One layer after the other; a layer is a Module or any function of a node, such as
    `F.relu`. Named by number, `0.weight`; `model[0]` is the first and can be replaced,
    `model[:-1]` a Sequential of the same layers but the last.

    GraphError for what cannot be called.
    """

    def __init__(self, *layers: Layer) -> None:
        for k, layer in enumerate(layers):
            self._set(k, layer)

    def __iter__(self) -> Iterator[Layer]:
        return (layer for name, layer in vars(self).items() if name.isdigit())

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

    def _set(self, k: int, layer: Layer) -> None:
        if not callable(layer):
            raise GraphError(
                f"Sequential: layer {k} is {layer!r}, expected a Module or a function of a node"
            )
        setattr(self, str(k), layer)

    def forward(self, x: Node) -> Node:
        for layer in self:
            x = layer(x)
        return x


class Residual(Module):
    """body(x) + shortcut(x), the shortcut x itself unless given. He et al., "Deep residual learning
    for image recognition" (2016).
    """

    @declared(body=Function(), shortcut=Function())
    def __init__(self, body: Layer, shortcut: Layer | None = None) -> None:
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Node) -> Node:
        return self.body(x) + (x if self.shortcut is None else self.shortcut(x))
