"""Elementwise operators: arithmetic, comparisons, truth values, activations and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....graph.node import Node
from ....graph.spec import promote
from ....ops.comparison import where_op
from ....ops.elementwise import add, clip_op, exp_op, sigmoid_op, tanh_op
from ....ops.math.transcendental import erf_op, expm1_op
from ..registry import rule
from ..trace import Emitter

BOOL = np.dtype(np.bool_)
_INT32 = np.dtype(np.int32)


def computed_in(dtype: np.dtype) -> np.dtype:
    """The dtype in which to compute: ONNX Runtime has few kernels of integers below 32 bits, which
    wrap around alike.
    """
    return _INT32 if dtype.kind in "iu" and dtype.itemsize < 4 else dtype


def comparable(dtype: np.dtype) -> np.dtype:
    """The dtype in which to order elements, or to move them where a value is filled in."""
    return _INT32 if dtype.kind == "b" else computed_in(dtype)


def operands(g: Emitter, node: Node, inputs: tuple[str, ...], dtype: np.dtype) -> list[str]:
    """The inputs of a node cast to one dtype."""
    return [g.cast(x, i.spec.dtype, dtype) for x, i in zip(inputs, node.inputs)]


def arithmetic(g: Emitter, node: Node, op_type: str, *inputs: str, **attributes: Any) -> str:
    """One ONNX operator over inputs of the node's dtype."""
    wide = computed_in(node.spec.dtype)
    y = g(op_type, *operands(g, node, inputs, wide), **attributes)
    return g.cast(y, wide, node.spec.dtype)


_DIRECT = {
    "neg": "Neg", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "cos": "Cos",
    "sin": "Sin", "sigmoid": "Sigmoid", "relu": "Relu", "abs": "Abs", "sign": "Sign",
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow",
    "minimum": "Min", "maximum": "Max", "softplus": "Softplus", "hard_swish": "HardSwish",
    "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "integer_power": "Pow",
}  # fmt: skip


def _direct(op_type: str) -> Any:
    def emit(g: Emitter, node: Node, *inputs: str) -> str | None:
        if op_type in ("Floor", "Ceil", "Round") and node.spec.dtype.kind != "f":
            return None  # integers are integers already
        return arithmetic(g, node, op_type, *inputs)

    return emit


for _name, _op_type in _DIRECT.items():
    rule(_name, _op_type)(_direct(_op_type))


# ---- an array and a number ----

_WITH_CONST = {
    "add_const": ("Add", False), "mul_const": ("Mul", False), "div_const": ("Div", False),
    "rsub_const": ("Sub", True), "rdiv_const": ("Div", True), "rpow_const": ("Pow", True),
    "pow_const": ("Pow", False),
}  # fmt: skip


def _with_const(op_type: str, swapped: bool) -> Any:
    def emit(g: Emitter, node: Node, x: str) -> str:
        wide = computed_in(node.spec.dtype)
        x = g.cast(x, node.inputs[0].spec.dtype, wide)
        const = node.attrs["const"]
        if op_type == "Pow" and not swapped and const == 0.5:
            return g("Sqrt", x)
        pair = (np.array(const, wide), x) if swapped else (x, np.array(const, wide))
        return g.cast(g(op_type, *pair), wide, node.spec.dtype)

    return emit


for _name, (_op_type, _swapped) in _WITH_CONST.items():
    rule(_name, _op_type)(_with_const(_op_type, _swapped))


@rule("cast", "Cast")
def _cast(g: Emitter, node: Node, x: str) -> str:
    return g.cast(x, node.inputs[0].spec.dtype, node.attrs["dtype"])


@rule("copy stop_gradient", "")
def _same(g: Emitter, node: Node, x: str) -> str:
    return x


# ---- comparisons and truth values ----


def _comparison(op_type: str) -> Any:
    def emit(g: Emitter, node: Node, a: str, b: str) -> str:
        common = promote(node, *[x.spec for x in node.inputs])
        assert common is not None
        dtype = BOOL if common == BOOL and op_type == "Equal" else comparable(common)
        return g(op_type, *operands(g, node, (a, b), dtype))

    return emit


for _name, _op_type in {
    "equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
}.items():  # fmt: skip
    rule(_name, _op_type)(_comparison(_op_type))


@rule("not_equal", "Equal, Not")
def _not_equal(g: Emitter, node: Node, a: str, b: str) -> str:
    return g("Not", _comparison("Equal")(g, node, a, b))


def _logical(op_type: str) -> Any:
    def emit(g: Emitter, node: Node, *inputs: str) -> str:
        return g(op_type, *operands(g, node, inputs, BOOL))

    return emit


