"""Reductions beyond sums: max, min, prod, var, argmax, argmin, logsumexp, and the running sum.

All but var come down to kernels over the middle axis of (outer, n, inner): neighbouring axes are
merged, and reduced axes that lie apart are brought together by a transpose. Several reduced axes
count as one, in the order of their elements in memory. NaN: max, min, prod and logsumexp give NaN
where there is one; argmax and argmin point at the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..graph.node import Node, Op, Spec
from ..graph.shapes import floating, normalize_axes
from ..graph.signature import Axes, Bool, Int, Signature, declared
from .comparison import where_op
from .elementwise import cast_op, exp_op
from .leaf import full_op
from .movement import reshape_op, transpose_op
from .reduce import expand_like_op, mean_op

INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)
Order = list[int] | None
Shape = tuple[int, ...]


# ---- kernels over the middle axis: x (outer, n, inner) to (outer, inner), or to x's shape ----


class Middle(Op):
    """A kernel over the middle axis. `keeps` says that the result has x's shape, `dtype` gives the
    result's dtype from x's, which is the same unless the kernel is `free` to take any.
    """

    def grouped(self, x: Node, dtype: np.dtype, order: Order, shape: Shape) -> Node:
        """x as this kernel takes it: in the result's dtype, with its axes in order and merged."""
        assert x.spec is not None
        if not self.any_dtype and x.spec.dtype != dtype:
            x = cast_op(x, dtype)
        return reshape_op(x if order is None else transpose_op(x, order), shape)

    def __init__(
        self,
        name: str,
        numpy: Callable,
        dtype: Callable,
        keeps: bool = False,
        free: bool = False,
        workspace: Callable = lambda x, y: [],
        outputs: int = 1,
        signature: Signature = Signature("x"),  # noqa: B008 (never changed)
    ) -> None:
        self.name = self.kernel = name
        self.any_dtype = free
        self._numpy = numpy
        self._dtype = dtype
        self._keeps = keeps
        self._workspace = workspace
        self.outputs = outputs
        self.signature = signature

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        outer, n, inner = specs[0].shape
        shape = (outer, n, inner) if self._keeps else (outer, inner)
        spec = Spec(shape, self._dtype(specs[0].dtype), specs[0].declared)
        return spec if self.outputs == 1 else (spec,) * self.outputs

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return self._workspace(inputs[0], outputs[0])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        self._numpy(*arrays, **node.attrs)

    def scalars(self, node: Node) -> tuple[int, ...]:
        return tuple(int(value) for value in node.attrs.values())

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size


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


def _cumsum(x: np.ndarray, y: np.ndarray, reverse: bool) -> None:
    step = -1 if reverse else 1
    dtype = np.float64 if y.dtype.kind == "f" else None  # roundings add up
    np.cumsum(x[:, ::step], axis=1, dtype=dtype, out=y[:, ::step])


def _prod(x: np.ndarray, y: np.ndarray) -> None:
    """Floats multiply in float64: roundings add up, and what is on the way may not fit float32."""
    dtype = np.float64 if y.dtype.kind == "f" else None
    np.copyto(y, np.prod(x, axis=1, dtype=dtype), casting="same_kind")


def _others(x: np.ndarray, before: np.ndarray, after: np.ndarray, y: np.ndarray) -> None:
    n = x.shape[1]
    before[:, :1] = after[:, n - 1 :] = 1
    if n > 1:
        np.cumprod(x[:, :-1], axis=1, dtype=np.float64, out=before[:, 1:])
        np.cumprod(x[:, :0:-1], axis=1, dtype=np.float64, out=after[:, n - 2 :: -1])
    np.multiply(before, after, out=y, casting="same_kind")


def _others_workspace(x: Spec, y: Spec) -> list[Spec]:
    return [x._replace(dtype=np.dtype(np.float64))] * 2


def _others_tangent(
    x: np.ndarray, g: np.ndarray, before: np.ndarray, change_before: np.ndarray,
    y: np.ndarray, dy: np.ndarray,
) -> None:  # fmt: skip
    """Writes `_others` of x to y and its change along g to dy: from the front, then from behind."""
    if not x.size:
        return
    product, change = np.ones(x[:, 0].shape), np.zeros(x[:, 0].shape)
    for k in range(x.shape[1]):
        before[:, k], change_before[:, k] = product, change
        product, change = product * x[:, k], change * x[:, k] + product * g[:, k]
    product, change = np.ones(x[:, 0].shape), np.zeros(x[:, 0].shape)
    for k in reversed(range(x.shape[1])):
        dy[:, k] = change_before[:, k] * product + before[:, k] * change
        y[:, k] = before[:, k] * product
        product, change = product * x[:, k], change * x[:, k] + product * g[:, k]


