"""Residual networks for images of about 224 by 224: architectures and names of torchvision, whose
weights load by name. He et al., "Deep residual learning for image recognition" (2016).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ... import functional as F
from ...arguments.signature import declared
from ...autodiff import Node
from ...init import RNG, Rng, generator, he_normal, xavier_uniform
from ..container import Sequential
from ..layers import SIZE, Conv2d, Linear
from ..module import Module
from ..norm import BatchNorm2d


class BasicBlock(Module):
    """Two 3×3 convolutions and the shortcut around them. inputs: the channels of x; planes: those
    of the result; stride: of the first convolution.
    """

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, rng: np.random.Generator) -> None:
        self.conv1 = _conv(inputs, planes, 3, rng, stride)
        self.bn1 = BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, 3, rng)
        self.bn2 = BatchNorm2d(planes)
        self.downsample = _downsample(inputs, planes, stride, rng)

    def forward(self, x: Node) -> Node:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(Module):
    """A 1×1 convolution to `planes`, a 3×3 one, which takes the stride, and a 1×1 one to four times
    as many, with the shortcut around them. inputs: the channels of x.
    """

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int, rng: np.random.Generator) -> None:
        outputs = planes * self.expansion
        self.conv1 = _conv(inputs, planes, 1, rng)
        self.bn1 = BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, 3, rng, stride)
        self.bn2 = BatchNorm2d(planes)
        self.conv3 = _conv(planes, outputs, 1, rng)
        self.bn3 = BatchNorm2d(outputs)
        self.downsample = _downsample(inputs, outputs, stride, rng)

    def forward(self, x: Node) -> Node:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(Module):
    """Four stages of blocks over a 7×7 convolution: x (N, channels, H, W) to logits (N, classes).

    Filters begin as He's normal by fan out, as in torchvision, the last layer as Xavier's uniform.
    block: `BasicBlock` or `Bottleneck`. depths: how many in each stage. seed: what weights are
    drawn from, as `rng` of layers.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        classes: int = 1000,
        channels: int = 3,
        *,
        seed: Rng = None,
    ) -> None:
        rng = generator(seed)
        stages: list[Sequential] = []
        self.conv1 = _conv(channels, 64, 7, rng, stride=2)
        self.bn1 = BatchNorm2d(64)
        inputs = 64
        for depth, planes, stride in zip(depths, (64, 128, 256, 512), (1, 2, 2, 2)):
            blocks: list[Module] = []
            for k in range(depth):
                blocks.append(block(inputs, planes, stride if k == 0 else 1, rng))
                inputs = planes * block.expansion
            stages.append(Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = Linear(inputs, classes, initializer=xavier_uniform, rng=rng)

    def forward(self, x: Node) -> Node:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.global_avg_pool2d(x))


class ResNet18(ResNet):
    """Two basic blocks a stage; 11.7 million parameters for 1,000 classes. classes, channels and
    seed: as of `ResNet`.

    >>> nn.ResNet18(classes=10).num_parameters()
    11181642
    """

    @declared(classes=SIZE, channels=SIZE, seed=RNG)
    def __init__(self, classes: int = 1000, channels: int = 3, *, seed: Rng = None) -> None:
        super().__init__(BasicBlock, (2, 2, 2, 2), classes, channels, seed=seed)


class ResNet50(ResNet):
    """3, 4, 6 and 3 bottlenecks; 25.6 million parameters for 1,000 classes. classes, channels and
    seed: as of `ResNet`.
    """

    @declared(classes=SIZE, channels=SIZE, seed=RNG)
    def __init__(self, classes: int = 1000, channels: int = 3, *, seed: Rng = None) -> None:
        super().__init__(Bottleneck, (3, 4, 6, 3), classes, channels, seed=seed)


def _conv(
    inputs: int, outputs: int, window: int, rng: np.random.Generator, stride: int = 1
) -> Conv2d:
    """A filter without bias that keeps the size at stride 1."""
    by_fan_out = partial(he_normal, fan="out")
    return Conv2d(
        inputs, outputs, window, stride, window // 2, bias=False, initializer=by_fan_out, rng=rng
    )


def _downsample(
    inputs: int, outputs: int, stride: int, rng: np.random.Generator
) -> Sequential | None:
    """The shortcut where a block changes the shape, else None."""
    if stride == 1 and inputs == outputs:
        return None
    return Sequential(_conv(inputs, outputs, 1, rng, stride), BatchNorm2d(outputs))
