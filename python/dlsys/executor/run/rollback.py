"""Rollback: restores the arrays that a run on a GPU has written when the run fails.

The memory of kernels is planned, so a run of nothing but kernels cannot end in its middle; it may
end at a user's own compute, or where debugging stops it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import DeviceLostError, OutOfMemoryError
from ...ndarray import NDArray
from ...runtime.device import Block, Context, stream
from ...runtime.library import load
from ..plan.arena import aligned


class Rollback:
    """`with rollback:` around a run that writes `arrays`. The snapshot lies on the device, or on
    the host where that has no room. Raises OutOfMemoryError where neither has.
    """

    def __init__(self, arrays: Iterable[NDArray], ctx: Context) -> None:
        self._arrays = list(arrays)
        self._ctx = ctx
        self._spans = _spans(self._arrays)
        self._nbytes = sum(aligned(nbytes) for _, nbytes in self._spans)
        self._snapshot: Block | None = None
        self._on_host: list[np.ndarray] = []

    def __enter__(self) -> None:
        try:
            self._snapshot = Block(self._ctx, self._nbytes)
        except OutOfMemoryError:
            self._copy_to_host()
        else:
            self._copy(self._snapshot, back=False)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        snapshot, on_host = self._snapshot, self._on_host
        self._snapshot, self._on_host = None, []
        if kind is None or issubclass(kind, DeviceLostError):
            return
        if snapshot is not None:
            self._copy(snapshot, back=True)
        for array, value in zip(self._arrays, on_host):
            array[:] = value

    def _copy_to_host(self) -> None:
        try:
            self._on_host = [array.asnumpy() for array in self._arrays]
        except MemoryError as error:
            raise OutOfMemoryError(
                f"out of memory: a run that may fail takes a snapshot of {self._nbytes:,} bytes, "
                "those that it changes; use a smaller model"
            ) from error

    def _copy(self, snapshot: Block, back: bool) -> None:
        library = load()
        ctx, on, at = self._ctx.struct, stream(self._ctx), snapshot.address
        for address, nbytes in self._spans:
            dst, src = (address, at) if back else (at, address)
            library.check(library.cdll.DLMemoryCopy(dst, ctx, src, ctx, nbytes, on))
            at += aligned(nbytes)


def _spans(arrays: Iterable[NDArray]) -> list[tuple[int, int]]:
    """Addresses and bytes of the arrays, with neighbors in one block merged."""
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
