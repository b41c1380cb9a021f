"""Gradients of Tensors: backward, grad, no_grad."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from typing import Any

from ..errors import GraphError, ShapeError
from ..functional.record import Recorder
from ..graph.gradients import gradients
from ..graph.lines import where
from ..graph.node import Node
from ..ops.leaf import Parameter
from ..ops.movement import reshape_op, stop_gradient_op
from .device import set_grad_enabled
from .engine import Engine
from .tape import State, name_of

Tensor = Any  # the class of tensor.py, which imports this file


def backward(tensor: Tensor, gradient: Any, retain_graph: bool) -> None:
    """See Tensor.backward."""
    given = tensor
    engine, tensor, seed = _checked(tensor, gradient)
    with engine.lock:
        tensor, seed = engine.adopt(tensor), None if seed is None else engine.adopt(seed)
        tape = engine.tape
        key = (backward, tensor._out, seed._out if seed is not None else None)
        state = _gradient_state(engine, key, tensor, seed)
        if not retain_graph:
            tape.consumed |= state.cone
        made = engine.tensors(tape, state)
    if given is not tensor and tensor._out in tape.consumed:
        with given.engine.lock:  # it is of another thread, where its history is let go too
            given.forget(True)
    trace = engine.trace
    for target, grad in zip(state.targets, made):
        holder: Any = target if type(target) is Parameter else tape.leaves[target].tensor
        before = holder.grad
        if before is not None:
            with no_grad():
                grad = before + grad
        if type(holder) is Parameter:
            holder.grad = grad
        else:
            holder._grad = grad
        if trace is not None:
            trace.before.setdefault(holder, before)
        grad._grad_of = holder


def _checked(tensor: Tensor, gradient: Any) -> tuple[Engine, Tensor, Any]:
    """The engine, the Tensor as a value of its tape, and the gradient as another."""
    engine = tensor.engine.here
    if not tensor.requires_grad or tensor._consumed:
        reason = (
            "its gradient was taken already; pass retain_graph=True to the call before this one"
            if tensor._consumed
            else "nothing that it was computed from requires one"
        )
        raise GraphError(f"backward: this Tensor has no history, {reason} [{where()}]")
    if gradient is None and tensor.size != 1:
        raise GraphError(
            f"backward: a Tensor of shape {tensor.shape} needs the gradient of what comes behind; "
            f"pass it, or sum() first [{where()}]"
        )
    tensor = engine.adopt(tensor)
    if gradient is None:
        return engine, tensor, None
    if not isinstance(gradient, Recorder.tensor):
        gradient = Recorder.tensor(gradient, engine.name, tensor.dtype)
    if gradient.shape != tensor.shape:
        raise ShapeError(
            f"backward: the gradient has shape {gradient.shape}, expected {tensor.shape} "
            f"[{where()}]"
        )
    return engine, tensor, engine.adopt(gradient)


def _gradient_state(engine: Engine, key: tuple[Any, ...], tensor: Tensor, seed: Any) -> State:
    """The state whose values are the gradients of a Tensor for all that requires one."""
    tape = engine.tape
    state = tape.state.next.get(key)
    if state is not None:
        return state
    cone = tape.cone(tensor._out, grad=True)
    # Trained Parameters, and leaves that require gradients, in the order in which they were met.
    targets: dict[Any, Node] = {}
    for entry in cone:
        if entry.call is None and entry.outs[0].requires_grad:
            targets[entry.outs[0].index] = entry.outs[0].node
        elif entry.call is not None:
            targets.update((p, p) for p in entry.call.parameters if p.trainable)
    nodes = gradients(
        tensor._out.node,
        list(targets.values()),
        None if seed is None else seed._out.node,
    )
    outs = [(stop_gradient_op(node), node.spec, False) for node in nodes]
    state = State(tape.state, outs, single=False)
    state.targets = tuple(targets)
    computed = [entry for entry in cone if entry.call is not None]
    state.cone = frozenset(out for entry in computed for out in entry.outs)
    tape.state.next[key] = state
    return state


def set_grad(tensor: Tensor, value: Any) -> None:
    """Replaces the gradient of a leaf."""
    if value is not None:
        if not isinstance(value, Recorder.tensor):
            raise GraphError(f"grad: expected a Tensor or None, got {type(value).__name__}")
        if value.shape != tensor.shape:
            raise ShapeError(f"grad: expected shape {tensor.shape}, got {value.shape} [{where()}]")
    tensor._grad = value


class no_grad(ContextDecorator):  # noqa: N801 (used as a function)
    """Inside `with no_grad():`, operations are not recorded for gradients. Also a decorator.

    grad: True records them all the same, as `enable_grad` does.

    >>> x = dl.tensor(2.0, requires_grad=True)
    >>> with dl.no_grad():
    ...     y = x * x
    ...
    >>> y.requires_grad
    False
    """

    def __init__(self, grad: bool = False) -> None:
        self._grad = grad
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(set_grad_enabled(self._grad))

    def __exit__(self, *error: object) -> None:
        set_grad_enabled(self._before.pop())

    def __repr__(self) -> str:
        return "enable_grad()" if self._grad else "no_grad()"


def enable_grad() -> no_grad:
    """Inside `with enable_grad():`, operations are recorded for gradients, also in `no_grad`.

    >>> x = dl.tensor(2.0, requires_grad=True)
    >>> with dl.no_grad(), dl.enable_grad():
    ...     y = x * x
    ...
    >>> y.requires_grad
    True
    """
    return no_grad(True)


def grad(function: Callable[..., Tensor], argument: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The function that computes the gradient of a function of Tensors, whose value has one
    element, for its positional argument of that number, or a tuple for several.

    The gradient has a gradient itself: `grad(grad(f))`, or a penalty on it in a loss.

    >>> cube = lambda x: (x**3).sum()
    >>> dl.grad(cube)(dl.tensor([1.0, 2.0]))
    Tensor([ 3., 12.], device=numpy)
    >>> dl.grad(lambda x: dl.grad(cube)(x).sum())(dl.tensor([1.0, 2.0]))  # 6 x
    Tensor([ 6., 12.], device=numpy)
    """

    @functools.wraps(function)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return value_and_grad(function, argument)(*args, **kwargs)[1]

    return gradient


