"""Groups of ranks: what collectives ask of the library that moves their bytes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CommunicationError
from ..ndarray import NDArray
from ..runtime.device import Context
from .window import window

LINE = " ["  # begins the source line at the end of what a rank tells
REDUCTIONS = ("sum", "mean", "max", "min")
Array = np.ndarray


class Group(ABC):
    """Ranks 0 to `size` - 1 that communicate, of which this process is `rank`.

    `local_rank` counts the ranks of one host, so that each takes a GPU of its own:
    `ndarray.gpu(world.local_rank)`. Every method is a collective: all ranks of the group call the
    same ones in the same order. x and y are numpy arrays, of one shape and dtype on all ranks; op
    is a reduction: "sum", "max", "min" and, where it says so, "mean"; root, target and source are
    ranks.
    CommunicationError where they are not, or where a rank does not come within `timeout` seconds.
    """

    rank = 0
    size = 1
    local_rank = 0
    one_host = True  # that all ranks are on
    handle = 0  # of its communicator in the native library, 0 before `connect`
    sums_in_kernels = False  # other kernels than collectives' may sum over these ranks, on all
    compares_every_run = True  # executors do, not only before the first run of each shape

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    # ---- what an implementation writes: y, or x of a broadcast, in place ----
    @abstractmethod
    def reduce_into(self, x: Array, y: Array, op: str) -> None:
        """y = the sum, maximum or minimum of all ranks' x."""

    @abstractmethod
    def gather_into(self, x: Array, y: Array) -> None:
        """y = all ranks' x, one after the other."""

    @abstractmethod
    def scatter_into(self, x: Array, y: Array, op: str) -> None:
        """y = this rank's part of the reduction of all ranks' x, `size` parts of y's size."""

    @abstractmethod
    def broadcast_into(self, x: Array, root: int) -> None:
        """x = rank `root`'s x."""

    @abstractmethod
    def exchange_into(self, x: Array, y: Array) -> None:
        """Part k of y = this rank's part of rank k's x, of `size` parts each."""

    @abstractmethod
    def permute_into(self, x: Array, y: Array, target: int | None, source: int | None) -> None:
        """Sends x to rank `target` and receives y from rank `source`, where there is one."""

    @abstractmethod
    def objects(self, value: Any) -> list[Any]:
        """Each rank's value, of any kind that JSON holds: for messages, not for data."""

    @abstractmethod
    def abort(self, sentence: str) -> None:
        """Ends all ranks, after printing a sentence that says why."""

    @abstractmethod
    def connect(self, ctx: Any) -> None:
        """Opens the communicator of a GPU, once; numpy and the CPU need none. An Executor with a
        group does so. ctx: the device. DeviceError where NCCL cannot be used.
        """

    @abstractmethod
    def check(self) -> None:
        """KernelError where the GPUs' library has found a rank or a network to be broken."""

    def window(self, ctx: Context, nbytes: int) -> NDArray:
        """Memory of a GPU that kernels of all ranks read; the same one for the same size.

        ctx: the GPU. nbytes: its size. DeviceError before `connect`, KernelError where NCCL has no
        memory left.
        """
        return window(ctx, self.handle, nbytes)

    # ---- what users call with arrays of the host ----
    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.all_reduce(np.zeros(1, np.int32))

    def all_reduce(self, x: Any, op: str = "sum") -> Array:
        """The sum, mean, max or min of all ranks' arrays, on all of them.

        x: an array of one shape and dtype on all ranks. op: the reduction.
        """
        x = np.asarray(x, order="C")
        y = np.empty_like(x)
        self.reduce_into(x, y, "sum" if op == "mean" else op)
        return (y / self.size).astype(x.dtype) if op == "mean" else y

    def all_gather(self, x: Any) -> Array:
        """All ranks' arrays x, stacked: (size, …)."""
        x = np.asarray(x, order="C")
        y = np.empty((self.size, *x.shape), x.dtype)
        self.gather_into(x, y)
        return y

    def broadcast(self, x: Any, root: int = 0) -> Array:
        """Rank `root`'s array on all ranks; the others' x give its shape and dtype."""
        y = np.array(x, order="C")
        self.broadcast_into(y, root)
        return y

    def agreed(self, number: int) -> int:
        """The number that all ranks give, 0 where they differ."""
        most, least = self.all_reduce(np.array([number, -number], np.int64), "max")
        return number if most == -least else 0

    def agree(self, digest: int, told: Mapping[str, Any]) -> None:
        """Returns where all ranks give the same digest, a number below 2^62.

        CommunicationError on all ranks otherwise, which names the first difference between what
        rank 0 and another rank `told`: lists of lines by what they are about.
        """
        pair = np.array([digest, -digest], np.int64)
        most = np.empty_like(pair)
        self.reduce_into(pair, most, "max")
        if most[0] != digest or most[1] != -digest:
            raise CommunicationError(_difference(self.objects(dict(told))))


class Alone(Group):
    """A world of one rank, which needs no library: collectives are left out of its graphs."""

    def reduce_into(self, x: Array, y: Array, op: str) -> None:
        np.copyto(y, x)

    def gather_into(self, x: Array, y: Array) -> None:
        np.copyto(y.reshape(x.shape), x)

    def scatter_into(self, x: Array, y: Array, op: str) -> None:
        np.copyto(y, x)

    def broadcast_into(self, x: Array, root: int) -> None:
        pass

    def exchange_into(self, x: Array, y: Array) -> None:
        np.copyto(y, x)

    def permute_into(self, x: Array, y: Array, target: int | None, source: int | None) -> None:
        if source is not None:
            np.copyto(y, x)

    def objects(self, value: Any) -> list[Any]:
        return [value]

    def abort(self, sentence: str) -> None:
        raise SystemExit(sentence)

    def connect(self, ctx: Any) -> None:
        pass

    def check(self) -> None:
        pass


def without_line(told: str) -> str:
    """What a rank told, without the source line, in which ranks may differ."""
    return told.rpartition(LINE)[0] or told


def _difference(told: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """The sentence about the first rank that differs from rank 0."""
    for rank, what in itertools.product(range(1, len(told)), told[0]):
        pairs = itertools.zip_longest(told[0][what], told[rank][what], fillvalue="nothing")
        for mine, other in pairs:
            if without_line(mine) != without_line(other):
                return (
                    f"rank {rank} differs from rank 0 in its {what}: it has {other}, where rank 0 "
                    f"has {mine}; run the same program with the same shapes on every rank"
                )
    raise AssertionError("ranks told the same, but gave other digests")
