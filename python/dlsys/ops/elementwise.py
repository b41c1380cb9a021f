"""Elementwise operators, with numpy's broadcasting. Each is one paragraph: name, numpy form,
gradient.

The native kernel has the operator's name; its formula is a functor in src/math/functors.h.
Gradients are written in terms of the inputs, the output `y` and the output's gradient `dy`, from
`y` where the mathematics allows it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import DType, Number, Rung
from ..arguments.signature import Signature
from ..dtypes import is_narrow, rounded
from ..graph.node import Node, Op, hooks
from ..graph.spec import Spec, broadcast, floating, promote
from ..rungs import ACTIVATION, AUTO, Ladder
from ..settings import settings
from .leaf import Scalar, constant_op

__all__ = [
    "abs_op", "add_byconst_op", "add_op", "cast_op", "clip_op", "const_div_op", "const_sub_op",
    "cos_op", "div_byconst_op", "div_op", "exp_op", "log1p_op", "log_op", "mul_byconst_op",
    "mul_op", "neg_op", "relu_gradient_op", "relu_op", "rsqrt_op", "sigmoid_op", "sign_op",
    "sin_op", "sqrt_op", "sub_op", "tanh_op",
]  # fmt: skip

_WIDER = np.dtype(np.int32), np.dtype(np.int64)  # native devices have no int16

_BLOCK_NBYTES = 1 << 18  # of an array: with some others of its size it lies in a core's cache


class Elementwise(Op):
    """Base of the elementwise operators: broadcast shapes, promoted dtypes, in place where
    possible.
    """

    inplace = True
    elementwise = True
    autocast = "follow"

    def __init__(
        self,
        name: str,
        numpy: Callable,
        gradient: Callable,
        scratch: bool = False,
        with_const: Callable | None = None,
        passes: bool = False,
        ladder: Ladder | None = None,
    ) -> None:
        self.name = self.kernel = name
        self.ladder = ladder
        self._numpy = numpy
        self._passes = passes  # numpy goes over its arrays several times
        self._gradient = gradient
        self._scratch = scratch  # numpy wants an array of bools besides
        self._with_const = with_const  # rebuilds a op b through the operators of constants
        kinds = {} if ladder is None else {"algo": Rung(ladder)}
        self.signature = Signature(*inputs_of(gradient), **kinds)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype = promote(node, *specs)
        if dtype is not None and dtype.kind == "b":
            dtype = np.dtype(np.int64)  # arithmetic on truth values is arithmetic on 0 and 1
        return Spec(broadcast(node, *specs), dtype, any(spec.declared for spec in specs))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        if self._passes or self._scratch:
            in_blocks(self._numpy, len(node.inputs), arrays)
        else:
            self._numpy(*arrays)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [outputs[0]._replace(dtype=np.dtype(np.bool_))] if self._scratch else []

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        grads = self._gradient(*node.inputs, node, output_grad)
        if len(node.inputs) == 1:
            return [grads]
        return [
            None if dx is None else hooks["sum_to_like"](dx, x) for x, dx in zip(node.inputs, grads)
        ]

    def simplify(self, node: Node) -> Node | None:
        """Inputs get the output's dtype; one that is one number everywhere becomes a number."""
        cast = in_one_dtype(node)
        if cast is not None or self._with_const is None:
            return cast
        for side, x in enumerate(node.inputs):
            other = node.inputs[1 - side]
            if x.op.constant_fill and other.spec == node.spec and node.spec.dtype.kind == "f":
                operands = [other, other]
                operands[side] = x.attrs["value"]
                plain = self._with_const(*operands)
                return plain if plain.spec[:2] == node.spec[:2] else None
        return None


class FloatElementwise(Elementwise):
    """Elementwise with a floating result whatever the input's dtype: exp, division, …"""

    def infer(self, node: Node, *specs: Spec) -> Spec:
        spec = super().infer(node, *specs)
        return spec._replace(dtype=floating(spec.dtype))


