"""A mixture of experts: layers of which each row takes one."""

from __future__ import annotations

import numpy as np

from .. import functional as F
from ..arguments.signature import declared
from ..autodiff import Node, Parameter
from ..init import Initializer, Rng, generator, he_normal
from .layers import DRAWN, SIZE, Linear, drawn
from .module import Module


class MixtureOfExperts(Module):
    """Each row of x (rows, features) by the expert that it is sent to: (rows, features).

    The gate, a linear layer, gives each expert a probability. A row goes to the likeliest one, two
    linear maps without biases and a ReLU between them, and what that makes of it counts by the
    probability, through which the gate learns (Fedus, Zoph and Shazeer 2022, arXiv:2101.03961).
    Rows are sorted by expert, so that all experts are two grouped products. No expert refuses rows,
    and no loss balances them.

    hidden: the features between the two maps. initializer: a function of `init`, which draws the
    weights. GraphError for extents below 1; ShapeError for other than rows of features.

    >>> nn.MixtureOfExperts(8, 32, experts=4, rng=0)(dl.ones(5, 8)).shape
    (5, 8)
    """

    @declared(features=SIZE, hidden=SIZE, experts=SIZE, **DRAWN)
    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        *,
        initializer: Initializer = he_normal,
        rng: Rng = None,
    ) -> None:
        rng = generator(rng)

        def weights(name: str, outputs: int, inputs: int) -> Parameter:
            shape = outputs, inputs
            each = [drawn("MixtureOfExperts", initializer, shape, rng) for _ in range(experts)]
            return Parameter(np.stack(each), name)

        self.gate = Linear(features, experts, bias=False, initializer=initializer, rng=rng)
        self.up = weights("up", hidden, features)
        self.down = weights("down", features, hidden)

    def forward(self, x: Node) -> Node:
        probabilities = F.softmax(self.gate(x))
        expert = F.argmax(probabilities, axis=-1)
        order = F.argsort(expert)
        sizes = F.sum(F.one_hot(expert, self.up.shape[0], np.int64), axis=0)
        hidden = F.relu(F.grouped_matmul(F.take(x, order), self.up, sizes, True))
        y = F.grouped_matmul(hidden, self.down, sizes, True)
        return F.take(y, F.argsort(order)) * F.max(probabilities, axis=-1, keepdims=True)

    def options(self) -> str:
        experts, hidden, features = self.up.shape
        return f"{features}, {hidden}, {experts}"
