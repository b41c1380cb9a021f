"""The steps of optimizers over Tensors: the updates join the tape that computed the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import GraphError
from ..graph.lines import where
from ..ops.leaf import Parameter, unsettled
from .engine import Engine, tracing
from .tape import State, token_of, written_by


def step(optimizer: Any, parameters: Sequence[Parameter]) -> None:
    """Updates the Parameters that have a gradient by `optimizer.apply_gradients`."""
    pairs = [(p, p.grad) for p in parameters if p.grad is not None]
    if not pairs:
        raise GraphError(
            f"{type(optimizer).__name__}.step: no Parameter has a gradient; call backward() of a "
            f"loss first [{where()}]"
        )
    engine: Engine = pairs[0][1].engine
    for _, grad in pairs:
        if grad._tape is not engine.tape:
            engine.adopt(grad)
    tape = engine.tape
    key = (tape.state, *[(token_of(p), grad._slot) for p, grad in pairs])
    known = token_of(optimizer).next
    state = known.get(key)
    if state is None:
        nodes = [(tape.outs[grad._slot.index].node, p) for p, grad in pairs]
        with engine.build():
            updates = optimizer.updates(nodes)
        state = State(tape.state, single=False)
        state.effects += tuple(updates)
        state.written |= written_by(updates, {out.node for out in tape.outs})
        known[key] = state
    tape.append(state)
    engine.close()


def drop_gradients(parameters: Iterable[Parameter]) -> None:
    """Drops gradients, and runs the step that waited for it."""
    for parameter in parameters:
        if tracing:
            tracing[-1].before.setdefault(parameter, parameter.grad)
        parameter.grad = None
    for engine in list(unsettled):
        if engine.own and engine.pending is not None:
            engine.run(engine.pending)
