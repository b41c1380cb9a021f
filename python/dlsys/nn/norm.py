"""Normalization as layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import functional as F
from ..autodiff import Node, Parameter
from ..graph.kinds import Axes, Number
from ..graph.signature import declared
from ..init import ones, zeros
from ..ops.norm.batch_norm import EPS
from .layers import SIZE
from .module import Module


class Extents(Axes):
    """A positive integer or several."""

    expected = "a positive integer or a tuple of them"

    def take(self, value: Any) -> int | tuple[int, ...]:
        shape = super().take(value)
        if min(shape if isinstance(shape, tuple) else (shape,), default=1) < 1:
            raise ValueError
        return shape


class BatchNorm2d(Module):
    """(x - mean) / sqrt(variance + eps) · weight + bias for each channel of x (N, channels, …).

    In training mode mean and variance are the batch's, and every step that an optimizer makes moves
    `running_mean` and `running_var` toward them, `momentum` of the way; the running variance is
    that of a sample (over n - 1), all as in PyTorch. In inference mode the running ones are used.
    Ioffe and Szegedy (2015). A training graph may use the layer once: a second use would update
    its statistics twice, which the executor refuses. GraphError for channels below 1, at use for
    eps and momentum out of range.
    """

    @declared(channels=SIZE, eps=EPS, momentum=Number(low=0, high=1))
    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.weight = Parameter(ones((channels,)), "weight")
        self.bias = Parameter(zeros((channels,)), "bias")
        self.running_mean = Parameter(zeros((channels,)), "running_mean", trainable=False)
        self.running_var = Parameter(ones((channels,)), "running_var", trainable=False)
        self.eps, self.momentum = eps, momentum

    def forward(self, x: Node) -> Node:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training,
            self.momentum, self.eps,
        )  # fmt: skip

    def options(self) -> str:
        return _with_eps(str(self.weight.shape[0]), self.eps) + (
            f", momentum={self.momentum}" if self.momentum != 0.1 else ""
        )


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) · weight + bias over the trailing axes of x, whose extents
    are `shape`, at each of the leading positions. Ba, Kiros and Hinton (2016). GraphError for
    extents below 1.
    """

    @declared(shape=Extents(), eps=EPS)
    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5) -> None:
        extents = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        self.weight = Parameter(ones(extents), "weight")
        self.bias = Parameter(zeros(extents), "bias")
        self.eps = eps

    def forward(self, x: Node) -> Node:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def options(self) -> str:
        return _with_eps(str(self.weight.shape), self.eps)


def _with_eps(text: str, eps: float) -> str:
    return text if eps == 1e-5 else f"{text}, eps={eps}"
