"""Windows: memory of a GPU that kernels of all ranks of a group read."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from ..ndarray import NDArray
from ..runtime.device import Block, Context, stream
from ..runtime.library import load

_BYTES = np.dtype(np.uint8)


class Window(Block):
    """A block that the library keeps as long as the process, for the next plan that asks for as
    many bytes: ranks that free and allocate at different times still have the same windows.
    """

    __slots__ = ()

    def __init__(self, ctx: Context, handle: int, nbytes: int) -> None:
        out = ctypes.c_void_p()
        memory = load().cdll.DLCommunicatorMemory
        load().check(memory(ctx.struct, handle, nbytes, ctypes.byref(out)))
        self.ctx = ctx
        self.nbytes = nbytes
        self.home = self.stream = stream(ctx)
        self._library = load()
        self._process = self.process
        self.address = out.value or 0

    def __del__(self) -> None:
        pass


@cache
def window(ctx: Context, handle: int, nbytes: int) -> NDArray:
    """So many bytes that kernels of all ranks of a communicator read: see `Group.window`."""
    return NDArray.from_block(Window(ctx, handle, nbytes), 0, (nbytes,), _BYTES)
