"""A feed-forward network that paints photographs in one style."""

from __future__ import annotations

from functools import partial

import numpy as np

from ... import functional as F
from ...arguments.signature import declared
from ...autodiff import Node
from ...init import RNG, Initializer, Rng, generator, he_normal, normal
from ..images import Upsample
from ..layers import SIZE, Conv2d
from ..module import Module
from ..norm import InstanceNorm2d

_SMALL = partial(normal, deviation=1e-3)  # of the last layer: the network begins as the identity
_EDGE = 0.01  # values nearer to 0 or 1 count as this far from them, where the logit is finite


class Mirrored(Module):
    """A convolution behind as many mirrored rows and columns as its window loses, so that edges get
    no frame.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int,
        rng: np.random.Generator,
        stride: int = 1,
        initializer: Initializer = he_normal,
    ) -> None:
        self.margin = window // 2
        self.conv = Conv2d(inputs, outputs, window, stride, initializer=initializer, rng=rng)

    def forward(self, x: Node) -> Node:
        both = (self.margin, self.margin)
        return self.conv(F.pad(x, ((0, 0), (0, 0), both, both), mode="reflect"))


class Normed(Module):
    """A mirrored convolution, instance normalization, and ReLU where `active`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int,
        rng: np.random.Generator,
        stride: int = 1,
        active: bool = True,
    ) -> None:
        self.conv = Mirrored(inputs, outputs, window, rng, stride)
        self.norm = InstanceNorm2d(outputs, affine=True)
        self.active = active

    def forward(self, x: Node) -> Node:
        y = self.norm(self.conv(x))
        return F.relu(y) if self.active else y


class ResidualBlock(Module):
    """Two 3×3 convolutions and the shortcut around them."""

    def __init__(self, channels: int, rng: np.random.Generator) -> None:
        self.first = Normed(channels, channels, 3, rng)
        self.second = Normed(channels, channels, 3, rng, active=False)

    def forward(self, x: Node) -> Node:
        return x + self.second(self.first(x))


class StyleNet(Module):
    """The transformation network of Johnson et al. (2016) with instance normalization (Ulyanov et
    al., 2016): x (N, 3, H, W) in [0, 1] to a painting of the same shape in (0, 1); 1.68 million
    parameters. Height and width are multiples of 4, at least 8.

    Three convolutions reduce x to a quarter, `blocks` residual blocks follow, and nearest-neighbor
    enlarging before two convolutions brings the size back, which leaves no checkerboard (Odena et
    al., 2016). Borders are mirrored. What the layers make is added to the logit of x, of which the
    painting is the sigmoid, so that training begins with the photo itself; the paper has no such
    sum. width: channels of the first layer. seed: what weights are drawn from, as `rng` of layers.

    >>> nn.StyleNet(width=8, blocks=1, seed=0)(dl.zeros(1, 3, 16, 24)).shape
    (1, 3, 16, 24)
    """

    multiple = 4

    @declared(width=SIZE, blocks=SIZE, seed=RNG)
    def __init__(self, width: int = 32, blocks: int = 5, *, seed: Rng = None) -> None:
        rng = generator(seed)
        self.stem = Normed(3, width, 9, rng)
        self.down1 = Normed(width, 2 * width, 3, rng, stride=2)
        self.down2 = Normed(2 * width, 4 * width, 3, rng, stride=2)
        self.blocks = [ResidualBlock(4 * width, rng) for _ in range(blocks)]
        self.enlarge = Upsample(scale=2)
        self.up1 = Normed(4 * width, 2 * width, 3, rng)
        self.up2 = Normed(2 * width, width, 3, rng)
        self.paint = Mirrored(width, 3, 9, rng, initializer=_SMALL)

    def forward(self, x: Node) -> Node:
        y = self.down2(self.down1(self.stem(x)))
        for block in self.blocks:
            y = block(y)
        y = self.up2(self.enlarge(self.up1(self.enlarge(y))))
        near = F.clip(x, _EDGE, 1 - _EDGE)
        return F.sigmoid(self.paint(y) + F.log(near / (1 - near)))
