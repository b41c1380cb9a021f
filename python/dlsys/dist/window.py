"""Windows: arenas that the GPUs of all ranks read and write directly.

NCCL's collectives between windows need fewer steps than those between other arrays, whose bytes
pass through buffers of its own. All ranks open theirs together, and close them together: a window
that is no longer used is closed when the next one is opened, where all ranks have done with it.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from ..errors import DeviceError, OutOfMemoryError
from ..runtime.device import Block, Context, stream, synchronize
from ..runtime.library import load
from .group import Group


class Window(Block):
    """A rank's part of a window, an arena like any other."""

    __slots__ = ("_closed", "_number")

    def __init__(self, ctx: Context, address: int, nbytes: int, number: int, closed: set[int]):
        self.ctx, self.address, self.nbytes = ctx, address, nbytes
        self.home = self.stream = stream(ctx)
        self._library, self._process = load(), self.process
        self._closed, self._number = closed, number

    def __del__(self) -> None:
        self._closed.add(self._number)


class Windows:
    """The windows of a group's communicator, in the order in which all ranks opened them."""

    def __init__(self, group: Group, ctx: Context) -> None:
        self._group, self._ctx = group, ctx
        self._addresses: dict[int, int] = {}  # of the open ones, by their numbers
        self._unused: set[int] = set()  # those that this rank has done with
        self._opened = 0

    def open(self, nbytes: int) -> Window | None:
        """This rank's part of a window of nbytes bytes. None on all ranks where one of them has not
        the memory, or an NCCL before 2.27.
        """
        self._close()
        cdll, handle, out = load().cdll, self._group.handle, ctypes.c_void_p()
        load().check(cdll.DLMemoryTrim(self._ctx.struct))  # NCCL's memory is not the allocator's
        try:
            load().check(cdll.DLWindowAlloc(self._ctx.struct, handle, nbytes, ctypes.byref(out)))
        except (DeviceError, OutOfMemoryError):
            out.value = None
        address = out.value
        if not self._group.all_reduce(np.array([address is not None], np.int32), "min")[0]:
            if address is not None:
                load().check(cdll.DLWindowFree(self._ctx.struct, handle, address))
            return None
        assert address is not None
        load().check(cdll.DLWindowRegister(self._ctx.struct, handle, address, nbytes))
        self._addresses[self._opened] = address
        self._opened += 1
        return Window(self._ctx, address, nbytes, self._opened - 1, self._unused)

    def _close(self) -> None:
        """Closes the windows that no rank uses any more."""
        numbers = [*self._addresses]
        unused = np.array([number in self._unused for number in numbers], np.int32)
        if not numbers or not (unused := self._group.all_reduce(unused, "min")).any():
            return
        synchronize(self._ctx)
        for number, done in zip(numbers, unused):
            if done:
                address = self._addresses.pop(number)
                load().check(
                    load().cdll.DLWindowFree(self._ctx.struct, self._group.handle, address)
                )


@cache
def windows_of(group: Group, ctx: Context) -> Windows:
    """The windows of a group with a communicator of a GPU."""
    return Windows(group, ctx)
