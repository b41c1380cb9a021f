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


class Symbol:
    """A value that calls of a function will have, while `jit` records it; `source` says where."""

    __slots__ = ("shape", "dtype", "source")

    def __init__(self, shape: tuple[int, ...], dtype: Any, source: tuple[Any, ...]) -> None:
        self.shape, self.dtype, self.source = shape, dtype, source


class Out:
    """A value of a tape, which stands for itself in keys and calls: outs are compared by identity,
    and each belongs to one state.

    `index` is its number among the values of the tape, `node` what computes it, `spec` its shape
    and dtype, and `requires_grad` says whether gradients reach it. The node is None for a view that
    is to be made anew, which is of no tape.
    """

    __slots__ = ("index", "node", "spec", "requires_grad")

    def __init__(self, index: int, node: Any, spec: Spec, requires_grad: bool) -> None:
        self.index, self.node, self.spec, self.requires_grad = index, node, spec, requires_grad

    def __repr__(self) -> str:
        return f"%{self.index}"


class Call(NamedTuple):
    """An entry: a function, and its arguments with outs in place of Tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Parameter, ...] = ()  # that its nodes read


class State:
    """A node of the trie: what the last entry made, and where entries lead from here.

    before: the state that the entry began at, None for a root. values: the node, spec and
    `requires_grad` of each value that it made.

    Attributes: `outs`, these values; `end`, the number of all values so far; `single`, whether
    the entry returned one value and no tuple; `call`, what it was, None for a leaf; `next`, by key;
    `effects` and `written`, the updates of all entries so far and the Parameters that they change;
    `reads`, the Parameters that all entries so far read; `draws`, whether it draws random numbers:
    then the last of its values is the number of the draw, which each tape feeds; `targets` and
    `cone`, of `backward`: what its values are gradients of, and the values on its way; `programs`,
    by the values that are held; `numbers`, how many transitions differ in a plain number alone;
    `indices`, the first of those that chose rows.
    """

    __slots__ = (
        "outs", "end", "single", "call", "next", "effects", "written", "reads", "draws", "targets",
        "cone", "programs", "numbers", "indices", "__weakref__",
    )  # fmt: skip
    made = 0  # since tries began anew
    epoch = 0  # how often they did

    def __init__(
        self, before: State | None, values: Sequence[tuple[Any, Spec, bool]] = (),
        single: bool = True, call: Call | None = None,
    ) -> None:  # fmt: skip
        first: int = before.end if before else 0
        self.outs = tuple([Out(first + k, *value) for k, value in enumerate(values)])
        self.end: int = first + len(self.outs)
        self.single, self.call = single, call
        self.next: Transitions = {}
        self.effects: tuple[Node, ...] = before.effects if before else ()
        self.written: frozenset[Parameter] = before.written if before else frozenset()
        self.reads: tuple[Parameter, ...] = before.reads if before else ()
        if call is not None and call.parameters:
            self.reads = tuple(dict.fromkeys((*self.reads, *call.parameters)))
        self.draws = False
        self.targets: tuple[Any, ...] = ()
        self.cone: frozenset[Out] = frozenset()
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
        "engine", "state", "states", "tensors", "leaves", "aliases", "versions", "again",
        "consumed", "failed", "__weakref__",
    )  # fmt: skip

    def __init__(self, engine: Engine, root: State) -> None:
        self.engine = engine
        self.state = root
        self.states: list[State] = []  # behind each entry
        self.tensors: list[Any] = []  # of each value that is no leaf, until the tape is run
        self.leaves: dict[int, Leaf] = {}
        self.aliases: dict[int, Any] = {}  # of Tensors of other threads, by their `id`
        self.versions: list[int] = []  # of `state.reads`, when the tape was run
        # Of values of other tapes, by index, that were recorded here again: what they are here.
        self.again: dict[tuple[Tape, int], Out] = {}
        self.consumed: frozenset[Out] = frozenset()  # values whose gradients were taken
        self.failed: BaseException | None = None

    @property
    def outs(self) -> list[Out]:
        """All values so far."""
        return [out for state in self.states for out in state.outs]

    def add_leaf(self, tensor: Any, value: Any) -> Out:
        """Reads the value of a Tensor, which is there already."""
        requires_grad = tensor._requires
        key = (Leaf, value.shape, value.dtype, requires_grad)
        state = self.state.next.get(key)
        if state is None:
            spec = Spec(value.shape, value.dtype)
            node = Variable(shape=spec.shape, dtype=spec.dtype)
            made = State(self.state, [(node, spec, requires_grad)])
            state = self.state.next[key] = made
        self.state = state
        self.states.append(state)
        self.tensors.append(None)
        out = state.outs[0]
        self.leaves[out.index] = Leaf(tensor, value)
        return out

    def cone(self, of: Out, grad: bool = False) -> list[State]:
        """The states behind the entries that a value depends on, in order.

        grad: those alone that gradients reach.
        """
        maker = {out: state for state in self.states for out in state.outs}
        found: set[State] = set()
        stack = [of]
        while stack:
            out = stack.pop()
            state = maker[out]
            if state not in found and not (grad and not out.requires_grad):
                found.add(state)
                if state.call is not None:
                    stack += outs_of((state.call.args, state.call.kwargs))
        return sorted(found, key=lambda state: state.end)


class Token:
    """A Parameter in keys, where a node as such would be compared by its own `==`; it keeps the
    transitions that involve the Parameter, by the state that they begin at and the key.
    """

    __slots__ = ("trainable", "epoch", "next")

    def __init__(self, trainable: bool | None) -> None:
        self.trainable, self.epoch = trainable, State.epoch
        self.next: Transitions = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Token, (self.trainable,)  # a copy of its holder has its own transitions


def token_of(holder: Any) -> Token:
    """The token of a Parameter: another one once it is frozen or no longer, and when tries begin
    anew. Optimizers and what `jit` made have one too.
    """
    token, trainable = getattr(holder, "token", None), getattr(holder, "trainable", None)
    if token is None or token.trainable is not trainable or token.epoch != State.epoch:
        token = holder.token = Token(trainable)
    return token


# ---- new states ----
def new_state(tape: Tape, call: Call, grad: bool, again: bool) -> State:
    """The state behind a call that is new at this node of the trie: calls the function on nodes.

    grad: gradients reach its values. again: it is recorded a second time, for a gradient, so its
    effects are not made. CUT where it reads or writes a Parameter that an entry before it writes.
    """
    made = call.function(*_on_nodes(call.args), **_on_nodes(call.kwargs))
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
    inputs = outs_of((call.args, call.kwargs))
    requires = any(x.requires_grad for x in inputs) or any(p.trainable for p in parameters)
    outs = []
    for node in nodes:
        reached = requires and node.spec.dtype.kind == "f" and node.op is not stop_gradient_op
        if reached and not grad:
            node = stop_gradient_op(node)
        outs.append((node, node.spec, reached and grad))
    if draw is not None:
        outs.append((draw, draw.spec, False))
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


def _on_nodes(value: Any) -> Any:
    """Arguments with nodes in place of outs."""
    kind = type(value)
    if kind is Out:
        return value.node
    if kind is dict:
        return {key: _on_nodes(item) for key, item in value.items()}
    if kind is tuple or kind is list:
        return kind([_on_nodes(item) for item in value])
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


def outs_of(value: Any) -> list[Out]:
    """The outs in arguments."""
    kind = type(value)
    if kind is Out:
        return [value]
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return []
    return [found for item in value for found in outs_of(item)]


def name_of(function: Any) -> str:
    """The name of a function in errors."""
    return getattr(function, "__name__", None) or repr(function)
