"""Reductions over axes: sums, means, max, min, prod, var, std, logsumexp, argmax, argmin; and the
opposites of a sum: summing to and repeating to another node's shape.

Floats keep their dtype, of 16 bits too: kernels accumulate in float32 or wider and round once, to
the result.

NaN: max, min, prod and logsumexp give NaN where there is one; argmax and argmin point at the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arguments.kinds import Axes, Bool, DType, Int, Name
from ..arguments.signature import Signature, declared
from ..dtypes import is_narrow
from ..graph.node import Node, Op
from ..graph.spec import FLOAT32, Spec, broadcast_axes, floating, merge_shapes, normalize_axes
from .axes import INT64, AlongAxesOp, AxisKernel, around, same_dtype, summed_dtype
from .comparison import where_op
from .elementwise import cast_like_op, cast_op, exp_op, mul_byconst_op, sqrt_op
from .leaf import full_op
from .movement import broadcast_to_op, reshape_op
from .scan import prod_others

__all__ = [
    "argmax_op", "argmin_op", "broadcastto_op", "expand_like_op", "logsumexp_op", "max_op",
    "mean_op", "min_op", "prod_op", "reduce_mean_op", "reduce_sum_op", "reducesumaxiszero_op",
    "std_op", "sum_op", "sum_to_like_op", "var_op",
]  # fmt: skip

BOOL = np.dtype(np.bool_)


class SumOp(Op):
    """Sum over `axis` (None: all), or the mean with `mean=True`; `keepdims` keeps the axes as
    extent 1.
    """

    name = "sum"
    kernel = "reduce_sum"
    tolerance = 1e-4
    autocast = "sum"
    signature = Signature(
        "x", axis=Axes(None, also="axes"), keepdims=Bool(False), name=Name(),
        dtype=DType(None, omitted=True),
    )  # fmt: skip

    def __init__(self, mean: bool = False) -> None:
        self._mean = mean
        self.name = "mean" if mean else "sum"
        self.doc = (
            f"The {self.name} of x over `axis` (None: all axes); `keepdims` keeps the axes as "
            "extent 1. Floats of 16 bits, which are added in float32, give float32 where `dtype` "
            "says so."
        )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        axes = normalize_axes(node, node.attrs["axis"], len(specs[0].shape))
        keepdims = node.attrs["keepdims"]
        shape = [1 if axis in axes else n for axis, n in enumerate(specs[0].shape)]
        if not keepdims:
            shape = [n for axis, n in enumerate(shape) if axis not in axes]
        if self._mean:
            made = Spec(tuple(shape), floating(specs[0].dtype), specs[0].declared)
        else:
            made = _sum_spec(specs[0], tuple(shape))
        wanted = node.attrs.get("dtype", made.dtype)
        if made.dtype is None or wanted == made.dtype:
            return made
        if wanted != FLOAT32 or made.dtype.kind != "f":
            raise node.error(
                f"dtype is {wanted}, expected {made.dtype}, or float32 for floats of 16 bits"
            )
        return made._replace(dtype=wanted) if is_narrow(made.dtype) else made

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        axes = normalize_axes(node, node.attrs["axis"], x.ndim)
        if (
            axes == tuple(range(len(axes)))
            and len(axes) < x.ndim
            and x.dtype.kind == "f"
            and x.size
        ):
            # numpy adds rows one after the other; a product adds them in blocks, faster and closer
            rows = x.size // y.size
            np.matmul(np.ones(rows, x.dtype), x.reshape(rows, y.size), out=y.reshape(y.size))
        else:
            np.sum(x, axis=axes, keepdims=node.attrs["keepdims"], dtype=y.dtype, out=y)
        if self._mean:
            np.multiply(y, y.size / x.size if x.size else np.nan, out=y)

    def scalars(self, node: Node) -> tuple[int, float]:
        spec = node.inputs[0].spec
        assert spec is not None and node.spec is not None
        axes = normalize_axes(node, node.attrs["axis"], len(spec.shape))
        count = spec.size // max(node.spec.size, 1)
        scale = (1.0 / count if count else float("nan")) if self._mean else 1.0
        return sum(1 << axis for axis in axes), scale

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        attrs = dict(axis=node.attrs["axis"], keepdims=node.attrs["keepdims"], mean=self._mean)
        x = node.inputs[0]
        grad = cast_like_op(output_grad, x) if "dtype" in node.attrs else output_grad
        return [expand_like_op(grad, x, **attrs)]

    def simplify(self, node: Node) -> Node | None:
        x, spec = node.inputs[0], node.inputs[0].spec
        assert spec is not None and node.spec is not None
        axes = normalize_axes(node, node.attrs["axis"], len(spec.shape))
        if x.op.constant_fill and spec.size:
            count = 1 if self._mean else spec.size // node.spec.size
            return full_op(node.spec.shape, x.attrs["value"] * count, node.spec.dtype)
        same = all(spec.shape[axis] == 1 for axis in axes) and spec.dtype == node.spec.dtype
        return reshape_op(node.inputs[0], node.spec.shape) if same else None

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size


class SumAxisZeroOp(Op):
    """The assignment's sum over axis 0; of a vector it has the shape (1,)."""

    name = "reducesumaxiszero"
    vocabulary = False
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if not specs[0].shape:
            raise node.error(f"expected at least one dimension, got {node.inputs[0].name} ()")
        return _sum_spec(specs[0], specs[0].shape[1:] or (1,))

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return reshape_op(sum_op(node.inputs[0], axis=0), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [broadcast_like_op(output_grad, node.inputs[0])]


class ExpandLikeOp(Op):
    """The opposite of a sum or mean: x repeated over `axis` to the shape of `like`."""

    name = "expand_like"
    vocabulary = False
    signature = Signature(
        "x", "like", axis=Axes(None, also="axes"), keepdims=Bool(False), mean=Bool(False)
    )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        dtype = floating(specs[0].dtype) if node.attrs["mean"] else specs[0].dtype
        return Spec(specs[1].shape, dtype, specs[0].declared)

    def simplify(self, node: Node) -> Node:
        x, like = node.inputs[0].spec, node.inputs[1].spec
        assert x is not None and like is not None
        axes = normalize_axes(node, node.attrs["axis"], len(like.shape))
        kept = tuple(1 if axis in axes else n for axis, n in enumerate(like.shape))
        count = like.size // max(x.size, 1)
        small = reshape_op(node.inputs[0], kept)
        if node.attrs["mean"]:
            small = mul_byconst_op(small, 1.0 / count if count else float("nan"))
        return broadcast_to_op(small, like.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        reduce = mean_op if node.attrs["mean"] else sum_op
        return [reduce(output_grad, axis=node.attrs["axis"], keepdims=node.attrs["keepdims"]), None]


class BroadcastLikeOp(Op):
    """x repeated to the shape of another node by numpy's rule; the assignment's
    `broadcastto_op(A, B)`.
    """

    name = "broadcast_like"
    vocabulary = False
    signature = Signature("x", "like")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if merge_shapes(specs[0].shape, specs[1].shape) != specs[1].shape:
            raise node.error(
                f"{node.inputs[0].name} {specs[0].shape} does not broadcast to "
                f"{node.inputs[1].name} {specs[1].shape}"
            )
        return Spec(specs[1].shape, specs[0].dtype, specs[0].declared)

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return broadcast_to_op(node.inputs[0], node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [sum_to_like_op(output_grad, node.inputs[0]), None]


class SumToLikeOp(Op):
    """The gradient of broadcasting: x summed over the axes along which `like` was repeated."""

    name = "sum_to_like"
    vocabulary = False
    signature = Signature("x", "like")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        if merge_shapes(specs[0].shape, specs[1].shape) != specs[0].shape:
            raise node.error(
                f"{node.inputs[0].name} {specs[0].shape} cannot be summed to "
                f"{node.inputs[1].name} {specs[1].shape}"
            )
        return Spec(specs[1].shape, specs[0].dtype, specs[0].declared)

    def simplify(self, node: Node) -> Node:
        x = node.inputs[0]
        assert node.spec is not None and x.spec is not None
        if x.spec.shape == node.spec.shape:
            return x
        total = sum_op(x, axis=broadcast_axes(node.spec.shape, x.spec.shape))
        return cast_op(reshape_op(total, node.spec.shape), node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [broadcast_like_op(output_grad, node.inputs[0]), None]


def _sum_spec(x: Spec, shape: tuple[int, ...]) -> Spec:
    """The spec of a sum of x: integers add up as int64."""
    integral = x.dtype is not None and x.dtype.kind != "f"
    return Spec(shape, np.dtype(np.int64) if integral else x.dtype, x.declared)


sum_op = reduce_sum_op = SumOp()
mean_op = reduce_mean_op = SumOp(mean=True)
reducesumaxiszero_op = SumAxisZeroOp()
expand_like_op = ExpandLikeOp()
broadcast_like_op = broadcastto_op = BroadcastLikeOp()
sum_to_like_op = SumToLikeOp()


def sum_to_like(x: Node, like: Node) -> Node:
    """`sum_to_like_op`, left out where both shapes are known to be equal."""
    known = x.spec is not None and like.spec is not None
    return x if known and x.spec.shape == like.spec.shape else sum_to_like_op(x, like)


# ---- reductions by kernels over one axis ----


def _logsumexp(x: np.ndarray, largest: np.ndarray, scratch: np.ndarray, y: np.ndarray) -> None:
    if not x.shape[1]:
        return y.fill(-np.inf)
    np.max(x, axis=1, keepdims=True, out=largest)
    np.copyto(largest, 0, where=np.isinf(largest))  # inf - inf would be NaN
    np.subtract(x, largest, out=scratch)
    np.exp(scratch, out=scratch)
    np.sum(scratch, axis=1, out=y)
    np.log(y, out=y)
    np.add(y, largest[:, 0], out=y)


def _logsumexp_workspace(x: Spec, y: Spec) -> list[Spec]:
    outer, _, inner = x.shape
    return [y._replace(shape=(outer, 1, inner)), y._replace(shape=x.shape)]


def _along(reduce: Callable) -> Callable:
    def numpy(x: np.ndarray, y: np.ndarray) -> None:
        if y.size:
            reduce(x, axis=1, out=y)

    return numpy


def _match(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> None:
    if not mask.size:
        return
    np.equal(x, y[:, None], out=mask)
    if x.dtype.kind == "f" and np.isnan(y).any():
        np.logical_or(mask, np.isnan(x), out=mask, where=np.isnan(y)[:, None])
    first = mask.argmax(axis=1)[:, None]
    found = np.take_along_axis(mask, first, 1)
    mask.fill(False)
    np.put_along_axis(mask, first, found, 1)


def _prod(x: np.ndarray, y: np.ndarray) -> None:
    """Floats multiply in float64: roundings add up, and what is on the way may not fit float32."""
    dtype = np.float64 if y.dtype.kind == "f" else None
    np.copyto(y, np.prod(x, axis=1, dtype=dtype), casting="same_kind")


_max_kernel = AxisKernel("reduce_max", _along(np.max), same_dtype, autocast="follow")
_min_kernel = AxisKernel("reduce_min", _along(np.min), same_dtype, autocast="follow")
_prod_kernel = AxisKernel("reduce_prod", _prod, summed_dtype)
_logsumexp_kernel = AxisKernel(
    "reduce_logsumexp", _logsumexp, floating, workspace=_logsumexp_workspace
)
_argmax_kernel = AxisKernel(
    "argmax", _along(np.argmax), lambda dtype: INT64, free=True, autocast="follow"
)
_argmin_kernel = AxisKernel(
    "argmin", _along(np.argmin), lambda dtype: INT64, free=True, autocast="follow"
)
_match_kernel = AxisKernel(
    "first_match", _match, lambda dtype: BOOL, keeps=True, free=True, signature=Signature("x", "y"),
    autocast="follow",
)  # fmt: skip


class Reduction(Op):
    """A reduction of x over `axis` (None: all); `keepdims` keeps the axes as extent 1."""

    signature = Signature("x", axis=Axes(None, also="axes"), keepdims=Bool(False))

    def __init__(
        self, name: str, kernel: AxisKernel, gradient: Callable | None = None, empty: bool = True
    ) -> None:
        self.name = name
        self._kernel = kernel
        self._gradient = gradient  # from x, y, the repeated dy and the axis
        self._empty = empty  # no elements have a result

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x = specs[0]
        axes = normalize_axes(node, node.attrs["axis"], len(x.shape))
        kept = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
        if not self._empty and x.size == 0 and 0 not in kept:
            raise node.error(f"{node.inputs[0].name} {x.shape} has no elements along axes {axes}")
        inner = self._kernel.infer(node, x._replace(shape=(1, 1, 1)))
        if not node.attrs["keepdims"]:
            kept = tuple(n for axis, n in enumerate(kept) if axis not in axes)
        return inner._replace(shape=kept)  # type: ignore[union-attr]

    def simplify(self, node: Node) -> Node:
        x = node.inputs[0]
        assert x.spec is not None and node.spec is not None
        axes = normalize_axes(node, node.attrs["axis"], len(x.spec.shape))
        order, shape = around(x.spec.shape, axes)
        x = self._kernel.grouped(x, node.spec.dtype, order, shape)
        return reshape_op(self._kernel(x), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        if self._gradient is None:
            return [None]
        x = node.inputs[0]
        return [self._gradient(x, node, expand_like_op(output_grad, x, **node.attrs), node.attrs)]


class CorrectionOp(Op):
    """n / (n - ddof) for the n elements of x that a reduction over `axis` joins."""

    name = "correction"
    signature = Signature("x", "*", axis=Axes(None), ddof=Int())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return Spec((), floating(specs[0].dtype), False)

    def simplify(self, node: Node) -> Node:
        x = node.inputs[0].spec
        assert x is not None and node.spec is not None
        axes = normalize_axes(node, node.attrs["axis"], len(x.shape))
        n = math.prod(x.shape[axis] for axis in axes)
        rest = n - node.attrs["ddof"]
        return full_op((), n / rest if rest > 0 else math.nan, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


def _to_extreme(x: Node, y: Node, dy: Node, attrs: dict) -> Node:
    return where_op(_first_match(x, y, axis=attrs["axis"]), dy, 0.0)


def _softmax_times(x: Node, y: Node, dy: Node, attrs: dict) -> Node:
    return dy * exp_op(x - expand_like_op(y, x, **attrs))


# The gradient of max and min goes to the first extreme, on every device: the first NaN where there
# is one.
max_op = Reduction("max", _max_kernel, _to_extreme, empty=False)
min_op = Reduction("min", _min_kernel, _to_extreme, empty=False)
prod_op = Reduction(
    "prod", _prod_kernel, lambda x, y, dy, attrs: dy * prod_others(x, axis=attrs["axis"])
)
logsumexp_op = Reduction("logsumexp", _logsumexp_kernel, _softmax_times)
argmax_op = Reduction("argmax", _argmax_kernel, empty=False)
argmin_op = Reduction("argmin", _argmin_kernel, empty=False)
_correction = CorrectionOp()


# True at the first element that equals the extreme y of its reduction (a NaN equals a NaN)
_first_match = AlongAxesOp(
    "first_match",
    _match_kernel,
    lambda node, dy: [None, None],
    Signature("x", "y", axis=Axes(None)),
)
# The docstrings of the operators.
for _op, _text in (
    (max_op, "The largest element of x over the axes, NaN where there is one."),
    (min_op, "The smallest element of x over the axes, NaN where there is one."),
    (prod_op, "The product of the elements of x over the axes."),
    (logsumexp_op, "log Σ exp(x) over the axes, finite for any finite x."),
    (argmax_op, "The index of the first largest element over the axes, int64."),
    (argmin_op, "The index of the first smallest element over the axes, int64."),
):
    _op.doc = _text


@declared(axis=Axes(), keepdims=Bool(), ddof=Int())
def var_op(x: Node, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Node:
    """The variance of x over `axis`: the mean of (x - mean)², times n / (n - ddof); NaN where
    n <= ddof.

    keepdims: keeps the axes that go, with extent 1.
    """
    centered = x - expand_like_op(mean_op(x, axis), x, axis=axis)
    variance = mean_op(centered * centered, axis, keepdims)
    return variance * _correction(x, axis=axis, ddof=ddof) if ddof else variance


@declared(axis=Axes(), keepdims=Bool(), ddof=Int())
def std_op(x: Node, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Node:
    """The standard deviation of x over `axis`, the root of `var_op`; its gradient is NaN where it
    is 0.

    keepdims: keeps the axes that go, with extent 1.
    """
    return sqrt_op(var_op(x, axis, keepdims, ddof))
