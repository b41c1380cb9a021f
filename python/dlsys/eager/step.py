"""The steps of optimizers over Tensors: the updates join the tape that computed the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import GraphError
from ..graph.lines import where
from ..ops.leaf import Parameter, unflushed
from .engine import Engine, tracing
from .tape import State, token_of, written_by


def step(optimizer: Any, parameters: Sequence[Parameter]) -> None:
    """Updates the Parameters that have a gradient by `optimizer.apply_gradients`."""
    pairs = [(p, grad) for p in parameters if (grad := p.grad) is not None]
    if not pairs:
        raise GraphError(
            f"{type(optimizer).__name__}.step: no Parameter has a gradient; call backward() of a "
            f"loss first [{where()}]"
        )
    engine: Engine = pairs[0][1].engine.here
    tape = engine.tape
    if any([grad._tape is not tape for _, grad in pairs]):
        pairs = [(p, engine.adopt(grad)) for p, grad in pairs]
    with engine.lock:  # all are of this thread now, and of one tape below
        _append(engine, optimizer, pairs)
        engine.close()


def _append(engine: Engine, optimizer: Any, pairs: Sequence[tuple[Parameter, Any]]) -> None:
    """Appends the updates by these gradients to the tape."""
    for _, grad in pairs:
        if grad._tape is not engine.tape:
            engine.adopt(grad)
    tape = engine.tape
    key: list[Any] = [tape.state]
    for p, grad in pairs:
        token = p.token
        key.append(token if token and token.trainable is p.trainable else token_of(p))
        key.append(grad._out)
    known, at = token_of(optimizer).next, tuple(key)
    state = known.get(at)
    if state is None:
        nodes = [(grad._out.node, p) for p, grad in pairs]
        with engine.build():
            updates = optimizer.updates(nodes)
        state = State(tape.state, single=False)
        state.effects += tuple(updates)
        state.written |= written_by(updates, {out.node for out in tape.outs})
        known[at] = state
    engine.tensors(tape, state)


def drop_gradients(parameters: Iterable[Parameter]) -> None:
    """Drops gradients, and runs the step that waited for it."""
    if tracing:
        before = tracing[-1].before
        for parameter in parameters:
            before.setdefault(parameter, parameter.grad)
    for parameter in parameters:
        parameter.grad = None
    for engine in list(unflushed):
        if engine.own and engine.pending is not None:
            engine.run(engine.pending)
