"""The tape: what was done with Tensors and not computed yet, and the trie of all tapes so far.

A call of a recorded function on Tensors appends one entry to the tape of its device: a transition
from one `State` of a trie to the next. A state is made once, the first time that a program comes
there: the function is called on nodes then, which builds an ordinary graph, infers shapes, and
raises the error of a call that does not fit at the user's line. When the same calls come again, as
they do in a training loop, recording them is a walk along known states, and the program that
computes the values is found at the state where the walk ends.

Keys of transitions are compared, never only hashed, so that no two different tapes meet. A
transition that involves a Parameter is kept by that Parameter, so that a model that is dropped
takes its states along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import GraphError
from ..graph.lines import where
from ..graph.node import Node
from ..graph.spec import Spec
from ..ops.leaf import Parameter, Variable
from ..ops.movement import stop_gradient_op

MOST_STATES = 20_000  # states of all tries together; then they begin anew

Transitions = dict[tuple[Any, ...], "State"]
Engine = Any  # of engine.py, which imports this file


class Slot:
    """A value of a tape as keys name it: an int would be taken for a plain argument."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


_SLOTS = [Slot(k) for k in range(256)]


def slot_of(index: int) -> Slot:
    """The one Slot of an index."""
    while index >= len(_SLOTS):
        _SLOTS.append(Slot(len(_SLOTS)))
    return _SLOTS[index]


class Symbol:
    """A value that calls of a function will have, while `jit` records it; `source` says where."""

    __slots__ = ("shape", "dtype", "source")

    def __init__(self, shape: tuple[int, ...], dtype: Any, source: tuple[Any, ...]) -> None:
        self.shape, self.dtype, self.source = shape, dtype, source


class Out(NamedTuple):
    """A value of a tape: the node that computes it, its spec, and whether gradients reach it. The
    node is None for a view that is to be made anew.
    """

    node: Any
    spec: Spec
    requires_grad: bool


