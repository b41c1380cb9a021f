"""Activation functions of networks beyond relu, sigmoid and tanh, elementwise.

Each that is smooth in pieces has a kernel for its gradient, in terms of the output y where that
tells enough (leaky_relu, elu, softplus, hard_sigmoid), else of the input x. At 0 the gradients of
leaky_relu and elu are those of the left piece, as relu's is 0 there; at their bounds hard_sigmoid
and relu6 have gradient 0, hard_swish has 0 at -3 and 1 at 3. NaN gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..arguments.signature import declared
from ..graph.node import Node
from .comparison import less_equal_op, where_op
from .elementwise import (
    Parametric,
    choose,
    clip_gradient_op,
    clip_op,
    exp_op,
    keep_where,
    sigmoid_op,
    write_sigmoid,
)

__all__ = [
    "elu_op", "gelu_op", "gelu_tanh_op", "hard_sigmoid_op", "hard_swish_op", "leaky_relu_op",
    "relu6_op", "silu_op", "softplus_op",
]  # fmt: skip

# (1 + 2z) exp(z²) erfc(z) as a polynomial in (z - 3) / (z + 3), highest power first: the truncated
# Chebyshev series of the function computed to 60 digits. Its relative error for z >= 0 is 3e-16.
_ERFCX = (
    -3.18135414349692733e-9, -7.64196289258997485e-9, 2.78438812655022206e-8,
    8.76588141173055843e-8, -1.20541422864893789e-7, -5.96398362552274053e-7,
    3.36697908064075958e-7, 3.4542947702777379e-6, -7.18788383440426665e-7,
    -2.00899978332842766e-5, 4.94412434222365985e-6, 1.2509531076254534e-4,
    -1.05158312978131282e-4, -7.79831279729015847e-4, 1.8886900977441495e-3,
    2.52939166720517231e-3, -2.37705148915300752e-2, 6.83080273563839702e-2,
    -1.19273663416760023e-1, 1.29645158702283467e-1, -4.75622943534203791e-2,
    -1.3562110612457575e-1, 1.25300805826972955,
)  # fmt: skip
# log((1 - Φ(x)) / Φ(x)) / x as a polynomial in x², highest power first: fitted so that the largest
# error of Φ is smallest, in relation to Φ from _FAR on: it is 1.5e-7. Where x is so large that
# the polynomial is far off, Φ is 1 anyway.
_LOGIT = (
    -2.791021903e-9, 2.460114391e-7, -7.788549141e-6, 1.102891358e-4, 6.499503889e-5,
    -7.266509663e-2, -1.595770395,
)  # fmt: skip
# exp(z² / 2) (1 - Φ(z)) / t as a polynomial in t = 1 / (z + 2.25), highest power first: its
# relative error from -_FAR to 14.6, where float32 ends, is 8e-9.
_MILLS = (
    30.2068129348, -25.7350527125, 2.25832427175, 1.55226754317, 1.63830517108, 0.897061782791,
    0.398949633119,
)  # fmt: skip
_FAR = -2.25  # below, rounding the logit to float32 alone moves Φ by more than some units
_FAR_BLOCK = 1 << 14  # elements whose working arrays lie in a core's cache
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


def _leaky_relu(
    x: np.ndarray, t: np.ndarray, mask: np.ndarray, y: np.ndarray, alpha: float
) -> None:
    np.multiply(x, alpha, out=t)
    if alpha > 0:  # x and alpha · x have one sign: which is the larger tells the piece
        (np.maximum if alpha <= 1 else np.minimum)(x, t, out=y)
        return
    np.greater(x, 0, out=mask)
    choose(mask, x, t, y)


def _leaky_relu_gradient(
    x: np.ndarray, g: np.ndarray, t: np.ndarray, mask: np.ndarray, dx: np.ndarray, alpha: float
) -> None:
    np.greater(x, 0, out=mask)
    np.multiply(g, alpha, out=t)
    choose(mask, g, t, dx)


def _elu(x: np.ndarray, t: np.ndarray, y: np.ndarray, alpha: float) -> None:
    np.add(x, 0, out=t)  # 0 of either zero
    np.clip(t, 0, math.inf, out=y)  # of two numbers: in a third of the time that np.maximum takes
    np.clip(t, -math.inf, 0, out=t)
    np.expm1(t, out=t)
    np.multiply(t, alpha, out=t)
    bits = np.dtype(f"i{y.itemsize}")  # one of the two is 0: a sum would lose the sign of -0
    np.bitwise_or(y.view(bits), t.view(bits), out=y.view(bits))


def _elu_gradient(
    y: np.ndarray, g: np.ndarray, t: np.ndarray, mask: np.ndarray, dx: np.ndarray, alpha: float
) -> None:
    np.greater(y, 0, out=mask)
    np.add(y, alpha, out=t)
    np.multiply(t, g, out=t)
    choose(mask, g, t, dx)


def _silu(x: np.ndarray, t: np.ndarray, y: np.ndarray) -> None:
    write_sigmoid(x, t)
    np.multiply(x, t, out=y)


def _silu_gradient(
    x: np.ndarray, g: np.ndarray, s: np.ndarray, t: np.ndarray, dx: np.ndarray
) -> None:
    write_sigmoid(x, s)
    np.subtract(1, s, out=t)
    np.multiply(t, x, out=t)
    np.add(t, 1, out=t)
    np.multiply(t, s, out=t)
    np.multiply(t, g, out=dx)


def _softplus(x: np.ndarray, t: np.ndarray, y: np.ndarray) -> None:
    np.absolute(x, out=t)
    np.negative(t, out=t)
    np.exp(t, out=t)
    np.log1p(t, out=t)
    np.clip(x, 0, math.inf, out=y)
    np.add(y, t, out=y)


def _softplus_gradient(y: np.ndarray, g: np.ndarray, t: np.ndarray, dx: np.ndarray) -> None:
    np.negative(y, out=t)
    np.expm1(t, out=t)
    np.subtract(0, t, out=t)  # 0 of either zero
    np.multiply(t, g, out=dx)


def _hard_sigmoid(x: np.ndarray, y: np.ndarray) -> None:
    np.add(x, 3, out=y)
    np.clip(y, 0, 6, out=y)
    np.divide(y, 6, out=y)


def _hard_swish(x: np.ndarray, t: np.ndarray, y: np.ndarray) -> None:
    _hard_sigmoid(x, t)
    np.multiply(x, t, out=y)


def _hard_swish_gradient(
    x: np.ndarray, g: np.ndarray, t: np.ndarray, mask: np.ndarray, dx: np.ndarray
) -> None:
    np.multiply(x, 2, out=t)
    np.add(t, 3, out=t)
    np.divide(t, 6, out=t)
    np.multiply(t, g, out=t)
    np.greater_equal(x, 3, out=mask)
    choose(mask, g, t, t)
    np.less_equal(x, -3, out=mask)
    np.logical_not(mask, out=mask)
    keep_where(mask, t, dx)


def _normal_cdf(
    x: np.ndarray, z: np.ndarray, t: np.ndarray, mask: np.ndarray, p: np.ndarray
) -> None:
    """Writes the standard normal distribution function of x to p, none of them one memory."""
    np.absolute(x, out=z)
    np.minimum(z, 60, out=z)
    np.multiply(z, math.sqrt(0.5), out=z)
    np.add(z, 3, out=p)
    np.subtract(z, 3, out=t)
    np.divide(t, p, out=t)
    p.fill(_ERFCX[0])
    for coefficient in _ERFCX[1:]:
        np.multiply(p, t, out=p)
        np.add(p, coefficient, out=p)
    np.multiply(z, 2, out=t)
    np.add(t, 1, out=t)
    np.divide(p, t, out=p)
    np.multiply(z, z, out=t)
    np.negative(t, out=t)
    np.exp(t, out=t)
    np.multiply(t, 0.5, out=t)
    np.multiply(p, t, out=p)  # the smaller tail
    np.subtract(1, p, out=t)
    np.greater(x, 0, out=mask)
    choose(mask, t, p, p)


def _inverse_normal_cdf32(x: np.ndarray, t: np.ndarray, p: np.ndarray) -> None:
    """Writes 1 / Φ(x) to p in float32 with a relative error of 7e-7 from _FAR on, in half the
    passes.
    """
    np.multiply(x, x, out=t)
    np.multiply(t, _LOGIT[0], out=p)
    np.add(p, _LOGIT[1], out=p)
    for coefficient in _LOGIT[2:]:
        np.multiply(p, t, out=p)
        np.add(p, coefficient, out=p)
    np.multiply(p, x, out=p)
    np.exp(p, out=p)
    np.add(p, 1, out=p)


def _gelu(
    x: np.ndarray, z: np.ndarray, t: np.ndarray, p: np.ndarray, mask: np.ndarray, y: np.ndarray
) -> None:
    if y.dtype == np.float32:
        _inverse_normal_cdf32(x, t, p)
        np.divide(x, p, out=y)
        return
    _normal_cdf(x, z, t, mask, p)
    np.multiply(x, p, out=y)


def _gelu_gradient(
    x: np.ndarray, g: np.ndarray, z: np.ndarray, t: np.ndarray, p: np.ndarray, mask: np.ndarray,
    dx: np.ndarray,
) -> None:  # fmt: skip
    if dx.dtype == np.float32:
        _inverse_normal_cdf32(x, t, p)
        np.reciprocal(p, out=p)
    else:
        _normal_cdf(x, z, t, mask, p)
    np.multiply(x, x, out=t)
    np.multiply(t, -0.5, out=t)
    np.exp(t, out=t)
    np.multiply(t, 1 / math.sqrt(2 * math.pi), out=t)
    np.multiply(t, x, out=t)
    np.add(p, t, out=p)
    np.multiply(p, g, out=dx)


def _mills(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Φ(x) / exp(-x² / 2) in float32, and exp(-x² / 2) in float64, for float32 numbers below
    _FAR.
    """
    t = np.subtract(2.25, x)
    np.reciprocal(t, out=t)
    p = np.multiply(t, _MILLS[0])
    np.add(p, _MILLS[1], out=p)
    for coefficient in _MILLS[2:]:
        np.multiply(p, t, out=p)
        np.add(p, coefficient, out=p)
    np.multiply(p, t, out=p)
    square = np.multiply(x, x, dtype=np.float64)
    np.multiply(square, -0.5, out=square)
    return p, np.exp(square, out=square)


