"""jit: a function of Tensors as programs that were recorded once.

The first call of a signature runs the function on Tensors without values and keeps the tapes that
it makes; where it takes no optimizer's step there is one, else one for each step and one for what
follows. A call runs their programs and gives the arrays of one to the next, without any Python of
the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from ..errors import GraphError
from ..functional.record import Recorder
from ..graph.lines import where
from ..graph.node import Node, find_topo_sort
from ..ndarray import NDArray
from ..ops.leaf import Parameter
from ..passes.precision import check_precision
from .device import engine_of
from .engine import Engine, Program, tracing
from .tape import Symbol, Tape, name_of, token_of

_MOST_SIGNATURES = 64  # of the arguments of one function; the oldest goes first


class Segment(NamedTuple):
    """A program, and the source of each of its feeds."""

    program: Program
    feeds: list[tuple[Node, tuple[Any, ...]]]
    tape: Tape
    live: tuple[int, ...]


class Trace:
    """The recording of one function: engines ask it instead of running tapes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.segments: list[Segment] = []
        self.before: dict[Any, Any] = {}  # gradients before the call, by what has them
        self.changed: dict[Any, Any] = {}  # values before the call of Tensors changed in place
        self.modes: dict[Any, bool] = {}  # the modes of modules that were called

    @property
    def writes(self) -> bool:
        """True where what was recorded so far changes Parameters."""
        return any(segment.tape.state.written for segment in self.segments)

    def refuse(self, what: str) -> None:
        """Raises GraphError: the function does what no program can."""
        raise GraphError(
            f"jit: {self.name} {what}, but it is being recorded and nothing is computed yet; "
            "return Tensors and look at them outside, choose by F.where instead of if "
            f"[{where()}]"
        )

    def check(self, value: Any) -> None:
        """Refuses a look at a value that calls will compute."""
        if value is None or type(value) is Symbol:
            self.refuse("looks at a value")

    def add(self, tape: Tape, program: Program, live: Sequence[int]) -> list[Symbol]:
        """Keeps the run of a tape; what stands for its values."""
        feeds = [(node, self._source(tape.leaves[k])) for node, k in program.feeds]
        number = len(self.segments)
        self.segments.append(Segment(program, feeds, tape, tuple(live)))
        outs = tape.outs
        specs = [outs[index].spec for index in live]
        return [Symbol(spec.shape, spec.dtype, ("made", number, k)) for k, spec in enumerate(specs)]

    def _source(self, leaf: Any) -> tuple[Any, ...]:
        if type(leaf.value) is Symbol:
            return leaf.value.source
        if leaf.tensor._grad_of is not None:
            return "gradient", leaf.tensor._grad_of
        return "tensor", leaf.tensor


