"""Indexing of Tensors, views, and changes in place.

A Tensor's values never change: a change in place makes new values, which the Tensor then has. What
basic indexing, `reshape`, `transpose` and their kind return is a view in that a change of either
shows in the other, as in numpy: a view knows its base and how it is made of it, so that it can be
made anew from a base that changed, and a change of the view is carried to the base.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arguments.kinds import is_integer
from ..errors import GraphError, ShapeError
from ..functional.record import Recorder
from ..graph.lines import where
from ..graph.node import Node
from ..graph.spec import FLOAT32, Spec
from ..ndarray import NDArray
from ..ops.comparison import where_op
from ..ops.elementwise import cast_op
from ..ops.indexing import gather_op, getitem_op, slice_gradient_op
from ..ops.leaf import full_op
from ..ops.movement import broadcast_to_op, copy_op, reshape_op, stop_gradient_op, transpose_op
from .engine import MOST_CONSTANTS, Engine
from .tape import Out

Tensor = Any  # the class of tensor.py, which imports this file


class View(NamedTuple):
    """The making of a view from its base: a function of nodes, its other arguments, and whether
    gradients are recorded.
    """

    function: Callable[..., Node]
    args: tuple[Any, ...]
    grad: bool


# ---- views ----
def view(base: Tensor, function: Callable[..., Node], *args: Any) -> Tensor:
    """A view of a Tensor."""
    engine = base.engine.here
    return _linked(base, engine.record(function, (base, *args)), View(function, args, engine.grad))


def _linked(base: Tensor, made: Tensor, how: View) -> Tensor:
    made._base, made._view = base, how
    if base._views is None:
        base._views = weakref.WeakSet()
    base._views.add(made)
    return made


def refresh(tensor: Tensor) -> None:
    """Makes a view anew whose base was changed in place since it was made."""
    if tensor._base is not None and tensor._tape is None and tensor._value is None:
        function, args, grad = tensor._view
        engine = tensor.engine.here
        before, engine.grad = engine.grad, grad
        try:
            _become(tensor, engine.record(function, (tensor._base, *args)))
        finally:
            engine.grad = before


def assign(tensor: Tensor, made: Tensor) -> None:
    """Gives a Tensor the values of another of its shape, in place: its base and all views of that
    show them.

    Raises GraphError for a leaf that requires a gradient, except inside `no_grad`.
    """
    engine = tensor.engine.here
    if made.shape != tensor.shape:
        raise ShapeError(
            f"a Tensor of shape {tensor.shape} cannot become {made.shape} in place [{where()}]"
        )
    leaf = tensor._requires and tensor.is_leaf
    if leaf and engine.grad:
        raise GraphError(
            f"a leaf that requires a gradient is changed in place only inside no_grad() [{where()}]"
        )
    if tensor.requires_grad and not leaf and not made._requires:
        raise _lost()
    if tensor._base is not None:
        base, (function, args, _) = tensor._base, tensor._view
        if function is stop_gradient_op and (made._requires or not base.is_leaf):
            raise _lost()
        assign(base, engine.record(inverse, (base, made, function, *args)))
        return
    if engine.trace is not None and tensor._value is not None:
        engine.trace.changed.setdefault(tensor, (tensor._value, tensor._requires))
    _become(tensor, made)
    _outdate(tensor)
    if leaf:  # it is one again, so its value must not be an entry of the tape
        engine.run(engine.tape)
        tensor._tape, tensor._requires = None, True


def _lost() -> GraphError:
    return GraphError(
        "a change in place through detach() or in no_grad() would give a Tensor a wrong gradient, "
        f"since values and history are of one piece; copy() it first [{where()}]"
    )


def _become(tensor: Tensor, made: Tensor) -> None:
    """Gives a Tensor the value of another, which nobody else holds."""
    tape = tensor.engine.tape
    if tensor._tape is tape and tensor._out.index not in tape.leaves:
        tape.tensors[tensor._out.index] = None
    tensor._tape, tensor._out, tensor._value = made._tape, made._out, made._value
    tensor.engine, tensor._requires, tensor._consumed = made.engine, made._requires, made._consumed
    tape = made.engine.tape
    if made._tape is tape and made._out.index not in tape.leaves:
        tape.tensors[made._out.index] = tensor


def _outdate(tensor: Tensor) -> None:
    """Has the views of a Tensor made anew when they are read next."""
    for made in tensor._views or ():
        tape = made._tape
        if tape is not None and tape is made.engine.tape and made._out.index not in tape.leaves:
            tape.tensors[made._out.index] = None
        made._out = Out(-1, None, Spec(made.shape, made.dtype), made._requires)
        made._tape = made._value = None
        _outdate(made)


def inverse(base: Node, made: Node, function: Any, *args: Any) -> Node:
    """The base of a view that became `made`."""
    if function is getitem_op:
        return placed(base, made, args[0])
    if function is transpose_op:
        return transpose_op(made, tuple([int(k) for k in np.argsort(args[0])]))
    if function is stop_gradient_op:
        return made
    if function is broadcast_to_op:
        raise GraphError(
            "a Tensor that was broadcast has several elements in one place and is not changed in "
            f"place; copy() it first [{where()}]"
        )
    return reshape_op(made, base.spec.shape)


def placed(base: Node, value: Node, key: Any) -> Node:
    """The base with other values where `key` chooses."""
    region = getitem_op(base, key)
    value = broadcast_to_op(value, region.spec.shape)
    chosen = slice_gradient_op(full_op(region.spec.shape, 1.0), cast_op(base, FLOAT32), key)
    return where_op(chosen != 0, slice_gradient_op(value, base, key), base)


# ---- reading ----
def get(tensor: Tensor, key: Any) -> Tensor:
    """`tensor[key]`: numpy's rules, and a view where numpy makes one."""
    entries = key if type(key) is tuple else (key,)
    if not _is_basic(entries):
        return _get_advanced(tensor, entries)
    entries = tuple([int(x) if is_integer(x) else x for x in entries])
    shown = _shown(tensor, entries)
    if shown is None and len(entries) == 1:
        shown = _fed(tensor, entries)
    return view(tensor, getitem_op, entries) if shown is None else shown


