"""Tensor: a value that one can hold, print, index, differentiate; computed when looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..describe import drawn_by
from ..dtypes import as_dtype, host
from ..errors import GraphError, ShapeError
from ..functional import methods as _methods  # noqa: F401 (fills in those of ArrayMethods)
from ..functional.record import Recorder
from ..graph.lines import where
from ..graph.node import Eager, Node, hooks
from ..graph.spec import FLOAT32
from ..methods import ArrayMethods
from ..ndarray import NDArray, array
from ..ops.elementwise import cast_op
from ..ops.leaf import ANYWHERE, Parameter
from ..ops.movement import (
    broadcast_to_op,
    expand_dims_op,
    flatten_op,
    reshape_op,
    squeeze_op,
    stop_gradient_op,
    transpose_op,
)
from ..values import Values
from . import autograd, indexing
from .device import Device, engine_of
from .engine import Engine
from .tape import Out, Symbol, Tape

_new = object.__new__


class Tensor(ArrayMethods, Values, Eager):
    """An array on a device, with the operators of Python and the functions of
    `dlsys.functional` as methods.

    Operations are recorded and computed together when a value is looked at: by printing,
    `numpy()`, `item()`, a comparison in an `if`, or an optimizer's step. Shapes and dtypes are
    known at once, and what does not fit raises where it is written.

    data: a number, a nested sequence, a numpy array, an NDArray or a Tensor, which is copied.
    Python's floats become float32, its integers int64. device: "numpy", "cpu", "gpu", "gpu:1";
    the best there is where it is None. requires_grad: `backward` leaves its gradient in `grad`.

    Attributes: `shape`, `dtype`, `device`, `requires_grad`, `grad`.

    >>> x = dl.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> y = (x * x).sum()
    >>> y.backward()
    >>> x.grad
    Tensor([[2., 4.],
            [6., 8.]],
           device=numpy)
    """

    # What every Tensor has, set by `of` and `holding` alone; the rest is rare. `engine` records its
    # operations, and is for the modules of this package.
    __slots__ = (
        "engine",
        "_tape",
        "_out",
        "_value",
        "_requires",
        "__dict__",
        "__weakref__",
    )
    __array_priority__ = 1000
    engine: Engine
    _tape: Tape | None
    _out: Out
    _value: Any
    _requires: bool
    _consumed = False  # its gradient was taken, and the history let go
    _grad: Any = None
    _grad_of: Any = None  # the leaf or Parameter whose gradient it is
    _base: Any = None
    _view: Any = None  # how it is made of its base
    _views: Any = None

    def __init__(
        self, data: Any, device: Device = None, dtype: Any = None, requires_grad: bool = False
    ) -> None:
        if isinstance(data, Tensor):
            device = data.engine.name if device is None else device
            data = data._looked()
        self.engine = engine_of(device)
        self._tape, self._value, self._requires = None, _held(data, dtype, self.engine), False
        if requires_grad:
            self.requires_grad = True

    @staticmethod
    def of(engine: Engine, tape: Tape, out: Out) -> Tensor:
        """The Tensor of a value of a tape."""
        self = _new(Tensor)
        self.engine = engine
        self._tape = tape
        self._out = out
        self._value = None
        self._requires = out.requires_grad
        return self

    @classmethod
    def holding(cls, engine: Engine, value: Any) -> Tensor:
        """The Tensor of an array that the device of an engine holds, which is not copied."""
        self = cls.__new__(cls)
        self.engine, self._tape, self._value, self._requires = engine, None, value, False
        return self

    # ---- what it is ----
    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return self._out.spec.shape if self._value is None else self._value.shape

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self._out.spec.dtype if self._value is None else self._value.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:  # type: ignore[override]
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def device(self) -> str:
        """Where it is: "numpy", "cpu:0", "gpu:0"."""
        return self.engine.name

    @property
    def requires_grad(self) -> bool:
        """True where gradients are recorded for it."""
        self.refresh()
        return self._requires

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if not self.is_leaf:
            raise GraphError(
                f"requires_grad is set for leaves, and this Tensor was computed; detach() it "
                f"[{where()}]"
            )
        if value and self.dtype.kind != "f":
            raise GraphError(f"gradients are for floats; this Tensor is {self.dtype} [{where()}]")
        self._looked()  # so that the leaf is a value and no entry that is computed anew
        self._tape = None
        self._requires = bool(value)

    @property
    def is_leaf(self) -> bool:
        """True where no operation that gradients go through made it."""
        if not self.requires_grad:
            return True
        tape = self._tape
        return not self._consumed and (tape is None or self._out.index in tape.leaves)

    @property
    def grad(self) -> Tensor | None:
        """The gradient that `backward` left, None before; it may be replaced or set to None."""
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        autograd.set_grad(self, value)

    # ---- values ----
    def refresh(self) -> None:
        """Reads a view anew whose base was changed in place."""
        indexing.refresh(self)

    def forget(self, consumed: bool) -> None:
        """Lets go of the history."""
        self._tape = None
        if consumed:
            self._consumed = True

    def _looked(self) -> Any:
        """The value, which is computed now where it was not."""
        self.refresh()
        value = self._value
        if self.engine.trace is not None and self.engine.own:
            self.engine.trace.check(value)
        if type(value) is Symbol:
            raise GraphError(
                "this Tensor was made while jit recorded a function, which did not return it: it "
                f"has no value [{where()}]"
            )
        if value is None:
            with self.engine.lock:  # while it runs in another thread
                tape = self._tape
                if self._value is None and tape is not None:
                    tape.engine.run(tape)
                value = self._value
            if value is None:
                assert tape is not None
                raise GraphError(
                    "this Tensor has no value: what would have computed it failed with "
                    f"{type(tape.failed).__name__}: {tape.failed} [{where()}]"
                ) from tape.failed
        return value

    def numpy(self) -> np.ndarray:
        """A copy as a numpy array; bfloat16 becomes float32.

        >>> dl.tensor([1, 2]).numpy()
        array([1, 2])
        """
        value = self._looked()
        return value.asnumpy() if type(value) is NDArray else value.copy()

    asnumpy = numpy

    def ndarray(self) -> Any:
        """The value as the device holds it, an NDArray or on numpy an array: not to be written."""
        return self._looked()

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        """numpy's functions take the values, and give arrays: `np.mean(x)`."""
        if function in (np.shape, np.ndim):  # for which nothing is computed, also in `jit`
            return getattr(self, function.__name__)
        return function(*_arrays(args), **_arrays(kwargs))

    def __dlpack__(self, **options: Any) -> Any:
        value = self._looked()
        return value.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._looked().__dlpack_device__()

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(
                f"a Tensor of shape {self.shape} is neither true nor false: compare one element, "
                f"or choose by F.where(condition, a, b) [{where()}]"
            )
        return super().__bool__()

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:
            raise TypeError("a Tensor without axes cannot be iterated over")
        return (self[k] for k in range(self.shape[0]))

    def __contains__(self, value: Any) -> bool:
        return bool((self.numpy() == np.asarray(value)).any())

    __hash__ = object.__hash__

    def facts(self) -> dict[str, Any]:
        """The repr's facts besides the values."""
        usual = (np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_))
        dtype = {} if self.dtype in usual else {"dtype": self.dtype}
        gradient = {"requires_grad": True} if self._requires else {}
        shape = {} if self.size else {"shape": self.shape}
        return {**shape, **dtype, "device": self.device, **gradient}

    def __repr__(self) -> str:
        if self.engine.trace is not None:
            return f"Tensor(shape={self.shape}, dtype={self.dtype}, while jit records)"
        return super().__repr__()

    _repr_html_ = drawn_by("values_html")

    # ---- operators; the binary ones are set below ----
    if TYPE_CHECKING:

        def _of_two(self, other: Any) -> Tensor: ...

        __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _of_two
        __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = _of_two
        __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _of_two
        __pow__ = __rpow__ = __ipow__ = __matmul__ = __rmatmul__ = _of_two
        __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _of_two
        __lt__ = __le__ = __gt__ = __ge__ = _of_two
        __eq__ = __ne__ = _of_two  # type: ignore[assignment]

    def __neg__(self) -> Tensor:
        return self.engine.record(hooks["neg"], (self,))

    def __abs__(self) -> Tensor:
        return self.engine.record(hooks["abs"], (self,))

    def __invert__(self) -> Tensor:
        return self.engine.record(hooks["not"], (self,))

    def __getitem__(self, key: Any) -> Tensor:
        return indexing.get(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        indexing.put(self, key, value)

    # ---- gradients ----
    def backward(self, gradient: Any = None, retain_graph: bool = False) -> None:
        """Adds the gradient of this Tensor to `grad` of every leaf that requires one and of every
        trainable Parameter that it was computed from.

        gradient: of what comes behind, in its shape; needed unless this Tensor has one element.
        retain_graph: keeps the history, so that `backward` may be called again.

        Raises GraphError where there is no history, ShapeError for another shape.

        >>> x = dl.tensor([1.0, 2.0], requires_grad=True)
        >>> (x**2).backward(dl.tensor([1.0, 10.0]))
        >>> x.grad
        Tensor([ 2., 40.], device=numpy)
        """
        autograd.backward(self, gradient, retain_graph)

    def detach(self) -> Tensor:
        """A view with the same values, a constant for gradients.

        >>> x = dl.tensor([1.0, 2.0], requires_grad=True)
        >>> x.detach().requires_grad
        False
        """
        return indexing.view(self, stop_gradient_op)

    def as_leaf(self) -> Tensor:
        """A leaf that requires a gradient and begins a history of its own, with the same values,
        which are computed now and not copied. GraphError for integers.

        >>> x = dl.tensor([1.0, 2.0]) * 2
        >>> x.as_leaf()
        Tensor([2., 4.], device=numpy, requires_grad=True)
        """
        return Tensor.holding(self.engine, self.ndarray()).requires_grad_()

    @property
    def consumed(self) -> bool:
        """True where `backward` has gone through the history and let go of it: what is computed
        from the Tensor cannot be differentiated.
        """
        return self._consumed

    # ---- views ----
    @property
    def T(self) -> Tensor:
        """A view with the axes in reverse order."""
        return self.transpose()

    def reshape(self, *shape: Any) -> Tensor:
        """A view in another shape, `reshape(2, -1)` or `reshape((2, -1))`.

        shape: the extents, of which one may be -1. ShapeError where the elements do not fit.

        >>> dl.arange(6).reshape(2, -1)
        Tensor([[0, 1, 2],
                [3, 4, 5]],
               device=numpy)
        """
        return indexing.view(self, reshape_op, _several(shape))

    view = reshape

    def flatten(self, axis: int = 0) -> Tensor:
        """A view with the axes from `axis` on as one.

        >>> dl.zeros(2, 3, 4).flatten(1).shape
        (2, 12)
        """
        return indexing.view(self, flatten_op, axis)

    def squeeze(self, axis: Any = None) -> Tensor:
        """A view without the axes of extent 1, or those of them that are named.

        axis: an axis or several; all of extent 1 where it is None. ShapeError for another extent.

        >>> dl.zeros(1, 3, 1).squeeze().shape
        (3,)
        """
        return indexing.view(self, squeeze_op, axis)

    def expand_dims(self, axis: Any) -> Tensor:
        """A view with axes of extent 1 put in.

        axis: where they are in the result, one or several.

        >>> dl.zeros(2, 3).expand_dims(0).shape
        (1, 2, 3)
        """
        return indexing.view(self, expand_dims_op, axis)

    unsqueeze = expand_dims

    def transpose(self, *axes: Any) -> Tensor:
        """A view with the axes in another order, or in reverse: transpose(1, 0, 2).

        axes: the old axis at each position.

        >>> dl.zeros(2, 3, 4).transpose(1, 0, 2).shape
        (3, 2, 4)
        """
        order = _several(axes) if axes and axes[0] is not None else range(self.ndim)[::-1]
        return indexing.view(self, transpose_op, tuple(order))

    permute = transpose

    def swapaxes(self, a: int, b: int) -> Tensor:
        """A view with two axes exchanged.

        a, b: the two. ShapeError for an axis that is not there.

        >>> dl.zeros(2, 3, 4).swapaxes(0, -1).shape
        (4, 3, 2)
        """
        order = list(range(self.ndim))
        try:
            order[a], order[b] = order[b], order[a]
        except IndexError:
            raise ShapeError(
                f"swapaxes: there is no axis {a} or {b} in shape {self.shape} [{where()}]"
            ) from None
        return indexing.view(self, transpose_op, tuple(order))

    def broadcast_to(self, shape: Any) -> Tensor:
        """A view that repeats its elements, which is not changed in place.

        shape: that of the view. ShapeError where it does not fit.

        >>> dl.tensor([1, 2]).broadcast_to((2, 2))
        Tensor([[1, 2],
                [1, 2]],
               device=numpy)
        """
        return indexing.view(self, broadcast_to_op, tuple(shape))

    def requires_grad_(self, value: bool = True) -> Tensor:
        """Sets `requires_grad` and returns the Tensor.

        value: True or False. GraphError for a Tensor that was computed, and for integers.

        >>> dl.zeros(2).requires_grad_()
        Tensor([0., 0.], device=numpy, requires_grad=True)
        """
        self.requires_grad = value
        return self

    def to(self, device: Any = None, dtype: Any = None) -> Tensor:
        """On another device, or in another dtype; itself where nothing changes. Gradients pass
        through a change of dtype, and not from one device to another.

        device: as of `tensor`, or in its place a dtype. DeviceError for a device that cannot be
        used.

        >>> dl.tensor([1.7, 2.2]).to("int64")
        Tensor([1, 2], device=numpy)
        >>> dl.tensor([1.0]).to("numpy").device
        'numpy'
        """
        if device is not None and not isinstance(device, str) and not hasattr(device, "device_id"):
            device, dtype = None, device
        elif isinstance(device, str) and device not in ("numpy",) and _is_dtype(device):
            device, dtype = None, device
        moved = self
        if device is not None and engine_of(device) is not self.engine.here:
            moved = Tensor(self, engine_of(device).name)
        if dtype is not None and as_dtype(dtype) != moved.dtype:
            moved = moved.engine.record(hooks["cast"], (moved,), {"dtype": as_dtype(dtype)})
        return moved

    def cpu(self) -> Tensor:
        """On the CPU device.

        DeviceError where the native library is not there.

        >>> dl.tensor([1.0]).cpu().device
        'cpu:0'
        """
        return self.to("cpu")

    def copy(self) -> Tensor:
        """A Tensor of its own with the same values; gradients pass through.

        >>> x = dl.tensor([1.0, 2.0])
        >>> y = x.copy()
        >>> y[0] = 5.0
        >>> x
        Tensor([1., 2.], device=numpy)
        """
        return self.engine.record(hooks["copy"], (self,))

    clone = copy

    def __copy__(self) -> Tensor:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return Tensor(self, requires_grad=self._requires and self.is_leaf)

    def __reduce__(self) -> tuple[Any, ...]:
        requires = self._requires and self.is_leaf
        return _unpickled, (self.numpy(), self.device, self.dtype, requires)


def tensor_of(parameter: Parameter) -> Tensor:
    """The value of a Parameter as a Tensor, on the Parameter's device."""
    home = parameter.home if parameter.storage is None else parameter.storage.ctx
    device = "numpy" if home is None else None if home is ANYWHERE else home
    return engine_of(device).record(autograd.watched, (parameter,))


def apply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function of nodes, such as an operator of one's own, on Tensors.

    It must be pure: the same nodes and plain arguments give the same graph. Its result is a Tensor
    where it returns a node, a tuple of them where it returns several. Gradients pass through it.
    args, kwargs: what it is called with; at least one is a Tensor, else GraphError.

    >>> dl.apply(lambda x, power: x**power, dl.tensor([2.0, 3.0]), power=2)
    Tensor([4., 9.], device=numpy)
    """
    found = next((x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)), None)
    if found is None:
        raise GraphError(f"apply: no argument is a Tensor [{where()}]")
    return found.engine.record(function, args, kwargs)


def _several(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Integers given one by one or as one sequence."""
    one = len(given) == 1 and isinstance(given[0], (tuple, list))
    return tuple(given[0]) if one else given


def _unpickled(values: np.ndarray, device: str, dtype: Any, requires_grad: bool) -> Tensor:
    return Tensor(values, device, dtype, requires_grad)


def _is_dtype(text: str) -> bool:
    try:
        as_dtype(text)
    except Exception:
        return False
    return True


def _held(data: Any, dtype: Any, engine: Engine) -> Any:
    """Data as the device of an engine holds it, in memory of its own."""
    ctx = engine.ctx
    if isinstance(data, NDArray):
        if ctx is not None:
            return array(data, ctx, dtype)
        return _numpy(data.asnumpy(), dtype, python=False, copy=True)
    python = not isinstance(data, (np.ndarray, np.generic))
    if python and hasattr(data, "__dlpack__") and not isinstance(data, (list, tuple)):
        data, python = np.asarray(data), False
    values = _numpy(data, dtype, python, copy=ctx is None)  # else the device's array is the copy
    return values if ctx is None else array(values, ctx, dtype)


def _numpy(data: Any, dtype: Any, python: bool, copy: bool) -> np.ndarray:
    make = np.array if copy else np.asarray
    try:
        values = make(data, dtype=None if dtype is None else host(as_dtype(dtype)))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"tensor: expected numbers in one shape, got {error} [{where()}]"
        ) from None
    if values.dtype.kind not in "fiub":
        raise ShapeError(f"tensor: expected numbers, got {values.dtype} [{where()}]")
    if python and dtype is None and values.dtype == np.float64:
        values = values.astype(np.float32)
    return values


