"""Elementwise operators: arithmetic, comparisons, activations and casts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .... import functional as F
from ...package import onnx_package
from ..call import Call
from ..registry import Unfit, graph, host
from ..walk import STORED


def wide(x: np.ndarray) -> np.ndarray:
    """Floats of fewer than 32 bits as float32, in which they are computed."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and not is_integer(x) else x


def is_integer(x: np.ndarray) -> bool:
    """True for numpy's integers and truth values."""
    return x.dtype.kind in "iub"


def unary(names: str, of_nodes: Callable[..., Any] | None, of_arrays: Callable[..., Any]) -> None:
    """Registers both rules of a function of one array."""
    if of_nodes is not None:
        graph(names)(lambda call, x: of_nodes(x))
    host(names)(lambda call, x: np.asarray(of_arrays(wide(x))).astype(x.dtype))


erf = np.vectorize(math.erf, otypes=[np.float64])

_FUNCTIONS: tuple[tuple[str, Any, Any], ...] = (
    ("Abs", F.abs, np.abs), ("Neg", F.neg, np.negative), ("Exp", F.exp, np.exp),
    ("Log", F.log, np.log), ("Sqrt", F.sqrt, np.sqrt), ("Sin", F.sin, np.sin),
    ("Cos", F.cos, np.cos), ("Tan", F.tan, np.tan), ("Asin", F.asin, np.arcsin),
    ("Acos", F.acos, np.arccos), ("Atan", F.atan, np.arctan), ("Sinh", F.sinh, np.sinh),
    ("Cosh", F.cosh, np.cosh), ("Asinh", F.asinh, np.arcsinh), ("Acosh", F.acosh, np.arccosh),
    ("Atanh", F.atanh, np.arctanh), ("Tanh", F.tanh, np.tanh), ("Floor", F.floor, np.floor),
    ("Ceil", F.ceil, np.ceil), ("Round", F.round, np.round), ("Sign", F.sign, np.sign),
    ("Reciprocal", F.reciprocal, np.reciprocal), ("Erf", F.erf, erf),
    ("Relu", F.relu, lambda x: np.maximum(x, 0)),
    ("Sigmoid", F.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    ("Softplus", F.softplus, lambda x: np.logaddexp(x, 0)),
    ("Softsign", lambda x: F.div(x, F.add(F.abs(x), 1.0)), lambda x: x / (1 + np.abs(x))),
    ("HardSwish", F.hardswish, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    ("Mish", lambda x: F.mul(x, F.tanh(F.softplus(x))),
     lambda x: x * np.tanh(np.logaddexp(x, 0))),
)  # fmt: skip
for _name, _nodes, _arrays in _FUNCTIONS:
    unary(_name, _nodes, _arrays)


def aligned(call: Call, a: Any, b: Any, reshape: Callable[..., Any]) -> Any:
    """b as the attributes of versions below 7 align it with a."""
    axis = call.get("axis")
    if call.version >= 7 or axis is None or not call.get("broadcast", 0):
        return b
    behind = len(a.shape) - axis % len(a.shape) - len(b.shape)
    return reshape(b, (*b.shape, *[1] * max(behind, 0)))


def binary(names: str, of_nodes: Callable[..., Any], of_arrays: Callable[..., Any],
           kinds: str = "fi", boolean: bool = False) -> None:  # fmt: skip
    """Registers both rules of a function of two arrays."""
    graph(names, kinds)(lambda call, a, b: of_nodes(a, aligned(call, a, b, F.reshape)))

    def compute(call: Call, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        made = of_arrays(wide(a), wide(aligned(call, a, b, np.reshape)))
        return np.asarray(made).astype(bool if boolean else a.dtype)

    host(names)(compute)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, of integers rounded towards zero."""
    if not is_integer(a):
        return a / b
    made = np.floor_divide(a, b)
    return made + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


binary("Add", F.add, np.add)
binary("Sub", F.sub, np.subtract)
binary("Mul", F.mul, np.multiply)
binary("Div", F.div, quotient, "f")
_COMPARISONS: tuple[tuple[str, Any, Any], ...] = (
    ("Less", F.less, np.less), ("LessOrEqual", F.less_equal, np.less_equal),
    ("Greater", F.greater, np.greater), ("GreaterOrEqual", F.greater_equal, np.greater_equal),
)  # fmt: skip
for _name, _nodes, _arrays in _COMPARISONS:
    binary(_name, _nodes, _arrays, boolean=True)
_LOGIC: tuple[tuple[str, Any, Any], ...] = (
    ("And", F.logical_and, np.logical_and), ("Or", F.logical_or, np.logical_or),
    ("Xor", F.logical_xor, np.logical_xor),
)  # fmt: skip
for _name, _nodes, _arrays in _LOGIC:
    binary(_name, _nodes, _arrays, "b", boolean=True)
_BITS: tuple[tuple[str, Any], ...] = (
    ("BitwiseAnd", np.bitwise_and), ("BitwiseOr", np.bitwise_or), ("BitwiseXor", np.bitwise_xor),
)  # fmt: skip
for _name, _arrays in _BITS:
    host(_name)(lambda call, a, b, f=_arrays: f(a, b))
host("BitwiseNot")(lambda call, x: np.invert(x))
host("Not")(lambda call, x: np.logical_not(x))
graph("Not", "b")(lambda call, x: F.logical_not(x))


@graph("Equal", "fi")
def _equal(call: Call, a: Any, b: Any) -> Any:
    return F.equal(a, aligned(call, a, b, F.reshape))


@host("Equal")
def _equal_arrays(call: Call, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.equal(a, aligned(call, a, b, np.reshape)).astype(bool)


@host("BitShift")
def _bit_shift(call: Call, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (np.left_shift if call.get("direction") == "LEFT" else np.right_shift)(a, b)


@graph("Mod", "f")
def _mod(call: Call, a: Any, b: Any) -> Any:
    return F.fmod(a, b) if call.get("fmod", 0) else F.remainder(a, b)


@host("Mod")
def _mod_arrays(call: Call, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    made = (np.fmod if call.get("fmod", 0) else np.mod)(wide(a), wide(b))
    return np.asarray(made).astype(a.dtype)


@graph("Pow", "f")
def _pow(call: Call, a: Any, b: Any) -> Any:
    return F.pow(a, aligned(call, a, b, F.reshape))


@host("Pow")
def _pow_arrays(call: Call, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    b = aligned(call, a, b, np.reshape)
    floats = is_integer(a) and (not is_integer(b) or bool((b < 0).any()))
    return np.asarray(np.power(a.astype(np.float64) if floats else wide(a), wide(b))).astype(
        a.dtype
    )


def variadic(name: str, of_nodes: Callable[..., Any], of_arrays: Callable[..., Any]) -> None:
    """Registers both rules of a function of any number of arrays."""
    graph(name, "f")(lambda call, *xs: functools.reduce(of_nodes, xs))
    host(name)(
        lambda call, *xs: np.asarray(functools.reduce(of_arrays, map(wide, xs))).astype(xs[0].dtype)
    )


variadic("Max", F.maximum, np.maximum)
variadic("Min", F.minimum, np.minimum)
variadic("Sum", F.add, np.add)


@graph("Mean")
def _mean(call: Call, *xs: Any) -> Any:
    return F.div(functools.reduce(F.add, xs), float(len(xs)))


@host("Mean")
def _mean_arrays(call: Call, *xs: np.ndarray) -> np.ndarray:
    return (functools.reduce(np.add, map(wide, xs)) / len(xs)).astype(xs[0].dtype)


def _bounds(call: Call, low: Any, high: Any) -> tuple[Any, Any]:
    low = call.get("min") if low is None else np.asarray(low).item()
    high = call.get("max") if high is None else np.asarray(high).item()
    return low, high


@graph("Clip", known=(1, 2))
def _clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    low, high = _bounds(call, low, high)
    if low is not None and high is not None and low > high:
        raise Unfit
    return F.clip(x, low, high)


@host("Clip")
def _clip_arrays(call: Call, x: np.ndarray, low: Any = None, high: Any = None) -> np.ndarray:
    low, high = _bounds(call, low, high)
    made = wide(x)
    made = made if low is None else np.maximum(made, np.asarray(low).astype(made.dtype))
    made = made if high is None else np.minimum(made, np.asarray(high).astype(made.dtype))
    return made.astype(x.dtype)


@graph("Where", "fiub")
def _where(call: Call, condition: Any, a: Any, b: Any) -> Any:
    return F.where(condition, a, b)


host("Where")(lambda call, condition, a, b: np.where(condition, a, b))


@graph("PRelu")
def _prelu(call: Call, x: Any, slope: Any) -> Any:
    if call.version < 7 and len(slope.shape) == 1 and slope.shape[0] > 1:
        slope = F.reshape(slope, (-1, *[1] * (len(x.shape) - 2)))
    return F.sub(F.relu(x), F.mul(slope, F.relu(F.neg(x))))


@host("PRelu")
def _prelu_arrays(call: Call, x: np.ndarray, slope: np.ndarray) -> np.ndarray:
    return np.where(x < 0, x * slope, x).astype(x.dtype)


# ---- activations with parameters: both rules from one formula over a namespace ----
class _Arrays:
    """The functions that formulas use, of arrays."""

    exp, maximum, minimum, where, tanh, abs = (
        np.exp, np.maximum, np.minimum, np.where, np.tanh, np.abs
    )  # fmt: skip
    greater, less = np.greater, np.less
    erf = staticmethod(erf)

    @staticmethod
    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    @staticmethod
    def clip(x: np.ndarray, low: float, high: float) -> np.ndarray:
        return np.clip(x, low, high)

    @staticmethod
    def elu(x: np.ndarray, alpha: float) -> np.ndarray:
        return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def formula(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers both rules of a formula f(namespace, call, x)."""

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        graph(name)(lambda call, x: f(F, call, x))
        host(name)(lambda call, x: np.asarray(f(_Arrays, call, wide(x))).astype(x.dtype))
        return f

    return register


@formula("Elu")
def _elu(ns: Any, call: Call, x: Any) -> Any:
    return ns.elu(x, call.get("alpha", 1.0))


@formula("Celu")
def _celu(ns: Any, call: Call, x: Any) -> Any:
    alpha = call.get("alpha", 1.0)
    return ns.elu(x * (1 / alpha), 1.0) * alpha


@formula("Selu")
def _selu(ns: Any, call: Call, x: Any) -> Any:
    alpha, gamma = call.get("alpha", 1.6732632), call.get("gamma", 1.050701)
    return ns.elu(x, alpha) * gamma


@formula("LeakyRelu")
def _leaky_relu(ns: Any, call: Call, x: Any) -> Any:
    return ns.where(ns.less(x, 0.0), x * call.get("alpha", 0.01), x)


@formula("ThresholdedRelu")
def _thresholded_relu(ns: Any, call: Call, x: Any) -> Any:
    return ns.where(ns.greater(x, call.get("alpha", 1.0)), x, 0.0 * x)


@formula("HardSigmoid")
def _hard_sigmoid(ns: Any, call: Call, x: Any) -> Any:
    return ns.clip(x * call.get("alpha", 0.2) + call.get("beta", 0.5), 0.0, 1.0)


@formula("Swish")
def _swish(ns: Any, call: Call, x: Any) -> Any:
    return x * ns.sigmoid(x * call.get("alpha", 1.0))


@formula("Gelu")
def _gelu(ns: Any, call: Call, x: Any) -> Any:
    if call.get("approximate", "none") == "tanh":
        return 0.5 * x * (1.0 + ns.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + ns.erf(x * (1 / math.sqrt(2))))


@formula("Affine")
def _affine(ns: Any, call: Call, x: Any) -> Any:
    return x * call.get("alpha", 1.0) + call.get("beta", 0.0)


@formula("ScaledTanh")
def _scaled_tanh(ns: Any, call: Call, x: Any) -> Any:
    return ns.tanh(x * call.get("beta", 1.0)) * call.get("alpha", 1.0)


@formula("ParametricSoftplus")
def _parametric_softplus(ns: Any, call: Call, x: Any) -> Any:
    return F.softplus(x * call.get("beta", 1.0)) * call.get("alpha", 1.0)


@host("Shrink")
def _shrink(call: Call, x: np.ndarray) -> np.ndarray:
    bias, limit = call.get("bias", 0.0), call.get("lambd", 0.5)
    return np.where(x < -limit, x + bias, np.where(x > limit, x - bias, 0)).astype(x.dtype)


graph("IsNaN")(lambda call, x: F.isnan(x))
host("IsNaN")(lambda call, x: np.isnan(x).astype(bool))


@host("IsInf")
def _is_inf(call: Call, x: np.ndarray) -> np.ndarray:
    x = wide(x)
    positive = (x == np.inf) & bool(call.get("detect_positive", 1))
    return positive | ((x == -np.inf) & bool(call.get("detect_negative", 1)))


# ---- dtypes ----
def dtype_of(code: int) -> np.dtype:
    """The numpy dtype of a code of TensorProto."""
    return np.dtype(onnx_package("onnx.helper").tensor_dtype_to_np_dtype(code))


_CAST = (*STORED, "int32", "int64")  # what kernels cast to


def cast(x: np.ndarray, dtype: np.dtype, saturate: bool, rounding: str = "up") -> np.ndarray:
    """x in another dtype; floats of 8 bits saturate on request."""
    if x.dtype.kind in "OUST":
        if dtype.kind in "OUST":
            return x
        return np.vectorize(float, otypes=[np.float64])(x).astype(dtype)
    if dtype.kind in "OUST":
        return np.vectorize(str, otypes=[object])(wide(x))
    if dtype.name == "float8_e8m0fnu":
        scaled = onnx_package("onnx.numpy_helper").to_float8e8m0
        return scaled(x.astype(np.float32), saturate, rounding).astype(dtype)
    if dtype.name.startswith("float8") and saturate:
        return np.asarray(onnx_package("onnx.numpy_helper").saturate_cast(wide(x), dtype))
    if dtype.name.startswith("float4"):
        return wide(x).astype(np.float32).astype(dtype)
    if "int2" == dtype.name[-4:] or "int4" == dtype.name[-4:]:
        return wide(x).astype(np.int64).astype(dtype)
    return wide(x).astype(dtype)


def _wanted(call: Call) -> np.dtype:
    """The dtype of a Cast; version 1 names it."""
    code = call.get("to")
    return dtype_of(
        onnx_package().TensorProto.DataType.Value(code) if isinstance(code, str) else code
    )


def _cast_to(x: Any, dtype: Any) -> Any:
    """A cast that kernels make: floats become integers on the host, by numpy's rule."""
    if str(dtype) not in _CAST or (getattr(x.dtype, "kind", "f") == "f" and dtype.kind != "f"):
        raise Unfit
    return F.astype(x, dtype)


graph("Cast", "fib")(lambda call, x: _cast_to(x, _wanted(call)))
graph("CastLike", "fib")(lambda call, x, like: _cast_to(x, like.dtype))


@host("Cast")
def _cast_arrays(call: Call, x: np.ndarray) -> np.ndarray:
    saturate = bool(call.get("saturate", 1))
    return cast(x, _wanted(call), saturate, call.get("round_mode", "up"))


@host("CastLike")
def _cast_like(call: Call, x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return cast(x, like.dtype, bool(call.get("saturate", 1)), call.get("round_mode", "up"))


@host("BitCast")
def _bit_cast(call: Call, x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(dtype_of(call.get("to"))).reshape(x.shape)
