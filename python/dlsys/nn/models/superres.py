"""Convolutional networks for super-resolution: one plane of a small image to that of a larger."""

from __future__ import annotations

from functools import partial

from ... import functional as F
from ...arguments.signature import declared
from ...autodiff import Node
from ...init import RNG, Rng, generator, normal
from ..layers import SIZE, Conv2d
from ..module import Module

# Of last layers: the networks begin as the identity, or as repeated pixels, nearly.
_SMALL = partial(normal, deviation=1e-3)


class SRCNN(Module):
    """SRCNN of Dong et al. (2014), layers 9-1-5: x (N, 1, H, W), already enlarged bicubically, to
    a sharper one of the same shape; 8,129 parameters.

    The input is added to the output, as in VDSR (Kim et al., 2016), so that the layers learn what
    is missing alone. A pixel depends on the `margin` of 6 pixels around it; behind the edges of x
    are zeros. seed: what weights are drawn from, as `rng` of layers.

    >>> nn.SRCNN(seed=0)(dl.zeros(2, 1, 8, 8)).shape
    (2, 1, 8, 8)
    """

    margin = 6

    @declared(seed=RNG)
    def __init__(self, *, seed: Rng = None) -> None:
        rng = generator(seed)
        self.extract = Conv2d(1, 64, 9, padding=4, rng=rng)
        self.map = Conv2d(64, 32, 1, rng=rng)
        self.rebuild = Conv2d(32, 1, 5, padding=2, initializer=_SMALL, rng=rng)

    def forward(self, x: Node) -> Node:
        return x + self.rebuild(F.relu(self.map(F.relu(self.extract(x)))))


class ESPCN(Module):
    """ESPCN of Shi et al. (2016), layers 5-3-3: x (N, 1, h, w) to (N, 1, h · scale, w · scale).

    It works at the size of the input: the last layer has a channel for each of the scale² pixels
    that one becomes, and `pixel_shuffle` puts them side by side. The input is added to each of
    these channels, so that the layers learn what repeated pixels lack alone, and ReLU stands for
    the tanh of the paper. A pixel of x counts for the output up to a `margin` of 4 pixels of x
    around it; behind the edges of x are zeros. seed: what weights are drawn from, as `rng` of
    layers.

    >>> nn.ESPCN(3, seed=0)(dl.zeros(2, 1, 8, 8)).shape
    (2, 1, 24, 24)
    """

    margin = 4

    @declared(scale=SIZE, seed=RNG)
    def __init__(self, scale: int = 2, *, seed: Rng = None) -> None:
        rng = generator(seed)
        self.scale = scale
        self.extract = Conv2d(1, 64, 5, padding=2, rng=rng)
        self.map = Conv2d(64, 32, 3, padding=1, rng=rng)
        self.rebuild = Conv2d(32, scale**2, 3, padding=1, initializer=_SMALL, rng=rng)

    def forward(self, x: Node) -> Node:
        parts = x + self.rebuild(F.relu(self.map(F.relu(self.extract(x)))))
        return F.pixel_shuffle(parts, self.scale)