for _name, _op_type in {
    "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor", "logical_not": "Not",
}.items():  # fmt: skip
    rule(_name, _op_type)(_logical(_op_type))


@rule("where", "Where")
def _where(g: Emitter, node: Node, condition: str, a: str, b: str) -> str:
    dtype = node.spec.dtype
    wide = computed_in(dtype)
    chosen = g.cast(condition, node.inputs[0].spec.dtype, BOOL)
    a, b = (g.cast(x, i.spec.dtype, wide) for x, i in zip((a, b), node.inputs[1:]))
    return g.cast(g("Where", chosen, a, b), wide, dtype)


# ---- with constants ----


@rule("clip", "Clip")
def _clip(g: Emitter, node: Node, x: str) -> str:
    wide = computed_in(node.spec.dtype)
    bounds = [np.array(node.attrs[key], wide) for key in ("low", "high")]
    y = g("Clip", g.cast(x, node.inputs[0].spec.dtype, wide), *bounds)
    return g.cast(y, wide, node.spec.dtype)


@rule("leaky_relu", "LeakyRelu")
def _leaky_relu(g: Emitter, node: Node, x: str) -> str:
    return arithmetic(g, node, "LeakyRelu", x, alpha=float(node.attrs["alpha"]))


@rule("elu", "Elu")
def _elu(g: Emitter, node: Node, x: str) -> str:
    return arithmetic(g, node, "Elu", x, alpha=float(node.attrs["alpha"]))


@rule("hard_sigmoid", "HardSigmoid")
def _hard_sigmoid(g: Emitter, node: Node, x: str) -> str:
    return arithmetic(g, node, "HardSigmoid", x, alpha=1 / 6, beta=0.5)


@rule("silu")
def _silu(g: Emitter, node: Node, x: str) -> Node:
    return node.inputs[0] * sigmoid_op(node.inputs[0])


@rule("gelu", "Gelu (from 20), Erf")
def _gelu(g: Emitter, node: Node, x: str) -> Any:
    if g.opset >= 20:
        return arithmetic(g, node, "Gelu", x)
    return node.inputs[0] * _normal_cdf(node.inputs[0])


@rule("gelu_tanh", "Gelu (from 20), Tanh")
def _gelu_tanh(g: Emitter, node: Node, name: str) -> Any:
    if g.opset >= 20:
        return arithmetic(g, node, "Gelu", name, approximate="tanh")
    x = node.inputs[0]
    return 0.5 * x * (1 + tanh_op(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _normal_cdf(x: Node) -> Node:
    return 0.5 * (1 + erf_op(x * math.sqrt(0.5)))


# ---- gradients of activations, from x or y and the output's gradient ----


@rule("relu_gradient")
def _relu_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, dy = node.inputs
    return where_op(x > 0, dy, 0)


@rule("clip_gradient")
def _clip_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, dy = node.inputs
    return where_op((x > node.attrs["low"]) & (x < node.attrs["high"]), dy, 0.0)


@rule("leaky_relu_gradient")
def _leaky_relu_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, dy = node.inputs
    return where_op(x > 0, dy, node.attrs["alpha"] * dy)


@rule("elu_gradient")
def _elu_gradient(g: Emitter, node: Node, *names: str) -> Node:
    y, dy = node.inputs
    return where_op(y > 0, dy, (y + node.attrs["alpha"]) * dy)


@rule("silu_gradient")
def _silu_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, dy = node.inputs
    s = sigmoid_op(x)
    return (1 + x * (1 - s)) * s * dy


@rule("gelu_gradient")
def _gelu_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, dy = node.inputs
    density = exp_op(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return (_normal_cdf(x) + x * density) * dy


@rule("gelu_tanh_gradient")
def _gelu_tanh_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, dy = node.inputs
    k = 2 * math.sqrt(2 / math.pi)
    s = sigmoid_op(k * (x + 0.044715 * (x * x * x)))
    return s * (1 + x * (1 - s) * (k + 3 * 0.044715 * k * (x * x))) * dy


@rule("softplus_gradient")
def _softplus_gradient(g: Emitter, node: Node, *names: str) -> Node:
    y, dy = node.inputs
    return -expm1_op(-y) * dy


@rule("hard_swish_gradient")
def _hard_swish_gradient(g: Emitter, node: Node, *names: str) -> Node:
    x, dy = node.inputs
    inside = where_op(x >= 3, dy, (2 * x + 3) / 6 * dy)
    return where_op(x <= -3, 0.0, inside)


@rule("huber")
def _huber(g: Emitter, node: Node, name: str) -> Node:
    d, delta = node.inputs[0], node.attrs["delta"]
    inner = clip_op(d, -delta, delta)
    return add(d, inner * -0.5) * inner
