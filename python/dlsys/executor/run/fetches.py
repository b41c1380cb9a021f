"""The output buffer cache: arrays that a fetch returned are reused once nobody holds them."""

from __future__ import annotations

import sys

from ...graph.spec import Spec
from ...ndarray import NDArray
from ...runtime.device import Block, Context

_MOST = 8  # arrays that a cache remembers; those beyond come from the caching allocator
_UNHELD = 2  # references to an array that its cache alone holds: the cache's, and the argument


class OutputCache:
    """The arrays of one fetch, each in a block of its own."""

    def __init__(self, ctx: Context, spec: Spec) -> None:
        self._ctx = ctx
        self._spec = spec
        self._arrays: list[NDArray] = []

    def take(self, on: int) -> NDArray:
        """An array that nobody holds, else a new one, for work on a stream."""
        arrays = self._arrays
        for k in range(len(arrays)):
            # Views and capsules of an array hold its block alone.
            if (
                sys.getrefcount(arrays[k]) == _UNHELD
                and sys.getrefcount(arrays[k].block) == _UNHELD
            ):
                break
        else:
            k = self._add()
        array = arrays[k]
        if array.block.stream != on:
            array.block.use(on)
        return array

    def _add(self) -> int:
        if len(self._arrays) == _MOST:
            del self._arrays[0]  # its holder keeps it alive
        block = Block(self._ctx, self._spec.nbytes)
        self._arrays.append(NDArray.from_block(block, 0, self._spec.shape, self._spec.dtype))
        return len(self._arrays) - 1
