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
def relu(x: Array, algo: str | None = None) -> Array:
    """The rectifier max(x, 0) of each element.

    x: any shape and dtype; the result has both. Its gradient at 0 is 0. algo: "cudnn" computes it
    and its gradient by cuDNN on a GPU, in kernels of their own; without it DLSYS_ACTIVATION counts.
    NotApplicableError at the first run where the device lacks the rung.

    >>> F.relu(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([0., 0., 2.], device=numpy)
    """
    return relu_op(as_node(x), algo=algo)


@recorded
def relu6(x: Array) -> Array:
    """min(max(x, 0), 6) of each element.

    x: any shape and dtype; floats keep their dtype, integers give floats. Its gradient is 0 at both
    bounds. After Howard et al., "MobileNets" (2017).

    >>> F.relu6(dl.tensor([-1.0, 3.0, 8.0]))
    Tensor([0., 3., 6.], device=numpy)
    """
    return relu6_op(as_node(x))


@recorded
def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    """x where it is positive, else negative_slope · x, of each element.

    x: any shape; floats keep their dtype, integers give floats. Its gradient at 0 is the slope.

    >>> F.leaky_relu(dl.tensor([-1.0, 0.0, 2.0]), 0.2)
    Tensor([-0.2,  0. ,  2. ], device=numpy)
    """
    return leaky_relu_op(as_node(x), alpha=negative_slope)


@recorded
def elu(x: Array, alpha: float = 1.0) -> Array:
    """x where it is positive, else alpha · (exp(x) - 1), of each element.

    x: any shape; floats keep their dtype, integers give floats. ShapeError for an alpha below 0.
    After Clevert, Unterthiner and Hochreiter (2016).

    >>> F.elu(dl.tensor([-1.0, 0.0, 2.0]), alpha=0.5)
    Tensor([-0.31606027,  0.        ,  2.        ], device=numpy)
    """
    return elu_op(as_node(x), alpha=alpha)


@recorded
def silu(x: Array) -> Array:
    """x · sigmoid(x) of each element, also called swish.

    x: any shape; floats keep their dtype, integers give floats.

    >>> F.silu(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([-0.2689414,  0.       ,  1.761594 ], device=numpy)
    """
    return silu_op(as_node(x))


@recorded
def gelu(x: Array, approximate: str = "none") -> Array:
    """x · Φ(x) of each element, Φ the distribution function of the standard normal.

    x: any shape; floats keep their dtype, integers give floats. approximate: "none", or "tanh" for
    x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2. GraphError for another word. After Hendrycks and
    Gimpel (2016).

    >>> F.gelu(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([-0.15865527,  0.        ,  1.9544997 ], device=numpy)
    >>> F.gelu(dl.tensor([-1.0, 0.0, 2.0]), approximate="tanh")
    Tensor([-0.158808 ,  0.       ,  1.9545978], device=numpy)
    """
    if approximate not in ("none", "tanh"):
        raise GraphError(f"gelu: approximate must be none or tanh, got {approximate!r} [{where()}]")
    return gelu_tanh_op(as_node(x)) if approximate == "tanh" else gelu_op(as_node(x))


@recorded
def softplus(x: Array) -> Array:
    """log(1 + exp(x)) of each element, finite for any finite x.

    x: any shape; floats keep their dtype, integers give floats.

    >>> F.softplus(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([0.31326163, 0.6931472 , 2.126928  ], device=numpy)
    """
    return softplus_op(as_node(x))


@recorded
def hardsigmoid(x: Array) -> Array:
    """min(max(x + 3, 0), 6) / 6 of each element.

    x: any shape; floats keep their dtype, integers give floats. Its gradient is 0 at both bounds.

    >>> F.hardsigmoid(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([0.33333334, 0.5       , 0.8333333 ], device=numpy)
    """
    return hard_sigmoid_op(as_node(x))


@recorded
def hardswish(x: Array) -> Array:
    """x · min(max(x + 3, 0), 6) / 6 of each element.

    x: any shape; floats keep their dtype, integers give floats. After Howard et al., "MobileNetV3"
    (2019).

    >>> F.hardswish(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([-0.33333334,  0.        ,  1.6666666 ], device=numpy)
    """
    return hard_swish_op(as_node(x))


@recorded
def sigmoid(x: Array, algo: str | None = None) -> Array:
    """1 / (1 + exp(-x)) of each element.

    x: any shape; floats keep their dtype, integers give floats. algo: as of `relu`.

    >>> F.sigmoid(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([0.2689414, 0.5      , 0.880797 ], device=numpy)
    """
    return sigmoid_op(as_node(x), algo=algo)


@recorded
def tanh(x: Array, algo: str | None = None) -> Array:
    """The hyperbolic tangent of each element.

    x: any shape; floats keep their dtype, integers give floats. algo: as of `relu`.

    >>> F.tanh(dl.tensor([-1.0, 0.0, 2.0]))
    Tensor([-0.7615942,  0.       ,  0.9640276], device=numpy)
    """
    return tanh_op(as_node(x), algo=algo)


@recorded
def softmax(x: Array, axis: int = -1) -> Array:
    """exp(x) / Σ exp(x) over one axis, computed as exp(x - max) / Σ exp(x - max).

    x: at least one dimension; floats keep their dtype, integers give floats; the result has x's
    shape and sums to 1 over the axis. axis: one of x's, from the end where it is negative.
    ShapeError for an axis that x does not have. Losses take logits: `cross_entropy` is exact where
    the logarithm of a softmax is not.

    >>> F.softmax(dl.tensor([[0.0, 0.0], [1.0, 3.0]]), axis=1)
    Tensor([[0.5       , 0.5       ],
            [0.11920292, 0.880797  ]],
           device=numpy)
    """
    return softmax_op(as_node(x), axis)


@recorded
def log_softmax(x: Array, axis: int = -1) -> Array:
    """x - log Σ exp(x) over one axis, finite for any finite x.

    x: at least one dimension; floats keep their dtype, integers give floats; the result has x's
    shape. ShapeError for an axis that x does not have.

    >>> F.log_softmax(dl.tensor([[0.0, 0.0], [1.0, 3.0]]), axis=1)
    Tensor([[-0.6931472 , -0.6931472 ],
            [-2.126928  , -0.12692805]],
           device=numpy)
    """
    return log_softmax_op(as_node(x), axis)
