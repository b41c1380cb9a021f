"""Vision transformer: images as sequences of patches. Dosovitskiy et al., "An image is worth 16x16
words" (2021).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ... import functional as F
from ...arguments.kinds import Number
from ...arguments.signature import declared
from ...autodiff import Node
from ...errors import GraphError
from ...graph.lines import where
from ...init import RNG, Rng, generator, normal
from ..attention import LearnedPositions, TransformerBlock
from ..layers import SIZE, Conv2d, Linear
from ..module import Module
from ..norm import LayerNorm


class VisionTransformer(Module):
    """x (N, channels, size, size), or that many elements a sample, to logits (N, classes): patches
    of patch × patch pixels, projected to `features`, with learned positions, through transformer
    blocks; the mean over the patches decides.

    layers: how many blocks. dropout: as of `TransformerBlock`. seed: what weights are drawn from.
    The defaults are for MNIST; `VisionTransformer(10, 32, 4, 3)` is for CIFAR-10. GraphError unless
    `patch` divides `size` and `heads` divides `features`.

    >>> nn.VisionTransformer(features=16, layers=1, seed=0)(dl.zeros(2, 784)).shape
    (2, 10)
    """

    @declared(
        classes=SIZE, size=SIZE, patch=SIZE, channels=SIZE, features=SIZE, layers=SIZE, heads=SIZE,
        dropout=Number(low=0, high=1), seed=RNG,
    )  # fmt: skip
    def __init__(
        self,
        classes: int = 10,
        size: int = 28,
        patch: int = 7,
        channels: int = 1,
        features: int = 64,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        *,
        seed: Rng = None,
    ) -> None:
        if size % patch:
            raise GraphError(
                f"VisionTransformer: patches of {patch} do not divide images of {size} pixels "
                f"[{where()}]"
            )
        rng: np.random.Generator = generator(seed)
        drawn = partial(normal, deviation=0.02)
        self.patches = Conv2d(channels, features, patch, patch, initializer=drawn, rng=rng)
        self.positions = LearnedPositions((size // patch) ** 2, features, rng=rng)
        self.blocks = [TransformerBlock(features, heads, dropout, rng=rng) for _ in range(layers)]
        self.norm = LayerNorm(features)
        self.head = Linear(features, classes, initializer=drawn, rng=rng)
        self.shape = (channels, size, size)

    def forward(self, x: Node) -> Node:
        """x (N, …) to logits (N, classes)."""
        x = self.patches(F.reshape(x, (-1, *self.shape)))
        x = self.positions(F.transpose(F.flatten(x, 2), (0, 2, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(F.mean(self.norm(x), axis=1))
