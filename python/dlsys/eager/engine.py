"""The engine of Tensors on one device: records calls on its tape, and runs tapes by Executors.

A tape is run when somebody looks at one of its values. An optimizer's step closes it, and then it
waits until the gradients are dropped or looked at: what nobody holds by the time of the run is
never made, so that the gradient of a weight and its update can be one kernel. A program is found by
the state where its tape ends and by the values that are held.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import getrefcount
from typing import Any

import numpy as np

from ..dtypes import host
from ..errors import DeviceError, GraphError
from ..executor.backend import backend_of
from ..executor.executor import Executor
from ..functional.record import Recorder
from ..graph.lines import where
from ..graph.node import Node, hooks
from ..graph.spec import Spec
from ..ndarray import NDArray
from ..ops.leaf import Parameter, unsettled
from ..runtime.device import Context
from .tape import (
    CUT,
    MOST_STATES,
    Call,
    Slot,
    State,
    Symbol,
    Tape,
    new_state,
    slot_of,
    token_of,
)

_MOST_ENTRIES = 10_000  # of a tape; then it is run
_MOST_PROGRAMS = 256  # of one engine; the oldest goes first
_UNHELD = 3  # references to a Tensor that its tape alone holds: the tape, the loop, the argument
MOST_NUMBERS = 4  # that one place of a program has as constants
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), type(Ellipsis)})


tracing: list[Any] = []  # what `jit` is recording, the innermost last


class Program:
    """The Executor of a tape, and which values of the tape it reads."""

    def __init__(self, engine: Engine, tape: Tape, live: Sequence[int]) -> None:
        fetches = [tape.outs[index].node for index in live]
        if tape.state.effects:
            fetches.append(hooks["group"](*tape.state.effects, name="updates"))
        self.executor = Executor(fetches, engine.ctx, engine.precision, backend=engine.backend)
        read = set(self.executor.topo_order)
        self.feeds = [(tape.outs[k].node, k) for k in tape.leaves if tape.outs[k].node in read]
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

    def __init__(self, ctx: Context | None) -> None:
        self.ctx = ctx
        self.name = "numpy" if ctx is None else f"{ctx.name}:{ctx.device_id}"
        self.backend = backend_of(ctx)
        self.precision = "fp32"
        self.grad = True  # gradients are recorded
        self.trace: Any = None  # the Trace of `jit` that is being made
        self.building = False  # a function is being called on nodes
        self.lock = threading.RLock()  # other threads may look at values of this one
        self._thread = threading.get_ident()
        self._epoch = State.epoch
        self._root = State(None)
        self._programs: deque[tuple[weakref.ref[State], Any]] = deque()
        self.pending: Tape | None = None  # closed by a step, not run yet
        self.tape = self.new_tape()

    @property
    def own(self) -> bool:
        """True in the thread that records here."""
        return self._thread == threading.get_ident()

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
        Raises what the function raises where a call does not fit, at the first call of its form.
        """
        if len(self.tape.entries) > _MOST_ENTRIES and not again and self.trace is None:
            self.run(self.tape)  # nobody looks: what was dropped need not be remembered
        key: list[Any] = [function, self.grad, again]
        for x in args:
            kind = type(x)
            if kind is Recorder.tensor:
                if x._tape is not self.tape:
                    self.adopt(x)
                key.append(x._slot)
            elif kind in _PLAIN:
                key += (kind, x)
            elif kind is Parameter:
                home = token_of(x)
                key.append(home)
            else:
                return self._record_any(function, args, kwargs or {}, again, home)
        if kwargs:
            for name, x in kwargs.items():
                if type(x) not in _PLAIN:
                    return self._record_any(function, args, kwargs, again, home)
                key += (name, type(x), x)
        made = tuple(key)
        tape = self.tape
        state = tape.state.next.get(made) if home is None else home.next.get((tape.state, made))
        if state is None or state is CUT or home is not None:
            return self._follow(made, home, function, args, kwargs, again)
        return self.tensors(tape, state)

    def _record_any(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
        again: bool, home: Any,
    ) -> Any:  # fmt: skip
        """`record` for arguments of any kind."""
        args = self._with_tensors(tuple(args))
        kwargs = self._with_tensors(kwargs)
        key: list[Any] = [function, self.grad, again]
        homes: list[Any] = []
        self._key(args, key, homes)
        self._key(kwargs, key, homes)
        home = home or (homes[0] if homes else None)
        return self._follow(tuple(key), home, function, args, kwargs, again)

    def _with_tensors(self, value: Any) -> Any:
        """Arguments with Tensors in place of arrays."""
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._with_tensors(item) for item in value])
        if kind is dict:
            return {name: self._with_tensors(item) for name, item in value.items()}
        if kind is np.ndarray or kind is NDArray:
            value = Recorder.tensor(value, self.name)
            kind = Recorder.tensor
        if kind is Recorder.tensor and value._tape is not self.tape:
            self.adopt(value)
        return value

    def _key(self, value: Any, key: list[Any], homes: list[Any]) -> None:
        kind = type(value)
        if kind is Recorder.tensor:
            key.append(value._slot)
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
            key += (kind, value)

    def _follow(
        self, key: tuple[Any, ...], home: Any, function: Callable[..., Any], args: Sequence[Any],
        kwargs: dict[str, Any] | None, again: bool,
    ) -> Any:  # fmt: skip
        """Goes along the transition of a key, which is made where it is new."""
        tape = self.tape
        known, key = (tape.state.next, key) if home is None else (home.next, (tape.state, key))
        state = known.get(key)
        if state is None and self._varies(tape, function, args):
            return self.record(function, self._fed(args), kwargs, again, home)
        if state is None:
            call = Call(function, *_slots((tuple(args), kwargs or {})))
            with self.build():
                state = known[key] = new_state(tape, call, self.grad, again)
        if state is CUT:
            self.run(tape)
            return self.record(function, args, kwargs, again, home)
        if home is not None:
            unsettled.add(self)
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
        form = function, *[x._slot if type(x) is Recorder.tensor else type(x) for x in args]
        seen = tape.state.numbers[form] = tape.state.numbers.get(form, 0) + 1
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
        index = tape.append(state)
        if state.single:
            made = Recorder.tensor.of(self, tape, slot_of(index), state.outs[0])
            tape.tensors.append(made)
            if state.draws:
                tape.tensors.append(None)
            return made
        several = [
            Recorder.tensor.of(self, tape, slot_of(index + k), out)
            for k, out in enumerate(state.outs)
        ]
        if state.draws:
            several[-1] = None  # the number of the draw is a leaf
        tape.tensors += several
        return tuple(several[:-1] if state.draws else several)

    def adopt(self, tensor: Any) -> None:
        """Makes a Tensor a value of the tape: a leaf where it was computed and has no history, else
        by its history, which is recorded again.
        """
        tensor.refresh()
        past = tensor._tape
        if past is self.tape:
            return
        if tensor.engine.ctx is not self.ctx:
            raise DeviceError(
                f"a Tensor of {tensor.engine.name} met one of {self.name}; move one by "
                f".to(device) first [{where()}]"
            )
        if past is not None and tensor._value is None:
            past.engine.run(past)
            past = tensor._tape
        if past is not None and tensor._slot.index not in past.leaves:
            index = self._again(past, tensor._slot.index)
            self.tape.tensors[index] = tensor
        else:
            spec = Spec(tensor._value.shape, tensor._value.dtype)
            index = self.tape.add_leaf(tensor, tensor._value, spec, tensor._requires)
        tape = self.tape
        tensor._tape, tensor._slot, tensor._out = tape, slot_of(index), tape.outs[index]

    def _again(self, past: Tape, index: int) -> int:
        """Records the history of a value of another tape once more; its index here. GraphError
        where something that it was computed from has changed since.
        """
        known = self.tape.again
        if (past, index) in known:
            return known[past, index]
        cone = past.cone(index)
        read = [p for state, _ in cone.values() if state.call for p in state.call.parameters]
        for parameter in read:
            if parameter.trainable and parameter.version != past.versions[parameter]:
                raise GraphError(
                    f"{parameter.name} was changed since a value was computed from it, so that its "
                    f"gradient cannot be; call backward before the change, or detach() [{where()}]"
                )
        grad, self.grad = self.grad, True
        try:
            for start, (state, _) in cone.items():
                if (past, start) not in known:
                    self._entry_again(past, start, state)
        finally:
            self.grad = grad
        return known[past, index]

    def _entry_again(self, past: Tape, start: int, state: State) -> None:
        known, tape = self.tape.again, self.tape
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
                self.adopt(tensor)
            known[past, start] = tensor._slot.index
            return
        here = [self._here(past, x) for x in (state.call.args, state.call.kwargs)]
        self.grad = any(out.requires_grad for out in state.outs)
        made = self.record(state.call.function, here[0], here[1], again=True)
        for k, tensor in enumerate([made] if state.single else made):
            known[past, start + k] = tensor._slot.index
        if state.draws:  # it draws what it drew
            drawn = past.leaves[start + len(state.outs) - 1]
            tape.leaves[len(tape.outs) - 1] = drawn

    def _here(self, past: Tape, value: Any) -> Any:
        """Arguments of an entry of another tape, with Tensors of this one."""
        kind = type(value)
        if kind is Slot:
            index = self.tape.again[past, value.index]
            return Recorder.tensor.of(self, self.tape, slot_of(index), self.tape.outs[index])
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
        unsettled.add(self)

    def settle(self, writing: bool) -> None:
        """Runs what waits, before Parameters are read or, `writing`, changed from elsewhere. For
        another thread it runs the step that waits and leaves the tape, on which its own may record.
        """
        if not self.own:
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
        if writing or self.tape.state.written:
            self.run(self.tape)

    def run(self, tape: Tape) -> None:
        """Computes all values of a tape that are held, and makes its updates."""
        with self.lock:
            if tape is self.tape:
                if self.pending is not None:
                    self.run(self.pending)
                self.tape = self.new_tape()
                unsettled.discard(self)
            elif tape is self.pending:
                self.pending = None
            elif not tape.tensors:
                return
            self._run(tape)

    def _run(self, tape: Tape) -> None:
        live, k = [], 0
        for tensor in tape.tensors:
            if tensor is not None and tensor._value is None and getrefcount(tensor) > _UNHELD:
                live.append(k)
            k += 1
        state = tape.state
        try:
            if live or state.effects:
                program = self._program(tape, tuple(live))
                if self.trace is not None:
                    values = self.trace.add(tape, program, live)
                else:
                    values = program.run({n: tape.leaves[k].value for n, k in program.feeds})
                for k, value in zip(live, values):
                    tape.tensors[k]._value = value
        except BaseException as error:
            tape.failed = error
            raise
        finally:
            self._forget(tape)

    def _forget(self, tape: Tape) -> None:
        """Lets go of what was run: only values with gradients to come keep the tape alive."""
        consumed = tape.consumed
        for k, tensor in enumerate(tape.tensors):
            if tensor is not None and tensor._value is not None:
                if not tape.outs[k].requires_grad or k in consumed:
                    tensor.forget(k in consumed)
        tape.tensors = []
        for k, (tensor, _) in tape.leaves.items():
            # One that was changed in place is another value of the tape by now.
            if tensor is not None and tensor._tape is tape and tensor._slot.index == k:
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


def _slots(value: Any) -> Any:
    """Arguments with slots in place of Tensors."""
    kind = type(value)
    if kind is Recorder.tensor:
        return value._slot
    if kind is tuple or kind is list:
        return kind([_slots(item) for item in value])
    if kind is dict:
        return {name: _slots(item) for name, item in value.items()}
    return value