def _is_basic(entries: tuple[Any, ...]) -> bool:
    return all(
        x is None or x is Ellipsis or isinstance(x, slice) or (is_integer(x) and np.ndim(x) == 0)
        for x in entries
        if not isinstance(x, Recorder.tensor) or x.ndim or x.dtype.kind == "b"
    )


def _shown(tensor: Tensor, key: tuple[Any, ...]) -> Tensor | None:
    """A view of a value that is computed and has no gradient: its elements where they are, at no
    cost. None where they must be moved.
    """
    value = tensor._value
    if value is None or tensor._requires or tensor.engine.trace is not None:
        return None
    if isinstance(value, NDArray):
        value = _part(value, key)
        if value is None:
            return None
    else:
        try:
            value = np.asarray(value[key])
        except IndexError as error:
            raise ShapeError(f"index of shape {tensor.shape}: {error} [{where()}]") from None
    return _linked(
        tensor,
        Recorder.tensor.holding(tensor.engine, value),
        View(getitem_op, (key,), tensor.engine.grad),
    )


def _fed(tensor: Tensor, key: tuple[Any, ...]) -> Tensor | None:
    """A view of a row, or of consecutive ones, by a number that is fed: where an entry of a tape
    has seen others before, as in a loop over batches. A program for each would be planned anew.
    None where it is a constant.
    """
    engine, (entry,) = tensor.engine.here, key
    if not tensor.shape or not (type(entry) is int or type(entry) is slice):
        return None
    extent = tensor.shape[0]
    rows = np.arange(extent)[entry] if type(entry) is slice else np.asarray(entry)
    if not rows.ndim and not -extent <= entry < extent:
        return None  # `getitem` says so
    of = engine.adopt(tensor)._out
    pattern = getitem_op, of, rows.shape
    seen = engine.tape.state.indices.setdefault(pattern, [])
    if repr(entry) in seen:
        return None
    if len(seen) < MOST_CONSTANTS:
        seen.append(repr(entry))
        return None
    made = engine.record(gather_op, (tensor, Recorder.tensor.holding(engine, rows % extent)))
    return _linked(tensor, made, View(getitem_op, (key,), engine.grad))


