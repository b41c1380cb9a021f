"""Nodes and operators, the two words that a graph is made of.

A node is one use of an operator: its inputs are other nodes, its attributes plain Python values. A
graph is whatever can be reached from some nodes. An operator states, side by side, its shape rule
(`infer`), its numpy form (`numpy`), its gradient and the name of its native kernel; the engine
reads its *traits* and never its class.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from operator import index, is_
from types import MethodType
from typing import Any, Protocol, TypeVar

import numpy as np

from ..describe import described, drawn_by, few, source_line
from ..errors import GraphError, ShapeError, SignatureError
from ..methods import ArrayMethods
from ..rungs import Ladder
from .lines import current_line, where
from .spec import Spec, promote

Self = TypeVar("Self", bound="Op")
_numbers = itertools.count()

# The few operators that nodes and gradients need; `ops/` fills them in, so that this floor knows
# none of them.
hooks: dict[str, Callable[..., Any]] = {}


class Arguments(Protocol):
    """An operator's inputs and attributes, as `arguments/` declares and checks them."""

    inputs: list[str]
    attributes: dict[str, Any]

    def bind(
        self, called: str, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any], str | None]:
        """Inputs, attributes and the node's name of a call. SignatureError where it does not
        fit.
        """

    def arguments(self, called: str, args: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        """All that a call gives and the defaults of the rest, by name."""

    def python(self) -> inspect.Signature:
        """The signature as `inspect` has them."""

    def described(self) -> str:
        """The attributes, a line each."""


class _Docstring:
    """The docstring of a class of operators; of an operator, its own text where it has one, and
    its attributes.
    """

    def __init__(self, text: str | None) -> None:
        self.text = text

    def __get__(self, op: Op | None, owner: type) -> str | None:
        if op is None:
            return self.text
        text = op.doc or inspect.cleandoc(self.text or "")
        # pydoc takes a text that equals the class's for inherited and leaves it out.
        return text + (op.signature.described() if op.signature is not None else "") + "\n"


class _PythonSignature:
    """An operator's signature for `inspect`, which has its own for the class."""

    def __get__(self, op: Op | None, owner: type) -> inspect.Signature:
        if op is None:
            raise AttributeError("__signature__")
        if op.signature is None:
            return inspect.signature(MethodType(owner.__call__, op))
        return op.signature.python()


class Op:
    """An operator. Subclass it, override what differs, and make one instance.

    Own operators need `infer_shape(node, input_shapes)`, `compute(node, input_vals, output_val,
    use_numpy)` and, to be differentiated, `gradient(node, output_grad)`; see "How to add an
    operator" in the README for one with a native kernel. Methods take `attrs`, attributes by name;
    a `node` or `nodes` of this operator; `specs`, of `inputs` and `output`; numpy `arrays`.
    """

    # ---- traits: all that the engine knows of an operator ----
    name: str = ""  # in texts, messages and profiles
    # Its inputs and attributes; None: any nodes and keywords.
    signature: Arguments | None = None
    doc: str = ""  # what `help` says of it, instead of its class's docstring
    kernel: str | None = None  # name in the native kernel table; None runs `compute` from Python
    outputs: int = 1  # values it makes, reached as node[0], node[1], …; 0 only groups its inputs
    projection: bool = False  # it is one value of an operator that has several
    # The output is input 0's memory under another shape; with an attribute `offset` it is the part
    # that begins at that element.
    view: bool = False
    inplace: bool | tuple[int, ...] = False  # an output may overwrite a dying input like it (these)
    # Inputs (Parameters) that it updates; its outputs are their new values.
    writes: tuple[int, ...] = ()
    # Of an update: the inputs that are gradients of what it writes, which ranks average.
    gradient_inputs: tuple[int, ...] = ()
    communicates: bool = False  # with other ranks, all of which run such operators in one order
    # Inputs (constants of zeros) that its kernel uses as workspace and leaves as zeros again.
    zeroed_workspace: tuple[int, ...] = ()
    cache_local: bool = False  # scheduled behind its producer, whose inputs a cache may still hold
    # The number of leading inputs that are gathered from: at most as many elements of each are
    # read as the output has, which bandwidth is computed from.
    gathers: int = 0
    reads_host: bool = False  # input 0 may be memory of the host (executor/capture/host.py)
    tells_host: bool = False  # its output may be, too, and its kernel tells the host of it
    shares: bool = False  # its numpy form has threads of its own (runtime/host_threads.py)
    fallible: bool = False  # may fail on the values it sees, so updates wait for it
    random: bool = False  # draws random numbers: equal uses are never merged
    step_at: int = -1  # of a random operator: the input that is the step of what it draws
    # Of the largest magnitude, between devices; sums of many terms need more.
    tolerance: float = 1e-5
    roundings: int = 1  # to 16 bits, where a kernel computes in them: of results, and of operands
    # Outputs that rounding may change altogether, such as an argmax or a sign.
    discrete_outputs: tuple[int, ...] = ()
    __repr__ = described
    elementwise: bool = False  # element k of the output depends on element k of the inputs only
    movement: bool = False  # it moves or repeats elements and computes nothing
    # Under the policy bf16 (executor/autocast.py), and the inputs that it is about, None for all.
    autocast: str = "float32"
    autocast_inputs: tuple[int, ...] | None = None
    has_precision: bool = False  # its kernel takes the precision of GEMM (passes/precision.py)
    tunable: bool = False  # its kernel takes an algorithm (executor/tune/autotune.py)
    ladder: Ladder | None = None  # what its attribute `algo` may name (executor/tune/rungs.py)
    casts: bool = False  # it copies to another dtype
    constant_fill: bool = False  # every element is `attrs["value"]`
    any_dtype: bool | tuple[int, ...] = False  # inputs that the native kernel takes in every dtype
    vocabulary: bool = True  # `dlsys.functional` names it: no part of others, not the course's
    leaf: str | None = None  # "feed", "state" or "constant": has a value without being computed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = _Docstring(cls.__dict__.get("__doc__"))  # type: ignore[assignment]
        if not cls.name:
            cls.name = cls.__qualname__.rpartition(".")[2].removesuffix("Op").lower()

    def __call__(self, *inputs: Any, **attrs: Any) -> Node:
        """A node that applies this operator to inputs, under attributes and a `name`.

        SignatureError where the call does not fit the signature. An operator that declares none
        takes any nodes, and keywords as attributes.
        """
        if self.signature is None:
            return Node(self, inputs, attrs, attrs.pop("name", None))
        nodes, values, name = self.signature.bind(self.name, inputs, attrs)
        return self.make(nodes, values, name)

    def make(self, inputs: Sequence[Any], attrs: dict[str, Any], name: str | None) -> Node:
        """The node of a call that fits the signature; overridden where attributes depend on each
        other or inputs may be arrays.
        """
        return Node(self, inputs, attrs, name)

    def __get__(self: Self, instance: Any, owner: Any = None) -> Self:
        """Itself: what has a `__get__` counts as a routine for `help`, which then shows the
        operator instead of its class. As an attribute of a class an operator is a plain value.
        """
        return self

    @property
    def __name__(self) -> str:
        return self.name

    __signature__ = _PythonSignature()

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        """The spec of the output (a tuple of them when `outputs` > 1) from those of the inputs."""
        if type(self).infer_shape is Op.infer_shape:
            raise GraphError(f"operator {self.name} defines neither infer nor infer_shape")
        # A user's operator in the form of the assignment has a rule for shapes only.
        dtype = promote(node, *specs) if specs else np.dtype(np.float32)
        declared = any(spec.declared for spec in specs)
        shapes = self.infer_shape(node, [spec.shape for spec in specs])
        try:
            several = [tuple(map(index, s)) for s in (shapes if self.outputs > 1 else [shapes])]
        except TypeError:
            several = []
        if len(several) != self.outputs or any(extent < 0 for s in several for extent in s):
            raise node.error(f"infer_shape returned {shapes!r}, expected {self.outputs} shape(s)")
        found = tuple(Spec(shape, dtype, declared) for shape in several)
        return found if self.outputs > 1 else found[0]

    def infer_shape(self, node: Node, input_shapes: Sequence[tuple[int, ...]]) -> Any:
        """The output's shape (a tuple of shapes when `outputs` > 1) from the inputs' shapes."""
        specs = self.infer(node, *(Spec(tuple(shape), None) for shape in input_shapes))
        return specs.shape if isinstance(specs, Spec) else tuple(spec.shape for spec in specs)

    def compute(
        self, node: Node, input_vals: list, output_val: Any, use_numpy: bool = True
    ) -> None:
        """Writes the output's values: numpy arrays, or NDArrays when `use_numpy` is False.

        It writes all of them, returns nothing and leaves the inputs alone; an executor raises
        GraphError for one that does not, at the latest in its first run.
        """
        if not use_numpy:
            hooks["compute"](node, input_vals, output_val)
            return
        outputs = output_val if self.outputs > 1 else [output_val]
        inputs, made = (
            [Spec(x.shape, x.dtype) for x in values] for values in (input_vals, outputs)
        )
        workspace = [np.empty(s.shape, s.dtype) for s in self.workspace(node, inputs, made)]
        self.numpy(node, *input_vals, *workspace, *outputs)

    @property
    def runs_python(self) -> bool:
        """True where it has a `compute` of its own, which every device can call."""
        return type(self).compute is not Op.compute

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        """Called with inputs, workspace and outputs in this order; writes the outputs."""
        raise GraphError(f"operator {self.name} has no numpy form [{node.where}]")

    def bound(self, node: Node) -> Callable[..., None]:
        """`numpy` for one step of a plan, whose scratch is the same memory in every run."""
        return partial(self.numpy, node)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> Sequence[Spec]:
        """Scratch arrays that `numpy` wants besides its inputs and outputs."""
        return ()

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        """The kernel's plain arguments, in the order of its signature."""
        return ()

    def lists(self, node: Node) -> Sequence[int]:
        """The number of arrays that each list of the kernel's signature takes, in order."""
        return ()

    def merge_key(self, node: Node) -> Hashable | None:
        """A key that updates share which `merged` can make one; None: this one stays alone."""
        return None

    def merged(self, nodes: Sequence[Node]) -> Node:
        """One node that does the updates of several, its outputs their results in order."""
        raise GraphError(f"operator {self.name} merges no updates")

    def gradient(self, node: Node, output_grad: Any) -> Sequence[Node | None]:
        """The gradient with respect to each input, None where there is none.

        `output_grad` is a node, or a list of nodes and Nones when `outputs` > 1.
        """
        raise GraphError(f"operator {self.name} has no gradient [{node.where}]")

    def simplify(self, node: Node) -> Node | None:
        """An equal, simpler or more primitive node, now that every spec is known; None keeps
        this one.
        """
        return None

    def compose(self, node: Node) -> list[Node]:
        """The values of a node by other operators, for a rung that is such a composition."""
        raise GraphError(f"operator {self.name} is no composition [{node.where}]")

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        """Floating-point operations of one application, for profiles."""
        return output.size


class Eager:
    """Base of values, such as Tensors, that answer themselves for operators beside a node."""

    __slots__ = ()


def _binary(name: str) -> Callable[[Any, Any], Any]:
    def apply(node: Node, other: Any) -> Any:
        return NotImplemented if isinstance(other, Eager) else hooks[name](node, other)

    return apply


def _swapped(name: str) -> Callable[[Any, Any], Node]:
    return lambda node, other: hooks[name](other, node)


def _comparison(name: str) -> Callable[[Any, Any], Node]:
    """A comparison with a node, a number or an array. To anything else, None among it, Python
    itself answers that a node is not equal, and refuses to order them.
    """

    def compare(node: Node, other: Any) -> Any:
        comparable = isinstance(other, (Node, int, float, np.generic, np.ndarray, list, tuple))
        return hooks[name](node, other) if comparable else NotImplemented

    return compare


class Node(ArrayMethods):
    """One use of an operator. `x + 2`, `x * y`, `-x`, `x / y`, `x // 2`, `x % 2`, `x ** 2`,
    `x @ w`, `x[1:3, ::2]`, `x == y`, `x < 2`, `(x > 0) & ~mask` make further nodes; `x[0]` of an
    operator with several outputs is its first output.

    A node is a key of dictionaries and sets by identity. Whether two names mean one node is asked
    by `is`, of lists of nodes by `same_nodes`: `==` makes a node, which has no truth value before a
    run, so `if`, `and`, `or`, `not`, and `in` a list raise GraphError.

    Attributes: `op`, `inputs` (nodes), `attrs` (plain values), `name`, `number` (unique, in order
    of making), `where` (the user's source line), `spec` (shape and dtype where they are known
    without feeds, else None), `partial` (what is known of them then, see ops/extents.py). Many
    functions are methods too, `x.sum(axis=0)`: see functional/methods.py.
    """

    __slots__ = (
        "op", "inputs", "attrs", "name", "number", "spec", "partial", "_origin", "_line",
        "_values", "__dict__", "__weakref__",
    )  # fmt: skip
    effects: tuple[Node, ...] = ()  # updates that a training step over this node makes besides
    changes = 0  # calls of `invalidate` of any node, so far
    changed = 0  # the last of them that was this node's own
    __array_ufunc__ = None  # numpy arrays leave `array + node` to the node
    _repr_html_ = drawn_by("graph_html")

    def __init__(
        self,
        op: Op,
        inputs: Iterable[Node] = (),
        attrs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.op = op
        self.inputs = list(inputs)
        self.attrs = attrs if attrs is not None else {}
        self.number = next(_numbers)
        self.name = name or f"{op.name}.{self.number}"
        self._line = current_line()
        self._values: dict[int, Node] | None = None
        self.spec: Any = None
        self.partial: Any = None
        self._origin: Node | None = None
        for x in self.inputs:
            if not isinstance(x, Node) or x.op.outputs != 1:
                _refuse_input(self, x)
        specs = [x.spec for x in self.inputs]
        if specs and None not in specs:
            self.spec = op.infer(self, *specs)
        elif specs:
            self.partial = hooks["partial"](self)

    def derive(self, inputs: list[Node], spec: Any) -> Node:
        """This use of the operator over other inputs, for graphs that passes rewrite."""
        node = Node.__new__(Node)
        node.op, node.inputs, node.attrs, node.name = self.op, inputs, self.attrs, self.name
        node.number, node._line, node._values, node.spec = self.number, self._line, None, spec
        node.partial, node._origin = None, self.origin
        return node

    @property
    def shape(self) -> Any:
        """The extents, None for one that only a feed decides; None where not even their number is
        known, and for an operator with several values.
        """
        return getattr(self.spec or self.partial, "shape", None)

    @property
    def dtype(self) -> Any:
        """The np.dtype, None where it is not known."""
        return getattr(self.spec or self.partial, "dtype", None)

    @property
    def origin(self) -> Node:
        """In a rewritten graph, the user's node that this one stands for; else the node itself."""
        return self if self._origin is None else self._origin

    def stand_for(self, node: Node) -> None:
        """Says that this node was made by rewriting another: it takes its number and origin."""
        self.number, self._origin = node.number, node.origin

    @property
    def where(self) -> str:
        """The user's source line that made this node, such as `model.py:31`."""
        return source_line(*self._line[:2])

    @property
    def backward(self) -> bool:
        """True where `gradients` made it, or a rewrite of what that made."""
        return self._line[2]

    @property
    def const_attr(self) -> Any:
        """The constant of `x + 2` and the like (the assignment's name for it), else None. Executors
        of a graph in which it was set plan anew; gradients that were made before keep the old one.
        """
        return self.attrs.get("const")

    @const_attr.setter
    def const_attr(self, value: Any) -> None:
        self.attrs["const"] = value
        self.invalidate()

    def invalidate(self) -> None:
        """Lets the executors of graphs with this node plan anew: it is no longer what it was."""
        Node.changes += 1
        self.changed = Node.changes

    def error(self, message: str) -> ShapeError:
        """A ShapeError with a message, this operator and the user's line, ready to raise."""
        return ShapeError(f"{self.op.name}: {message} [{self.where}]")

    def __getitem__(self, index: Any) -> Node:
        if self.op.outputs == 1:
            return hooks["getitem"](self, index)
        if not isinstance(index, int) or not 0 <= index < self.op.outputs:
            raise GraphError(
                f"{self.name} has {self.op.outputs} output(s); there is no [{index!r}] of it"
            )
        if self._values is None:
            self._values = {}
        if index not in self._values:
            name = f"{self.name}[{index}]"
            self._values[index] = Node(output_op, (self,), {"index": index}, name)
        return self._values[index]

    def __iter__(self) -> Iterator[Node]:
        if self.op.outputs == 1:
            raise TypeError(f"{self.name} is one value and cannot be unpacked")
        return (self[index] for index in range(self.op.outputs))

    __add__ = __radd__ = _binary("add")
    __mul__ = __rmul__ = _binary("mul")
    __and__ = __rand__ = _binary("and")
    __or__ = __ror__ = _binary("or")
    __xor__ = __rxor__ = _binary("xor")
    __sub__, __rsub__ = _binary("sub"), _swapped("sub")
    __truediv__, __rtruediv__ = _binary("div"), _swapped("div")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _swapped("floor_divide")
    __mod__, __rmod__ = _binary("remainder"), _swapped("remainder")
    __pow__, __rpow__ = _binary("power"), _swapped("power")
    __matmul__, __rmatmul__ = _binary("matmul"), _swapped("matmul")
    __eq__, __ne__ = _comparison("equal"), _comparison("not_equal")  # type: ignore[assignment]
    __lt__, __le__ = _comparison("less"), _comparison("less_equal")
    __gt__, __ge__ = _comparison("greater"), _comparison("greater_equal")
    __hash__ = object.__hash__  # a class with an __eq__ of its own has none otherwise

    def __neg__(self) -> Node:
        return hooks["neg"](self)

    def __abs__(self) -> Node:
        return hooks["abs"](self)

    def __invert__(self) -> Node:
        return hooks["not"](self)

    def __bool__(self) -> bool:
        raise GraphError(
            f"{self.name} has no truth value before a run: choose by ad.where_op(condition, a, b), "
            "join conditions by & | ~, find the same node by `is` or in a set, or run it first "
            f"[{where()}]"
        )

    def __repr__(self) -> str:
        arguments = few([node.name for node in self.inputs])
        arguments += [
            f"{key}={value!r}" for key, value in self.attrs.items() if not hasattr(value, "shape")
        ]
        text = f"{self.name} = {self.op.name}({', '.join(arguments)})"
        if self.shape is not None:
            text += f" : {self.dtype or '?'} {self.shape}"
        return text


class OutputOp(Op):
    """One value of an operator that has several: `node[1]`."""

    name = "output"
    view = projection = True

    def infer(self, node: Node, *specs: Any) -> Spec:
        return specs[0][node.attrs["index"]]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        raise AssertionError("gradients() hands the gradient of an output to the operator itself")


output_op = OutputOp()


def same_nodes(a: Sequence[Node], b: Sequence[Node]) -> bool:
    """True where two sequences hold the very same nodes in one order; `==` of nodes makes nodes."""
    return len(a) == len(b) and all(map(is_, a, b))


def find_topo_sort(node_list: Iterable[Node]) -> list[Node]:
    """Every node that `node_list` depends on, inputs before users. GraphError names a cycle."""
    order: list[Node] = []
    done: dict[Node, bool] = {}  # False while its inputs are visited, True once it is in `order`
    stack = list(node_list)[::-1]
    while stack:
        node = stack[-1]
        visited = done.get(node)
        if visited is None and node.inputs:
            done[node] = False
            for x in reversed(node.inputs):
                known = done.get(x)
                if known is None:
                    stack.append(x)
                elif not known:
                    raise GraphError(_cycle_text([n for n in stack if done.get(n) is False], x))
        else:
            stack.pop()
            if not visited:
                done[node] = True
                order.append(node)
    return order


def _refuse_input(node: Node, value: Any) -> None:
    """An input must be one value; only `group` takes whatever can be fetched."""
    if isinstance(value, Node):
        if node.op.outputs == 0 or node.op.projection:
            return
        what = f"{value.name} has {value.op.outputs} values, expected one"
        advice = f"use {value.name}[0]" if value.op.outputs else "a group can only be fetched"
        raise GraphError(f"{node.op.name}: {what}; {advice} [{node.where}]")
    raise SignatureError(f"{node.op.name}: {no_node('an input', value)} [{node.where}]")


def no_node(key: str, value: Any) -> str:
    """Why a value is no input, as a part of a sentence."""
    advice = "wrap arrays in ad.constant"
    if isinstance(value, bool):
        advice = "compare nodes by == or <, which makes one"
    return f"{key} is {type(value).__name__}, expected a node; {advice}"


def _cycle_text(path: list[Node], start: Node) -> str:
    first = next(k for k, node in enumerate(path) if node is start)
    names = [node.name for node in path[first:]]
    if len(names) > 8:
        names = [*names[:4], "…", *names[-3:]]
    path_text = " → ".join(reversed([*names, names[0]]))
    return f"the graph has a cycle: {path_text}; a node cannot depend on itself"