class Compiled:
    """The programs of a function for arguments of one signature."""

    def __init__(self, trace: Trace, made: Any, engine: Engine) -> None:
        self.engine = engine
        self._segments = trace.segments
        self._modes = trace.modes
        self._trained = [(p, p.trainable) for s in trace.segments for p in s.tape.state.reads]
        self._result = _map(self._kept, made)
        self._gradients = [
            (holder, None if holder.grad is None else self._kept(holder.grad))
            for holder, before in trace.before.items()
            if holder.grad is not before
        ]
        self._changed = [(tensor, self._kept(tensor)) for tensor in trace.changed]
        others = self._gradients or self._changed
        if others or any(segment.tape.state.effects for segment in self._segments):
            self.differentiable = False
        else:  # one program whose results may have gradients
            runs = [(s.tape.outs, s.live) for s in self._segments]
            self.differentiable = any(outs[k].requires_grad for outs, live in runs for k in live)

    def _kept(self, tensor: Any) -> Any:
        """A result as calls make it: a source and its need of gradients, or a value as it is."""
        if type(tensor) is not Recorder.tensor:
            return tensor
        if type(tensor._value) is Symbol:
            return _Result(tensor._value.source)
        return _Result(("tensor", tensor))

    @property
    def valid(self) -> bool:
        """False where a module is in another mode than when it was recorded, or a Parameter was
        frozen since, or is trained again.
        """
        for module, mode in self._modes.items():
            if module.training is not mode:
                return False
        return all(parameter.trainable is trained for parameter, trained in self._trained)

    def run(self, arguments: Sequence[Any]) -> Any:
        """The results of a call with these arrays."""
        made: list[list[Any]] = []

        def find(source: tuple[Any, ...]) -> Any:
            kind = source[0]
            if kind == "argument":
                return arguments[source[1]]
            if kind == "made":
                return made[source[1]][source[2]]
            if kind == "tensor":
                return source[1]._looked()
            if kind == "draw":
                return self.engine.next_draw()
            return _gradient(source[1])

        for program, feeds, _, _ in self._segments:
            values = {node: find(source) for node, source in feeds}
            with self.engine.lock:
                made.append(program.run(values))

        def result(kept: Any) -> Any:
            if type(kept) is not _Result:
                return kept
            if kept.source[0] == "tensor":
                return kept.source[1]
            return Recorder.tensor.holding(self.engine, find(kept.source))

        for holder, kept in self._gradients:
            grad = result(kept)
            if grad is not None:
                grad._grad_of = holder
            if type(holder) is Parameter:
                holder.grad = grad
            else:
                holder._grad = grad
        for tensor, kept in self._changed:
            tensor._value = find(kept.source)
            tensor._tape = None
        return _map(result, self._result)

    # ---- as one recorded function ----
    def record(self, tensors: Sequence[Any]) -> Any:
        """The results of a call as an entry of the tape, through which gradients pass."""
        args: list[Any] = []
        for _, source in self._segments[0].feeds:
            if source[0] == "argument":
                args.append(tensors[source[1]])
            elif source[0] == "draw":
                args.append(Recorder.tensor.holding(self.engine, self.engine.next_draw()))
            else:
                args.append(source[1] if source[0] == "tensor" else source[1].grad)
        made = self.engine.record(self.graft, args, home=token_of(self))

        def result(kept: Any) -> Any:
            if type(kept) is not _Result:
                return kept
            kind, *_, last = kept.source
            if kind == "tensor":
                return last
            return made[last] if kind == "made" else tensors[last]

        return _map(result, self._result)

    def graft(self, *leaves: Node) -> list[Node]:
        """The graph of the only program over other leaves, so that gradients pass through it."""
        (segment,) = self._segments
        over = dict(zip((node for node, _ in segment.feeds), leaves))
        outs = segment.tape.outs
        fetched = [outs[index].node for index in segment.live]
        for node in find_topo_sort(fetched):
            if node not in over:
                inputs = [over[x] for x in node.inputs]
                same = all(a is b for a, b in zip(inputs, node.inputs))
                over[node] = node if same else node.derive(inputs, node.spec)
        return [over[node] for node in fetched]


class _Result(NamedTuple):
    source: tuple[Any, ...]


