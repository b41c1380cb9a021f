"""A residual network for small photographs."""

from __future__ import annotations

import numpy as np

from ... import functional as F
from ...arguments.signature import declared
from ...autodiff import Node
from ...errors import ShapeError
from ...init import RNG, Rng, generator, xavier_uniform
from ..container import Sequential
from ..layers import SIZE, Conv2d, Linear
from ..module import Module
from ..norm import BatchNorm2d
from .resnet import BasicBlock

_PATCH = 3  # pixels a side that are made white together
_SAMPLES = 5000  # images that the directions are measured on
_LEAST = 5e-4  # that is added to variances, of pixels in [0, 1] normalized


class ResNetCIFAR(Module):
    """ResNet-18 for x (N, 3, 32, 32), or any size from 8 on, to logits (N, classes): its four
    stages of two basic blocks behind a 1×1 convolution in place of the strided one and the pooling,
    as He et al. (2016) begin on CIFAR-10, 11.2 million parameters at width 64.

    Before all comes a fixed 3×3 convolution to 27 planes, which `whiten` sets so that patches have
    uncorrelated values of one variance; until then it is drawn. width: channels of the first stage.
    seed: what weights are drawn from, as `rng` of layers.

    >>> nn.ResNetCIFAR(width=8, seed=0)(dl.zeros(2, 3, 32, 32)).shape
    (2, 10)
    """

    @declared(classes=SIZE, width=SIZE, seed=RNG)
    def __init__(self, classes: int = 10, width: int = 64, *, seed: Rng = None) -> None:
        rng = generator(seed)
        planes = 3 * _PATCH**2
        self.patches = Conv2d(3, planes, _PATCH, padding=_PATCH // 2, bias=False, rng=rng)
        self.patches.freeze()
        self.conv1 = Conv2d(planes, width, 1, bias=False, rng=rng)
        self.bn1 = BatchNorm2d(width)
        inputs = width
        stages = []
        for k in range(4):
            outputs = width * 2**k
            first = BasicBlock(inputs, outputs, 1 if k == 0 else 2, rng)
            stages.append(Sequential(first, BasicBlock(outputs, outputs, 1, rng)))
            inputs = outputs
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = Linear(inputs, classes, initializer=xavier_uniform, rng=rng)

    def forward(self, x: Node) -> Node:
        x = F.relu(self.bn1(self.conv1(self.patches(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.global_avg_pool2d(x))

    def whiten(self, images: np.ndarray) -> None:
        """Sets the first convolution to the whitening of the 3×3 patches of images (n, 3, H, W), as
        the model takes them: the eigenvectors of their covariance, each divided by the root of its
        eigenvalue (Coates and Ng, 2012). ShapeError for what is no such images.
        """
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < _PATCH:
            raise ShapeError(f"whiten: expected images (n, 3, H, W), got {images.shape}")
        part = np.asarray(images[:_SAMPLES], np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(part, (_PATCH, _PATCH), (2, 3))
        rows = windows[:, :, ::2, ::2].transpose(0, 2, 3, 1, 4, 5).reshape(-1, 3 * _PATCH**2)
        values, vectors = np.linalg.eigh(np.cov(rows, rowvar=False))
        filters = (vectors / np.sqrt(values + _LEAST)).T[::-1]
        self.patches.weight.set(filters.reshape(self.patches.weight.shape).astype(np.float32))