def _arrays(value: Any) -> Any:
    """Arguments with arrays in place of Tensors."""
    if isinstance(value, Tensor):
        return value.numpy()
    if type(value) in (list, tuple):
        return type(value)(_arrays(item) for item in value)
    return {key: _arrays(x) for key, x in value.items()} if type(value) is dict else value


def _operator(name: str) -> Callable[..., Node]:
    """The function of nodes that an operator of Tensors records. Integers divided by integers, or
    met by a Python float, give float32, as in PyTorch.
    """
    function = hooks[name]

    def compute(a: Any, b: Any) -> Node:
        nodes = [x for x in (a, b) if isinstance(x, Node)]
        if all(x.dtype.kind in "iub" for x in nodes) and (
            name == "div" or float in map(type, (a, b))
        ):
            a, b = (cast_op(x, FLOAT32) if isinstance(x, Node) else x for x in (a, b))
        return function(a, b)

    compute.__name__ = name
    return compute


_OPERATORS = {name: _operator(name) for name in ("add", "sub", "mul", "div", "power")}


def _binary(name: str) -> Callable[[Tensor, Any], Any]:
    function = _OPERATORS.get(name, hooks[name])

    def apply(self: Tensor, other: Any) -> Any:
        if type(other) not in _OPERANDS:
            other = _operand(other)
            if other is NotImplemented:
                return other
        engine = self.engine
        return engine.record(function, (self, other))

    return apply