class WithConst(Elementwise):
    """Elementwise between an array and one Python number, `node.attrs["const"]`, which adapts to
    the array.
    """

    def __init__(
        self,
        name: str,
        numpy: Callable,
        gradient: Callable,
        identity: float | None = None,
        of_two: Callable | None = None,
    ) -> None:
        super().__init__(name, numpy, gradient)
        self._identity = identity  # the constant that changes nothing
        self._of_two = (
            of_two  # two arrays, as which integers with an integer constant stay integers
        )
        self.signature = Signature("x", const=Scalar())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype, const = specs[0].dtype, node.attrs["const"]
        if self._of_two is not None and isinstance(const, int):
            return specs[0]._replace(dtype=holding(dtype, const))
        return specs[0]._replace(dtype=floating(dtype))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        self._numpy(arrays[0], node.attrs["const"], arrays[1])

    def scalars(self, node: Node) -> tuple[float]:
        return (float(node.attrs["const"]),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [self._gradient(node.inputs[0], node.attrs["const"], node, output_grad)]

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        if node.attrs["const"] == self._identity and node.spec == x.spec:
            return x
        if self._of_two is None or node.spec.dtype.kind == "f" or x.op.constant_fill:
            return in_one_dtype(node)
        const = constant_op(node.attrs["const"], dtype=node.spec.dtype)  # not by way of a float
        return self._of_two(x, const)


class Parametric(Elementwise):
    """Elementwise with Python constants besides its inputs, the attributes `constants`, which adapt
    to the arrays.
    """

    def __init__(
        self,
        name: str,
        constants: tuple[str, ...],
        numpy: Callable,
        gradient: Callable,
        scratch: int = 0,
        mask: bool = False,
        check: Callable | None = None,
        integral: bool = False,
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(name, numpy, gradient, mask)
        self._constants = constants
        self._arrays = scratch  # working arrays like the output that numpy wants, before the mask
        self._check = check  # what is wrong with the constants, or None
        self._integral = integral  # integers with integer constants stay integers
        given = defaults or {}
        kinds = {key: Number(given[key]) if key in given else Number() for key in constants}
        self.signature = Signature(*inputs_of(gradient, len(constants)), **kinds)

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        node = Node(self, inputs, attrs, name)
        wrong = self._check(**node.attrs) if self._check else None
        if wrong:
            raise node.error(wrong)
        return node

    def infer(self, node: Node, *specs: Spec) -> Spec:
        spec = super().infer(node, *specs)
        constants = [node.attrs[key] for key in self._constants]
        if self._integral and all(isinstance(constant, int) for constant in constants):
            for constant in constants:
                spec = spec._replace(dtype=holding(spec.dtype, constant))
            return spec
        return spec._replace(dtype=floating(spec.dtype))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [outputs[0]] * self._arrays + super().workspace(node, inputs, outputs)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        in_blocks(self._numpy, len(node.inputs), arrays, **node.attrs)

    def scalars(self, node: Node) -> tuple[float, ...]:
        return tuple(float(node.attrs[key]) for key in self._constants)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        grads = self._gradient(*node.inputs, node, output_grad, **node.attrs)
        return list(grads) if len(node.inputs) > 1 else [grads]


class CastOp(Op):
    """A copy of x in another dtype; floats lose their fraction on the way to integers."""

    name = kernel = "cast"
    elementwise = any_dtype = casts = True
    signature = Signature("x", dtype=DType())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]._replace(dtype=node.attrs["dtype"])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        dtype = node.attrs["dtype"]
        source = rounded(arrays[0], dtype) if is_narrow(dtype) else arrays[0]
        np.copyto(arrays[1], source, casting="unsafe")

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x = node.inputs[0].spec
        if node.attrs["dtype"].kind != "f":
            return [None]  # constant between its jumps
        if x is None or x.dtype is None:
            return [output_grad]
        return [cast_op(output_grad, x.dtype) if x.dtype.kind == "f" else None]

    def simplify(self, node: Node) -> Node | None:
        x = node.inputs[0]
        return x if x.spec is not None and x.spec.dtype == node.attrs["dtype"] else None


class CastLikeOp(Op):
    """x in the dtype of another float where either is stored in 16 bits, else x itself: so a
    gradient gets the dtype of what it is the gradient of.
    """

    name = "cast_like"
    signature = Signature("x", "like")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, like = specs[0].dtype, specs[1].dtype
        if x is None or like is None:
            return specs[0]._replace(dtype=None)
        both = x.kind == like.kind == "f" and (is_narrow(x) or is_narrow(like))
        return specs[0]._replace(dtype=like if both else x)

    def simplify(self, node: Node) -> Node:
        x = node.inputs[0]
        return x if x.spec.dtype == node.spec.dtype else cast_op(x, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [cast_like_op(output_grad, node.inputs[0]), None]


class ActivationGradient(FloatElementwise):
    """The gradient of an activation, of its output y and the output's gradient g, for a rung that
    computes it; without one it is a composition.
    """

    inplace = False  # numpy goes over its arrays several times

    def __init__(
        self, name: str, numpy: Callable, gradient: Callable, composed: Callable[[Node, Node], Node]
    ) -> None:
        super().__init__(name, numpy, gradient, ladder=ACTIVATION)
        self.composed = composed

    def simplify(self, node: Node) -> Node | None:
        cast = super().simplify(node)
        return cast if cast is not None or _names_rung(node) else self.composed(*node.inputs)


def inputs_of(gradient: Callable, constants: int = 0) -> list[str]:
    """The names of the inputs, as a gradient rule calls them: its parameters before the output, the
    output's gradient and the constants.
    """
    names = list(inspect.signature(gradient).parameters)
    return names[: len(names) - 2 - constants]


def in_one_dtype(node: Node) -> Node | None:
    """The node over inputs cast to its own dtype where they differ, else None.

    numpy chooses how to compute by its inputs' dtypes alone: exp of uint8 is a float16 there.
    """
    dtype = node.spec.dtype
    for x in node.inputs:
        if x.spec.dtype != dtype:
            break
    else:
        return None
    inputs = [x if x.spec.dtype == dtype else cast_op(x, dtype) for x in node.inputs]
    return node.derive(inputs, node.spec)


def holding(dtype: np.dtype | None, const: int) -> np.dtype | None:
    """The dtype itself, or for integers the next one of every device that holds `const` too."""
    if dtype is None or dtype.kind == "f":
        return dtype
    if dtype.kind == "b":
        return np.dtype(np.int64)
    own = np.iinfo(dtype)
    for wide in (dtype, *_WIDER):
        info = np.iinfo(wide)
        if info.min <= min(own.min, const) and max(own.max, const) <= info.max:
            return wide
    return np.result_type(dtype, np.min_scalar_type(const))


def in_blocks(call: Callable, inputs: int, arrays: Sequence[np.ndarray], **attrs: Any) -> None:
    """Calls `call` with arrays of one shape a block after the other, so that what one of its passes
    writes is still in the cache when the next one reads it.

    arrays: the inputs, working arrays, of which all blocks use the same beginning, and the output.
    The output may be the memory of an input. Arrays of other shapes or layouts go as they are.
    """
    out = arrays[-1]
    size = _BLOCK_NBYTES // out.itemsize
    if out.size <= size or any(a.shape != out.shape or not a.flags.c_contiguous for a in arrays):
        call(*arrays, **attrs)
        return
    flat = [a.reshape(-1) for a in arrays]
    last = len(flat) - 1
    for start in range(0, out.size, size):
        block = slice(start, min(start + size, out.size))
        rest = slice(0, block.stop - start)
        parts = [a[rest if inputs <= k < last else block] for k, a in enumerate(flat)]
        call(*parts, **attrs)


def _masked(mask_source: np.ndarray, values: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    np.greater(mask_source, 0, out=mask)
    keep_where(mask, values, out)


def _rsqrt(x: np.ndarray, y: np.ndarray) -> None:
    np.sqrt(x, out=y)
    np.reciprocal(y, out=y)


def _clip(x: np.ndarray, y: np.ndarray, low: float, high: float) -> None:
    np.clip(x, low, high, out=y)


def _clip_gradient(
    x: np.ndarray, g: np.ndarray, mask: np.ndarray, out: np.ndarray, low: float, high: float
) -> None:
    np.greater(x, low, out=mask)
    np.logical_and(mask, np.less(x, high), out=mask)  # with `where` it takes ten times as long
    keep_where(mask, g, out)


def keep_where(mask: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """Writes the values where the mask is True and 0 elsewhere, in place or not.

    Bits times 0 or 1, exact for NaN and infinity too: a masked copy takes ten times as long.
    """
    if values.dtype != out.dtype:
        np.copyto(out, values)
        values = out
    bits = np.dtype(f"i{out.itemsize}")
    np.multiply(values.view(bits), mask.view(np.int8), out=out.view(bits))


def choose(mask: np.ndarray, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Writes a where the mask is True, else b; `out` may be either.

    b's bits with those that differ from a's exchanged: np.where and masked copies branch, which
    takes ten times as long where the mask is irregular.
    """
    bits = np.dtype(f"i{out.itemsize}")
    a, b = (x.astype(out.dtype, copy=False).view(bits) for x in (a, b))
    different = np.asarray(np.bitwise_xor(a, b))
    if different.shape == out.shape:
        np.multiply(different, mask.view(np.int8), out=different)
    else:
        different = np.multiply(different, mask.view(np.int8))
    np.bitwise_xor(different, b, out=out.view(bits))


def _relu(x: np.ndarray, y: np.ndarray) -> None:
    if y.dtype.kind == "f":
        np.clip(x, 0, math.inf, out=y)  # -0 of -0, in a third of np.maximum's time for a number
    else:
        np.maximum(x, 0, out=y)


def _sign(x: np.ndarray, y: np.ndarray) -> None:
    """Of floats by two comparisons: np.sign branches, which takes twenty times as long."""
    if y.dtype.kind != "f":
        np.sign(x, out=y)
        return
    above, below, nan = np.greater(x, 0), np.less(x, 0), np.isnan(x)
    np.subtract(above, below, out=y, dtype=y.dtype)
    np.copyto(y, np.nan, where=nan)


def write_sigmoid(x: np.ndarray, y: np.ndarray) -> None:
    np.negative(x, out=y)
    np.exp(y, out=y)
    np.add(y, 1, out=y)
    np.reciprocal(y, out=y)


def rung_attribute(node: Node) -> dict[str, str]:
    """The attribute `algo` where a node has it, for what is made of this one: gradients, and what
    fusions put in its place.
    """
    return {"algo": node.attrs["algo"]} if "algo" in node.attrs else {}


def _names_rung(activation: Node) -> bool:
    return settings.rung(ACTIVATION, activation.attrs.get("algo")) != AUTO


def _sigmoid_gradient(y: np.ndarray, g: np.ndarray, dx: np.ndarray) -> None:
    np.subtract(1, y, out=dx)
    np.multiply(dx, y, out=dx)
    np.multiply(dx, g, out=dx)


def _tanh_gradient(y: np.ndarray, g: np.ndarray, dx: np.ndarray) -> None:
    np.multiply(y, y, out=dx)
    np.subtract(1, dx, out=dx)
    np.multiply(dx, g, out=dx)


def _back(op: ActivationGradient, y: Node, dy: Node) -> Node:
    """The gradient of an activation y, by its rung or as the composition."""
    return op(y, dy, **rung_attribute(y)) if _names_rung(y) else op.composed(y, dy)


# ---- one input ----
neg_op = Elementwise("neg", np.negative, lambda x, y, dy: -dy)
exp_op = FloatElementwise("exp", np.exp, lambda x, y, dy: dy * y)
log_op = FloatElementwise("log", np.log, lambda x, y, dy: dy / x)
log1p_op = FloatElementwise("log1p", np.log1p, lambda x, y, dy: dy / (1 + x))
sqrt_op = FloatElementwise("sqrt", np.sqrt, lambda x, y, dy: 0.5 * dy / y)
rsqrt_op = FloatElementwise("rsqrt", _rsqrt, lambda x, y, dy: -0.5 * dy * (y * y * y), passes=True)
abs_op = Elementwise("abs", np.absolute, lambda x, y, dy: dy * sign_op(x))
sign_op: Elementwise = Elementwise(  # constant beside 0
    "sign", _sign, lambda x, y, dy: None, passes=True
)
tanh_op: Elementwise = FloatElementwise(
    "tanh", np.tanh, lambda x, y, dy: _back(tanh_gradient_op, y, dy), ladder=ACTIVATION
)
cos_op: Elementwise = FloatElementwise("cos", np.cos, lambda x, y, dy: -dy * sin_op(x))
sin_op: Elementwise = FloatElementwise("sin", np.sin, lambda x, y, dy: dy * cos_op(x))
sigmoid_op: Elementwise = FloatElementwise(
    "sigmoid", write_sigmoid, lambda x, y, dy: _back(sigmoid_gradient_op, y, dy), ladder=ACTIVATION
)
relu_op: Elementwise = Elementwise(
    "relu", _relu, lambda x, y, dy: relu_gradient_op(y, dy, **rung_attribute(y)), ladder=ACTIVATION
)

# ---- two inputs ----
add_op = Elementwise("add", np.add, lambda a, b, y, dy: (dy, dy), with_const=lambda a, b: add(a, b))
sub_op = Elementwise(
    "sub", np.subtract, lambda a, b, y, dy: (dy, -dy), with_const=lambda a, b: sub(a, b)
)
mul_op = Elementwise(
    "mul", np.multiply, lambda a, b, y, dy: (dy * b, dy * a), with_const=lambda a, b: mul(a, b)
)
div_op = FloatElementwise(
    "div", np.divide, lambda a, b, y, dy: _quotient_gradients(b, y, dy),
    with_const=lambda a, b: div(a, b),
)  # fmt: skip

# dy where relu's input (or its output, which has the same sign) is positive, else 0
relu_gradient_op: Elementwise = Elementwise(
    "relu_gradient", _masked,
    lambda x, g, y, dy: (None, relu_gradient_op(x, dy, **rung_attribute(y))),
    scratch=True, ladder=ACTIVATION,
)  # fmt: skip
# those of sigmoid and tanh, of y, where a rung is named
sigmoid_gradient_op: ActivationGradient = ActivationGradient(
    "sigmoid_gradient", _sigmoid_gradient,
    lambda y, g, dx, u: (u * g * (1 - 2 * y), sigmoid_gradient_op(y, u, **rung_attribute(dx))),
    composed=lambda y, g: g * (y * (1 - y)),
)  # fmt: skip
tanh_gradient_op: ActivationGradient = ActivationGradient(
    "tanh_gradient", _tanh_gradient,
    lambda y, g, dx, u: (-2 * u * g * y, tanh_gradient_op(y, u, **rung_attribute(dx))),
    composed=lambda y, g: g * (1 - y * y),
)  # fmt: skip

# ---- an array and a number ----
add_byconst_op = WithConst("add_const", np.add, lambda x, c, y, dy: dy, identity=0, of_two=add_op)
mul_byconst_op = WithConst("mul_const", np.multiply, lambda x, c, y, dy: dy * c, 1, of_two=mul_op)
div_byconst_op = WithConst("div_const", np.divide, lambda x, c, y, dy: dy / c, identity=1)
const_sub_op = WithConst(
    "rsub_const", lambda x, c, y: np.subtract(c, x, y), lambda x, c, y, dy: -dy,
    of_two=lambda x, c: sub_op(c, x),
)  # fmt: skip
const_div_op = WithConst(
    "rdiv_const", lambda x, c, y: np.divide(c, x, y), lambda x, c, y, dy: -(dy / x) * y
)
cast_op = CastOp()
for _amplifies in (exp_op, log_op, log1p_op, rsqrt_op, const_div_op):
    _amplifies.autocast = "float32"  # a relative error of x grows, or these are parts of losses
cast_like_op = CastLikeOp()

# ---- arrays and several constants ----
clip_op = Parametric(
    "clip", ("low", "high"), _clip, lambda x, y, dy, low, high: clip_gradient_op(y, dy, low, high),
    check=lambda low, high: None if low <= high else f"low {low} is above high {high}",
    integral=True,
)  # fmt: skip
# g where x (or clip's output, which lies alike) is strictly between the bounds, else 0
clip_gradient_op: Parametric = Parametric(
    "clip_gradient", ("low", "high"), _clip_gradient, mask=True,
    gradient=lambda x, g, y, dy, low, high: (None, clip_gradient_op(x, dy, low, high)),
)  # fmt: skip


def _quotient_gradients(b: Node, y: Node, dy: Node) -> tuple[Node, Node]:
    """Of a / b: the second is finite where the first, y and the true value are; dy · y may overflow
    or vanish where the quotient by b would come back.
    """
    of_a = dy / b
    return of_a, -of_a * y


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    )


def number_of(value: Any) -> int | float:
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value


def as_node(value: Any) -> Node:
    """A node as it is; an array as a constant."""
    return value if isinstance(value, Node) else constant_op(value)


Binary = Callable[[Any, Any], Node]


def joined(words: str, nodes: Op, by_number: Callable, of_number: Callable) -> Binary:
    """A function of a and b, each a node, a number or an array: of two nodes, of a node and a
    number, or, with the node first too, of a number and a node.
    """

    def function(a: Any, b: Any) -> Node:
        if is_number(b):
            return by_number(a, number_of(b))
        return of_number(b, number_of(a)) if is_number(a) else nodes(as_node(a), as_node(b))

    function.__doc__ = f"{words}, where each is a node, a number or an array."
    return function


add: Binary = joined("a + b", add_op, add_byconst_op, add_byconst_op)
sub: Binary = joined("a - b", sub_op, lambda a, b: add_byconst_op(a, -b), const_sub_op)
mul: Binary = joined("a · b element by element", mul_op, mul_byconst_op, mul_byconst_op)
div: Binary = joined("a / b element by element", div_op, div_byconst_op, const_div_op)


# The docstrings of the operators.
for _op, _text in (
    (neg_op, "-x."),
    (exp_op, "e to the power x."),
    (log_op, "The natural logarithm of x: -inf at 0, NaN below."),
    (log1p_op, "The natural logarithm of 1 + x, exact for small x too."),
    (sqrt_op, "The square root of x, NaN below 0."),
    (rsqrt_op, "1 / sqrt(x)."),
    (abs_op, "|x|; its gradient at 0 is 0."),
    (sign_op, "1 where x is positive, -1 where it is negative, else 0 or NaN as x is."),
    (tanh_op, "The hyperbolic tangent of x."),
    (cos_op, "The cosine of x, in radians."),
    (sin_op, "The sine of x, in radians."),
    (sigmoid_op, "1 / (1 + exp(-x))."),
    (relu_op, "max(x, 0); its gradient at 0 is 0."),
    (add_op, "a + b, broadcast against each other."),
    (sub_op, "a - b, broadcast against each other."),
    (mul_op, "a · b element by element, broadcast against each other."),
    (div_op, "a / b in floats, broadcast against each other."),
    (relu_gradient_op, "g where x is positive, else 0: the gradient of relu."),
    (sigmoid_gradient_op, "g · y · (1 - y): the gradient of sigmoid, of its output y."),
    (tanh_gradient_op, "g · (1 - y²): the gradient of tanh, of its output y."),
    (add_byconst_op, "x + const."),
    (mul_byconst_op, "x · const."),
    (div_byconst_op, "x / const, in floats."),
    (const_sub_op, "const - x."),
    (const_div_op, "const / x, in floats."),
    (clip_op, "x within [low, high]; its gradient is 0 at the bounds and beyond."),
    (clip_gradient_op, "g where x lies between low and high, else 0: the gradient of clip."),
):
    _op.doc = _text