def _same(dtype: np.dtype | None) -> np.dtype | None:
    return dtype


def _summed(dtype: np.dtype | None) -> np.dtype | None:
    """Integers add up and multiply as int64."""
    return INT64 if dtype is not None and dtype.kind != "f" else dtype


_middle_max = Middle("reduce_max", _along(np.max), _same)
_middle_min = Middle("reduce_min", _along(np.min), _same)
_middle_prod = Middle("reduce_prod", _prod, _summed)
_middle_logsumexp = Middle("reduce_logsumexp", _logsumexp, floating, workspace=_logsumexp_workspace)
_middle_argmax = Middle("argmax", _along(np.argmax), lambda dtype: INT64, free=True)
_middle_argmin = Middle("argmin", _along(np.argmin), lambda dtype: INT64, free=True)
_middle_match = Middle(
    "first_match", _match, lambda dtype: BOOL, keeps=True, free=True, signature=Signature("x", "y")
)
_middle_cumsum = Middle(
    "cumsum", _cumsum, _summed, keeps=True, signature=Signature("x", reverse=Bool())
)
_middle_others = Middle("prod_others", _others, floating, keeps=True, workspace=_others_workspace)
_middle_tangent = Middle(
    "prod_others_tangent", _others_tangent, floating, keeps=True, outputs=2,
    workspace=_others_workspace, signature=Signature("x", "g"),
)  # fmt: skip


# ---- reductions over any axes ----


def _around(shape: Shape, axes: Shape) -> tuple[Order, Shape]:
    """The shape (outer, n, inner) that puts `axes` in the middle, and the order that axes must have
    first, None where they lie side by side.
    """
    wide = [axis for axis in axes if shape[axis] != 1]
    between = range(wide[0], wide[-1]) if wide else ()
    order = None
    if any(axis not in axes and shape[axis] != 1 for axis in between):
        order = [axis for axis in range(len(shape)) if axis not in axes] + list(axes)
        shape = tuple(shape[axis] for axis in order)
        wide = list(range(len(shape) - len(axes), len(shape)))
    start, end = (wide[0], wide[-1] + 1) if wide else (0, 0)
    return order, tuple(math.prod(part) for part in (shape[:start], shape[start:end], shape[end:]))


def _in_place_of(result: Node, order: Order, before: Shape) -> Node:
    """A grouped result in the shape that x had before its axes were put in order."""
    if order is None:
        return reshape_op(result, before)
    moved = reshape_op(result, [before[axis] for axis in order])
    return transpose_op(moved, [int(axis) for axis in np.argsort(order)])


class Reduction(Op):
    """A reduction of x over `axis` (None: all); `keepdims` keeps the axes as extent 1."""

    signature = Signature("x", axis=Axes(None, also="axes"), keepdims=Bool(False))

    def __init__(
        self, name: str, middle: Middle, gradient: Callable | None = None, empty: bool = True
    ) -> None:
        self.name = name
        self._middle = middle
        self._gradient = gradient  # from x, y, the repeated dy and the axis
        self._empty = empty  # no elements have a result

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x = specs[0]
        axes = normalize_axes(node, node.attrs["axis"], len(x.shape))
        kept = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
        if not self._empty and x.size == 0 and 0 not in kept:
            raise node.error(f"{node.inputs[0].name} {x.shape} has no elements along axes {axes}")
        inner = self._middle.infer(node, x._replace(shape=(1, 1, 1)))
        if not node.attrs["keepdims"]:
            kept = tuple(n for axis, n in enumerate(kept) if axis not in axes)
        return inner._replace(shape=kept)  # type: ignore[union-attr]

    def simplify(self, node: Node) -> Node:
        x = node.inputs[0]
        assert x.spec is not None and node.spec is not None
        axes = normalize_axes(node, node.attrs["axis"], len(x.spec.shape))
        order, shape = _around(x.spec.shape, axes)
        x = self._middle.grouped(x, node.spec.dtype, order, shape)
        return reshape_op(self._middle(x), node.spec.shape)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        if self._gradient is None:
            return [None]
        x = node.inputs[0]
        return [self._gradient(x, node, expand_like_op(output_grad, x, **node.attrs), node.attrs)]