def _swapped(name: str) -> Callable[[Tensor, Any], Any]:
    function = _OPERATORS.get(name, hooks[name])

    def apply(self: Tensor, other: Any) -> Any:
        other = _operand(other)
        return other if other is NotImplemented else self.engine.record(function, (other, self))

    return apply


def _operand(other: Any) -> Any:
    """The other side of an operator; lists are arrays."""
    if type(other) in _OPERANDS:
        return other
    if isinstance(other, np.generic):
        return other.item()
    if isinstance(other, (list, tuple)):
        return np.asarray(other, np.float32 if np.asarray(other).dtype.kind == "f" else None)
    return other if isinstance(other, (np.ndarray, NDArray, Node)) else NotImplemented


_OPERANDS = frozenset({Tensor, int, float, bool, Parameter})
_NAMES = dict(
    add="add", sub="sub", mul="mul", truediv="div", floordiv="floor_divide", mod="remainder",
    pow="power", matmul="matmul",
    **{"and": "and", "or": "or", "xor": "xor"},
)  # fmt: skip
_COMPARISONS = dict(
    eq="equal", ne="not_equal", lt="less", le="less_equal", gt="greater", ge="greater_equal"
)

for _word, _hook in _NAMES.items():
    setattr(Tensor, f"__{_word}__", _binary(_hook))
    setattr(Tensor, f"__r{_word}__", _swapped(_hook))
for _word, _hook in _COMPARISONS.items():
    setattr(Tensor, f"__{_word}__", _binary(_hook))


def _in_place(name: str) -> Callable[[Tensor, Any], Any]:
    function = _OPERATORS.get(name, hooks[name])

    def apply(self: Tensor, other: Any) -> Any:
        other = _operand(other)
        if other is NotImplemented:
            return other
        made = self.engine.record(function, (self, other))
        indexing.assign(self, made if made.dtype == self.dtype else made.to(dtype=self.dtype))
        return self

    return apply


for _word, _hook in _NAMES.items():
    if _word != "matmul":
        setattr(Tensor, f"__i{_word}__", _in_place(_hook))
Recorder.tensor = Tensor
Engine.arithmetic.update(_OPERATORS.values())
