"""Convolutional networks for images of 28 by 28, in any shape of 784 elements a sample."""

from __future__ import annotations

import numpy as np

from ... import functional as F
from ...arguments.signature import declared
from ...autodiff import Node
from ...init import RNG, Rng, generator, xavier_uniform
from ..activation import ReLU
from ..container import Residual, Sequential
from ..layers import SIZE, Conv2d, Linear, Reshape
from ..module import Module
from ..norm import BatchNorm2d
from ..pool import GlobalMaxPool, MaxPool2d


class LeNet5(Module):
    """LeNet-5 of LeCun et al. (1998) with ReLU and max-pooling: 61,706 parameters for 10 classes.

    Weights are He's normal, those of the last layer Xavier's uniform. seed: what weights are drawn
    from, as `rng` of layers.

    >>> model = nn.LeNet5(seed=0)
    >>> model(dl.zeros(2, 1, 28, 28)).shape, model.num_parameters()
    ((2, 10), 61706)
    """

    @declared(classes=SIZE, seed=RNG)
    def __init__(self, classes: int = 10, *, seed: Rng = None) -> None:
        rng = generator(seed)
        self.conv1 = Conv2d(1, 6, 5, padding=2, rng=rng)
        self.conv2 = Conv2d(6, 16, 5, rng=rng)
        self.fc1 = Linear(400, 120, rng=rng)
        self.fc2 = Linear(120, 84, rng=rng)
        self.fc3 = Linear(84, classes, initializer=xavier_uniform, rng=rng)

    def forward(self, x: Node) -> Node:
        """x (N, …) to logits (N, classes)."""
        x = F.reshape(x, (-1, 1, 28, 28))
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(F.flatten(x, 1)))
        return self.fc3(F.relu(self.fc2(x)))


class ResNetMNIST(Sequential):
    """A small residual network: 32 planes, 64 and a residual block at half the size, 128 and
    another at a quarter, the largest element of each plane, a linear layer to logits (N, classes).

    Weights are He's normal, those of the last layer Xavier's uniform. seed: what weights are drawn
    from, as `rng` of layers.
    """

    @declared(classes=SIZE, seed=RNG)
    def __init__(self, classes: int = 10, *, seed: Rng = None) -> None:
        rng = generator(seed)
        super().__init__(
            Reshape(1, 28, 28),
            *_stage(1, 32, rng),
            MaxPool2d(2),
            *_stage(32, 64, rng),
            *_block(64, rng),
            MaxPool2d(2),
            *_stage(64, 128, rng),
            *_block(128, rng),
            GlobalMaxPool(),
            Linear(128, classes, initializer=xavier_uniform, rng=rng),
        )


def _stage(inputs: int, outputs: int, rng: np.random.Generator) -> list[Module]:
    """A 3×3 convolution, normalized, and ReLU."""
    return [
        Conv2d(inputs, outputs, 3, padding=1, bias=False, rng=rng),
        BatchNorm2d(outputs),
        ReLU(),
    ]


def _block(planes: int, rng: np.random.Generator) -> list[Module]:
    """Two of them with a shortcut around both but the last ReLU."""
    body = [*_stage(planes, planes, rng), *_stage(planes, planes, rng)[:-1]]
    return [Residual(Sequential(*body)), ReLU()]
