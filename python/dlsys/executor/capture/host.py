"""A captured program between arrays of the host: what one prediction at a time takes.

Its input copies read pinned memory and its output copies write there, so that a run is one launch;
the host looks at the memory itself for the end of it, which a GPU tells sooner than by its driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import numpy as np

from ...dtypes import is_narrow
from ...ndarray import NDArray
from ...runtime.device import Context
from ...runtime.library import load
from ..plan.arena import aligned
from ..run.tables import Segment
from .graph import GraphCopies, capture

_MOST_NBYTES = 1 << 20  # of all feeds and fetches


class PinnedMemory:
    """Pinned memory of the host for arrays of a device."""

    def __init__(self, ctx: Context, nbytes: int) -> None:
        self._ctx, self._library = ctx.struct, load()
        address = ctypes.c_void_p()
        self._library.check(
            self._library.cdll.DLHostAlloc(self._ctx, max(nbytes, 1), ctypes.byref(address))
        )
        assert address.value is not None
        self.address = address.value

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._library.cdll.DLHostFree(self._ctx, self.address)

    def array(self, offset: int, like: NDArray) -> np.ndarray:
        """A view of the shape and dtype of an array of the device."""
        held = (ctypes.c_char * like.nbytes).from_address(self.address + offset)
        return np.ndarray(like.shape, like.dtype, held)  # type: ignore[arg-type]


class HostGraph:
    """A segment whose feeds and fetches are arrays of the host.

    feeds, fetches: views of pinned memory. Write the first, call `run(stream)`, read the second.
    """

    def __init__(
        self, segment: Segment, feeds: Sequence[NDArray], fetches: Sequence[NDArray], on: int
    ) -> None:
        offsets = [0]
        for slot in (*feeds, *fetches):
            offsets.append(offsets[-1] + aligned(slot.nbytes))
        memory = self._memory = PinnedMemory(segment.ctx, offsets[-1])
        arrays = [memory.array(at, slot) for at, slot in zip(offsets, (*feeds, *fetches))]
        self.feeds, self.fetches = arrays[: len(feeds)], arrays[len(feeds) :]
        inputs, outputs = GraphCopies(feeds, inward=True), GraphCopies(fetches, inward=False)
        for copies, first in ((inputs, 0), (outputs, len(feeds))):
            for k in range(copies.count):
                copies.addresses[k] = memory.address + offsets[first + k]
        self._graph = capture(segment, on, inputs, outputs)
        self._replay = partial(load().cdll.DLGraphReplayAndWait, self._graph.handle)

    def run(self, on: int) -> None:
        """One run on a stream, whose results are in `fetches` on return."""
        status = self._replay(on)
        if status:
            load().check(status)


def fits(slots: Sequence[NDArray]) -> bool:
    """True for a few small arrays of dtypes that numpy has: large ones are copied while the host
    reads on.
    """
    nbytes = [slot.nbytes for slot in slots]
    held = all(slot.nbytes and not is_narrow(slot.dtype) for slot in slots)
    return held and sum(nbytes) <= _MOST_NBYTES
