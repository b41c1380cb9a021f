"""undo: takes back what a run on a native device has written when the run fails.

A kernel on a GPU takes memory for its intermediate results as it is launched; where none is left
the run ends there, behind updates that are queued already. So it may at a user's own compute, or
where debugging stops it. A replay of nothing but kernels takes no memory and ends nowhere. A kernel
on the CPU takes memory in the first run of its program, and what it took is there for all later
ones (src/cpu/runtime/scratch.h).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import DeviceLostError, OutOfMemoryError
from ...ndarray import NDArray
from ...runtime.device import Block, Context, stream
from ...runtime.library import load
from ...runtime.target import target_of
from ..plan.arena import aligned


class Undo:
    """`with undo:` around a run that writes `arrays`. The copies lie on the device, or on the host
    where that has no room. Raises OutOfMemoryError where neither has.
    """

    def __init__(self, arrays: Iterable[NDArray], ctx: Context) -> None:
        self._arrays = list(arrays)
        self._ctx = ctx
        self._spans = _spans(self._arrays)
        self._nbytes = sum(aligned(nbytes) for _, nbytes in self._spans)
        self._kept: Block | None = None
        self._on_host: list[np.ndarray] = []

    def __enter__(self) -> None:
        if not target_of(self._ctx).streams:  # which would keep the block for its next arrays
            self._copy_to_host()
            return
        try:
            self._kept = Block(self._ctx, self._nbytes)
        except OutOfMemoryError:
            self._copy_to_host()
        else:
            self._copy(self._kept, back=False)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        kept, on_host = self._kept, self._on_host
        self._kept, self._on_host = None, []
        if kind is None or issubclass(kind, DeviceLostError):
            return
        if kept is not None:
            self._copy(kept, back=True)
        for array, value in zip(self._arrays, on_host):
            array[:] = value

    def _copy_to_host(self) -> None:
        try:
            self._on_host = [array.asnumpy() for array in self._arrays]
        except MemoryError as error:
            raise OutOfMemoryError(
                f"out of memory: a run that may fail keeps a copy of the {self._nbytes:,} bytes "
                "that it changes; use a smaller model"
            ) from error

    def _copy(self, kept: Block, back: bool) -> None:
        library = load()
        ctx, on, at = self._ctx.struct, stream(self._ctx), kept.address
        for address, nbytes in self._spans:
            dst, src = (address, at) if back else (at, address)
            library.check(library.cdll.DLMemoryCopy(dst, ctx, src, ctx, nbytes, on))
            at += aligned(nbytes)


def _spans(arrays: Iterable[NDArray]) -> list[tuple[int, int]]:
    """Addresses and bytes of the arrays; those that lie one behind the other in a block are one."""
    spans: list[tuple[int, int]] = []
    last: Block | None = None
    for array in sorted(arrays, key=lambda array: array.data_address):
        start, end = array.data_address, array.data_address + array.nbytes
        if array.block is last and start == aligned(sum(spans[-1])):
            spans[-1] = spans[-1][0], end - spans[-1][0]
        elif array.nbytes:
            spans.append((start, end - start))
            last = array.block
    return spans