def _part(value: NDArray, key: tuple[Any, ...]) -> NDArray | None:
    """Consecutive elements of an array of a device: of the first axis alone."""
    if len(key) != 1 or not value.shape:
        return None
    extent, rest = value.shape[0], value.shape[1:]
    if type(key[0]) is int:
        if not -extent <= key[0] < extent:
            raise ShapeError(
                f"index {key[0]} is out of range for axis 0 of shape {value.shape} [{where()}]"
            )
        start, shape = key[0] % extent, rest
    elif isinstance(key[0], slice):
        start, stop, step = key[0].indices(extent)
        if step != 1:
            return None
        shape = (max(stop - start, 0), *rest)
    else:
        return None
    offset = value.data_address - value.block.address
    offset += start * int(np.prod(rest, dtype=np.int64)) * value.dtype.itemsize
    return NDArray.from_block(value.block, offset, shape, value.dtype)


def _positions(tensor: Tensor, entries: tuple[Any, ...]) -> np.ndarray:
    """The positions that a key chooses among all elements in order; index Tensors are looked at."""
    plain = tuple([x.numpy() if isinstance(x, Recorder.tensor) else x for x in entries])
    plain = tuple([np.asarray(x) if isinstance(x, list) else x for x in plain])
    try:
        return np.arange(tensor.size).reshape(tensor.shape)[plain]
    except IndexError as error:
        raise ShapeError(f"index of shape {tensor.shape}: {error} [{where()}]") from None


def _get_advanced(tensor: Tensor, entries: tuple[Any, ...]) -> Tensor:
    (first, *more) = entries
    if isinstance(first, Recorder.tensor) and first.dtype.kind in "iu" and not more:
        return tensor.engine.record(_rows, (tensor, first))
    return tensor.engine.record(_taken, (tensor, _positions(tensor, entries)))


def _rows(x: Node, indices: Node) -> Node:
    """x at indices of its first axis, which count from its end where they are negative."""
    if indices.spec.dtype.kind == "i":
        indices = where_op(indices < 0, indices + x.spec.shape[0], indices)
    return gather_op(x, indices, axis=0)


def _taken(x: Node, positions: Node) -> Node:
    return gather_op(reshape_op(x, (-1,)), positions, axis=0)


# ---- writing ----
def put(tensor: Tensor, key: Any, value: Any) -> None:
    """`tensor[key] = value`: the value is broadcast and takes the dtype."""
    engine = tensor.engine.here
    entries = key if type(key) is tuple else (key,)
    if not isinstance(value, Recorder.tensor):
        value = Recorder.tensor(value, engine.name)
    if value.dtype != tensor.dtype:
        value = value.to(dtype=tensor.dtype)
    if _is_basic(entries):
        entries = tuple([int(x) if is_integer(x) else x for x in entries])
        made = engine.record(placed, (tensor, value, entries))
    elif len(entries) == 1 and _is_mask(entries[0], tensor) and value.size == 1:
        made = engine.record(_masked, (tensor, value, _as_tensor(entries[0], engine)))
    else:
        positions = _positions(tensor, entries)
        source = np.full(tensor.size, -1)
        source[positions.reshape(-1)] = np.arange(positions.size)  # the last of several counts
        source = source.reshape(tensor.shape)
        args = (tensor, value, source >= 0, np.maximum(source, 0), positions.shape)
        made = engine.record(_scattered, args)
    assign(tensor, made)


def _is_mask(entry: Any, tensor: Tensor) -> bool:
    return getattr(entry, "dtype", None) == np.bool_ and entry.shape == tensor.shape


def _as_tensor(value: Any, engine: Engine) -> Tensor:
    return value if isinstance(value, Recorder.tensor) else Recorder.tensor(value, engine.name)


def _masked(x: Node, value: Node, mask: Node) -> Node:
    return where_op(mask, broadcast_to_op(reshape_op(value, ()), x.spec.shape), x)


def _scattered(x: Node, value: Node, chosen: Node, source: Node, shape: tuple[int, ...]) -> Node:
    """x with element source[k] of the broadcast value at each k that is chosen."""
    if 0 in shape:
        return copy_op(x)
    flat = reshape_op(broadcast_to_op(value, shape), (-1,))
    return where_op(chosen, gather_op(flat, source, axis=0), x)
