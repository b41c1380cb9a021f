"""The sources of values: fed Variables, Parameters that live on a device, constants and filled
arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ..arguments.kinds import Bool, DType, Input, Kind, Name, Number, Shape, shown
from ..arguments.signature import Signature, declared
from ..dtypes import bfloat16, host, rounded
from ..errors import GraphError, ShapeError
from ..graph.lines import where
from ..graph.node import Node, Op
from ..graph.spec import FLOAT32, Spec
from .extents import partial_of

__all__ = [
    "Parameter", "Variable", "constant", "full_op", "oneslike_op", "placeholder_op",
    "zeroslike_op",
]  # fmt: skip

ANYWHERE = object()  # the home of a Parameter that the first executor to use it may choose

# What has work recorded that reads or writes Parameters and has not run: the engines of Tensors.
unflushed: set[Any] = set()


def flush(writing: bool = True) -> None:
    """Runs what was recorded before state is read, or `writing` it, in another way."""
    for engine in list(unflushed):
        engine.flush(writing)


class Array(Kind):
    """A number, or numbers in an array or in lists."""

    expected = "a number or an array of numbers"

    def take(self, value: Any) -> Any:
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.dtype.kind not in "fiub" or isinstance(value, Node):
            raise TypeError
        return value


class Operand(Input):
    """A node, or a number or an array of numbers that becomes one."""

    expected = "a node, a number or an array of numbers"

    def take(self, value: Any) -> Any:
        if isinstance(value, Node):
            return value
        if isinstance(value, bool):
            raise TypeError
        return _ARRAY.take(value)

    def refusal(self, key: str, value: Any) -> str:
        if isinstance(value, bool):
            return f"{key} is the Python bool {value}; compare nodes by == or <, which makes a node"
        return Kind.refusal(self, key, value)


_ARRAY = Array()


class Scalar(Number):
    """A number, or a truth value as 1 or 0."""

    def __init__(self) -> None:
        super().__init__(nan=True)

    def take(self, value: Any) -> float:
        return super().take(int(value) if isinstance(value, (bool, np.bool_)) else value)


class PlaceholderOp(Op):
    """A value that the caller feeds at each run."""

    name = "Variable"
    leaf = "feed"
    signature = Signature(
        name=Name(), shape=Shape(None, free=True, omitted=True), dtype=DType(None, omitted=True)
    )

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        node = Node(self, inputs, attrs, name)
        if "shape" in attrs:
            spec = Spec(attrs["shape"], attrs.get("dtype"), "dtype" in attrs)
            if None in spec.shape:
                node.partial = partial_of(spec)
            else:
                node.spec = spec
        return node

    def infer(self, node: Node, *specs: Spec) -> Spec:
        raise GraphError(f"{node.name} is not fed; its shape is unknown [{node.where}]")


class ConstantOp(Op):
    """An array that belongs to the graph."""

    name = "constant"
    leaf = "constant"
    signature = Signature(value=Array(), name=Name(), dtype=DType(None))

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        value, dtype = attrs["value"], attrs["dtype"]
        array = array_of("constant", value, dtype)
        if (
            dtype is None
            and isinstance(value, (int, float, list, tuple))
            and array.dtype.kind == "f"
        ):
            array = array.astype(FLOAT32)
        array.flags.writeable = False
        node = Node(self, inputs, {"value": array}, name)
        declared = dtype is not None or array.dtype == FLOAT32
        node.spec = Spec(array.shape, dtype or array.dtype, declared)
        return node


class FullOp(Op):
    """An array with one number everywhere; costs a fill and no input."""

    name = "full"
    kernel = "fill"
    constant_fill = True
    any_dtype = True
    signature = Signature(shape=Shape(), value=Scalar(), dtype=DType(FLOAT32))

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        value, dtype = attrs["value"], attrs["dtype"]
        attrs["value"] = array_of("full", value, dtype).item()
        if dtype.kind in "iu" and attrs["value"] != value:
            raise GraphError(f"full: no {dtype} is {value} [{where()}]")
        node = Node(self, inputs, attrs, name)
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
        self.signature = Signature("x")
        self.doc = f"{value:g} everywhere, in the shape and dtype of x, whose values do not matter."

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        arrays[-1].fill(self.value)

    def simplify(self, node: Node) -> Node:
        return full_op(node.spec.shape, self.value, node.spec.dtype)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


class ParameterOp(Op):
    """A value that lives on a device between runs."""

    name = "Parameter"
    leaf = "state"
    signature = Signature(value=Array(), name=Name(), dtype=DType(None), trainable=Bool(True))

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        return Parameter(name=name, **attrs)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        assert isinstance(node, Parameter)
        return Spec(node.shape, node.dtype, node.declared)


def array_of(what: str, value: Any, dtype: Any) -> np.ndarray:
    """An array of its own of numbers, in row-major order: of the dtype in which numpy holds
    `dtype`. GraphError where it cannot hold them.
    """
    try:
        array = np.array(value, dtype=host(dtype), order="C")
        return rounded(array, dtype) if dtype is bfloat16 else array
    except (TypeError, ValueError, OverflowError) as error:
        raise GraphError(f"{what}: {dtype} cannot hold {shown(value)} [{where()}]") from error


placeholder_op = PlaceholderOp()
constant = constant_op = ConstantOp()
full_op = FullOp()
oneslike_op = FillLikeOp("ones_like", 1.0)
zeroslike_op = FillLikeOp("zeros_like", 0.0)
parameter_op = ParameterOp()


def Variable(name: str | None = None, shape: Any = None, dtype: Any = None) -> Node:
    """A value that is fed at run time.

    `shape` may declare extents, None for any (`(None, 784)`); `dtype` may declare a dtype. What is
    declared is checked when fed. Without a dtype, floats that are fed take the dtype of the graph's
    Parameters; where there are none numpy keeps the fed array's. Native devices compute in float32.

    >>> ad.Variable("x", (None, 784)).shape
    (None, 784)
    """
    return placeholder_op(name, shape, dtype)


class Parameter(Node):
    """A trainable value with storage of its own on one device, shared by every executor that uses
    it.

    The storage is made at the first use, where the executor runs. `asnumpy()` reads it,
    `set(array)` writes it, `to(ctx)` moves it. Without `dtype` it keeps the array's floating dtype
    on numpy and is float32 on native devices.

    >>> w = ad.Parameter(np.ones(2, np.float32), "w")
    >>> w.set(np.array([3.0, 4.0]))
    >>> w.asnumpy()
    array([3., 4.], dtype=float32)
    """

    __slots__ = (
        "storage", "initial", "declared", "dtype", "trainable", "home", "version", "grad", "token",
    )  # fmt: skip
    dtype: Any  # that of the value, known from the start
    frozen: bool = False  # it would be trainable, but `nn.Module.freeze` holds it
    of_rank: bool = False  # of ranks that train together each has a value of its own
    derived: bool = False  # it follows other state, and is in no checkpoint

    @declared(value=Array(), dtype=DType(), trainable=Bool())
    def __init__(
        self, value: Any, name: str | None = None, dtype: Any = None, trainable: bool = True
    ) -> None:
        array = array_of("Parameter", value, dtype)
        if (
            dtype is None
            and array.dtype.kind == "f"
            and not isinstance(value, (np.ndarray, np.generic))
        ):
            array = array.astype(FLOAT32)
        super().__init__(parameter_op, (), {}, name)
        self.initial: np.ndarray | None = array
        self.dtype = array.dtype if dtype is None else dtype
        self.declared = dtype is not None or array.dtype != np.float64
        self.trainable = trainable
        self.storage: Any = None  # an executor's state.Slot once one has placed it
        self.home: Any = ANYWHERE  # the context that `to` asked for
        self.version = 0  # counts changes of the value, for Tensors that were computed from it
        self.grad: Any = None  # the Tensor that `backward` of a Tensor left
        self.token: Any = None  # stands for it in what was recorded with Tensors (eager/tape.py)
        self.spec = Spec(array.shape, self.dtype if self.declared else None, self.declared)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles take the value along and are Parameters of their own, which live where
        they are used first.
        """
        value = self.asnumpy().astype(host(self.dtype), copy=False)
        dtype = self.dtype if self.declared else None
        arguments = (value, self.name, dtype, self.trainable)
        return type(self), arguments, ({"frozen": True} if self.frozen else None)

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """The shape of what `asnumpy` gives and `set` takes."""
        return self.shape

    def asnumpy(self) -> np.ndarray:
        """A copy of the value as it is now."""
        if unflushed:
            flush(writing=False)
        if self.storage is not None:
            return self.storage.asnumpy()
        assert self.initial is not None
        return self.initial.copy()

    def set(self, value: Any) -> None:
        """Replaces the value; shape and device stay. ShapeError when the shape differs."""
        if unflushed:
            flush()
        array = np.asarray(value)
        held = host(self.dtype)
        if array.shape != self.shape or not np.can_cast(array.dtype, held, "same_kind"):
            raise ShapeError(
                f"Parameter {self.name}: set() got {array.dtype} {array.shape}, expected "
                f"{self.dtype} {self.shape}"
            )
        array = array_of("Parameter", array, self.dtype if self.dtype is bfloat16 else None)
        self.version += 1
        if self.storage is not None:
            self.storage.write(array)
        else:
            self.initial = array.astype(held, copy=False)

    def tensor(self) -> Any:
        """A Tensor with the value that the Parameter has when it is computed; gradients go to the
        Parameter. For expressions of Parameters alone, which are nodes otherwise.
        """
        return import_module("dlsys.eager.tensor").tensor_of(self)

    def to(self, ctx: Any) -> None:
        """Moves the storage to another device; executors there then use it.

        ctx: None for numpy, a context, or a name such as "gpu". DeviceError for what names none.
        """
        ctx = import_module("dlsys.runtime.device").context_or_numpy(ctx)
        if unflushed:
            flush()
        value = Parameter.asnumpy(self)  # of a part of a state, that part alone
        self.storage = None
        self.initial = value.astype(host(self.dtype), copy=False)
        self.home = ctx
        self.invalidate()


def home_of(model: Any) -> Any:
    """The native device on which the Parameters of a model (an `nn.Module`) live; None for numpy,
    or where that is not known yet.
    """
    return common_home(parameter for _, parameter in model.named_state())


def common_home(parameters: Iterable[Parameter]) -> Any:
    """The native device of the first of these Parameters that lives on one, see `home_of`."""
    homes = (p.home if p.storage is None else p.storage.ctx for p in parameters)
    return next((home for home in homes if home is not None and home is not ANYWHERE), None)