class Call(NamedTuple):
    """An entry: a function, and its arguments with slots in place of Tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Parameter, ...] = ()  # that its nodes read


class State:
    """A place of the trie: what the last entry made, and where entries lead from here.

    Attributes: `outs`, the values of the last entry; `single`, whether it returned one value and no
    tuple; `call`, what it was, None for a leaf; `next`, by key; `effects` and `written`, the
    updates of all entries so far and the Parameters that they change; `draws`, whether it draws
    random numbers: then the last of its values is the number of the draw, which each tape feeds;
    `targets` and `cone`, of `backward`: what its values are gradients of, and the values on its
    way; `programs`, by the values that are held; `numbers`, how many transitions
    differ in a plain number alone; `indices`, the first of those that chose rows.
    """

    __slots__ = (
        "outs", "single", "call", "next", "effects", "written", "draws", "targets", "cone",
        "programs", "numbers", "indices", "__weakref__",
    )  # fmt: skip
    made = 0  # since tries began anew
    epoch = 0  # how often they did

    def __init__(
        self, before: State | None, outs: Sequence[Out] = (), single: bool = True,
        call: Call | None = None,
    ) -> None:  # fmt: skip
        self.outs, self.single, self.call = tuple(outs), single, call
        self.next: Transitions = {}
        self.effects: tuple[Node, ...] = before.effects if before else ()
        self.written: frozenset[Parameter] = before.written if before else frozenset()
        self.draws = False
        self.targets: tuple[Any, ...] = ()
        self.cone: frozenset[int] = frozenset()
        self.programs: dict[Any, Any] = {}
        self.numbers: dict[Any, int] = {}
        self.indices: dict[Any, list[str]] = {}
        State.made += 1


CUT = State(None)  # in place of a next state: the tape must be run before this entry


class Leaf(NamedTuple):
    """A Tensor that a tape reads, and the value that it had then."""

    tensor: Any
    value: Any


class Tape:
    """Entries of one device that follow each other, from the root of its trie on."""

    __slots__ = (
        "engine", "state", "entries", "outs", "tensors", "leaves", "versions", "again", "consumed",
        "failed", "__weakref__",
    )  # fmt: skip

    def __init__(self, engine: Engine, root: State) -> None:
        self.engine = engine
        self.state = root
        self.entries: list[tuple[State, int]] = []  # with the index of the first value of each
        self.outs: list[Out] = []
        self.tensors: list[Any] = []  # of each value that is no leaf, until the tape is run
        self.leaves: dict[int, Leaf] = {}
        self.versions: dict[Parameter, int] = {}  # of the Parameters that are read
        # Of values of other tapes that were recorded here again, the index.
        self.again: dict[tuple[Tape, int], int] = {}
        self.consumed: frozenset[int] = frozenset()  # values whose gradients were taken
        self.failed: BaseException | None = None

    def append(self, state: State) -> int:
        """Goes on to a state; the index of its first value."""
        index = len(self.outs)
        self.state = state
        self.entries.append((state, index))
        self.outs += state.outs
        if state.call is not None:
            for parameter in state.call.parameters:
                self.versions.setdefault(parameter, parameter.version)
        if state.draws:
            self.leaves[len(self.outs) - 1] = Leaf(None, self.engine.next_draw())
        return index

    def add_leaf(self, tensor: Any, value: Any, spec: Spec, requires_grad: bool) -> int:
        """Reads a value that is there already; its index."""
        key = (Leaf, *spec, requires_grad)
        state = self.state.next.get(key)
        if state is None:
            node = Variable(shape=spec.shape, dtype=spec.dtype)
            state = self.state.next[key] = State(self.state, [Out(node, spec, requires_grad)])
        index = self.append(state)
        self.leaves[index] = Leaf(tensor, value)
        self.tensors.append(None)
        return index

    def cone(self, index: int, grad: bool = False) -> dict[int, tuple[State, int]]:
        """The entries that a value depends on, in order, each by the index of its first value.

        grad: those alone that gradients reach.
        """
        first = {}
        for state, start in self.entries:
            for k in range(start, start + max(len(state.outs), 1)):
                first[k] = (state, start)
        found: dict[int, tuple[State, int]] = {}
        stack = [index]
        while stack:
            at = stack.pop()
            state, start = first[at]
            if start not in found and not (grad and not self.outs[at].requires_grad):
                found[start] = (state, start)
                if state.call is not None:
                    stack += [s.index for s in slots_of((state.call.args, state.call.kwargs))]
        return dict(sorted(found.items()))


class Token:
    """A Parameter in keys, where a node as such would be compared by its own `==`; it keeps the
    transitions that involve the Parameter.
    """

    __slots__ = ("trainable", "_next", "_epoch")

    def __init__(self, trainable: bool | None) -> None:
        self.trainable = trainable
        self._next: Transitions = {}
        self._epoch = State.epoch

    @property
    def next(self) -> Transitions:
        """The transitions, by the state that they begin at and the key."""
        if self._epoch != State.epoch:
            self._next, self._epoch = {}, State.epoch
        return self._next


def token_of(holder: Any) -> Token:
    """The token of a Parameter: another one once it is frozen or no longer. Optimizers and what
    `jit` made have one too.
    """
    trainable = getattr(holder, "trainable", None)
    made = holder.__dict__.get("_token")
    if made is None or made.trainable is not trainable:
        made = holder.__dict__["_token"] = Token(trainable)
    return made


# ---- new states ----
def new_state(tape: Tape, call: Call, grad: bool, again: bool) -> State:
    """The state behind a call that is new at this place of the trie: calls the function on nodes.

    grad: gradients reach its values. again: it is recorded a second time, for a gradient, so its
    effects are not made. CUT where it reads or writes a Parameter that an entry before it writes.
    """
    made = call.function(*_on_nodes(tape, call.args), **_on_nodes(tape, call.kwargs))
    nodes = [made] if isinstance(made, Node) else list(made or ())
    for node in nodes:
        if not isinstance(node, Node) or node.op.outputs != 1:
            raise GraphError(
                f"{name_of(call.function)} made {type(node).__name__}, expected a node or several "
                f"[{where()}]"
            )
    known = {out.node for out in tape.outs}
    draw = _drawn(behind(nodes, known))
    fresh = behind(nodes, known)
    parameters = tuple(node for node in fresh if isinstance(node, Parameter))
    effects = [] if again else list(dict.fromkeys(e for node in fresh for e in node.effects))
    changed = written_by(effects, known)
    before = tape.state.written
    if before and not before.isdisjoint([*parameters, *changed]):
        return CUT
    inputs = [tape.outs[slot.index] for slot in slots_of((call.args, call.kwargs))]
    requires = any(x.requires_grad for x in inputs) or any(p.trainable for p in parameters)
    outs = []
    for node in nodes:
        reached = requires and node.spec.dtype.kind == "f" and node.op is not stop_gradient_op
        if reached and not grad:
            node = stop_gradient_op(node)
        outs.append(Out(node, node.spec, reached and grad))
    if draw is not None:
        outs.append(Out(draw, draw.spec, False))
    state = State(tape.state, outs, isinstance(made, Node), call._replace(parameters=parameters))
    state.draws = draw is not None
    state.effects = tuple(dict.fromkeys((*state.effects, *effects)))  # by identity: == makes nodes
    state.written |= changed
    return state


def _drawn(nodes: Sequence[Node]) -> Node | None:
    """The number of a draw as a node, which random nodes that were just made read from now on
    instead of a step that training advances; None where there are none.
    """
    random = [node for node in nodes if node.op.random]
    if not random:
        return None
    draw = Variable("draw", shape=(), dtype=np.int64)
    for k, node in enumerate(reversed(random)):
        node.inputs[node.op.step_at] = draw
        node.effects = ()
        node.attrs.update({key: n for key, n in (("seed", 0), ("node", k)) if key in node.attrs})
    return draw


def _on_nodes(tape: Tape, value: Any) -> Any:
    """Arguments with nodes in place of slots."""
    kind = type(value)
    if kind is Slot:
        return tape.outs[value.index].node
    if kind is dict:
        return {key: _on_nodes(tape, item) for key, item in value.items()}
    if kind is tuple or kind is list:
        return kind([_on_nodes(tape, item) for item in value])
    return value


def behind(nodes: Sequence[Node], known: set[Node]) -> list[Node]:
    """The nodes that the given ones depend on, as far as known ones."""
    found: dict[Node, None] = {}
    stack = [*nodes]
    while stack:
        node = stack.pop()
        if node not in known and node not in found:
            found[node] = None
            stack += node.inputs
    return list(found)


def written_by(effects: Sequence[Node], known: set[Node]) -> frozenset[Any]:
    """The Parameters that updates change."""
    nodes = behind(effects, known)
    return frozenset(node.inputs[k] for node in nodes for k in node.op.writes)


def slots_of(value: Any) -> list[Slot]:
    """The slots in arguments."""
    kind = type(value)
    if kind is Slot:
        return [value]
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return []
    return [found for item in value for found in slots_of(item)]


def name_of(function: Any) -> str:
    """The name of a function in errors."""
    return getattr(function, "__name__", None) or repr(function)