class Jit:
    """A function as `jit` makes it; `signatures` are those of arguments it was recorded for."""

    def __init__(self, function: Callable[..., Any], precision: str | None = None) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._precision = precision
        self.signatures: dict[tuple[Any, ...], Compiled] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return (
            f"<jit of {name_of(self._function)}, recorded for {len(self.signatures)} signature(s)>"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        key = [_signature(args, tensors), _signature(kwargs, tensors)]
        engine: Engine = tensors[0].engine.here if tensors else engine_of(None)
        if engine.trace is not None:  # inside another one it is part of that
            return self._function(*args, **kwargs)
        if self._precision in (None, engine.precision):
            return self._called(engine, key, tensors, args, kwargs)
        engine.flush(writing=True)
        before, engine.precision = engine.precision, self._precision
        try:
            made = self._called(engine, key, tensors, args, kwargs)
            engine.flush(writing=True)
            return made
        finally:
            engine.precision = before

    def _called(
        self, engine: Engine, key: list[Any], tensors: list[Any], args: Any, kwargs: Any
    ) -> Any:
        signature = (*key, engine, engine.grad, engine.precision)
        compiled = self.signatures.get(signature)
        if compiled is None or not compiled.valid:
            compiled = self.signatures[signature] = self._recorded(engine, args, kwargs)
            if len(self.signatures) > _MOST_SIGNATURES:
                del self.signatures[next(iter(self.signatures))]
        if compiled.differentiable:
            return compiled.record(tensors)
        if engine.tape.states or engine.pending is not None:
            engine.flush(writing=True)
        return compiled.run([tensor._looked() for tensor in tensors])

    def _recorded(self, engine: Engine, args: Any, kwargs: Any) -> Compiled:
        """Runs the function on Tensors without values."""
        if engine.tape.states or engine.pending is not None:
            engine.run(engine.tape)
        trace = engine.trace = Trace(name_of(self._function))
        tracing.append(trace)
        counter = iter(range(1 << 30))

        def argument(tensor: Any) -> Any:
            if type(tensor) is not Recorder.tensor:
                return tensor
            symbol = Symbol(tensor.shape, tensor.dtype, ("argument", next(counter)))
            made = Recorder.tensor.holding(engine, symbol)
            made._requires = tensor._requires
            return made

        try:
            made = self._function(*_map(argument, args), **_map(argument, kwargs))
            engine.run(engine.tape)
            return Compiled(trace, made, engine)
        finally:
            tracing.remove(trace)
            engine.trace = None
            engine.pending = None
            engine.tape = engine.new_tape()
            for holder, before in trace.before.items():
                if type(holder) is Parameter:
                    holder.grad = before
                else:
                    holder._grad = before
            for tensor, (value, requires) in trace.changed.items():
                tensor._value, tensor._requires, tensor._tape = value, requires, None


@overload
def jit(function: Callable[..., Any], *, precision: str | None = None) -> Jit: ...


@overload
def jit(
    function: None = None, *, precision: str | None = None
) -> Callable[[Callable[..., Any]], Jit]: ...


def jit(function: Callable[..., Any] | None = None, *, precision: str | None = None) -> Any:
    """A function of Tensors, such as a training step or a model's forward, as one program.

    Arguments may be Tensors, arrays, plain values, and lists, tuples and dicts of them. The
    function is run once for each signature of them: shapes, dtypes, plain values. What it does in
    Python may depend on these, and not on values of Tensors: a look at one raises GraphError with
    the line. What else it does, such as printing, happens at that one run only. Parameters, and
    Tensors that it finds outside, are read anew by each call; `backward`, steps of optimizers,
    gradients and changes in place are part of the program. precision: as of `set_precision`, for
    the program alone: `@dl.jit(precision="bf16")`. Gradients through its results that are taken
    outside have the precision that holds there. GraphError for one that does not exist.

    >>> @dl.jit
    ... def distance(a, b):
    ...     return ((a - b) ** 2).sum() ** 0.5
    ...
    >>> distance(dl.tensor([0.0, 0.0]), dl.tensor([3.0, 4.0]))
    Tensor(5., device=numpy)
    """
    if precision is not None:
        check_precision(precision)
    return (
        functools.partial(Jit, precision=precision)
        if function is None
        else (Jit(function, precision))
    )


def _gradient(holder: Any) -> Any:
    grad = holder.grad
    if grad is None:
        raise GraphError(
            "jit: the function was recorded when there was a gradient, which it adds to, and now "
            "there is none; call zero_grad() inside it"
        )
    return grad._looked()


def _signature(value: Any, tensors: list[Any]) -> Any:
    """Programs depend on this: shapes, dtypes and plain values. Tensors are put into a list."""
    kind = type(value)
    if kind is Recorder.tensor:
        tensors.append(value)
        return value.shape, value.dtype, value._requires
    if kind is tuple or kind is list:
        return (kind, *[_signature(item, tensors) for item in value])
    if kind is dict:
        return (kind, *value, *[_signature(item, tensors) for item in value.values()])
    if kind is np.ndarray or kind is NDArray:
        raise GraphError(
            "jit: an argument is an array; make it a Tensor, dl.tensor(x), before the call "
            f"[{where()}]"
        )
    if isinstance(value, Parameter):
        return token_of(value)
    return kind, value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_map(function, item) for item in value])
    if kind is dict:
        return {key: _map(function, item) for key, item in value.items()}
    return function(value)
