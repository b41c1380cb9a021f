"""Normalization as layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import functional as F
from ..arguments.kinds import Axes, Bool, Instance, Number
from ..arguments.signature import declared
from ..autodiff import Node, Parameter
from ..dist.batch_norm import synchronized_batch_norm
from ..dist.group import Group
from ..errors import GraphError
from ..graph.lines import where
from ..init import ones, zeros
from ..ops.norm.batch_norm import EPS, RUNG
from ..rungs import AUTO
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
    its statistics twice, which the executor refuses. group: ranks that train together
    (docs/dist.md), whose shares are one batch then. algo: as of `F.batch_norm`; not with a group.
    GraphError for channels below 1, at use for eps and momentum out of range.

    >>> layer = nn.BatchNorm2d(3).eval()
    >>> layer(dl.ones(1, 3, 2, 2)).shape
    (1, 3, 2, 2)
    >>> [name for name, _ in layer.named_buffers()]
    ['running_mean', 'running_var']
    """

    @declared(
        channels=SIZE, eps=EPS, momentum=Number(low=0, high=1),
        group=Instance(Group, default=None), algo=RUNG,
    )  # fmt: skip
    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        group: Group | None = None,
        algo: str | None = None,
    ) -> None:
        if group is not None and algo not in (None, AUTO):
            raise GraphError(
                f"{type(self).__name__}: algo={algo!r} takes the statistics of one rank's share; "
                f"leave out algo or group [{where()}]"
            )
        self.weight = Parameter(ones((channels,)), "weight")
        self.bias = Parameter(zeros((channels,)), "bias")
        self.running_mean = Parameter(zeros((channels,)), "running_mean", trainable=False)
        self.running_var = Parameter(ones((channels,)), "running_var", trainable=False)
        self.eps, self.momentum, self.group, self.algo = eps, momentum, group, algo

    def forward(self, x: Node) -> Node:
        if self.group is not None and self.training:
            return synchronized_batch_norm(
                x, self.weight, self.bias, self.running_mean, self.running_var, self.momentum,
                self.eps, self.group,
            )  # fmt: skip
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training,
            self.momentum, self.eps, self.algo,
        )  # fmt: skip

    def options(self) -> str:
        return (
            _with_eps(str(self.weight.shape[0]), self.eps)
            + (f", momentum={self.momentum}" if self.momentum != 0.1 else "")
            + (f", algo={self.algo}" if self.algo else "")
        )


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) · weight + bias over the trailing axes of x, whose extents
    are `shape`, at each of the leading positions. Ba, Kiros and Hinton (2016). GraphError for
    extents below 1.

    >>> nn.LayerNorm(2)(dl.tensor([[1.0, 3.0]]))
    Tensor([[-0.999995,  0.999995]], device=numpy, requires_grad=True)
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


class BatchNorm1d(BatchNorm2d):
    """`BatchNorm2d` for x (N, channels) or (N, channels, L), under PyTorch's name.

    >>> nn.BatchNorm1d(3)(dl.randn(8, 3)).mean(axis=0).shape
    (3,)
    """


class GroupNorm(Module):
    """(x - mean) / sqrt(variance + eps) · weight + bias of x (N, channels, …), the statistics those
    of each of `groups` groups of neighboring channels of each sample. Wu and He (2018).

    Without `affine` it has no weight and no bias. GraphError unless groups divide channels.

    >>> nn.GroupNorm(2, 4)(dl.randn(2, 4, 5)).shape
    (2, 4, 5)
    """

    @declared(groups=SIZE, channels=SIZE, eps=EPS, affine=Bool())
    def __init__(self, groups: int, channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        if channels % groups:
            raise GraphError(
                f"{type(self).__name__}: {groups} groups do not divide {channels} channels "
                f"[{where()}]"
            )
        self.weight = Parameter(ones((channels,)), "weight") if affine else None
        self.bias = Parameter(zeros((channels,)), "bias") if affine else None
        self.groups, self.channels, self.eps = groups, channels, eps

    def forward(self, x: Node) -> Node:
        return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)

    def options(self) -> str:
        affine = ", affine=False" if self.weight is None else ""
        return _with_eps(f"{self.groups}, {self.channels}", self.eps) + affine


class InstanceNorm2d(GroupNorm):
    """`GroupNorm` with a group for each channel: the statistics are those of each plane of each
    sample of x (N, channels, H, W). As in PyTorch without weight and bias unless `affine`. Ulyanov,
    Vedaldi and Lempitsky (2016).

    eps: as of `F.instance_norm`.
    """

    @declared(channels=SIZE, eps=EPS, affine=Bool())
    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__(channels, channels, eps, affine)

    def options(self) -> str:
        affine = "" if self.weight is None else ", affine=True"
        return _with_eps(str(self.channels), self.eps) + affine


class InstanceNorm1d(InstanceNorm2d):
    """`InstanceNorm2d` for x (N, channels, L).

    eps: as of `F.instance_norm`.
    """


class RMSNorm(Module):
    """x / sqrt(mean(x²) + eps) · weight over the trailing axes of x, whose extents are `shape`, at
    each of the leading positions. Zhang and Sennrich (2019). GraphError for extents below 1.

    >>> nn.RMSNorm(2)(dl.tensor([[3.0, 3.0]]))
    Tensor([[0.9999994, 0.9999994]], device=numpy, requires_grad=True)
    """

    @declared(shape=Extents(), eps=EPS)
    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5) -> None:
        extents = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        self.weight, self.eps = Parameter(ones(extents), "weight"), eps

    def forward(self, x: Node) -> Node:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    options = LayerNorm.options


def _with_eps(text: str, eps: float) -> str:
    return text if eps == 1e-5 else f"{text}, eps={eps}"
