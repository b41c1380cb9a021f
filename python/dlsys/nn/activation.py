"""Activation functions as layers, all elementwise but the softmaxes."""

from __future__ import annotations

from .. import autodiff as ad
from ..autodiff import Node
from ..graph.kinds import Bool, Number
from ..graph.signature import declared
from .module import Module


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Node) -> Node:
        return ad.relu_op(x)


class ReLU6(Module):
    """min(max(x, 0), 6)."""

    def forward(self, x: Node) -> Node:
        return ad.relu6_op(x)


class LeakyReLU(Module):
    """x where positive, else slope · x."""

    @declared(slope=Number())
    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope

    def forward(self, x: Node) -> Node:
        return ad.leaky_relu_op(x, alpha=self.slope)

    def options(self) -> str:
        return f"{self.slope}"


class ELU(Module):
    """x where positive, else alpha · (exp(x) - 1). GraphError at use unless alpha >= 0."""

    @declared(alpha=Number())
    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def forward(self, x: Node) -> Node:
        return ad.elu_op(x, alpha=self.alpha)

    def options(self) -> str:
        return f"{self.alpha}"


class GELU(Module):
    """x · Φ(x), Φ the standard normal distribution; `approximate` takes its form by tanh."""

    @declared(approximate=Bool())
    def __init__(self, approximate: bool = False) -> None:
        self.approximate = approximate

    def forward(self, x: Node) -> Node:
        return ad.gelu_tanh_op(x) if self.approximate else ad.gelu_op(x)

    def options(self) -> str:
        return "approximate=True" if self.approximate else ""


class SiLU(Module):
    """x · sigmoid(x)."""

    def forward(self, x: Node) -> Node:
        return ad.silu_op(x)


class Softplus(Module):
    """log(1 + exp(x))."""

    def forward(self, x: Node) -> Node:
        return ad.softplus_op(x)


class HardSigmoid(Module):
    """min(max(x + 3, 0), 6) / 6."""

    def forward(self, x: Node) -> Node:
        return ad.hard_sigmoid_op(x)


class HardSwish(Module):
    """x · min(max(x + 3, 0), 6) / 6."""

    def forward(self, x: Node) -> Node:
        return ad.hard_swish_op(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Node) -> Node:
        return ad.sigmoid_op(x)


class Tanh(Module):
    """tanh(x)."""

    def forward(self, x: Node) -> Node:
        return ad.tanh_op(x)


class Softmax(Module):
    """exp(x) / Σ exp(x) over `axis`, the last by default. Losses take logits, so no model here ends
    with it.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Node) -> Node:
        return ad.softmax_op(x, self.axis)

    def options(self) -> str:
        return "" if self.axis == -1 else f"axis={self.axis}"


class LogSoftmax(Softmax):
    """x - log Σ exp(x) over `axis`, the last by default."""

    def forward(self, x: Node) -> Node:
        return ad.log_softmax_op(x, self.axis)
