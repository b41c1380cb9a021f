"""Where values come from: fed Variables, Parameters that live on a device, constants and filled
arrays.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..errors import GraphError, ShapeError
from ..graph.node import Node, Op, Spec
from ..graph.shapes import FLOAT32

Shape = tuple[int, ...]
ANYWHERE = object()  # the home of a Parameter that the first executor to use it may choose


class PlaceholderOp(Op):
    """A value that the caller feeds at each run."""

    name = "Variable"
    leaf = "feed"

    def __call__(self, name: str | None = None, shape: Any = None, dtype: Any = None) -> Node:  # type: ignore[override]
        attrs: dict[str, Any] = {}
        if shape is not None:
            attrs["shape"] = _extents(f"Variable {name}", shape, free=True)
        if dtype is not None:
            attrs["dtype"] = np.dtype(dtype)
        node = Node(self, (), attrs, name)
        if "shape" in attrs and None not in attrs["shape"]:
            node.spec = Spec(attrs["shape"], attrs.get("dtype"), dtype is not None)
        return node

    def infer(self, node: Node, *specs: Spec) -> Spec:
        raise GraphError(f"{node.name} is not fed; its shape is unknown [{node.where}]")


class ConstantOp(Op):
    """An array that belongs to the graph."""

    name = "constant"
    leaf = "constant"

    def __call__(self, value: Any, name: str | None = None, dtype: Any = None) -> Node:  # type: ignore[override]
        array = np.array(value, dtype=dtype, order="C")
        if (
            dtype is None
            and isinstance(value, (int, float, list, tuple))
            and array.dtype.kind == "f"
        ):
            array = array.astype(FLOAT32)
        if array.dtype.kind not in "fiub":
            raise ShapeError(f"constant: expected numbers, got an array of {array.dtype}")
        array.flags.writeable = False
        node = Node(self, (), {"value": array}, name)
        declared = dtype is not None or array.dtype == FLOAT32
        node.spec = Spec(array.shape, array.dtype, declared)
        return node


class FullOp(Op):
    """An array with one number everywhere; costs a fill and no input."""

    name = "full"
    kernel = "fill"
    filled = True
    any_dtype = True

    def __call__(  # type: ignore[override]
        self, shape: Shape, value: float, dtype: Any = FLOAT32, name: str | None = None
    ) -> Node:
        kind = np.dtype(dtype)
        attrs = {"shape": _extents("full", shape), "value": kind.type(value).item(), "dtype": kind}
        node = Node(self, (), attrs, name)
        node.spec = self.infer(node)
        return node

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return Spec(node.attrs["shape"], node.attrs["dtype"], declared=False)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        arrays[0].fill(node.attrs["value"])

    def scalars(self, node: Node) -> tuple[float]:
        value = float(np.float32(node.attrs["value"]))
        if node.attrs["dtype"].kind != "f" and value != node.attrs["value"]:
            raise GraphError(
                f"full: {node.attrs['value']} passes no float32 and native devices cannot fill "
                f"with it; use ad.constant [{node.where}]"
            )
        return (value,)


class FillLikeOp(Op):
    """`value` in the shape of another node, whose own values are never computed for it."""

    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self.value = value

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]

    def simplify(self, node: Node) -> Node:
        assert node.spec is not None
        return full_op(node.spec.shape, self.value, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


class ParameterOp(Op):
    """A value that lives on a device between runs."""

    name = "Parameter"
    leaf = "state"

    def infer(self, node: Node, *specs: Spec) -> Spec:
        assert isinstance(node, Parameter)
        return Spec(node.shape, node.dtype, node.declared)


def _extents(what: str, shape: Any, free: bool = False) -> tuple:
    """A shape as a tuple of non-negative numbers, or None where an extent may be free."""
    try:
        extents = tuple(None if free and n is None else operator.index(n) for n in shape)
    except TypeError:
        extents = (-1,)
    if any(n is not None and n < 0 for n in extents):
        raise ShapeError(
            f"{what}: {shape!r} is no shape, expected a tuple of extents such as (3, 4)"
        )
    return extents


placeholder_op = PlaceholderOp()
constant_op = ConstantOp()
full_op = FullOp()
oneslike_op = FillLikeOp("ones_like", 1.0)
zeroslike_op = FillLikeOp("zeros_like", 0.0)
parameter_op = ParameterOp()


def Variable(name: str | None = None, shape: Any = None, dtype: Any = None) -> Node:
    """A value that is fed at run time.

    `shape` may declare extents, None for any (`(None, 784)`); `dtype` may declare a dtype. What is
    declared is checked when fed. Without a dtype, floats that are fed take the dtype of the graph's
    Parameters; where there are none numpy keeps the fed array's. Native devices compute in float32.
    """
    return placeholder_op(name, shape, dtype)


class Parameter(Node):
    """A trainable value with storage of its own on one device, shared by every executor that uses
    it.

    The storage is made at the first use, where the executor runs. `asnumpy()` reads it,
    `set(array)` writes it, `to(ctx)` moves it. Without `dtype` it keeps the array's floating dtype
    on numpy and is float32 on native devices.
    """

    __slots__ = ("storage", "initial", "declared", "dtype", "trainable", "home")
    moves = 0  # counts calls of `to`, which executors watch

    def __init__(
        self, value: Any, name: str | None = None, dtype: Any = None, trainable: bool = True
    ) -> None:
        array = np.array(value, dtype=dtype, order="C")
        if array.dtype.kind not in "fiub":
            raise ShapeError(
                f"Parameter {name or ''}: expected numbers, got an array of {array.dtype}"
            )
        if (
            dtype is None
            and array.dtype.kind == "f"
            and not isinstance(value, (np.ndarray, np.generic))
        ):
            array = array.astype(FLOAT32)
        super().__init__(parameter_op, (), {}, name)
        self.initial: np.ndarray | None = array
        self.dtype = array.dtype
        self.declared = dtype is not None or array.dtype != np.float64
        self.trainable = trainable
        self.storage: Any = None  # an executor's state.Slot once one has placed it
        self.home: Any = ANYWHERE  # the context that `to` asked for
        self.spec = Spec(array.shape, self.dtype if self.declared else None, self.declared)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles take the value along and are Parameters of their own, which live where
        they are used first.
        """
        value = self.asnumpy().astype(self.dtype, copy=False)
        dtype = self.dtype if self.declared else None
        return type(self), (value, self.name, dtype, self.trainable)

    @property
    def shape(self) -> Shape:
        """The shape of the value."""
        assert self.spec is not None
        return self.spec.shape

    def asnumpy(self) -> np.ndarray:
        """A copy of the value as it is now."""
        if self.storage is not None:
            return self.storage.asnumpy()
        assert self.initial is not None
        return self.initial.copy()

    def set(self, value: Any) -> None:
        """Replaces the value; shape and device stay. ShapeError when the shape differs."""
        array = np.asarray(value)
        if array.shape != self.shape or not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise ShapeError(
                f"Parameter {self.name}: set() got {array.dtype} {array.shape}, expected "
                f"{self.dtype} {self.shape}"
            )
        if self.storage is not None:
            self.storage.write(array)
        else:
            self.initial = np.array(array, dtype=self.dtype, order="C")

    def to(self, ctx: Any) -> None:
        """Moves the storage to another device (None for numpy); executors there then use it."""
        value = self.asnumpy()
        self.storage = None
        self.initial = value.astype(self.dtype, copy=False)
        self.home = ctx
        Parameter.moves += 1
