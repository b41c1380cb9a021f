"""Networks of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...arguments.kinds import Number, Shape
from ...arguments.signature import declared
from ...errors import GraphError
from ...init import RNG, Rng, generator, xavier_uniform, zeros
from ..activation import ReLU
from ..container import Layer, Sequential
from ..kinds import Function
from ..layers import SIZE, Flatten, Linear
from ..module import Module
from ..regularize import Dropout


class LogisticRegression(Sequential):
    """One linear layer: x (N, …) of `inputs` elements each to logits (N, classes).

    It begins at 0: the loss is convex, so there is no symmetry to break.
    """

    @declared(inputs=SIZE, classes=SIZE)
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(Flatten(), Linear(inputs, classes, initializer=zeros))


class MLP(Sequential):
    """Linear layers of the given sizes, input first: x (N, …) to logits (N, sizes[-1]).

    Between them comes an activation, made by `activation()`, and dropout where its probability is
    not 0. Weights are He's normal, those of the last layer Xavier's uniform. seed: what weights are
    drawn from, as `rng` of layers. GraphError for fewer than two sizes.

    >>> nn.MLP((4, 16, 3), seed=0)(dl.zeros(2, 4)).shape
    (2, 3)
    """

    @declared(sizes=Shape(low=1), activation=Function(), dropout=Number(low=0, high=1), seed=RNG)
    def __init__(
        self,
        sizes: Sequence[int],
        activation: Callable[[], Module] = ReLU,
        dropout: float = 0.0,
        *,
        seed: Rng = None,
    ) -> None:
        if len(sizes) < 2:
            raise GraphError(f"MLP: expected at least two sizes, such as (784, 10), got {sizes}")
        rng = generator(seed)
        layers: list[Layer] = [Flatten()]
        for inputs, outputs in zip(sizes[:-2], sizes[1:-1]):
            layers += [Linear(inputs, outputs, rng=rng), activation()]
            layers += [Dropout(dropout, rng=rng)] if dropout else []
        layers.append(Linear(sizes[-2], sizes[-1], initializer=xavier_uniform, rng=rng))
        super().__init__(*layers)