def value_and_grad(
    function: Callable[..., Tensor], argument: int | Sequence[int] = 0
) -> Callable[..., tuple[Tensor, Any]]:
    """Like `grad`, and the value too: a function that returns (value, gradient).

    argument: as of `grad`.

    >>> dl.value_and_grad(lambda x: (x**2).sum())(dl.tensor([1.0, 3.0]))
    (Tensor(10., device=numpy), Tensor([2., 6.], device=numpy))
    """
    positions = [argument] if isinstance(argument, int) else list(argument)

    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        given = list(args)
        with enable_grad():
            for k in positions:
                x = given[k]
                if not isinstance(x, Recorder.tensor) or x.dtype.kind != "f":
                    raise GraphError(
                        f"grad: argument {k} is {_kind(x)}, expected a Tensor of floats [{where()}]"
                    )
                given[k] = x.engine.record(watched, (x,))
                given[k]._requires = True
            value = function(*given, **kwargs)
            if not isinstance(value, Recorder.tensor) or value.size != 1:
                raise GraphError(
                    f"grad: {name_of(function)} returned {_kind(value)}, expected a Tensor of one "
                    f"element [{where()}]"
                )
            made = value.engine.record(gradient_nodes, (value, *[given[k] for k in positions]))
        return value, made if len(positions) > 1 else made[0]

    return both


def watched(x: Node) -> Node:
    """x under another name, for which a gradient is asked."""
    return reshape_op(x, x.spec.shape)


def gradient_nodes(value: Node, *nodes: Node) -> list[Node]:
    """The gradients of a value with respect to nodes."""
    return gradients(value, nodes)


def _kind(value: Any) -> str:
    if isinstance(value, Recorder.tensor):
        return f"a Tensor of {value.dtype} {value.shape}"
    return type(value).__name__
