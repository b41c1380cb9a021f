"""Parameters: their storage, one block of memory in the order in which a step completes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...dtypes import host
from ...errors import GraphError
from ...graph.node import Node
from ...graph.spec import FLOAT32, FLOAT64
from ...ndarray import NDArray
from ...ops.leaf import ANYWHERE, Parameter
from ...runtime.device import Block, Context
from ..plan.arena import aligned


class Slot:
    """Where a Parameter lives: a view of a numpy buffer (ctx None) or of a device block."""

    __slots__ = ("ctx", "array")

    def __init__(self, ctx: Context | None, array: Any) -> None:
        self.ctx = ctx
        self.array = array

    def asnumpy(self) -> np.ndarray:
        """A copy of the value."""
        return self.array.copy() if self.ctx is None else self.array.asnumpy()

    def write(self, value: np.ndarray) -> None:
        """Replaces the value, cast to the slot's dtype."""
        if self.ctx is None:
            np.copyto(self.array, value, casting="unsafe")
        else:
            held = np.ascontiguousarray(value, dtype=host(self.array.dtype))
            self.array[:] = held.reshape(value.shape)


def dtype_on(parameter: Parameter, ctx: Context | None) -> Any:
    """The dtype of a Parameter's storage on a device: undeclared float64 is float32 on native
    ones, bfloat16 is float32 on numpy.
    """
    if ctx is None:
        return host(parameter.dtype)
    if parameter.dtype == FLOAT64 and not parameter.declared:
        return FLOAT32
    return parameter.dtype


def check_home(parameter: Parameter, ctx: Context | None) -> None:
    """Raises GraphError for a Parameter that lives on another device than `ctx`."""
    home = parameter.storage.ctx if parameter.storage is not None else parameter.home
    if home is not ANYWHERE and home != ctx:
        where, here = (repr(c) if c is not None else "numpy" for c in (home, ctx))
        target = f"ndarray.{ctx!r}" if ctx is not None else "None"
        raise GraphError(
            f"Parameter {parameter.name} lives on {where} and this executor runs on {here}; "
            f"move it with {parameter.name}.to({target}), or all of a model with model.to({target})"
        )


def place(parameters: Iterable[Node], ctx: Context | None) -> None:
    """Gives storage to every Parameter that has none, all in one allocation, in the given order."""
    new: Sequence[Parameter] = [p for p in parameters if p.storage is None]  # type: ignore[attr-defined, misc]
    dtypes = [dtype_on(parameter, ctx) for parameter in new]
    offsets = [0]
    for parameter, dtype in zip(new, dtypes):
        offsets.append(offsets[-1] + aligned(int(np.prod(parameter.shape)) * dtype.itemsize))
    if not new:
        return
    block = Block(ctx, offsets[-1]) if ctx is not None else aligned_bytes(offsets[-1])
    if isinstance(block, Block):
        block.fill(0)  # a rollback copies the gaps along
    slots = []
    for parameter, dtype, offset in zip(new, dtypes, offsets):
        if isinstance(block, Block):
            slot = Slot(ctx, NDArray.from_block(block, offset, parameter.shape, dtype))
        else:
            slot = Slot(ctx, np.ndarray(parameter.shape, dtype, block, offset))
        assert parameter.initial is not None
        slot.write(parameter.initial)
        slots.append(slot)
    for parameter, slot in zip(new, slots):  # after everything that can fail
        parameter.storage, parameter.initial = slot, None


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Uninitialized bytes whose address is a multiple of 64."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
