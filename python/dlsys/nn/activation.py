"""Activation functions as layers, all elementwise but the softmaxes."""

from __future__ import annotations

from .. import functional as F
from ..arguments.kinds import Bool, Number, Rung
from ..arguments.signature import declared
from ..autodiff import Node
from ..rungs import ACTIVATION
from .module import Module


class ByRung(Module):
    """Base of the activations that have a rung besides the own kernel."""

    @declared(algo=Rung(ACTIVATION))
    def __init__(self, algo: str | None = None) -> None:
        self.algo = algo

    def options(self) -> str:
        return f"algo={self.algo}" if self.algo else ""


class ReLU(ByRung):
    """max(x, 0). algo: as of `F.relu`."""

    def forward(self, x: Node) -> Node:
        return F.relu(x, self.algo)


class ReLU6(Module):
    """min(max(x, 0), 6)."""

    def forward(self, x: Node) -> Node:
        return F.relu6(x)


class LeakyReLU(Module):
    """x where positive, else slope · x."""

    @declared(slope=Number())
    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope

    def forward(self, x: Node) -> Node:
        return F.leaky_relu(x, self.slope)

    def options(self) -> str:
        return f"{self.slope}"


class ELU(Module):
    """x where positive, else alpha · (exp(x) - 1). GraphError at use unless alpha >= 0."""

    @declared(alpha=Number())
    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def forward(self, x: Node) -> Node:
        return F.elu(x, self.alpha)

    def options(self) -> str:
        return f"{self.alpha}"


class GELU(Module):
    """x · Φ(x), Φ the standard normal distribution; `approximate` takes its form by tanh."""

    @declared(approximate=Bool())
    def __init__(self, approximate: bool = False) -> None:
        self.approximate = approximate

    def forward(self, x: Node) -> Node:
        return F.gelu(x, "tanh" if self.approximate else "none")

    def options(self) -> str:
        return "approximate=True" if self.approximate else ""


class SiLU(Module):
    """x · sigmoid(x)."""

    def forward(self, x: Node) -> Node:
        return F.silu(x)


class Softplus(Module):
    """log(1 + exp(x))."""

    def forward(self, x: Node) -> Node:
        return F.softplus(x)


class HardSigmoid(Module):
    """min(max(x + 3, 0), 6) / 6."""

    def forward(self, x: Node) -> Node:
        return F.hardsigmoid(x)


class HardSwish(Module):
    """x · min(max(x + 3, 0), 6) / 6."""

    def forward(self, x: Node) -> Node:
        return F.hardswish(x)


class Sigmoid(ByRung):
    """1 / (1 + exp(-x)). algo: as of `F.relu`."""

    def forward(self, x: Node) -> Node:
        return F.sigmoid(x, self.algo)


class Tanh(ByRung):
    """tanh(x). algo: as of `F.relu`."""

    def forward(self, x: Node) -> Node:
        return F.tanh(x, self.algo)


class Softmax(Module):
    """exp(x) / Σ exp(x) over `axis`, the last by default. Losses take logits, so no model here ends
    with it.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Node) -> Node:
        return F.softmax(x, self.axis)

    def options(self) -> str:
        return "" if self.axis == -1 else f"axis={self.axis}"


class LogSoftmax(Softmax):
    """x - log Σ exp(x) over `axis`, the last by default."""

    def forward(self, x: Node) -> Node:
        return F.log_softmax(x, self.axis)