def _far_gelu(x: np.ndarray) -> np.ndarray:
    ratio, bell = _mills(x)
    return np.multiply(bell, np.multiply(ratio, x, out=ratio), out=bell)


def _far_gelu_gradient(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    ratio, bell = _mills(x)
    x_pdf = np.multiply(x, 1 / math.sqrt(2 * math.pi))
    np.multiply(bell, x_pdf, out=x_pdf)
    np.multiply(bell, ratio, out=ratio)
    np.add(ratio, x_pdf, out=ratio)  # in float32, where 0 and -0 make the 0 of native devices
    return np.multiply(ratio, g, out=ratio)


class _Tailed(Parametric):
    """Gelu or its gradient of x, whose numpy form is replaced by `far` where x is float32 and so
    far below 0 that Φ(x) is tiny: for few elements, as a rule.
    """

    def __init__(
        self, name: str, numpy: Callable, gradient: Callable, far: Callable[..., np.ndarray]
    ) -> None:
        super().__init__(name, (), numpy, gradient, scratch=3, mask=True)
        self._far = far

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        given, mask, out = arrays[: len(node.inputs)], arrays[-2], arrays[-1]
        if out.dtype != np.float32:
            return super().numpy(node, *arrays)
        np.less(given[0], _FAR, out=mask)
        at = np.flatnonzero(mask)
        values = np.empty(at.size, np.float32)  # made first: out may be the memory of an input
        for start in range(0, at.size, _FAR_BLOCK):
            block = slice(start, start + _FAR_BLOCK)
            taken = [np.broadcast_to(a, out.shape).take(at[block]) for a in given]
            values[block] = self._far(*taken)
        super().numpy(node, *arrays)
        if out.flags.c_contiguous:
            out.reshape(-1)[at] = values
        else:
            out.put(at, values)


def _tanh_argument(x: np.ndarray, u: np.ndarray) -> None:
    """Writes 2 √(2/π) (x + 0.044715 x³) to u: (1 + tanh(u / 2)) / 2 is sigmoid(u)."""
    np.multiply(x, x, out=u)
    np.multiply(u, 0.044715, out=u)
    np.add(u, 1, out=u)
    np.multiply(u, 2 * _ROOT_2_OVER_PI, out=u)
    np.multiply(u, x, out=u)


def _gelu_tanh(x: np.ndarray, t: np.ndarray, y: np.ndarray) -> None:
    _tanh_argument(x, t)
    write_sigmoid(t, t)
    np.multiply(x, t, out=y)


def _gelu_tanh_gradient(
    x: np.ndarray, g: np.ndarray, s: np.ndarray, t: np.ndarray, r: np.ndarray, dx: np.ndarray
) -> None:
    _tanh_argument(x, s)
    write_sigmoid(s, s)
    np.multiply(x, x, out=t)
    np.multiply(t, 3 * 0.044715, out=t)
    np.add(t, 1, out=t)
    np.multiply(t, 2 * _ROOT_2_OVER_PI, out=t)
    np.multiply(t, x, out=t)
    np.subtract(1, s, out=r)
    np.multiply(t, r, out=t)
    np.add(t, 1, out=t)
    np.multiply(t, s, out=t)
    np.multiply(t, g, out=dx)


# ---- second derivatives, times u ----


def _silu_second(x: Node, u: Node) -> Node:
    s = sigmoid_op(x)
    return u * (s * (1 - s)) * (x * (1 - 2 * s) + 2)


def _gelu_second(x: Node, u: Node) -> Node:
    density = exp_op(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return u * density * (2 - x * x)


def _gelu_tanh_second(x: Node, u: Node) -> Node:
    k, c = 2 * _ROOT_2_OVER_PI, 0.044715
    s = sigmoid_op(k * (x + c * (x * x * x)))
    du = k + 3 * k * c * (x * x)
    return u * (s * (1 - s)) * (2 * du + x * (du * du * (1 - 2 * s) + 6 * k * c * x))


def _not_negative(alpha: float) -> str | None:
    return None if alpha >= 0 else f"expected alpha >= 0, got {alpha}"


# ---- functions of x ----
leaky_relu_op = Parametric(
    "leaky_relu", ("alpha",), _leaky_relu,
    lambda x, y, dy, alpha: leaky_relu_gradient_op(y if alpha >= 0 else x, dy, alpha),
    scratch=1, mask=True, defaults={"alpha": 0.01},
)  # fmt: skip
elu_op = Parametric(
    "elu", ("alpha",), _elu, lambda x, y, dy, alpha: elu_gradient_op(y, dy, alpha),
    scratch=1, check=_not_negative, defaults={"alpha": 1.0},
)  # fmt: skip
silu_op = Parametric("silu", (), _silu, lambda x, y, dy: silu_gradient_op(x, dy), scratch=1)
gelu_op = _Tailed("gelu", _gelu, lambda x, y, dy: gelu_gradient_op(x, dy), _far_gelu)
gelu_tanh_op = Parametric(
    "gelu_tanh", (), _gelu_tanh, lambda x, y, dy: gelu_tanh_gradient_op(x, dy), scratch=1
)
softplus_op = Parametric(
    "softplus", (), _softplus, lambda x, y, dy: softplus_gradient_op(y, dy), scratch=1
)
softplus_op.autocast = "float32"  # it is a part of losses
hard_sigmoid_op = Parametric(
    "hard_sigmoid", (), _hard_sigmoid, lambda x, y, dy: clip_gradient_op(y, dy, 0.0, 1.0) / 6
)
hard_swish_op = Parametric(
    "hard_swish", (), _hard_swish, lambda x, y, dy: hard_swish_gradient_op(x, dy), scratch=1
)

# ---- their gradients, of x or y and of the output's gradient g ----
leaky_relu_gradient_op: Parametric = Parametric(  # the sign of x is all that counts
    "leaky_relu_gradient", ("alpha",), _leaky_relu_gradient,
    lambda x, g, dx, u, alpha: (None, leaky_relu_gradient_op(x, u, alpha)),
    scratch=1, mask=True,
)  # fmt: skip
elu_gradient_op: Parametric = Parametric(
    "elu_gradient", ("alpha",), _elu_gradient,
    lambda y, g, dx, u, alpha: (
        where_op(less_equal_op(y, 0.0), u * g, 0.0), elu_gradient_op(y, u, alpha)
    ),
    scratch=1, mask=True,
)  # fmt: skip
silu_gradient_op: Parametric = Parametric(
    "silu_gradient", (), _silu_gradient,
    lambda x, g, dx, u: (_silu_second(x, u * g), silu_gradient_op(x, u)), scratch=2,
)  # fmt: skip
gelu_gradient_op: Parametric = _Tailed(
    "gelu_gradient", _gelu_gradient,
    lambda x, g, dx, u: (_gelu_second(x, u * g), gelu_gradient_op(x, u)), _far_gelu_gradient,
)  # fmt: skip
gelu_tanh_gradient_op: Parametric = Parametric(
    "gelu_tanh_gradient", (), _gelu_tanh_gradient,
    lambda x, g, dx, u: (_gelu_tanh_second(x, u * g), gelu_tanh_gradient_op(x, u)), scratch=3,
)  # fmt: skip
softplus_gradient_op: Parametric = Parametric(
    "softplus_gradient", (), _softplus_gradient,
    lambda y, g, dx, u: (u * g * exp_op(-y), softplus_gradient_op(y, u)), scratch=1,
)  # fmt: skip
hard_swish_gradient_op: Parametric = Parametric(
    "hard_swish_gradient", (), _hard_swish_gradient,
    lambda x, g, dx, u: (
        clip_gradient_op(x, u * g, -3.0, 3.0) / 3, hard_swish_gradient_op(x, u)
    ),
    scratch=1, mask=True,
)  # fmt: skip


# The docstrings of the operators.
for _op, _text in (
    (leaky_relu_op, "x where it is positive, else alpha · x."),
    (elu_op, "x where it is positive, else alpha · (exp(x) - 1)."),
    (silu_op, "x · sigmoid(x), also called swish."),
    (gelu_op, "x · Φ(x), Φ the standard normal distribution."),
    (gelu_tanh_op, "x · Φ(x) in its usual form by tanh."),
    (softplus_op, "log(1 + exp(x)), finite for any x."),
    (hard_sigmoid_op, "min(max(x + 3, 0), 6) / 6."),
    (hard_swish_op, "x · min(max(x + 3, 0), 6) / 6."),
):
    _op.doc = _text


@declared()
def relu6_op(x: Node, name: str | None = None) -> Node:
    """min(max(x, 0), 6), with gradient 0 at both bounds."""
    return clip_op(x, 0.0, 6.0, name=name)
