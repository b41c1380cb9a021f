"""Activation functions."""

from __future__ import annotations

from ..errors import GraphError
from ..graph.lines import where
from ..ops.activation import (
    elu_op,
    gelu_op,
    gelu_tanh_op,
    hard_sigmoid_op,
    hard_swish_op,
    leaky_relu_op,
    relu6_op,
    silu_op,
    softplus_op,
)
from ..ops.elementwise import as_node, relu_op, sigmoid_op, tanh_op
from ..ops.loss.softmax import log_softmax_op, softmax_op
from .record import Array, recorded

__all__ = [
    "elu", "gelu", "hardsigmoid", "hardswish", "leaky_relu", "log_softmax", "relu", "relu6",
    "sigmoid", "silu", "softmax", "softplus", "tanh",
]  # fmt: skip


@recorded
def relu(x: Array) -> Array:
    """The rectifier max(x, 0) of each element.

    x: any shape and dtype; the result has both. Its gradient at 0 is 0.

    Example: F.relu(x)
    """
    return relu_op(as_node(x))


@recorded
def relu6(x: Array) -> Array:
    """min(max(x, 0), 6) of each element.

    x: any shape and dtype; floats keep their dtype, integers give floats. Its gradient is 0 at both
    bounds. After Howard et al., "MobileNets" (2017).

    Example: F.relu6(x)
    """
    return relu6_op(as_node(x))


@recorded
def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    """x where it is positive, else negative_slope · x, of each element.

    x: any shape; floats keep their dtype, integers give floats. Its gradient at 0 is the slope.

    Example: F.leaky_relu(x, 0.2)
    """
    return leaky_relu_op(as_node(x), alpha=negative_slope)


@recorded
def elu(x: Array, alpha: float = 1.0) -> Array:
    """x where it is positive, else alpha · (exp(x) - 1), of each element.

    x: any shape; floats keep their dtype, integers give floats. ShapeError for an alpha below 0.
    After Clevert, Unterthiner and Hochreiter (2016).

    Example: F.elu(x, alpha=0.5)
    """
    return elu_op(as_node(x), alpha=alpha)


@recorded
def silu(x: Array) -> Array:
    """x · sigmoid(x) of each element, also called swish.

    x: any shape; floats keep their dtype, integers give floats.

    Example: F.silu(x)
    """
    return silu_op(as_node(x))


@recorded
def gelu(x: Array, approximate: str = "none") -> Array:
    """x · Φ(x) of each element, Φ the distribution function of the standard normal.

    x: any shape; floats keep their dtype, integers give floats. approximate: "none", or "tanh" for
    x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2. GraphError for another word. After Hendrycks and
    Gimpel (2016).

    Example: F.gelu(x, approximate="tanh")
    """
    if approximate not in ("none", "tanh"):
        raise GraphError(f"gelu: approximate must be none or tanh, got {approximate!r} [{where()}]")
    return gelu_tanh_op(as_node(x)) if approximate == "tanh" else gelu_op(as_node(x))


@recorded
def softplus(x: Array) -> Array:
    """log(1 + exp(x)) of each element, finite for any finite x.

    x: any shape; floats keep their dtype, integers give floats.

    Example: F.softplus(x)
    """
    return softplus_op(as_node(x))


@recorded
def hardsigmoid(x: Array) -> Array:
    """min(max(x + 3, 0), 6) / 6 of each element.

    x: any shape; floats keep their dtype, integers give floats. Its gradient is 0 at both bounds.

    Example: F.hardsigmoid(x)
    """
    return hard_sigmoid_op(as_node(x))


@recorded
def hardswish(x: Array) -> Array:
    """x · min(max(x + 3, 0), 6) / 6 of each element.

    x: any shape; floats keep their dtype, integers give floats. After Howard et al., "MobileNetV3"
    (2019).

    Example: F.hardswish(x)
    """
    return hard_swish_op(as_node(x))


@recorded
def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) of each element.

    x: any shape; floats keep their dtype, integers give floats.

    Example: F.sigmoid(x)
    """
    return sigmoid_op(as_node(x))


@recorded
def tanh(x: Array) -> Array:
    """The hyperbolic tangent of each element.

    x: any shape; floats keep their dtype, integers give floats.

    Example: F.tanh(x)
    """
    return tanh_op(as_node(x))


@recorded
def softmax(x: Array, axis: int = -1) -> Array:
    """exp(x) / Σ exp(x) over one axis, computed as exp(x - max) / Σ exp(x - max).

    x: at least one dimension; floats keep their dtype, integers give floats; the result has x's
    shape and sums to 1 over the axis. ShapeError for an axis that x does not have. Losses take
    logits: `cross_entropy` is exact where the logarithm of a softmax is not.

    Example: F.softmax(logits, axis=-1)
    """
    return softmax_op(as_node(x), axis)


@recorded
def log_softmax(x: Array, axis: int = -1) -> Array:
    """x - log Σ exp(x) over one axis, finite for any finite x.

    x: at least one dimension; floats keep their dtype, integers give floats; the result has x's
    shape. ShapeError for an axis that x does not have.

    Example: F.log_softmax(logits, axis=-1)
    """
    return log_softmax_op(as_node(x), axis)
