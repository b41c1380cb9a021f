"""The engine of Tensors on one device: records calls on its tape, and runs tapes by Executors.

A tape is run when somebody looks at one of its values. An optimizer's step closes it, and then it
waits until the gradients are dropped or looked at: what nobody holds by the time of the run is
never made, so that the gradient of a weight and its update can be one kernel. A program is found by
the state where its tape ends and by the values that are held.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import getrefcount
from threading import RLock, get_ident
from typing import Any

import numpy as np

from ..dtypes import host
from ..errors import DeviceError, GraphError
from ..executor.backend import backend_of
from ..executor.executor import Executor
from ..functional.record import Recorder
from ..graph.lines import where
from ..graph.node import Node, hooks
from ..ndarray import NDArray
from ..ops.leaf import Parameter, unflushed
from ..runtime.device import Context
from .tape import (
    CUT,
    MOST_STATES,
    Call,
    Leaf,
    Out,
    State,
    Symbol,
    Tape,
    new_state,
    token_of,
)

_MOST_ENTRIES = 10_000  # of a tape; then it is run
_MOST_PROGRAMS = 256  # of one engine; the oldest goes first
_UNHELD = 3  # references to a Tensor that its tape alone holds: the tape, the loop, the argument
MOST_NUMBERS = 4  # that one place of a program has as constants
_INTEGERS = frozenset({int})
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), type(Ellipsis)})


tracing: list[Any] = []  # what `jit` is recording, the innermost last


class Program:
    """The Executor of a tape, and which values of the tape it reads."""

    def __init__(self, engine: Engine, tape: Tape, live: Sequence[int]) -> None:
        outs = tape.outs
        fetches = [outs[index].node for index in live]
        if tape.state.effects:
            fetches.append(hooks["group"](*tape.state.effects, name="updates"))
        self.executor = Executor(fetches, engine.ctx, engine.precision, backend=engine.backend)
        read = set(self.executor.topo_order)
        self.feeds = [(outs[k].node, k) for k in tape.leaves if outs[k].node in read]
        self.written = tuple(tape.state.written)

    def run(self, feeds: Mapping[Node, Any]) -> list[Any]:
        """The values of the fetches."""
        fetched = self.executor.run_recorded(feeds)
        for parameter in self.written:
            parameter.version += 1
        return fetched


class Engine:
    """Tensors of one device in one thread."""

    arithmetic: set[Any] = set()  # functions of two operands, one of which may be a number
    seed = 0  # mixed to 63 bits
    drawn = itertools.count()  # the numbers of draws since `manual_seed`

    def __init__(self, ctx: Context | None, of_thread: Callable[[Any], Engine]) -> None:
        self.ctx = ctx
        self._of_thread = of_thread
        self.name = "numpy" if ctx is None else f"{ctx.name}:{ctx.device_id}"
        self.backend = backend_of(ctx)
        self.precision = "fp32"
        self.grad = True  # gradients are recorded
        self.trace: Any = None  # the Trace of `jit` that is being made
        self.building = False  # a function is being called on nodes
        # Held while its thread records, and while a tape runs: other threads may look at values of
        # this one, which runs its tape. Who holds it waits for no other engine.
        self.lock = RLock()
        self._thread = get_ident()
        self._epoch = State.epoch
        self._root = State(None)
        self._programs: deque[tuple[weakref.ref[State], Any]] = deque()
        self.pending: Tape | None = None  # closed by a step, not run yet
        self.tape = self.new_tape()

    @property
    def own(self) -> bool:
        """True in the thread that records here."""
        return self._thread == get_ident()

    def retire(self) -> None:
        """Its thread has ended, whose number another one may get."""
        self._thread = 0

    @property
    def here(self) -> Engine:
        """The engine of its device in the thread that asks."""
        return self if self.own else self._of_thread("numpy" if self.ctx is None else self.ctx)

    def new_tape(self) -> Tape:
        """An empty tape."""
        if State.made > MOST_STATES:
            State.made, State.epoch = 0, State.epoch + 1
        if self._epoch != State.epoch:
            self._epoch, self._root = State.epoch, State(None)
            self._programs.clear()
        return Tape(self, self._root)

    def next_draw(self) -> Any:
        """A number that no draw had since `manual_seed`."""
        if self.trace is not None:
            return Symbol((), np.dtype(np.int64), ("draw",))
        return np.asarray((Engine.seed + next(Engine.drawn)) % 2**63)

    # ---- recording ----
    def record(
        self, function: Callable[..., Any], args: Sequence[Any],
        kwargs: dict[str, Any] | None = None, again: bool = False, home: Any = None,
    ) -> Any:  # fmt: skip
        """The Tensor, or the tuple of them, that a function of nodes makes of Tensors.

        Its other arguments are plain values, Parameters, and numpy arrays, which become Tensors.
        home: a Token that keeps the transition; else that of a Parameter does, or the state.
        Raises what the function raises where a call does not fit, once for each signature.
        """
        if self._thread != get_ident():
            return self.here.record(function, args, kwargs, again, home)
        with self.lock:
            tape, tensor, epoch = self.tape, Recorder.tensor, State.epoch
            key: list[Any] = [function, self.grad, again]
            for x in (*args, *kwargs.values()) if kwargs else args:
                kind = type(x)
                if kind is tensor:
                    if x._tape is not tape and self._adopt(x) is not x:
                        return self._record_any(function, args, kwargs or {}, again, home)
                    key.append(x._out)
                elif kind in _PLAIN:
                    key += (kind, x if x or kind is not float else repr(x))  # 0.0 == -0.0
                elif kind is Parameter:
                    home = x.token
                    if home is None or home.trainable is not x.trainable or home.epoch != epoch:
                        home = token_of(x)
                    key.append(home)
                elif kind is tuple and _INTEGERS.issuperset(map(type, x)):
                    key += (kind, x)
                else:
                    return self._record_any(function, args, kwargs or {}, again, home)
            if kwargs:
                key += kwargs  # the names
            if tape is self.tape:
                made = tuple(key)
                known, at = (
                    (tape.state.next, made) if home is None else (home.next, (tape.state, made))
                )
                state = known.get(at)
                if state is None or state is CUT:
                    return self._follow(made, home, function, args, kwargs, again)
                if home is not None:
                    unflushed.add(self)
                return self.tensors(tape, state)
        return self.record(function, args, kwargs, again, home)  # the tape was run meanwhile

    def _record_any(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
        again: bool, home: Any,
    ) -> Any:  # fmt: skip
        """`record` for arguments of any kind."""
        tape = self.tape
        args = self._with_tensors(tuple(args))
        kwargs = self._with_tensors(kwargs)
        if tape is not self.tape:
            return self._record_any(function, args, kwargs, again, home)
        key: list[Any] = [function, self.grad, again]
        homes: list[Any] = []
        self._key(args, key, homes)
        self._key(kwargs, key, homes)
        home = home or (homes[0] if homes else None)
        return self._follow(tuple(key), home, function, args, kwargs, again)

    def _with_tensors(self, value: Any) -> Any:
        """Arguments with Tensors of the tape in place of arrays and other Tensors."""
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._with_tensors(item) for item in value])
        if kind is dict:
            return {name: self._with_tensors(item) for name, item in value.items()}
        if kind is np.ndarray or kind is NDArray:
            value = Recorder.tensor(value, self.name)
            kind = Recorder.tensor
        if kind is Recorder.tensor and value._tape is not self.tape:
            return self._adopt(value)
        return value

    def _key(self, value: Any, key: list[Any], homes: list[Any]) -> None:
        kind = type(value)
        if kind is Recorder.tensor:
            key.append(value._out)
        elif kind is Parameter:
            homes.append(token_of(value))
            key.append(homes[-1])
        elif kind is tuple or kind is list:
            key += (kind, len(value))
            for item in value:
                self._key(item, key, homes)
        elif kind is dict:
            key += (kind, *value)
            for item in value.values():
                self._key(item, key, homes)
        elif kind is slice:
            key.append(kind)
            self._key((value.start, value.stop, value.step), key, homes)
        elif isinstance(value, Node):
            raise GraphError(
                f"{value.name} is a node of a graph, and this is computed with Tensors: use "
                "Tensors and Parameters here, w.tensor() for an expression of Parameters "
                f"alone, or only nodes [{where()}]"
            )
        else:
            key += (kind, value if kind is not float or value else repr(value))

    def _follow(
        self, key: tuple[Any, ...], home: Any, function: Callable[..., Any], args: Sequence[Any],
        kwargs: dict[str, Any] | None, again: bool,
    ) -> Any:  # fmt: skip
        """Goes along the transition of a key, which is made where it is new."""
        tape = self.tape
        known, key = (tape.state.next, key) if home is None else (home.next, (tape.state, key))
        state = known.get(key)
        if state is None and len(tape.states) > _MOST_ENTRIES and not again and self.trace is None:
            state = CUT  # nobody looks: what was dropped need not be remembered
        if state is None and self._varies(tape, function, args):
            return self.record(function, self._fed(args), kwargs, again, home)
        if state is None:
            call = Call(function, *_outs((tuple(args), kwargs or {})))
            with self.build():
                state = known[key] = new_state(tape, call, self.grad, again)
        if state is CUT:
            self.run(tape)
            return self.record(function, args, kwargs, again, home)
        if home is not None:
            unflushed.add(self)
        return self.tensors(tape, state)

    @contextmanager
    def build(self) -> Iterator[None]:
        """Around functions that are called on nodes, which may read Parameters."""
        before, self.building = self.building, True
        try:
            yield
        finally:
            self.building = before

    def _varies(self, tape: Tape, function: Callable[..., Any], args: Sequence[Any]) -> bool:
        """True for arithmetic with a number that was another each time: it is fed then, since a
        program for each would be planned anew.
        """
        if function not in Engine.arithmetic or len(args) != 2 or not any(map(_is_float, args)):
            return False
        pattern = function, *[x._out if type(x) is Recorder.tensor else type(x) for x in args]
        seen = tape.state.numbers[pattern] = tape.state.numbers.get(pattern, 0) + 1
        return seen > MOST_NUMBERS and any(type(x) in (int, float) for x in args)

    def _fed(self, args: Sequence[Any]) -> list[Any]:
        dtype = next(x.dtype for x in args if _is_float(x))
        return [
            Recorder.tensor.holding(self, np.asarray(x, host(dtype)))
            if type(x) in (int, float)
            else x
            for x in args
        ]

    def tensors(self, tape: Tape, state: State) -> Any:
        """The Tensors of an entry that is appended now."""
        tape.state = state
        tape.states.append(state)
        of = Recorder.tensor.of
        if state.draws:
            tape.leaves[state.end - 1] = Leaf(None, self.next_draw())
        elif state.single:
            made = of(self, tape, state.outs[0])
            tape.tensors.append(made)
            return made
        several = [of(self, tape, out) for out in state.outs]
        if state.draws:
            several[-1] = None  # the number of the draw is a leaf
        tape.tensors += several
        if state.draws:
            several.pop()
        return several[0] if state.single else tuple(several)

    def adopt(self, tensor: Any) -> Any:
        """A Tensor as a value of the tape: a leaf where it was computed and has no history, else
        by its history, which is recorded again. It is the Tensor itself, and for one of another
        thread, which may be using it, a Tensor of this one.
        """
        if tensor._tape is self.tape:
            return tensor
        with self.lock:
            return self._adopt(tensor)

    def _adopt(self, tensor: Any) -> Any:
        tensor.refresh()
        past = tensor._tape
        if past is self.tape:
            return tensor
        if tensor.engine is not self and tensor.engine.ctx is not self.ctx:
            raise DeviceError(
                f"a Tensor of {tensor.engine.name} met one of {self.name}; move one by "
                f".to(device) first [{where()}]"
            )
        if tensor.engine is not self:
            return self._alias(tensor)
        if past is not None and tensor._value is None:
            past.engine.run(past)
            past = tensor._tape
        if past is not None and tensor._out.index not in past.leaves:
            out = self._again(past, tensor._out)
            self.tape.tensors[out.index] = tensor
        else:
            out = self.tape.add_leaf(tensor, tensor._value)
        tensor._tape, tensor._out = self.tape, out
        return tensor

    def _alias(self, tensor: Any) -> Any:
        """A Tensor of this thread for one of another thread, whose gradients go to that."""
        owner = tensor.engine
        self.lock.release()  # the other thread may be waiting for this one
        try:
            with owner.lock:
                if tensor._value is None:
                    tensor.refresh()
                    owner.run(tensor._tape)
                value, past = tensor._value, tensor._tape
                of: Any = None if past is None else tensor._out
        finally:
            self.lock.acquire()
        known = self.tape.aliases.get(id(tensor))
        if known is not None and known._value is value:
            return known
        if past is not None and of.index not in past.leaves:
            out = self._again(past, of)
        else:
            out = self.tape.add_leaf(tensor, value)
        alias = self.tape.aliases[id(tensor)] = Recorder.tensor.of(self, self.tape, out)
        alias._value = value
        return alias

    def _again(self, past: Tape, out: Out) -> Out:
        """Records the history of a value of another tape once more; what it is here. GraphError
        where something that it was computed from has changed since.
        """
        known = self.tape.again
        if (past, out.index) in known:
            return known[past, out.index]
        cone = past.cone(out)
        read = {p for state in cone if state.call is not None for p in state.call.parameters}
        for parameter, version in zip(past.state.reads, past.versions):
            if parameter in read and parameter.trainable and parameter.version != version:
                raise GraphError(
                    f"{parameter.name} was changed since a value was computed from it, so that its "
                    f"gradient cannot be; call backward before the change, or detach() [{where()}]"
                )
        grad, self.grad = self.grad, True
        try:
            for state in cone:
                if (past, state.outs[0].index) not in known:
                    self._entry_again(past, state)
        finally:
            self.grad = grad
        return known[past, out.index]

    def _entry_again(self, past: Tape, state: State) -> None:
        known, tape, start = self.tape.again, self.tape, state.outs[0].index
        if state.call is None:
            if start not in past.leaves:
                raise GraphError(
                    "the history of a Tensor goes through a gradient that backward left, which "
                    f"counts as a constant; use dl.grad for gradients of gradients [{where()}]"
                )
            tensor, value = past.leaves[start]
            if tensor._value is not value and not state.outs[0].requires_grad:
                tensor = Recorder.tensor.holding(self, value)  # what it was then
            if tensor._value is not value:
                raise GraphError(
                    "a Tensor was changed in place since a value was computed from it, so that its "
                    f"gradient cannot be; call backward before the change [{where()}]"
                )
            if tensor._tape is not tape:
                tensor = self._adopt(tensor)
            known[past, start] = tensor._out
            return
        here = [self._here(past, x) for x in (state.call.args, state.call.kwargs)]
        self.grad = any(out.requires_grad for out in state.outs)
        made = self.record(state.call.function, here[0], here[1], again=True)
        for k, tensor in enumerate([made] if state.single else made):
            known[past, start + k] = tensor._out
        if state.draws:  # it draws what it drew
            tape.leaves[tape.state.end - 1] = past.leaves[state.end - 1]

    def _here(self, past: Tape, value: Any) -> Any:
        """Arguments of an entry of another tape, with Tensors of this one."""
        kind = type(value)
        if kind is Out:
            return Recorder.tensor.of(self, self.tape, self.tape.again[past, value.index])
        if kind is tuple or kind is list:
            return kind([self._here(past, item) for item in value])
        if kind is dict:
            return {name: self._here(past, item) for name, item in value.items()}
        return value

    # ---- running ----
    def close(self) -> None:
        """Ends the tape, which waits to be run; the one that waits already is run."""
        if self.pending is not None:
            self.run(self.pending)
        self.pending, self.tape = self.tape, self.new_tape()
        unflushed.add(self)

    def flush(self, writing: bool) -> None:
        """Runs what waits, before Parameters are read or, `writing`, changed from elsewhere. For
        another thread it runs the step that waits and leaves the tape, on which its own may record;
        of a thread that has ended it runs all.
        """
        ended = self._thread == 0
        if not self.own and not ended:
            if (waiting := self.pending) is not None:
                self.run(waiting)
            return
        if self.trace is not None:
            if writing or self.tape.state.written or self.trace.writes:
                self.trace.refuse("reads or writes a Parameter")
            return
        if self.pending is not None:
            self.run(self.pending)
        if self.building and not writing:
            return  # what is on the tape is not done yet
        if writing or self.tape.state.written or ended:
            self.run(self.tape)

    def run(self, tape: Tape) -> None:
        """Computes all values of a tape that are held, and makes its updates."""
        with self.lock:
            if tape is self.tape:
                if self.pending is not None:
                    self.run(self.pending)
                self.tape = self.new_tape()
                unflushed.discard(self)
            elif tape is self.pending:
                self.pending = None
            elif not tape.tensors:
                return
            self._run(tape)

    def _run(self, tape: Tape) -> None:
        live, held, k = [], [], 0
        for tensor in tape.tensors:
            if tensor is not None:
                if tensor._value is not None:
                    held.append(tensor)  # it was computed before, and its history recorded again
                elif getrefcount(tensor) > _UNHELD:
                    live.append(k)
            k += 1
        state = tape.state
        tape.versions = [parameter.version for parameter in state.reads]
        try:
            if live or state.effects:
                program = self._program(tape, tuple(live))
                if self.trace is not None:
                    values = self.trace.add(tape, program, live)
                else:
                    leaves = tape.leaves
                    values = program.run({node: leaves[k].value for node, k in program.feeds})
                for k, value in zip(live, values):
                    tensor = tape.tensors[k]
                    tensor._value = value
                    held.append(tensor)
        except BaseException as error:
            tape.failed = error
            raise
        finally:
            self._forget(tape, held)

    def _forget(self, tape: Tape, held: Sequence[Any]) -> None:
        """Lets go of what was run: of the Tensors that are `held` with a value, only those with
        gradients to come keep the tape alive.
        """
        for tensor in held:
            out = tensor._out
            if not out.requires_grad or out in tape.consumed:
                tensor.forget(out in tape.consumed)
        tape.tensors = []
        for k, (tensor, _) in tape.leaves.items():
            # One that was changed in place is another value of the tape by now.
            if tensor is not None and tensor._tape is tape and tensor._out.index == k:
                tensor._tape = None

    def _program(self, tape: Tape, live: tuple[int, ...]) -> Program:
        state = tape.state
        key = live, self.precision
        program = state.programs.get(key)
        if program is None:
            program = state.programs[key] = Program(self, tape, live)
            self._programs.append((weakref.ref(state), key))
            if len(self._programs) > _MOST_PROGRAMS:
                old, gone = self._programs.popleft()
                (old() or state).programs.pop(gone, None)
        return program


def _is_float(x: Any) -> bool:
    return type(x) is Recorder.tensor and x.dtype.kind == "f"


def _outs(value: Any) -> Any:
    """Arguments with outs in place of Tensors."""
    kind = type(value)
    if kind is Recorder.tensor:
        return value._out
    if kind is tuple or kind is list:
        return kind([_outs(item) for item in value])
    if kind is dict:
        return {name: _outs(item) for name, item in value.items()}
    return value
