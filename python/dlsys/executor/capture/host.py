"""A captured program between arrays of the host: what one prediction at a time takes.

Its input copies read pinned memory and its output copies write there, so that a run is one launch;
the host looks at the memory itself for the end of it, which a GPU tells sooner than by its driver.
A small feed is not copied where the kernel that reads it can do so in pinned memory, nor the only
fetch where the last kernel can write there and tell the host.
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
from ..plan.memory import Plan, Value
from ..run.tables import Segment
from .graph import GraphCopies, capture

_MOST_NBYTES = 1 << 20  # of all feeds and fetches
_MOST_DIRECT = 4 << 10  # of a feed that kernels read where it is: some blocks read all of it


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
    """The only segment of a plan, with feeds and fetches that are arrays of the host.

    slots: arrays of the device in which its steps have the feeds, and then the fetches.
    """

    def __init__(self, segment: Segment, plan: Plan, slots: Sequence[NDArray], on: int) -> None:
        offsets = [0]
        for slot in slots:
            offsets.append(offsets[-1] + aligned(slot.nbytes))
        memory = self._memory = PinnedMemory(segment.ctx, offsets[-1])
        addresses, count = [memory.address + at for at in offsets], len(plan.feeds)
        arrays = [memory.array(at, slot) for at, slot in zip(offsets, slots)]
        self._feeds, self._fetches = arrays[:count], arrays[count:]  # views of pinned memory
        copied = []
        for k, value in enumerate(plan.feeds):
            if _is_read_in_place(value, plan):
                segment.table.place(value.buffer, addresses[k])
            else:
                copied.append(k)
        inputs = GraphCopies([slots[k] for k in copied], inward=True)
        for j, k in enumerate(copied):
            inputs.addresses[j] = addresses[k]
        outputs = GraphCopies(slots[count:], inward=False)
        for j, address in enumerate(addresses[count:-1]):
            outputs.addresses[j] = address
        if (made := _made_in_place(plan)) is not None:
            segment.table.place(made.buffer, addresses[count])
            outputs.share(0, addresses[count])
        self._graph = capture(segment, on, inputs, outputs)
        self._replay = partial(load().cdll.DLGraphReplayAndWait, self._graph.handle)

    def run(self, feeds: Sequence[np.ndarray], on: int) -> list[np.ndarray]:
        """The fetches of one run on a stream, fresh arrays."""
        for array, value in zip(self._feeds, feeds):
            array[...] = value
        status = self._replay(on)
        if status:
            load().check(status)
        return [array.copy() for array in self._fetches]


def _is_read_in_place(feed: Value, plan: Plan) -> bool:
    """True for a small feed that a single kernel reads, which can do so in memory of the host."""
    readers = [
        (step.node.op, k)
        for step in plan.steps
        for k, value in enumerate(step.inputs)
        if value.buffer is feed.buffer
    ]
    few = len(readers) == 1 and feed.spec.nbytes <= _MOST_DIRECT
    return few and readers[0][0].reads_host and readers[0][1] == 0


def _made_in_place(plan: Plan) -> Value | None:
    """The only fetch, where the last step makes it by a kernel that tells the host."""
    last, fetches = plan.steps[-1], plan.fetches
    if len(fetches) != 1 or not last.node.op.tells_host or not last.outputs:
        return None
    return fetches[0] if fetches[0] and fetches[0].buffer is last.outputs[0].buffer else None


def fits(slots: Sequence[NDArray]) -> bool:
    """True for a few small arrays of dtypes that numpy has: large ones are copied while the host
    reads on.
    """
    nbytes = [slot.nbytes for slot in slots]
    held = all(slot.nbytes and not is_narrow(slot.dtype) for slot in slots)
    return held and sum(nbytes) <= _MOST_NBYTES