class AlongAxesOp(Op):
    """A kernel over the middle axis whose result has the shape of x, for any axes of x; a second
    input is a reduction of x over these axes.
    """

    def __init__(self, name: str, middle: Middle, gradient: Callable, signature: Signature) -> None:
        self.name = name
        self.signature = signature
        self._middle = middle
        self._gradient = gradient

    def infer(self, node: Node, *specs: Spec) -> Spec:
        normalize_axes(node, node.attrs["axis"], len(specs[0].shape))
        inner = self._middle.infer(node, specs[0]._replace(shape=(1, 1, 1)))
        return inner._replace(shape=specs[0].shape)  # type: ignore[union-attr]

    def simplify(self, node: Node) -> Node:
        x, *rest = node.inputs
        assert x.spec is not None and node.spec is not None
        before = x.spec.shape
        order, shape = _around(before, normalize_axes(node, node.attrs["axis"], len(before)))
        x = self._middle.grouped(x, node.spec.dtype, order, shape)
        rest = [reshape_op(y, (shape[0], shape[2])) for y in rest]
        attrs = {key: value for key, value in node.attrs.items() if key != "axis"}
        return _in_place_of(self._middle(x, *rest, **attrs), order, before)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return self._gradient(node, output_grad)


class OthersChangeOp(Op):
    """The change of `prod_others` of x along g, and, since it is symmetric, its gradient for g."""

    name = "prod_others_change"
    signature = Signature("x", "g", axis=Axes(None))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def simplify(self, node: Node) -> Node:
        x, g = node.inputs
        assert x.spec is not None
        before = x.spec.shape
        order, shape = _around(before, normalize_axes(node, node.attrs["axis"], len(before)))
        grouped = [_middle_tangent.grouped(y, node.spec.dtype, order, shape) for y in (x, g)]
        return _in_place_of(_middle_tangent(*grouped)[1], order, before)


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
max_op = Reduction("max", _middle_max, _to_extreme, empty=False)
min_op = Reduction("min", _middle_min, _to_extreme, empty=False)
prod_op = Reduction(
    "prod", _middle_prod, lambda x, y, dy, attrs: dy * _prod_others(x, axis=attrs["axis"])
)
logsumexp_op = Reduction("logsumexp", _middle_logsumexp, _softmax_times)
argmax_op = Reduction("argmax", _middle_argmax, empty=False)
argmin_op = Reduction("argmin", _middle_argmin, empty=False)
_correction = CorrectionOp()
_others_change = OthersChangeOp()

# True at the first element that equals the extreme y of its reduction (a NaN equals a NaN)
_first_match = AlongAxesOp(
    "first_match",
    _middle_match,
    lambda node, dy: [None, None],
    Signature("x", "y", axis=Axes(None)),
)
# for each element the product of all others, so that a zero among them does no harm
_prod_others: AlongAxesOp = AlongAxesOp(
    "prod_others",
    _middle_others,
    lambda node, dy: [_others_change(node.inputs[0], dy, axis=node.attrs["axis"])],
    Signature("x", axis=Axes(None)),
)
_cumulative: AlongAxesOp = AlongAxesOp(
    "cumsum",
    _middle_cumsum,
    lambda node, dy: [_cumulative(dy, axis=node.attrs["axis"], reverse=not node.attrs["reverse"])],
    Signature("x", axis=Int(-1), reverse=Bool(False)),
)


# What help says of each.
for _op, _text in (
    (max_op, "The largest element of x over the axes, NaN where there is one."),
    (min_op, "The smallest element of x over the axes, NaN where there is one."),
    (prod_op, "The product of the elements of x over the axes."),
    (logsumexp_op, "log Σ exp(x) over the axes, finite for any finite x."),
    (argmax_op, "The place of the first largest element over the axes, int64."),
    (argmin_op, "The place of the first smallest element over the axes, int64."),
):
    _op.doc = _text


@declared(axis=Int(), reverse=Bool())
def cumsum_op(x: Node, axis: int = -1, reverse: bool = False, name: str | None = None) -> Node:
    """Sums of x along one axis up to and with each element; from the end with `reverse`."""
    return _cumulative(x, axis=axis, reverse=reverse, name=name)


@declared(axis=Axes(), keepdims=Bool(), ddof=Int())
def var_op(x: Node, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Node:
    """The variance of x over `axis`: the mean of (x - mean)², times n / (n - ddof); NaN where
    n <= ddof.
    """
    centred = x - expand_like_op(mean_op(x, axis), x, axis=axis)
    variance = mean_op(centred * centred, axis, keepdims)
    return variance * _correction(x, axis=axis, ddof=ddof) if ddof else variance
