"""EfficientNet-Lite: inverted residuals without squeeze-and-excitation, for devices without much
memory. Tan and Le, "EfficientNet" (2019); the Lite variants are of TensorFlow's model zoo.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from ... import functional as F
from ...arguments.kinds import Int
from ...arguments.signature import declared
from ...autodiff import Node
from ...init import RNG, Rng, generator, he_normal, xavier_uniform
from ..layers import SIZE, Conv2d, Linear
from ..module import Module
from ..norm import BatchNorm2d
from ..regularize import Dropout

_EPS, _MOMENTUM = 1e-3, 0.01  # of batch normalization
_STEM, _HEAD = 32, 1280  # channels, which the Lite variants do not scale


class _Stage(NamedTuple):
    """Blocks with one window and as many channels; the first takes the stride."""

    blocks: int
    window: int
    stride: int
    expansion: int
    channels: int


_STAGES = (
    _Stage(1, 3, 1, 1, 16), _Stage(2, 3, 2, 6, 24), _Stage(2, 5, 2, 6, 40), _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112), _Stage(4, 5, 2, 6, 192), _Stage(1, 3, 1, 6, 320),
)  # fmt: skip
# Width, depth, extent of the images that the weights were trained on, dropout.
_VARIANTS = (
    (1.0, 1.0, 224, 0.2), (1.0, 1.1, 240, 0.2), (1.1, 1.2, 260, 0.3), (1.2, 1.4, 280, 0.3),
    (1.4, 1.8, 300, 0.3),
)  # fmt: skip


class ConvBN(Module):
    """A convolution without bias that keeps the size at stride 1, with an odd rest of the padding
    behind at stride 2 as TensorFlow has it, batch normalization, and ReLU6 where `active`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int,
        rng: np.random.Generator,
        stride: int = 1,
        groups: int = 1,
        active: bool = True,
    ) -> None:
        self.conv = Conv2d(
            inputs, outputs, window, stride, "same", groups=groups, bias=False,
            initializer=partial(he_normal, fan="out"), rng=rng,
        )  # fmt: skip
        self.bn = BatchNorm2d(outputs, _EPS, _MOMENTUM)
        self.active = active

    def forward(self, x: Node) -> Node:
        y = self.bn(self.conv(x))
        return F.relu6(y) if self.active else y


class InvertedResidual(Module):
    """A 1×1 convolution to `expansion` times as many channels, none at 1, a depthwise one with the
    stride, and a linear 1×1 one, with the shortcut around them where the shape stays. Sandler et
    al. (2018).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int,
        stride: int,
        expansion: int,
        rng: np.random.Generator,
    ) -> None:
        inner = inputs * expansion
        self.expand = ConvBN(inputs, inner, 1, rng) if expansion > 1 else None
        self.depthwise = ConvBN(inner, inner, window, rng, stride, groups=inner)
        self.project = ConvBN(inner, outputs, 1, rng, active=False)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Node) -> Node:
        y = x if self.expand is None else self.expand(x)
        y = self.project(self.depthwise(y))
        return x + y if self.shortcut else y


class EfficientNetLite(Module):
    """EfficientNet-Lite: x (N, channels, H, W) to logits (N, classes), 4.7 million parameters at
    the smallest for 1,000 classes. `train.load_efficientnet_lite` has weights of ImageNet for it.

    variant: 0 to 4, each wider and deeper. seed: what weights are drawn from, as `rng` of layers.
    `extent` is that of the square images that the variant is meant for. There is no stochastic
    depth, which TensorFlow's training adds.

    >>> model = nn.EfficientNetLite(classes=10, seed=0)
    >>> model.extent, model.num_parameters()
    (224, 3383818)
    """

    @declared(classes=SIZE, variant=Int(low=0, high=4), channels=SIZE, seed=RNG)
    def __init__(
        self, classes: int = 1000, variant: int = 0, channels: int = 3, *, seed: Rng = None
    ) -> None:
        rng = generator(seed)
        width, depth, self.extent, dropout = _VARIANTS[variant]
        self.stem = ConvBN(channels, _STEM, 3, rng, stride=2)
        self.blocks: list[InvertedResidual] = []
        inputs = _STEM
        for k, stage in enumerate(_STAGES):
            outer = k in (0, len(_STAGES) - 1)  # whose depth the Lite variants do not scale
            outputs = _rounded(stage.channels * width)
            for j in range(stage.blocks if outer else math.ceil(stage.blocks * depth)):
                stride = stage.stride if j == 0 else 1
                block = InvertedResidual(
                    inputs, outputs, stage.window, stride, stage.expansion, rng
                )
                self.blocks.append(block)
                inputs = outputs
        self.head = ConvBN(inputs, _HEAD, 1, rng)
        self.dropout = Dropout(dropout, rng=rng)
        self.fc = Linear(_HEAD, classes, initializer=xavier_uniform, rng=rng)

    def forward(self, x: Node) -> Node:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(self.dropout(F.global_avg_pool2d(self.head(x))))


def _rounded(channels: float) -> int:
    """Channels as a multiple of 8 that is at most a tenth below."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8
